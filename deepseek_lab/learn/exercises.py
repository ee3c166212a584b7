"""`@exercise`, `check`, `hint`, `reveal`: a learner's side of one function of the package.

The package is the solution: an exercise names a function by its dotted path, and its grader is a plain function that
judges any candidate for that slot.  `check` runs the very grader that the tests run on the package's own function and
on a bank of wrong answers.  While a stub is unwritten, the package's function runs in its place, so that a notebook
runs from top to bottom; only `check` tells a stub from an answer.
"""

import ast
import functools
import inspect
import linecache
import multiprocessing
import os
import re
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepseek_lab import slots
from deepseek_lab.learn.progress import load, note_attempt, note_hint, note_reveal
from deepseek_lab.learn.ranks import RankError
from deepseek_lab.learn.verdict import OPEN, Verdict, card, code_in_text

Grader = Callable[[Callable[..., Any]], Verdict]


@dataclass(frozen=True)
class Exercise:
    """One function (or small class) of the package, set as an exercise.  `level`: "warm-up", "core" or "stretch"."""

    number: str
    path: str
    title: str
    grade: Grader
    hints: tuple[str, ...] = ()
    level: str = "core"
    minutes: int = 10

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def judge(self, candidate: Callable[..., Any]) -> Verdict:
        """Grade a candidate as it would run in the package's slot; what it raises becomes part of the verdict."""
        try:
            verdict = self.grade(slots.bind(self.path, candidate))
        except Exception as error:
            verdict = _raised(error)
        verdict.title = f"{self.number} {self.name}"
        return verdict


class CheckFailed(AssertionError):
    """A check that did not pass, raised only where DEEPSEEK_LAB_STRICT=1 (the solutions, under test)."""


def exercise(path: str) -> Callable[[Any], Any]:
    """Mark a notebook's function as the answer to the exercise at `path`.

    An unwritten stub runs the package's function instead, and says so once.
    """
    slots.resolve(path)

    def mark(candidate: Any) -> Any:
        _latest[path] = candidate
        unwritten = is_stub(candidate)
        if isinstance(candidate, type):
            candidate.__exercise__ = path  # type: ignore[attr-defined]
            if not unwritten:
                return candidate
            _say_once(path)
            return slots.original(path)

        @functools.wraps(candidate)
        def answer(*args: Any, **kwargs: Any) -> Any:
            if unwritten:
                _say_once(path)
                return slots.original(path)(*args, **kwargs)
            return candidate(*args, **kwargs)

        answer.__exercise__ = path  # type: ignore[attr-defined]
        answer.__answer__ = candidate  # type: ignore[attr-defined]
        answer.__unwritten__ = unwritten  # type: ignore[attr-defined]
        return answer

    return mark


_latest: dict[str, Any] = {}  # path -> what the notebook defined last
_said: set[str] = set()


def _say_once(path: str) -> None:
    if path not in _said and multiprocessing.parent_process() is None:
        _said.add(path)
        print(f"{path.rpartition('.')[2]} is not written yet, so the package's own runs in its place.")


def check(candidate: Any) -> Verdict:
    """Grade your function, and keep it when it passes.

    `candidate`: the function, or the number of its exercise ("1.1").  Returns a verdict that Jupyter draws.  Raises
    LookupError when it answers no exercise, or when its cell has not been run.
    """
    task = find(candidate)
    if isinstance(candidate, str):
        if task.path not in _latest:
            raise LookupError(f"{task.name} is not defined here yet: run its cell, then check({task.name})")
        candidate = _latest[task.path]
    mine = getattr(candidate, "__answer__", candidate)
    package_own = slots.original(task.path)
    if mine is package_own:  # what stands in for the stub of a class
        mine = _latest.get(task.path, mine)
    if mine is package_own:
        verdict = _not_yet(task, f"This is the package's own {task.name}: there is nothing of yours to check.")
    elif is_stub(mine):
        before = " You passed it before: that answer is kept." if load().get(task.number, {}).get("passed") else ""
        verdict = _not_yet(task, f"Write the body of {task.name}, run its cell, then run this one again.{before}")
    else:
        verdict = task.judge(mine)
        if verdict.written:
            note_attempt(task.number, verdict.passed)
        if verdict.passed:
            slots.save_mine(task.path, mine, source_of(mine) or "")
    if os.environ.get("DEEPSEEK_LAB_STRICT") == "1" and not verdict.passed:
        raise CheckFailed(repr(verdict))
    return verdict


def find(which: Any) -> Exercise:
    """The exercise for a number ("1.1"), a dotted path, a function's name, or the function itself.

    Raises LookupError, with the numbers there are, when nothing matches.
    """
    from deepseek_lab.learn.chapters import exercises

    wanted = which if isinstance(which, str) else getattr(which, "__exercise__", getattr(which, "__name__", ""))
    for attribute in ("number", "path", "name"):
        for task in exercises():
            if getattr(task, attribute) == wanted:
                return task
    known = ", ".join(f"{task.number} {task.name}" for task in exercises())
    raise LookupError(f"{which!r} answers no exercise. There are: {known}")


