"""The lab's parallelism beside PyTorch's own, in one run on 4 or 8 ranks, as ratios: `python benchmarks/parallel.py`.

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

from deepseek_lab.data.batches import Batch
from deepseek_lab.learn import run_ranks
from deepseek_lab.model import DeepSeekConfig
from deepseek_lab.parallel import collectives, engine
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.parallel.mesh import Mesh, build_mesh
from deepseek_lab.plan import memory
from deepseek_lab.train import optim
from deepseek_lab.train.config import OptimConfig

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
    micro_batches: int = 1
    layers: int | None = None  # else those of the model

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.parallel.get("dp", 1) * self.parallel.get("tp", 1) * self.parallel.get("pp", 1)

    def mesh(self) -> Mesh:
        """On the ranks of this contest."""
        return build_mesh(ParallelConfig(**{"dp": 1, **self.parallel}), "cpu")


CONTESTS = [
    Contest("DDP", {"dp": 4, "bucket_mb": 100.0}, BUCKETS_MB),
    Contest("ZeRO-2", {"dp": 4, "zero_stage": 2}, UNITS),
    Contest("ZeRO-3", {"dp": 4, "zero_stage": 3}, UNITS),
    Contest("tp 4", {"tp": 4}, [{}]),
    Contest("2x2", {"dp": 2, "tp": 2}, UNITS),
    Contest("2x2, ZeRO-2", {"dp": 2, "tp": 2, "zero_stage": 2}, UNITS),
    Contest("pp 4, 1F1B", {"pp": 4}, [{}], 8, layers=8),
    Contest("pp 4, interleaved", {"pp": 4, "schedule": "interleaved", "chunks": 2}, [{}], 8, layers=8),
    Contest("2x2x2", {"dp": 2, "tp": 2, "pp": 2}, [{"blocks_per_unit": n} for n in (1, 4)], 4, layers=8),
]


class Contender:
    """One engine with its optimizer; `step` is a whole training step on this rank's rows."""

    def __init__(self, model: DeepSeekConfig, mesh: Mesh, contest: Contest, which: str, **variant: Any):
        settings = ParallelConfig(**contest.parallel | {k: v for k, v in variant.items() if k == "bucket_mb"})
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
        mine = ids[mesh.rank("dp") * rows :][:rows]
        batch = Batch(mine[:, :-1], mine[:, 1:], torch.zeros_like(mine[:, 1:]))
        self.micros = list(batch.split(rows // contest.micro_batches))
        self.most_bytes = 0

    def step(self, count_bytes: bool = False) -> float:
        """This rank's part of the loss."""
        ours, optimizer = self.engine, self.optimizer

        def forward(chunk: int, x: torch.Tensor | None, micro: Batch) -> Any:
            result = ours.run_stage(chunk, x, micro.input_ids, micro.labels, None, None, 0.0)
            self._count(count_bytes)
            return result

        ours.zero_grad()
        loss_sum, _ = ours.run(self.micros, forward, ROWS * T)
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
    mesh = contest.mesh()
    lab = Contender(model, mesh, contest, "lab")
    tried: dict[str, float] = {}
    for variant in contest.variants:
        peer = Contender(model, mesh, contest, "torch", **variant)
        peer.seconds()  # warm-up
        tried[str(variant)] = statistics.median(peer.seconds() for _ in range(3))
    best = min(contest.variants, key=lambda variant: tried[str(variant)])
    peer = Contender(model, mesh, contest, "torch", **best)
    for contender in (lab, peer):
        contender.step(count_bytes=True)
        contender.step(count_bytes=True)
    losses = [most(contender.step()) for contender in (lab, peer)]  # of a pipeline only the last rank has it
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
        "least": least_bytes_sent(contest, model),
    }


def bytes_sent(contender: Contender) -> int:
    """By this rank, in one step whose collectives are our own ring."""
    collectives.set_algorithm("ring")
    with collectives.record() as trace:
        contender.step()
    collectives.set_algorithm("gloo")
    return trace.wire_bytes()


def least_bytes_sent(contest: Contest, model: DeepSeekConfig) -> float | None:
    """What a rank must send in a step of one pass, whatever the algorithm, in fp32; None for a pipeline.

    Data parallelism: gradients are reduced and weights spread, (R-1)/R of them each; in stage 3 those of
    the blocks twice.  Tensor parallelism: four all-reduces a block and two at the ends, of a rank's activations.
    """
    parallel = contest.parallel
    if "pp" in parallel:
        return None
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
    mesh = contest.mesh()
    tables = {}
    for which in ("lab", "torch"):
        contender = Contender(model, mesh, contest, which)
        contender.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as run:
            contender.step()
        tables[which] = run.key_averages().table(sort_by="self_cpu_time_total", row_limit=20)
    return tables


def show(contest: Contest, found: dict[str, Any]) -> None:
    ratios = sorted(found["ratios"])
    lab_bytes, peer_bytes = found["bytes"]
    passes = f", {contest.micro_batches} micro-batches" if contest.micro_batches > 1 else ""
    print(f"\n{contest.name}: {contest.parallel}{passes}, {contest.ranks} ranks")
    for variant, seconds in found["tried"].items():
        print(f"  peer tried {variant:24s} {seconds * 1e3:8.0f} ms a step")
    print(f"  peer's best   {found['best'] or 'its only way'}")
    print(f"  step time     lab/torch {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}")
    print(f"  state bytes   lab/torch {lab_bytes / peer_bytes:.3f} ({lab_bytes:,.0f} and {peer_bytes:,.0f})")
    least = f"; the least possible {found['least']:,.0f}" if found["least"] else ""
    print(f"  bytes sent    {found['sent']:,.0f}{least}")
    ours, theirs = found["losses"]
    print(f"  largest loss of a rank in the third step: {ours:.3f} and {theirs:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--only", help="the name of one contest")
    parser.add_argument(
        "--quick", action="store_true", help="only shows that it runs: a small model, one variant, two pairs"
    )
    parser.add_argument("--profile", action="store_true", help="show where the time of rank 0 goes instead")
    arguments = parser.parse_args()
    base, pairs = (QUICK, 2) if arguments.quick else (MODEL, arguments.pairs)
    print(f"ranks of one thread, width {base.hidden_size}, {ROWS} x {T} tokens")
    for contest in CONTESTS:
        if arguments.only not in (None, contest.name):
            continue
        if arguments.quick:
            contest = replace(contest, variants=contest.variants[:1])
        model = replace(base, num_hidden_layers=contest.layers or base.num_hidden_layers)
        if arguments.profile:
            for which, table in run_ranks(profile, contest.ranks, contest, model, timeout=600)[0].items():
                print(f"\n{contest.name}, {which}\n{table}")
        else:
            show(contest, run_ranks(hold, contest.ranks, contest, model, pairs, timeout=3600)[0])


if __name__ == "__main__":
    main()
