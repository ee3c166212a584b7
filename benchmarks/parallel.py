"""The lab's parallelism beside PyTorch's own, in one run on 4 ranks, as ratios: `python benchmarks/parallel.py`.

    python benchmarks/parallel.py [--pairs 10] [--only DDP] [--quick] [--profile]

Same model, weights, batch and optimizer (torch's fused AdamW, clipping included).  The peer comes at its best: first it
tries every wrapping and bucket size below and keeps the fastest.  Then the two take turns, and each pair of steps gives
one ratio, so that a drift of the machine's speed meets both.  A step takes as long as its slowest rank.

Bytes of state are those of the fullest rank, at the fullest moment of a step: after forward, or after backward.  Bytes
sent are the lab's own, measured in a step over its ring, beside the least that any algorithm could send.  Above 1.0,
`--profile` shows where the time goes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepseek_lab.learn import run_ranks
from deepseek_lab.model import DeepSeekConfig
from deepseek_lab.parallel import collectives, engine
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.parallel.mesh import Mesh, build_mesh
from deepseek_lab.plan import memory
from deepseek_lab.train import optim
from deepseek_lab.train.config import OptimConfig

RANKS = 4
MODEL = DeepSeekConfig.preset("small", num_hidden_layers=6, vocab_size=4096)
QUICK = DeepSeekConfig.preset("tiny", num_hidden_layers=2, vocab_size=256)
ROWS, T = 8, 256
BUCKETS_MB = [{"bucket_mb": mb} for mb in (1.0, 4.0, 25.0, 100.0)]
UNITS = [{"blocks_per_unit": n} for n in (1, 2, 3, 6)]


@dataclass(frozen=True)
class Contest:
    """A layout, and what the peer may try."""

    name: str
    parallel: dict[str, Any]
    variants: list[dict[str, Any]]


CONTESTS = [
    Contest("DDP", {"dp": 4, "bucket_mb": 100.0}, BUCKETS_MB),
    Contest("ZeRO-2", {"dp": 4, "zero_stage": 2}, UNITS),
    Contest("ZeRO-3", {"dp": 4, "zero_stage": 3}, UNITS),
    Contest("tp 4", {"tp": 4}, [{}]),
    Contest("2x2", {"dp": 2, "tp": 2}, UNITS),
    Contest("2x2, ZeRO-2", {"dp": 2, "tp": 2, "zero_stage": 2}, UNITS),
]


class Contender:
    """One engine with its optimizer; `step` is a whole training step on this rank's rows."""

    def __init__(self, model: DeepSeekConfig, mesh: Mesh, parallel: dict[str, Any], which: str, **variant: Any):
        settings = ParallelConfig(**parallel | {k: v for k, v in variant.items() if k == "bucket_mb"})
        build: Any = engine.parallelize
        how = {k: v for k, v in variant.items() if k == "blocks_per_unit"}
        if which == "torch":
            from deepseek_lab.parallel import torch_engine

            build = torch_engine.parallelize
        self.engine: Any = build(model, mesh, settings, **how)
        self.engine.model.train()
        self.optimizer = optim.build_optimizer(*self.engine.optimizer_tensors(), OptimConfig())
        rows = ROWS // mesh.size("dp")
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, model.vocab_size, (ROWS, T + 1), generator=generator)
        self.ids = ids[mesh.rank("dp") * rows :][:rows]
        self.most_bytes = 0

    def step(self, count_bytes: bool = False) -> float:
        """This rank's part of the loss."""
        ours, optimizer = self.engine, self.optimizer
        ours.zero_grad()
        with ours.micro_batch(last=True):
            loss_sum, _ = ours.model.loss_sum(self.ids[:, :-1], self.ids[:, 1:])
            self._count(count_bytes)
            (loss_sum / (ROWS * T)).backward()
            self._count(count_bytes)
        ours.finish_backward()
        optim.clip_gradients(ours, 1.0)
        optimizer.step()
        ours.after_step()
        self._count(count_bytes)
        return loss_sum.item()

    def _count(self, wanted: bool) -> None:
        if wanted:
            self.most_bytes = max(self.most_bytes, sum(self.engine.state_bytes(self.optimizer).values()))

    def seconds(self) -> float:
        """One step of the slowest rank."""
        collectives.barrier()
        start = time.perf_counter()
        self.step()
        return most(time.perf_counter() - start)


def most(value: float) -> float:
    return collectives.all_reduce(torch.tensor([value], dtype=torch.float64), op="max").item()