def is_stub(candidate: Any) -> bool:
    """Whether a function, or every method of a class, holds no more than a docstring and a `raise`, `pass` or `...`."""
    source = source_of(candidate)
    if source is None:
        return False
    try:
        definition = ast.parse(textwrap.dedent(source)).body[0]
    except (SyntaxError, IndexError):
        return False
    functions = definition.body if isinstance(definition, ast.ClassDef) else [definition]
    bodies = [f.body for f in functions if isinstance(f, ast.FunctionDef)]
    return bool(bodies) and all(_is_empty(body) for body in bodies)


def _is_empty(body: list[ast.stmt]) -> bool:
    rest = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return all(
        isinstance(s, ast.Pass) or (isinstance(s, ast.Raise) and "NotImplementedError" in ast.dump(s)) for s in rest
    )


def source_of(candidate: Any) -> str | None:
    """The source text of a function or class, also of one defined in a cell; None where there is none."""
    if not isinstance(candidate, type):
        try:
            return inspect.getsource(candidate)
        except (OSError, TypeError):
            return None
    members = [getattr(m, "__func__", m) for m in vars(candidate).values()]
    files = [m.__code__.co_filename for m in members if inspect.isfunction(m)]
    text = "".join(linecache.getlines(files[0])) if files else ""
    try:  # inspect cannot find classes that were defined in a cell
        tree = ast.parse(text)
    except SyntaxError:
        return None
    found = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == candidate.__name__]
    if not found:
        return None
    start = min([found[-1].lineno, *(d.lineno for d in found[-1].decorator_list)])
    return "\n".join(text.splitlines()[start - 1 : found[-1].end_lineno]) + "\n"


def hint(which: Any, n: int = 1) -> "Folded":
    """Hint `n` of an exercise or a puzzle, folded; opening it shows the fold of the next one.

    Raises LookupError for an unknown exercise, ValueError for a hint that does not exist.
    """
    from deepseek_lab.learn.chapters import chapters

    puzzles = {name: hints for chapter in chapters() for name, hints in chapter.hints.items()}
    if isinstance(which, str) and which in puzzles:
        name, hints, last = which, puzzles[which], ""
    else:
        task = find(which)
        name, hints = task.number, task.hints
        last = f"That was the last hint. reveal({task.number!r}) shows the package's own function."
    if not 1 <= n <= len(hints):
        raise ValueError(f"{name} has {len(hints)} hints; asked for hint {n}")
    note_hint(name, n)
    texts = [(f"Hint {i} of {len(hints)}", text) for i, text in enumerate(hints, 1)][n - 1 :]
    return Folded(texts, last, f"hint({name!r}, {n + 1}) shows the next one.")


class Folded:
    """Texts that fold open one inside the other in Jupyter.  As plain text, the first, and `more` on how to go on."""

    def __init__(self, texts: list[tuple[str, str]], last: str = "", more: str = "") -> None:
        self.texts, self.last, self.more = texts, last, more

    def __repr__(self) -> str:
        title, text = self.texts[0]
        return f"{title}: {text}\n{self.more if len(self.texts) > 1 else self.last}".rstrip()

    def _repr_html_(self) -> str:
        inner = f'<div style="margin-top:6px">{code_in_text(self.last)}</div>' if self.last else ""
        for title, text in reversed(self.texts):
            fold = (
                f'<summary style="cursor:pointer">{title}</summary><div style="margin:4px 0">{code_in_text(text)}</div>'
            )
            inner = f'<details style="margin:4px 0">{fold}{inner}</details>'
        return card(inner, OPEN, "lab-hint")


def reveal(which: Any) -> "Source":
    """The package's own function: the solution.  Noted in your progress, without any consequence."""
    task = find(which)
    note_reveal(task.number)
    return Source(source_of(slots.original(task.path)) or "", task.path)


class Source:
    """Python source with its name; Jupyter colours it in its own theme."""

    def __init__(self, text: str, path: str) -> None:
        self.text, self.path = text, path

    def __repr__(self) -> str:
        return f"# {self.path}\n{self.text}"

    def _repr_markdown_(self) -> str:
        return f"`{self.path}`\n```python\n{self.text}```\n"


def _not_yet(task: Exercise, summary: str) -> Verdict:
    return Verdict(False, summary, title=f"{task.number} {task.name}", written=False)


def _raised(error: Exception) -> Verdict:
    """A verdict on code that raised: the message, and the lines of it that are the learner's."""
    cause = error.cause if isinstance(error, RankError) else f"{type(error).__name__}: {error}"
    if "NotImplementedError: Exercise" in cause:
        return Verdict(False, "A part of it is still to be written.", written=False)
    if isinstance(error, RankError):  # it carries its own account: the rank, its traceback, where the others wait
        cause, _, account = str(error).partition("\n\n")
        ours = r'  File "[^"]*deepseek_lab/(?:learn|parallel)/.*\n(    .*\n)*'  # frames that are no help, or a solution
        account = re.sub(ours, "", account)
        account = re.sub(r'File "[^"]*ipykernel[^"]*", line', "Your cell, line", account)
        return Verdict(False, f"{cause[:1].upper()}{cause[1:]}.", detail=account)
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if "ipykernel" in f.filename or f.filename.startswith("<")]
    lines = [*getattr(error, "__notes__", []), *(f"line {f.lineno} of {f.name}: {f.line}" for f in mine)]
    return Verdict(False, f"It raised {type(error).__name__}: {error}", detail="\n".join(lines))
