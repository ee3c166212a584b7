"""Executor against simulator, schedule by schedule: `python benchmarks/pipeline.py [ms] [micro-batches]`.

The executor, autograd and messages are real; only a stage's compute is replaced by a wait, so that four ranks on two
cores do not get into each other's way.  How long F, I and W and a message between two ranks take is measured on one
schedule, zb_h1, and used for all.  The makespan is that of the rank which takes longest, from its first start to its
last end, the median of three runs.  Target: within 3% of the simulator.
"""

import statistics
import sys
import time

import torch
from torch import Tensor

from deepseek_lab.learn import run_ranks
from deepseek_lab.model import split_backward
from deepseek_lab.parallel.pipeline import Executor, Stage
from deepseek_lab.plan.schedules import SCHEDULES, build_schedule, direction, simulate

RANKS, WIDTH = 4, 4096
CALIBRATE, REPEATS = "zb_h1", 3


class Wait(torch.autograd.Function):
    """The identity, which takes its time: in forward, in the input part of backward, and in the weight part."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, seconds: float) -> Tensor:
        ctx.w, ctx.seconds = w, seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor):
        def weight_part() -> tuple[Tensor]:
            time.sleep(ctx.seconds)
            return (torch.zeros_like(ctx.w),)

        time.sleep(ctx.seconds)
        return dy, None if split_backward.put_off([ctx.w], weight_part) else weight_part()[0], None


class WaitingStage(Stage):
    def __init__(self, seconds: float, last: bool):
        self.seconds, self.last, self.w = seconds, last, torch.zeros(1, requires_grad=True)

    def forward(self, m: int, x: Tensor | None) -> Tensor:
        x = torch.zeros(WIDTH, requires_grad=True) if x is None else x
        y = Wait.apply(x, self.w, self.seconds)
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


def main(ms: float = 60, micro_batches: float = 8) -> None:
    m = int(micro_batches)
    measured = calibrate(m, ms / 1e3)
    print("measured on", CALIBRATE + ":", ", ".join(f"{name} {s * 1e3:.2f} ms" for name, s in measured.items()))
    print(f"{RANKS} ranks, {m} micro-batches        executor   simulator   ratio")
    for name in SCHEDULES:
        runs = [run_ranks(carry_out, RANKS, name, m, ms / 1e3, timeout=120) for _ in range(REPEATS)]
        executor_s = statistics.median(max(s[-1].end_s - s[0].start_s for s in by_rank) for by_rank in runs)
        simulator_s = simulate(build_schedule(name, RANKS, m, chunks_of(name)), **measured).makespan
        print(f"{name:30}{executor_s:8.3f} s  {simulator_s:8.3f} s  {executor_s / simulator_s:6.3f}")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
