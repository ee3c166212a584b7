"""How the ranks are laid out.  The batch is set globally elsewhere; a layout only splits it.

Everything that cannot be is refused here, before any process group exists, naming what can.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_lab.model.config import DeepSeekConfig
from deepseek_lab.plan.schedules import Schedule, build_schedule
from deepseek_lab.plan.stages import split_layers

COLLECTIVES = ("gloo", "ring")
COMPRESSIONS = ("none", "int8", "topk")
RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "dualpipe_v")
TORCH_SCHEDULES = ("gpipe", "1f1b", "interleaved")


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism, and how each kind works.

    Degrees: `dp` data-parallel ranks (None takes all that the others leave), `tp` ranks that share every layer, `pp`
    pipeline stages; `ep` divides `dp`: experts are spread inside data parallelism.

    `zero_stage`: what data-parallel ranks share out instead of each holding it whole: 0 nothing, 1 the optimizer's
    state, 2 gradients too, 3 weights too (arXiv 1910.02054).  `overlap`: gradients travel while backward goes on.
    `bucket_mb`: megabytes of gradient to a message.  `compression`: of gradients, "int8" or "topk", lossy.
    `sequence_parallel`: between the layers that `tp` splits, activations are split too, along the sequence.
    `recompute`: activations that are worked out again in backward: "selective" those of attention, "full" whole blocks.
    `collectives`: "gloo" leaves them to the process group (NCCL on GPUs), "ring" uses the package's own ring.
    `schedule`: the order of a pipeline's work (`plan/schedules.py`), in which each rank has `chunks` stages.
    `stage_layers`: how many blocks each stage holds, None for equally many.
    """

    dp: int | None = None
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    stage_layers: list[int] | None = None
    collectives: str = "gloo"
    compression: str = "none"
    overlap: bool = True
    bucket_mb: float = 25.0
    recompute: str = "none"

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "ep", "chunks"):
            if (degree := getattr(self, name)) is not None and degree < 1:
                raise ValueError(f"parallel.{name}={degree} must be at least 1")
        for name, known in (
            ("collectives", COLLECTIVES),
            ("compression", COMPRESSIONS),
            ("recompute", RECOMPUTE),
            ("schedule", SCHEDULES),
        ):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"parallel.{name}={value!r} is not known; use one of {', '.join(known)}")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"parallel.zero_stage={self.zero_stage} is not a stage; use 0, 1, 2 or 3")
        self.pipeline()
        if self.bucket_mb <= 0:
            raise ValueError(f"parallel.bucket_mb={self.bucket_mb} must be more than 0")
        if self.compression != "none" and self.zero_stage:
            raise ValueError(
                f"parallel.compression={self.compression!r} compresses an all-reduce of whole gradients, which "
                f"parallel.zero_stage={self.zero_stage} does not have; use zero_stage 0"
            )
        if self.dp is not None and self.dp % self.ep:
            raise ValueError(
                f"parallel.ep={self.ep} does not divide parallel.dp={self.dp}; use {divisors(self.dp)} (experts are "
                "spread over data-parallel ranks)"
            )

    def sizes(self, world_size: int) -> dict[str, int]:
        """Ranks along every axis of the mesh."""
        dp = self.dp or world_size // (self.tp * self.pp)
        return {"pp": self.pp, "dp": dp, "edp": dp // self.ep, "ep": self.ep, "tp": self.tp}

    def pipeline(self, micro_batches: int | None = None) -> Schedule:
        """The schedule of a step of `micro_batches`; by default of some number, for where each stage is.

        Raises:
            ValueError: when the schedule cannot have that many ranks, chunks or micro-batches.
        """
        return build_schedule(self.schedule, self.pp, micro_batches or 2 * self.pp, self.chunks)

    def check(self, world_size: int) -> None:
        """Raises ValueError when the layout does not use exactly the ranks that were launched."""
        others = self.tp * self.pp
        if self.dp is None and world_size % others:
            raise ValueError(
                f"parallel.tp={self.tp} times parallel.pp={self.pp} does not divide the {world_size} ranks that were "
                f"launched; their product must be one of {divisors(world_size)}"
            )
        if self.dp is not None and self.dp * others != world_size:
            raise ValueError(
                f"parallel.dp={self.dp} x tp={self.tp} x pp={self.pp} = {self.dp * others} does not match the "
                f"{world_size} ranks that were launched; leave parallel.dp out, or launch with "
                f"--num_processes {self.dp * others}"
            )
        if (dp := self.sizes(world_size)["dp"]) % self.ep:
            raise ValueError(f"parallel.ep={self.ep} does not divide the {dp} data-parallel ranks; use {divisors(dp)}")

    def check_torch_engine(self, mixed: bool) -> None:
        """Raises ValueError for what PyTorch's own parts do not do; `mixed`: with wider weights for the optimizer."""
        refused = {
            "zero_stage=1": (
                self.zero_stage == 1,
                "ZeroRedundancyOptimizer replaces the optimizer itself; use 0, 2 or 3",
            ),
            f"compression={self.compression!r}": (self.compression != "none", "use none"),
            f"collectives={self.collectives!r}": (self.collectives != "gloo", "use gloo"),
            "overlap=false": (not self.overlap, "its gradients always travel during backward; use true"),
            f"schedule={self.schedule!r}": (
                self.pp > 1 and self.schedule not in TORCH_SCHEDULES,
                f"use one of {', '.join(TORCH_SCHEDULES)}",
            ),
            f"ep={self.ep}": (self.ep > 1, "PyTorch has no expert dispatch of its own; use 1"),
            f"zero_stage={self.zero_stage} with precision='mixed'": (
                mixed and self.zero_stage == 0,
                "FSDP keeps the wider weights in its shards; use 2 or 3",
            ),
        }
        for what, (asked, instead) in refused.items():
            if asked:
                raise ValueError(f"engine: torch has no parallel.{what}: {instead}, or engine: lab")

    def check_torch_pipeline(self, micro_batches: int) -> None:
        """Raises ValueError when PyTorch's schedule cannot have that many micro-batches, while ours could."""
        if self.schedule == "1f1b" and micro_batches < self.pp:
            raise ValueError(
                f"PyTorch's 1f1b needs at least as many micro-batches as stages, parallel.pp={self.pp}, "
                f"not {micro_batches}; use gpipe, or engine: lab"
            )

    def check_model(self, model: DeepSeekConfig, seq_len: int) -> None:
        """Raises ValueError when the model cannot be split this way."""
        tp = self.tp
        sizes = {"num_attention_heads": model.num_attention_heads, "vocab_size": model.vocab_size}
        if model.first_k_dense_replace > 0:
            sizes["intermediate_size"] = model.intermediate_size
        if model.first_k_dense_replace < model.num_hidden_layers:
            sizes["moe_intermediate_size"] = model.moe_intermediate_size
        if self.sequence_parallel:
            sizes["data.seq_len"] = seq_len
        for name, size in sizes.items():
            if size % tp:
                raise ValueError(f"parallel.tp={tp} does not divide {name}={size}; use {divisors(size)}")
        split_layers(model.num_hidden_layers, self.pp * self.chunks, self.stage_layers)
        if self.ep > 1 and model.first_k_dense_replace >= model.num_hidden_layers:
            raise ValueError(f"parallel.ep={self.ep} spreads experts, and this model has none; use 1")
        if model.n_routed_experts % self.ep:
            raise ValueError(
                f"parallel.ep={self.ep} does not divide n_routed_experts={model.n_routed_experts}; "
                f"use {divisors(model.n_routed_experts)}"
            )


def divisors(n: int) -> str:
    """The divisors of `n` up to 64, for an error: "1, 2 or 4"."""
    found = [str(d) for d in range(1, min(n, 64) + 1) if n % d == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"
