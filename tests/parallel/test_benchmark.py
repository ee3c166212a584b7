"""The benchmark of both engines runs, and its arithmetic of bytes is right; how fast anything is, no test says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.ranks
def test_the_benchmark_runs_and_the_lab_sends_no_more_than_it_must():
    command = [sys.executable, "benchmarks/parallel.py", "--quick", "--only", "ZeRO-3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.search(r"step time +lab/torch \d", done.stdout)
    sent, least = re.search(r"bytes sent +([\d,]+); the least possible ([\d,]+)", done.stdout).groups()
    sent, least = (int(number.replace(",", "")) for number in (sent, least))
    assert least <= sent < 1.01 * least  # padding, the norm
