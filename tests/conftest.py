"""What all tests share: a lab folder of their own, one thread for tensors, the count of wrong answers at the end."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers share two cores; read when torch is first imported

import pytest
import torch

torch.set_num_threads(1)

_rejected: dict[str, bool] = {}  # wrong answer -> was it named


@pytest.fixture(autouse=True)
def own_lab_folder(tmp_path, monkeypatch):
    """No test reads or writes a learner's own `.lab/`."""
    monkeypatch.setenv("DEEPSEEK_LAB_HOME", str(tmp_path / "lab"))
    monkeypatch.delenv("DEEPSEEK_LAB_STRICT", raising=False)


def pytest_runtest_logreport(report):
    """Collect what test_answers.py found, also from xdist's workers."""
    if report.when == "call" and report.passed:
        for key, value in report.user_properties:
            if key == "wrong answer":
                name, named = value
                _rejected[name] = named


def pytest_terminal_summary(terminalreporter):
    if _rejected:
        named = sum(_rejected.values())
        terminalreporter.write_line(f"{len(_rejected)} wrong answers rejected, {named} of them by name")