def hold(contest: Contest, model: DeepSeekConfig, pairs: int) -> dict[str, Any]:
    """On a rank: choose the peer's best variant, then take turns with it."""
    mesh = build_mesh(ParallelConfig(dp=contest.parallel.get("dp"), tp=contest.parallel.get("tp", 1)), "cpu")
    lab = Contender(model, mesh, contest.parallel, "lab")
    tried: dict[str, float] = {}
    for variant in contest.variants:
        peer = Contender(model, mesh, contest.parallel, "torch", **variant)
        peer.seconds()  # warm-up
        tried[str(variant)] = statistics.median(peer.seconds() for _ in range(3))
    best = min(contest.variants, key=lambda variant: tried[str(variant)])
    peer = Contender(model, mesh, contest.parallel, "torch", **best)
    for contender in (lab, peer):
        contender.step(count_bytes=True)
        contender.step(count_bytes=True)
    losses = [contender.step() for contender in (lab, peer)]
    ratios = []
    for pair in range(pairs):
        first, second = (lab, peer) if pair % 2 == 0 else (peer, lab)
        seconds = {first: first.seconds(), second: second.seconds()}
        ratios.append(seconds[lab] / seconds[peer])
    return {
        "tried": tried,
        "best": best,
        "ratios": ratios,
        "bytes": [most(contender.most_bytes) for contender in (lab, peer)],
        "losses": losses,
        "sent": most(bytes_sent(lab)),
        "least": least_bytes_sent(contest.parallel, model),
    }


def bytes_sent(contender: Contender) -> int:
    """By this rank, in one step whose collectives are our own ring."""
    collectives.set_algorithm("ring")
    with collectives.record() as trace:
        contender.step()
    collectives.set_algorithm("gloo")
    return trace.wire_bytes()


def least_bytes_sent(parallel: dict[str, Any], model: DeepSeekConfig) -> float:
    """What a rank must send in a step of one pass, whatever the algorithm, in fp32.

    Data parallelism: gradients are reduced and weights spread, (R-1)/R of them each; in stage 3 those of
    the blocks twice.  Tensor parallelism: four all-reduces a block and two at the ends, of a rank's activations.
    """
    dp, tp, stage = parallel.get("dp", 1), parallel.get("tp", 1), parallel.get("zero_stage", 0)
    blocks = [memory.layer_parameters(model, layer) for layer in range(model.num_hidden_layers)]
    in_blocks = sum(memory.parameters_of_a_rank(counts, tp) for counts in blocks)
    everywhere = in_blocks + memory.parameters_of_a_rank(memory.end_parameters(model), tp)
    data = (dp - 1) / dp * 4 * (2 * everywhere + (in_blocks if stage == 3 else 0))
    activations = ROWS // dp * T * model.hidden_size
    tensor = (4 * model.num_hidden_layers + 2) * 2 * (tp - 1) / tp * 4 * activations
    return data + tensor


def profile(contest: Contest, model: DeepSeekConfig) -> dict[str, str]:
    """On a rank: where a step of each spends its time."""
    mesh = build_mesh(ParallelConfig(dp=contest.parallel.get("dp"), tp=contest.parallel.get("tp", 1)), "cpu")
    tables = {}
    for which in ("lab", "torch"):
        contender = Contender(model, mesh, contest.parallel, which)
        contender.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as run:
            contender.step()
        tables[which] = run.key_averages().table(sort_by="self_cpu_time_total", row_limit=20)
    return tables


def show(contest: Contest, found: dict[str, Any]) -> None:
    ratios = sorted(found["ratios"])
    lab_bytes, peer_bytes = found["bytes"]
    print(f"\n{contest.name}: {contest.parallel}")
    for variant, seconds in found["tried"].items():
        print(f"  peer tried {variant:24s} {seconds * 1e3:8.0f} ms a step")
    print(f"  peer's best   {found['best'] or 'its only way'}")
    print(f"  step time     lab/torch {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}")
    print(f"  state bytes   lab/torch {lab_bytes / peer_bytes:.3f} ({lab_bytes:,.0f} and {peer_bytes:,.0f})")
    print(f"  bytes sent    {found['sent']:,.0f}; the least possible {found['least']:,.0f}")
    ours, theirs = found["losses"]
    print(f"  loss of rank 0 in the third step: {ours:.3f} and {theirs:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--only", help="the name of one contest")
    parser.add_argument(
        "--quick", action="store_true", help="only shows that it runs: a small model, one variant, two pairs"
    )
    parser.add_argument("--profile", action="store_true", help="show where the time of rank 0 goes instead")
    arguments = parser.parse_args()
    model, pairs = (QUICK, 2) if arguments.quick else (MODEL, arguments.pairs)
    print(
        f"{RANKS} ranks of one thread, {model.num_hidden_layers} layers, width {model.hidden_size}, {ROWS} x {T} tokens"
    )
    for contest in CONTESTS:
        if arguments.only not in (None, contest.name):
            continue
        if arguments.quick:
            contest = replace(contest, variants=contest.variants[:1])
        if arguments.profile:
            for which, table in run_ranks(profile, RANKS, contest, model, timeout=600)[0].items():
                print(f"\n{contest.name}, {which}\n{table}")
        else:
            show(contest, run_ranks(hold, RANKS, contest, model, pairs, timeout=3600)[0])


if __name__ == "__main__":
    main()
