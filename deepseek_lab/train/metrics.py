"""What a run writes down: one JSON object a step, a summary, and what the hardware could do at most."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from deepseek_lab.plan import flops

PEAK_SIZE = 1024  # side of the square matrices of the measurement
PEAK_SECONDS = 0.3


class MetricsFile:
    """`metrics.jsonl`: floats are written so that reading gives the same float back (17 digits).

    A run that goes on after `steps_done` steps first drops the lines of later steps, which a stop may have left.
    """

    def __init__(self, path: Path, steps_done: int = 0):
        kept = [line for line in read_metrics(path) if line["step"] <= steps_done] if path.exists() else []
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(partial, path)
        self._stream = path.open("a")

    def write(self, values: dict[str, Any]) -> None:
        self._stream.write(json.dumps(values) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of a `metrics.jsonl`; a last line cut short by a crash is left out."""
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def peak_flops_per_s(device: torch.device, precision: str) -> float:
    """What this rank's device can do at most, FLOP/s: the data sheet's dense figure, or else what matmuls reach here.

    On a CPU all ranks should measure at the same time, since they share the cores; their figures then add up.
    """
    if device.type == "cuda":
        known = flops.peak_of(torch.cuda.get_device_name(device), precision)
        if known:
            return known
    dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(precision, torch.bfloat16)
    a = torch.randn(PEAK_SIZE, PEAK_SIZE, device=device, dtype=dtype)
    b, out = torch.randn_like(a), torch.empty_like(a)
    torch.mm(a, b, out=out)
    done, started, elapsed = 0, time.perf_counter(), 0.0
    while elapsed < PEAK_SECONDS:
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        done, elapsed = done + 1, time.perf_counter() - started
    return done * 2 * PEAK_SIZE**3 / elapsed


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held: of a GPU its tensors, of a CPU the whole process, libraries included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # absent on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
