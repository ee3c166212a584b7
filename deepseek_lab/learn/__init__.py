"""What a learner touches: ranks in a cell, exercises with their checks, hints and progress."""

from deepseek_lab.learn.exercises import check, exercise, hint, reveal
from deepseek_lab.learn.progress import progress
from deepseek_lab.learn.ranks import RankError, run_ranks
from deepseek_lab.learn.verdict import Verdict
from deepseek_lab.parallel.collectives import Link, record

__all__ = ["Link", "RankError", "Verdict", "check", "exercise", "hint", "progress", "record", "reveal", "run_ranks"]
