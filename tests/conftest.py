"""What all tests share: a lab folder of their own, one thread for tensors, the count of wrong answers at the end."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers share two cores; read when torch is first imported

import pytest
import torch

torch.set_num_threads(1)

_rejected: dict[str, bool] = {}  # wrong answer -> was it named
_parity: list[str] = []  # cells with their worst deviation


@pytest.fixture(autouse=True)
def own_lab_folder(tmp_path, monkeypatch):
    """No test reads or writes a learner's own `.lab/`."""
    monkeypatch.setenv("DEEPSEEK_LAB_HOME", str(tmp_path / "lab"))
    monkeypatch.delenv("DEEPSEEK_LAB_STRICT", raising=False)


def pytest_collection_modifyitems(config, items):
    """Leave out what only `make parity` has the time for, unless it was asked for."""
    if "parity_full" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("parity_full")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_logreport(report):
    """Collect what test_answers.py and parity/test_parity.py found, also from xdist's workers."""
    for key, value in report.user_properties if report.when == "call" else []:
        if key == "parity":
            _parity.append(value)
        if key == "wrong answer" and report.passed:
            name, named = value
            _rejected[name] = named


def pytest_terminal_summary(terminalreporter):
    if _rejected:
        named = sum(_rejected.values())
        terminalreporter.write_line(f"{len(_rejected)} wrong answers rejected, {named} of them by name")
    if _parity:
        terminalreporter.write_line(f"worst deviation from the serial run, in each of {len(_parity)} cells:")
        for line in sorted(_parity, key=lambda line: float(line.split()[0])):
            terminalreporter.write_line(line)
