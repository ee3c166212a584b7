"""Wrong answers to the exercises: one per misconception that a learner could have, no near-copies.

A module `cNN_topic` defines `WRONG`, a list of `Wrong`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wrong:
    """A function that the grader of `exercise` must reject, and the `misconception` that its verdict must name."""

    exercise: str
    fn: Callable[..., Any]
    misconception: str | None = None
