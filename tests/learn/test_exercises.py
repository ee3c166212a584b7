"""check, hint, reveal and progress, as a learner meets them."""

import linecache

import pytest
import torch

from deepseek_lab import slots
from deepseek_lab.learn import check, exercise, hint, progress, reveal
from deepseek_lab.learn.chapters import exercises
from deepseek_lab.learn.exercises import CheckFailed, Exercise, find, is_stub
from deepseek_lab.learn.verdict import close, ok, short, wrong
from deepseek_lab.parallel import data_parallel

PATH = "deepseek_lab.parallel.data_parallel.global_token_mean"
HEAD = "def global_token_mean(loss_sum, n_tokens, group=None):\n"
STUB = HEAD + '    """Doc."""\n    raise NotImplementedError("Exercise 0.1: write the body")\n'
RIGHT = HEAD + (
    "    totals = torch.tensor([float(loss_sum), float(n_tokens)], dtype=torch.float64)\n"
    "    totals = collectives.all_reduce(totals, group)\n"
    "    return totals[0] / totals[1]\n"
)


def cell(source: str, name: str = "global_token_mean"):
    """Run a cell as Jupyter does: in its own namespace, its source known to linecache."""
    file = f"<ipython-input-{abs(hash(source))}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = {"__name__": "__main__", "exercise": exercise, "torch": torch}
    exec(compile(source, file, "exec"), namespace)
    return namespace[name]


def marked(source: str):
    return cell(f'@exercise("{PATH}")\n{source}')


def test_a_stub_runs_the_packages_function_and_says_so_once(capsys, monkeypatch):
    monkeypatch.setattr("deepseek_lab.learn.exercises._said", set())
    stub = marked(STUB)
    assert stub(torch.tensor(6.0), 3).item() == 2.0
    stub(torch.tensor(6.0), 3)
    assert capsys.readouterr().out.count("not written yet") == 1


def test_a_stub_is_not_yet(tmp_path):
    verdict = check(marked(STUB))
    assert not verdict.passed
    assert not verdict.written
    assert "not yet" in repr(verdict)
    assert slots.load_mine() == {}


def test_the_packages_own_function_is_not_an_answer():
    assert not check(data_parallel.global_token_mean).written


def test_a_right_answer_passes_is_kept_and_counted():
    verdict = check(marked(RIGHT))
    assert verdict.passed, verdict
    assert progress().passed == 1
    (kept,) = slots.load_mine().values()
    assert (slots.lab_home() / "functions" / f"{PATH}.py").read_text() == f'@exercise("{PATH}")\n{RIGHT}'
    with slots.filled({PATH: kept}):
        assert data_parallel.global_token_mean(torch.tensor(6.0), 3).item() == 2.0


def test_check_takes_the_number_of_an_exercise(monkeypatch):
    monkeypatch.setattr("deepseek_lab.learn.exercises._latest", {})
    with pytest.raises(LookupError, match="run its cell"):
        check("0.1")
    marked(HEAD + "    return loss_sum / n_tokens\n")
    assert check("0.1").misconception == "a local mean"


def test_a_stub_after_a_pass_says_that_the_answer_is_kept():
    check(marked(RIGHT))
    assert "passed it before" in check(marked(STUB)).summary


def test_a_wrong_answer_is_not_kept_and_does_not_undo_an_earlier_pass():
    check(marked(RIGHT))
    verdict = check(marked(HEAD + "    return loss_sum / n_tokens\n"))
    assert verdict.misconception == "a local mean"
    assert progress().passed == 1
    assert list(slots.load_mine()) == [PATH]


def test_an_answer_that_raises_gets_a_verdict_with_its_own_line():
    verdict = check(marked(HEAD + "    return undefined_name\n"))
    assert not verdict.passed
    assert "NameError" in verdict.summary
    assert "undefined_name" in verdict.detail
    assert "c00_start_here" not in verdict.detail, "the grader's frames are no help to a learner"


