"""Slots: a learner's function in the package's place, with the learner's names first and the module's behind them."""

import sys
import types

import cloudpickle
import pytest
import torch

from deepseek_lab import slots

PACKAGE_MODULE = """
scale = 10

def helper(x):
    return x + scale

def answer(x):
    return helper(x)

def caller(x):
    return answer(x)
"""


@pytest.fixture
def module(monkeypatch):
    """A module of the package as far as slots are concerned: `answer` is the exercise, `caller` uses it."""
    made = types.ModuleType("deepseek_lab.a_slot_for_tests")
    exec(PACKAGE_MODULE, vars(made))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


ANSWER = "deepseek_lab.a_slot_for_tests.answer"
HELPER = "deepseek_lab.a_slot_for_tests.helper"


def from_a_cell(source: str, **names):
    """What a notebook would define: a function whose globals are those of `__main__`, not of the package."""
    namespace = {"__name__": "__main__", **names}
    exec(source, namespace)
    return namespace["answer"]


def test_a_filled_slot_takes_hold_everywhere_and_is_put_back(module):
    own = module.answer
    with slots.filled({ANSWER: lambda x: -x}):
        assert module.caller(3) == -3
        assert slots.filled_paths() == [ANSWER]
        assert slots.original(ANSWER) is own
    assert module.answer is own
    assert slots.filled_paths() == []


def test_slots_are_put_back_after_an_error_and_when_nested(module):
    own = module.answer

    def fail_inside():
        with slots.filled({ANSWER: lambda x: 1}):
            with slots.filled({ANSWER: lambda x: 2}):
                assert module.caller(0) == 2
            assert module.caller(0) == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert module.answer is own


def test_no_slot_changes_when_one_path_is_wrong(module):
    own = module.answer
    with pytest.raises(LookupError, match="did you mean answer"):
        slots.fill({ANSWER: lambda x: 1, "deepseek_lab.a_slot_for_tests.anser": lambda x: 1})
    assert module.answer is own


def test_the_learners_names_come_first_and_the_modules_behind_them(module):
    mine = from_a_cell("def answer(x): return my_helper(x) + scale", my_helper=lambda x: 100 * x)
    with slots.filled({ANSWER: mine}):
        assert module.caller(2) == 210
    mine = from_a_cell("def answer(x): return helper(x) + scale", scale=1)
    with slots.filled({ANSWER: mine}):
        assert module.caller(2) == 13, "the learner's scale here, the module's own in its helper"


def test_a_sibling_slot_filled_at_the_same_time_is_seen(module):
    """The exercise's cell imports `helper`: that name only repeats the module's, so the filled one must win."""
    mine = from_a_cell("def answer(x): return helper(x)", helper=module.helper)
    with slots.filled({ANSWER: mine, HELPER: lambda x: 7}):
        assert module.caller(2) == 7


RECURSIVE = """
@exercise(path)
def answer(x):
    return scale if x == 0 else 2 * answer(x - 1)
"""


def test_an_answer_that_calls_itself_gets_itself(module):
    """Graders call most answers outside of their slot: there, too, the package must not answer the inner calls."""
    from deepseek_lab.learn import exercise

    mine = from_a_cell(RECURSIVE, exercise=exercise, path=ANSWER)
    assert slots.bind(ANSWER, mine)(3) == 80, "with the package's own for the inner call it would be 2 * (2 + 10)"
    sent = cloudpickle.loads(cloudpickle.dumps(slots.bind(ANSWER, mine)))
    with slots.filled({ANSWER: sent}):
        assert module.caller(3) == 80

    other = from_a_cell(RECURSIVE + "earlier = lambda x: answer(x)", exercise=exercise, path=ANSWER)
    earlier = other.__answer__.__globals__["earlier"]
    assert slots.bind(ANSWER, earlier)(3) == 80, "the answer that the name stands for, not the package's"


def test_a_class_that_names_itself_gets_itself(module):
    from deepseek_lab.learn import exercise

    source = """
@exercise(path)
class answer:
    def __init__(self):
        super().__init__()
        self.kept = scale
    def again(self):
        return answer()
"""
    bound = slots.bind(ANSWER, from_a_cell(source, exercise=exercise, path=ANSWER))
    assert type(bound().again()) is bound
    assert bound().again().kept == 10


def test_what_crosses_to_another_process_is_the_learners_part_only(module):
    mine = from_a_cell("def answer(x): return helper(x) + mine", helper=module.helper, mine=5, unused=object())
    sent = cloudpickle.loads(cloudpickle.dumps(slots.bind(ANSWER, mine)))
    assert {name for name in sent.__globals__ if not name.startswith("__")} == {"mine"}
    with slots.filled({ANSWER: sent, HELPER: lambda x: 1}):
        assert module.caller(2) == 6


def test_a_class_is_bound_method_by_method(module):
    namespace = {"__name__": "__main__", "torch": torch}
    source = """
class answer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * scale
    @staticmethod
    def backward(ctx, g):
        return g * scale
"""
    exec(source, namespace)
    x = torch.ones(2, requires_grad=True)
    with slots.filled({ANSWER: namespace["answer"]}):
        module.answer.apply(x).sum().backward()
    assert x.grad.tolist() == [10.0, 10.0]


def test_kept_functions_come_back_and_run(module):
    mine = from_a_cell("def answer(x): return helper(x) * factor", factor=2)
    file = slots.save_mine(ANSWER, mine, "def answer(x): ...\n")
    assert file.with_suffix(".py").read_text() == "def answer(x): ...\n"
    with slots.filled(slots.load_mine()):
        assert module.caller(1) == 22


def test_a_damaged_kept_function_is_refused_with_the_way_out(module):
    slots.save_mine(ANSWER, lambda x: x, "").write_bytes(b"not a pickle")
    with pytest.raises(RuntimeError, match="Run its check again in the notebook, or delete that file"):
        slots.load_mine()


def test_the_lab_folder_lies_beside_the_nearest_pyproject(tmp_path, monkeypatch):
    monkeypatch.delenv("DEEPSEEK_LAB_HOME")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert slots.lab_home() == tmp_path / ".lab"


def test_an_unwritten_exercise_leaves_the_package_s_own_in_its_slot():
    from deepseek_lab.learn import exercise

    path = "deepseek_lab.model.norm.rms_norm"

    @exercise(path)
    def rms_norm(x, weight, eps):
        """Not written yet."""
        raise NotImplementedError("Exercise 1.1: write the body, then run check(rms_norm)")

    own = slots.original(path)
    with slots.filled({path: rms_norm}):
        module, name = slots.resolve(path)
        assert getattr(module, name) is own
