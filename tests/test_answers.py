"""The graders, judged: each passes the package's own function and rejects every wrong answer in the bank."""

import importlib
import pkgutil

import pytest

import tests.wrong_answers as banks
from deepseek_lab import slots
from deepseek_lab.learn.chapters import exercises
from deepseek_lab.learn.exercises import find

EXERCISES = exercises()
WRONG = [
    wrong
    for info in sorted(pkgutil.iter_modules(banks.__path__), key=lambda info: info.name)
    for wrong in importlib.import_module(f"{banks.__name__}.{info.name}").WRONG
]


@pytest.mark.parametrize("task", EXERCISES, ids=lambda task: f"{task.number}-{task.name}")
def test_the_packages_own_function_passes(task):
    verdict = task.judge(slots.original(task.path))
    assert verdict.passed, verdict
    assert slots.filled_paths() == [], "the grader left a slot filled"


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong.exercise}-{wrong.fn.__name__}")
def test_a_wrong_answer_is_rejected(wrong, record_property):
    verdict = find(wrong.exercise).judge(wrong.fn)
    assert not verdict.passed, f"accepted a wrong answer: {verdict}"
    if wrong.misconception:
        assert verdict.misconception == wrong.misconception, verdict
    record_property("wrong answer", [f"{wrong.exercise} {wrong.fn.__name__}", bool(verdict.misconception)])


@pytest.mark.parametrize("task", EXERCISES, ids=lambda task: f"{task.number}-{task.name}")
def test_every_exercise_has_wrong_answers_and_hints(task):
    bank = [wrong for wrong in WRONG if wrong.exercise == task.number]
    assert bank, f"tests/wrong_answers has none for {task.number} {task.name}"
    names = [wrong.misconception for wrong in bank if wrong.misconception]
    assert len(names) == len(set(names)), "one wrong answer per misconception"
    assert task.hints
    assert task.level in ("warm-up", "core", "stretch")
