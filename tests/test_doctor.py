"""The doctor: a healthy machine passes, and each kind of fault is found and comes with its cure."""

import pytest

from deepseek_lab import doctor


def test_this_machine_is_fit(capsys):
    """Includes the real all-reduce on 4 ranks."""
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert "all-reduce on 4 ranks" in said
    assert doctor.FAULT not in said


@pytest.mark.parametrize(
    ("version", "ranges", "expected"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.14.0", "<2.14,>=2.11", False),
        ("2.9.1", ">=2.11", False),
        ("8.1", "<9,>=8.1", True),
        ("0.11.0", "<0.12,>=0.11", True),
        ("3", "!=3.0", False),
        ("5.0.0rc1", ">=5.0,<6", True),
        ("1.0", "", True),
    ],
)
def test_version_ranges(version, ranges, expected):
    assert doctor.within(version, ranges) is expected


def test_requirements_are_read_as_pip_writes_them():
    assert doctor.parse_requirement('ruff<1,>=0.11; extra == "test"') == ("ruff", "<1,>=0.11", True)
    assert doctor.parse_requirement("torch<2.14,>=2.11") == ("torch", "<2.14,>=2.11", False)
    assert doctor.parse_requirement("name[with_extra] (>=1)") == ("name", ">=1", False)


def test_a_version_out_of_range_and_a_missing_one_are_faults(monkeypatch):
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda name: ["torch>=99", "no_such_package>=1", "ruff>=99; extra"]
    )
    levels = {f.what.split()[0]: (f.level, f.cure) for f in doctor.versions()}
    assert levels["torch"] == (doctor.FAULT, 'pip install "torch>=99"')
    assert levels["no_such_package"][0] == doctor.FAULT
    assert levels["ruff"][0] == doctor.NOTE, "an extra keeps nothing from running"


def test_a_failing_all_reduce_is_a_fault_with_a_cure(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("connection refused")

    monkeypatch.setattr("deepseek_lab.learn.ranks.run_ranks", broken)
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert "connection refused" in said
    assert "->" in said.split("connection refused")[1]


def test_a_check_that_breaks_is_a_fault_and_the_others_still_run(monkeypatch, capsys):
    def broken():
        raise OSError("no such device")
        yield

    monkeypatch.setattr(doctor, "machine", broken)
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert "no such device" in said
    assert "all-reduce on 4 ranks" in said


def test_arguments_are_refused(capsys):
    assert doctor.main(["--fast"]) == 2
    assert "usage" in capsys.readouterr().out
