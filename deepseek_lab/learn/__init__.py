"""What a learner touches: ranks in a cell, exercises with their checks, hints and progress."""

from deepseek_lab.learn.exercises import check, exercise, hint, reveal
from deepseek_lab.learn.progress import progress
from deepseek_lab.learn.verdict import Verdict

__all__ = ["Verdict", "check", "exercise", "hint", "progress", "reveal"]
