"""Executor against simulator, and stale weights against none: `python benchmarks/pipeline.py [executor] [staleness]`.

The executor, autograd and messages are real; only a stage's compute is replaced by a wait, so that four ranks on two
cores do not get into each other's way.  How long F, I and W and a message between two ranks take is measured on one
schedule, zb_h1, and used for all.  The makespan is that of the rank which takes longest, from its first start to its
last end, the median of three runs.  Target: within 3% of the simulator.

Losses are those of a small model on real text, four stages on four ranks, plain SGD, over three seeds.
"""

import statistics
import sys

import torch
from torch import Tensor

from deepseek_lab.learn import run_ranks
from deepseek_lab.learn.chapters.c06_pipeline import takes_time, train_bytes
from deepseek_lab.parallel.pipeline import Executor, Stage
from deepseek_lab.plan.schedules import SCHEDULES, build_schedule, direction, simulate

RANKS, WIDTH = 4, 4096
CALIBRATE, REPEATS = "zb_h1", 3


class WaitingStage(Stage):
    def __init__(self, seconds: float, last: bool):
        self.seconds, self.last, self.w = seconds, last, torch.zeros(1, requires_grad=True)

    def forward(self, m: int, x: Tensor | None) -> Tensor:
        x = torch.zeros(WIDTH, requires_grad=True) if x is None else x
        y = takes_time(x, self.w, self.seconds)
        return y.sum() if self.last else y

    def input_like(self, m: int) -> Tensor:
        return torch.empty(WIDTH)


def chunks_of(name: str) -> int:
    return 2 if name in ("interleaved", "dualpipe_v") else 1


def carry_out(name: str, micro_batches: int, seconds: float):
    schedule = build_schedule(name, RANKS, micro_batches, chunks_of(name))
    rank = torch.distributed.get_rank()
    stages = [
        WaitingStage(seconds, schedule.stage(rank, chunk) == schedule.stages - 1) for chunk in range(schedule.chunks)
    ]
    executor = Executor(schedule, stages)
    executor.run()
    return executor.spans


def calibrate(micro_batches: int, seconds: float) -> dict[str, float]:
    """What an F, an I and a W take, and a message to a rank that stands waiting for it."""
    by_rank = run_ranks(carry_out, RANKS, CALIBRATE, micro_batches, seconds, timeout=120)
    takes = {
        kind: statistics.median(s.end_s - s.start_s for spans in by_rank for s in spans if s.action.kind == kind)
        for kind in "FIW"
    }
    ends = {
        (direction(s.action), s.action.micro_batch, rank): s.end_s
        for rank, spans in enumerate(by_rank)
        for s in spans
        if s.action.kind in "FI"
    }
    gaps = []
    for rank, spans in enumerate(by_rank):
        for before, s in zip([None, *spans], spans, strict=False):
            of, sender = direction(s.action), rank - 1 if s.action.kind == "F" else rank + 1
            sent_s = ends.get((of, s.action.micro_batch, sender)) if s.action.kind in "FI" else None
            if sent_s is not None and (before is None or before.end_s < sent_s):
                gaps.append(s.start_s - sent_s)
    return {"t_f": takes["F"], "t_b": takes["I"], "t_w": takes["W"], "t_comm": statistics.median(gaps)}


def show_executor(seconds: float = 0.06, m: int = 8) -> None:
    measured = calibrate(m, seconds)
    print("measured on", CALIBRATE + ":", ", ".join(f"{name} {s * 1e3:.2f} ms" for name, s in measured.items()))
    print(f"{RANKS} ranks, {m} micro-batches        executor   simulator   ratio")
    for name in SCHEDULES:
        runs = [run_ranks(carry_out, RANKS, name, m, seconds, timeout=120) for _ in range(REPEATS)]
        executor_s = statistics.median(max(s[-1].end_s - s[0].start_s for s in by_rank) for by_rank in runs)
        simulator_s = simulate(build_schedule(name, RANKS, m, chunks_of(name)), **measured).makespan
        print(f"{name:30}{executor_s:8.3f} s  {simulator_s:8.3f} s  {executor_s / simulator_s:6.3f}")


def show_staleness(updates: int = 400) -> None:
    torch.set_num_threads(1)
    print(f"loss, mean of the last 100 of {updates} updates      flush   PipeDream   without stashing")
    for lr in (0.3, 0.5, 0.9):
        for seed in range(3):
            flush = train_bytes(updates, lr, seed)
            stale, overwritten = (
                run_ranks(train_bytes, RANKS, updates, lr, seed, stash=stash, timeout=120)[-1]
                for stash in (True, False)
            )
            means = [sum(losses[-100:]) / 100 for losses in (flush, stale, overwritten)]
            print(f"learning rate {lr}, seed {seed}: {means[0]:24.3f} {means[1]:11.3f} {means[2]:18.3f}", flush=True)


def main(*what: str) -> None:
    for name in what or ("executor", "staleness"):
        {"executor": show_executor, "staleness": show_staleness}[name]()


if __name__ == "__main__":
    main(*sys.argv[1:])
