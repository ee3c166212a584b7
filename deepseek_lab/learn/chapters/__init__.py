"""The chapters' exercises, graders and hints: one module a chapter, found by name, in order.

A chapter's module `cNN_topic` defines `EXERCISES`, a tuple of `Exercise`, and may define `HINTS`, a dictionary from a
name such as "1-bug" to its hints, for puzzles that no function answers, and `TITLE`.
"""

import functools
import importlib
import pkgutil
from dataclasses import dataclass, field

from deepseek_lab.learn.exercises import Exercise


@dataclass(frozen=True)
class Chapter:
    """`number` "01", `name` "01_one_rank", `title` "One rank"."""

    number: str
    name: str
    title: str
    exercises: tuple[Exercise, ...]
    hints: dict[str, tuple[str, ...]] = field(default_factory=dict)


@functools.cache
def chapters() -> tuple[Chapter, ...]:
    """All chapters in the order of their numbers.

    Raises ValueError when two exercises share a number or a path, or one carries another chapter's number.
    """
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name.startswith("c") and m.name[1:3].isdigit())
    found = tuple(_load(name) for name in names)
    seen: set[str] = set()
    for chapter in found:
        for exercise in chapter.exercises:
            if int(exercise.number.partition(".")[0]) != int(chapter.number):
                raise ValueError(f"exercise {exercise.number} stands in chapter {chapter.name}")
            for key in (exercise.number, exercise.path):
                if key in seen:
                    raise ValueError(f"two exercises share {key!r} (chapter {chapter.name})")
                seen.add(key)
    return found


def exercises() -> tuple[Exercise, ...]:
    """The exercises of all chapters, in order."""
    return tuple(exercise for chapter in chapters() for exercise in chapter.exercises)


def _load(module_name: str) -> Chapter:
    module = importlib.import_module(f"{__name__}.{module_name}")
    name = module_name[1:]
    title = getattr(module, "TITLE", name[3:].replace("_", " ").capitalize())
    return Chapter(name[:2], name, title, tuple(module.EXERCISES), dict(getattr(module, "HINTS", {})))
