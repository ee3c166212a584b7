"""What a learner touches: ranks in a cell, exercises with their checks, hints and progress."""

from typing import Any

from deepseek_lab.learn.exercises import check, exercise, hint, reveal
from deepseek_lab.learn.progress import progress
from deepseek_lab.learn.ranks import RankError, run_ranks
from deepseek_lab.learn.verdict import Verdict
from deepseek_lab.parallel.collectives import Link, record

__all__ = [
    "Link",
    "RankError",
    "Verdict",
    "check",
    "exercise",
    "hint",
    "progress",
    "record",
    "reveal",
    "run_ranks",
    "show_traffic",
]


def __getattr__(name: str) -> Any:
    """Load what draws only when it is asked for: ranks are forked from a process that imports this package."""
    if name == "show_traffic":
        from deepseek_lab.learn.widgets import show_traffic

        return show_traffic
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