def test_what_a_grader_notes_on_an_error_is_shown():
    """Graders note what they asked for: an answer that raises shows the input that it raised for."""

    def grade(fn):
        try:
            fn()
        except ZeroDivisionError as error:
            error.add_note("Asked for rank 3 of 4.")
            raise

    verdict = Exercise("0.0", "deepseek_lab.model.norm.rms_norm", "", grade).judge(lambda: 1 // 0)
    assert verdict.detail.startswith("Asked for rank 3 of 4.")


def test_strict_mode_raises(monkeypatch):
    monkeypatch.setenv("DEEPSEEK_LAB_STRICT", "1")
    assert check(marked(RIGHT)).passed
    for source in (STUB, HEAD + "    return loss_sum\n"):
        with pytest.raises(CheckFailed):
            check(marked(source))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(x):\n    '''doc'''\n    raise NotImplementedError('Exercise')\n", True),
        ("def f(x):\n    pass\n", True),
        ("def f(x):\n    '''doc'''\n    ...\n", True),
        ("def f(x):\n    return x\n    raise NotImplementedError('Exercise')\n", False),
        ("def f(x):\n    raise ValueError(x)\n", False),
        ("class f:\n    def a(self):\n        raise NotImplementedError\n    def b(self):\n        pass\n", True),
        ("class f:\n    def a(self):\n        return 1\n    def b(self):\n        pass\n", False),
    ],
)
def test_what_counts_as_a_stub(source, expected):
    assert is_stub(cell(source, "f")) is expected


def test_a_class_that_is_a_stub_gives_way_to_the_packages():
    from deepseek_lab.parallel import collectives

    source = (
        '@exercise("deepseek_lab.parallel.collectives.CopyToGroup")\n'
        "class CopyToGroup(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x, group):\n        raise NotImplementedError('Exercise')\n"
    )
    assert cell(source, "CopyToGroup") is collectives.CopyToGroup
    written = cell(source.replace("raise NotImplementedError('Exercise')", "return x"), "CopyToGroup")
    assert written is not collectives.CopyToGroup


def test_hints_fold_open_one_inside_the_other():
    page = hint("0.1")._repr_html_()
    assert page.count("<details") == len(find("0.1").hints)
    assert "reveal" in page
    assert repr(hint(marked(STUB), 2)).startswith("Hint 2 of 3")
    assert "hint('0.1', 3) shows the next" in repr(hint("0.1", 2))
    with pytest.raises(ValueError, match="3 hints; asked for hint 4"):
        hint("0.1", 4)


def test_reveal_shows_the_packages_source():
    assert "all_reduce(totals, group)" in repr(reveal("0.1"))


def test_an_unknown_exercise_names_those_there_are():
    with pytest.raises(LookupError, match=r"0\.1 global_token_mean"):
        find("99.9")
    with pytest.raises(LookupError):
        exercise("deepseek_lab.parallel.data_parallel.no_such_function")


def test_progress_survives_damage():
    check(marked(RIGHT))
    (slots.lab_home() / "progress.json").write_text("{broken")
    assert progress().passed == 0
    check(marked(RIGHT))
    assert progress().passed == 1
    assert f"1 of {len(exercises())}" in repr(progress())


def test_verdicts_escape_what_they_show():
    page = wrong("<script>", "a <b>", [("x", "<i>", torch.ones(2))])._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "<i>" not in page


def test_close_is_norm_wise_and_strict_about_shape_and_type():
    assert close(torch.tensor([1e9, 0.0]), torch.tensor([1e9, 0.1]))
    assert not close(1.0, 1.0 + 1e-8)
    assert close(1.0, 1.0 + 1e-10)
    assert not close(torch.ones(2), torch.ones(2, 1))
    assert not close(None, 1.0)
    assert not close(float("nan"), 1.0)
    assert close(0.0, 0.0)


def test_short_stays_short():
    assert short(torch.arange(3)) == "[0, 1, 2]"
    assert short(torch.zeros(100, 100)) == "float32 tensor of shape (100, 100), norm 0"
    assert len(short("x" * 1000)) <= 120


def test_a_grader_that_breaks_gives_a_verdict_not_a_crash():
    task = Exercise("0.9", PATH, "broken", lambda fn: [][1])
    assert "IndexError" in task.judge(lambda: 0).summary
    assert Exercise("0.9", PATH, "fine", lambda fn: ok("yes")).judge(lambda: 0).title == "0.9 global_token_mean"
