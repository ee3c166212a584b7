"""Memory of one rank, worked out before anything is started.

The one idea: of the model's state, each rank holds 1/R of what it shares out with R others, and all of the rest.  ZeRO
(Rajbhandari et al., arXiv 1910.02054, section 5 and table 1) shares out optimizer state, then gradients, then
parameters over the data-parallel ranks; tensor parallelism splits most parameters over its own.  Activations are
counted tensor by tensor, as autograd keeps them in this package's model (in the manner of Korthikanti et al., arXiv
2205.05198, section 4).

Everything here is arithmetic.  Bytes unless said otherwise; B batch, T tokens, D width, H heads, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Protocol

from deepseek_lab.model.config import DeepSeekConfig
from deepseek_lab.model.loss import ROWS
from deepseek_lab.plan.schedules import Schedule, simulate
from deepseek_lab.plan.stages import split_layers

# Bytes a parameter: itself, its gradient, its optimizer state (two moments; in "mixed" the fp32 master copy as well).
STATE_BYTES: dict[str, tuple[int, int, int]] = {
    "fp32": (4, 4, 8),
    "bf16": (4, 4, 8),  # autocast: only activations are narrow
    "mixed": (2, 2, 12),
    "fp64": (8, 8, 16),
}
ACTIVATION_BYTES = {"fp32": 4, "bf16": 2, "mixed": 2, "fp64": 8}
RESIDUAL_BYTES = ACTIVATION_BYTES | {"bf16": 4}  # what blocks read and write: autocast narrows only what is multiplied
REPLICATED = ("latents", "router", "norms")  # held whole by every tensor-parallel rank


class ParallelSettings(Protocol):
    """As much of a ParallelConfig as memory depends on."""

    @property
    def tp(self) -> int: ...
    @property
    def zero_stage(self) -> int: ...
    @property
    def sequence_parallel(self) -> bool: ...
    @property
    def recompute(self) -> str: ...
    @property
    def bucket_mb(self) -> float: ...
    @property
    def pp(self) -> int: ...
    @property
    def ep(self) -> int: ...
    @property
    def stage_layers(self) -> list[int] | None: ...
    def pipeline(self, micro_batches: int | None = None) -> Schedule: ...


# --- state ----------------------------------------------------------------------------------------------------


def zero_state_bytes(
    n_params: int, n_ranks: int, stage: int, param_bytes: int = 2, grad_bytes: int = 2, optim_bytes: int = 12
) -> dict[str, int]:
    """Bytes of model state that one of `n_ranks` data-parallel ranks holds under ZeRO stage 0, 1, 2 or 3.

    Stage 1 shares out the optimizer's state, stage 2 gradients as well, stage 3 parameters as well.  A share is a whole
    number of parameters, rounded up; what is held whole counts `n_params`.  The defaults are mixed precision with Adam.

    Returns:
        {"parameters": bytes, "gradients": bytes, "optimizer": bytes}

    Raises:
        ValueError: for another stage.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage} is not a stage of ZeRO; use 0, 1, 2 or 3")
    share = math.ceil(n_params / n_ranks)
    return {
        "parameters": param_bytes * (share if stage >= 3 else n_params),
        "gradients": grad_bytes * (share if stage >= 2 else n_params),
        "optimizer": optim_bytes * (share if stage >= 1 else n_params),
    }


def padded(numel: int, n_ranks: int) -> int:
    """`numel` numbers, padded at the end until `n_ranks` divide them."""
    return -(-numel // n_ranks) * n_ranks


def layer_parameters(config: DeepSeekConfig, layer: int) -> dict[str, int]:
    """How many parameters of each kind one block has."""
    D, H, r = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    q = config.q_lora_rank
    counts = {
        "attention": (q or D) * H * config.qk_head_dim
        + r * H * (config.qk_nope_head_dim + config.v_head_dim)
        + H * config.v_head_dim * D,
        "latents": D * (r + config.qk_rope_head_dim) + r + (D * q + q if q else 0),
        "norms": 2 * D,
    }
    if not config.is_moe(layer):
        return counts | {"dense": 3 * D * config.intermediate_size}
    expert = 3 * D * config.moe_intermediate_size
    return counts | {
        "router": D * config.n_routed_experts,
        "experts": config.n_routed_experts * expert,
        "shared experts": config.n_shared_experts * expert,
    }


def end_parameters(config: DeepSeekConfig) -> dict[str, int]:
    """How many parameters lie outside the blocks, a tied table once."""
    table = config.vocab_size * config.hidden_size
    head = {} if config.tie_word_embeddings else {"head": table}
    return {"embedding": table, **head, "norms": config.hidden_size}


def parameters_of_a_rank(counts: dict[str, int], tp: int = 1) -> int:
    """How many of these parameters one tensor-parallel rank holds."""
    return sum(n if kind in REPLICATED else n // tp for kind, n in counts.items())


def layers_of_a_rank(config: DeepSeekConfig, parallel: ParallelSettings, pp_rank: int) -> tuple[list[int], bool, bool]:
    """The blocks of one pipeline rank, and whether it holds the embedding, and the head."""
    place = parallel.pipeline()
    layers = split_layers(config.num_hidden_layers, place.stages, parallel.stage_layers)
    stages = [place.stage(pp_rank, chunk) for chunk in range(place.chunks)]
    return [layer for stage in stages for layer in layers[stage]], 0 in stages, place.stages - 1 in stages


def units_of_a_rank(config: DeepSeekConfig, parallel: ParallelSettings, pp_rank: int) -> list[tuple[int, int]]:
    """How many parameters each block of one rank has, and its ends: (of all but routed experts, of those).

    With tied embeddings the first stage and the last both hold the table.
    """
    layers, first, last = layers_of_a_rank(config, parallel, pp_rank)
    counts = [layer_parameters(config, layer) for layer in layers]
    ends = end_parameters(config)
    table = ends.pop("embedding")
    held = {"head": ends.get("head", 0), "norms": ends["norms"]} if last else {}
    if first or (last and config.tie_word_embeddings):
        held["embedding"] = table
    units = []
    for unit in [*counts, held]:
        experts = unit.pop("experts", 0)
        units.append((parameters_of_a_rank(unit, parallel.tp), experts // parallel.tp // parallel.ep))
    return units


def state_of_a_rank(
    config: DeepSeekConfig, parallel: ParallelSettings, pp_rank: int, world_size: int, bytes_each: tuple[int, int, int]
) -> dict[str, int]:
    """Bytes of state, as `zero_state_bytes`: experts are shared out over fewer ranks than all else.

    A rank's share is rounded up once: of all its parameters but experts together, and of all its experts together.

    Args:
        parallel: gives `tp`, `pp`, `ep` and `zero_stage`; what is left of `world_size` is dp.
        pp_rank: the rank's pipeline stage, of whose parameters `units_of_a_rank` counts its part under tp and ep.
        bytes_each: of a parameter itself, of its gradient and of its optimizer state.
    """
    n_ranks = max(world_size // parallel.tp // parallel.pp, 1)
    dense, experts = (sum(numbers) for numbers in zip(*units_of_a_rank(config, parallel, pp_rank), strict=True))
    state = zero_state_bytes(dense, n_ranks, parallel.zero_stage, *bytes_each)
    of_experts = zero_state_bytes(experts, n_ranks // parallel.ep, parallel.zero_stage, *bytes_each)
    return {kind: state[kind] + of_experts[kind] for kind in state}


# --- activations ----------------------------------------------------------------------------------------------


def block_activations(
    config: DeepSeekConfig,
    layer: int,
    seq_len: int,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    precision: str = "fp32",
    document_mask: bool = False,
) -> float:
    """Bytes a token that one block keeps from forward to backward.

    A norm and a linear layer keep their input; attention queries, keys, values (padded to the width of keys) and its
    output; SwiGLU gate, up, the switched gate and the product.  Layers that read the same norm keep one input together,
    but for autocast, which narrows it for each of them again, and leaves it wide for the router.
    """
    s = tp if sequence_parallel else 1
    D, H, r, q = config.hidden_size, config.num_attention_heads / tp, config.kv_lora_rank, config.q_lora_rank
    p, qk = config.qk_rope_head_dim, config.qk_head_dim
    narrow = ACTIVATION_BYTES[precision]
    wide, index, residual = max(narrow, 4), 8, RESIDUAL_BYTES[precision] * D / s
    if recompute == "full":
        return residual
    autocast = precision == "bf16"

    def read_by(n_layers: int) -> float:
        return narrow * D * (n_layers if autocast else 1)

    attention = residual + read_by(2) + narrow * (H * config.v_head_dim + (2 * r + p) + 2 * (q or 0))
    if recompute == "selective":  # what goes into attention, of which the rotated parts are copies
        attention += narrow * (H * (qk + p) + p)
    else:
        attention += narrow * (4 * H * qk + (seq_len if document_mask else 0)) + wide * H
    if not config.is_moe(layer):
        return attention + residual + read_by(2) + narrow * 4 * config.intermediate_size / tp
    E, k, F = config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size / tp
    routing = wide * (E + k + 1 + D * autocast) + index * k
    experts = k * (2 * narrow * F + 2 * index + narrow) + narrow * 4 * config.n_shared_experts * F
    return attention + residual + read_by(3 if config.n_shared_experts else 1) + routing + experts


def head_activations(config: DeepSeekConfig, n_tokens: int, *, tp: int = 1, s: int = 1, precision: str = "fp32") -> int:
    """Bytes that the final norm and the head keep for `n_tokens`; `s` ranks split the sequence before them.

    On one rank the head has worked out the gradients of its input and of its weight already, and keeps those.  Over
    several it keeps its input, and its part of the logits with their exponentials.
    """
    D, V, narrow = config.hidden_size, config.vocab_size, ACTIVATION_BYTES[precision]
    wide = max(narrow, 4)
    kept = n_tokens * RESIDUAL_BYTES[precision] * (D / s + D)
    kept += 2 * wide * n_tokens * V / tp if tp > 1 else STATE_BYTES[precision][0] * V * D
    return round(kept)


# --- a layout -------------------------------------------------------------------------------------------------


def estimate(
    config: DeepSeekConfig,
    parallel: ParallelSettings,
    *,
    micro_batch_size: int,
    seq_len: int,
    precision: str = "fp32",
    world_size: int = 1,
    micro_batches: int | None = None,
    optimizer: str = "adamw",
    document_mask: bool = False,
) -> dict[str, int]:
    """Bytes that one rank needs while it trains: "parameters", "gradients", "optimizer", "activations", "transient".

    Activations are those of all micro-batches between their forward and their backward, as many as the schedule keeps;
    of a pipeline the rank that needs most counts.  Transient is what lives for a moment
    on top of them: under stage 3 the layer in use and the one that is being fetched, from stage 2 on gradients on their
    way, one block that is recomputed, a slice of the logits.  What the runtime itself needs is not counted.

    Args:
        parallel: a ParallelConfig, or anything with its fields.
        optimizer: "adamw" keeps two numbers a parameter, "sgd" none.
    """
    param_bytes, grad_bytes, optim_bytes = STATE_BYTES[precision]
    if optimizer == "sgd":
        optim_bytes -= 2 * (8 if precision == "fp64" else 4)
    kept = simulate(parallel.pipeline(micro_batches)).peak_activations
    needs = []
    for pp_rank in range(parallel.pp):
        state = state_of_a_rank(config, parallel, pp_rank, world_size, (param_bytes, grad_bytes, optim_bytes))
        passing = _activations(
            config, parallel, pp_rank, kept[pp_rank], micro_batch_size, seq_len, precision, document_mask
        )
        units = [sum(unit) for unit in units_of_a_rank(config, parallel, pp_rank)]
        if precision == "bf16":
            passing["transient"] += 2 * sum(units)  # autocast's copies of the weights
        if parallel.zero_stage == 2:
            passing["transient"] += round(2 * min(parallel.bucket_mb * 2**20, grad_bytes * sum(units)))
        if parallel.zero_stage == 3:
            passing["transient"] += 2 * (param_bytes + grad_bytes) * max(units)
        needs.append(state | passing)
    return max(needs, key=lambda need: sum(need.values()))


def _activations(
    config: DeepSeekConfig,
    parallel: ParallelSettings,
    pp_rank: int,
    kept: int,
    micro_batch_size: int,
    seq_len: int,
    precision: str,
    document_mask: bool,
) -> dict[str, int]:
    """Of `kept` passes of one chunk of a pipeline rank, and what one pass needs on top for a moment."""
    tp, n_tokens, s = parallel.tp, micro_batch_size * seq_len, parallel.tp if parallel.sequence_parallel else 1
    layers, _, last = layers_of_a_rank(config, parallel, pp_rank)
    of_block = _blocks(config, parallel, layers, parallel.recompute, seq_len, precision, document_mask)
    activations = n_tokens * sum(of_block)
    if last:
        activations += head_activations(config, n_tokens, tp=tp, s=s, precision=precision)
    if document_mask and parallel.recompute != "none":
        activations += n_tokens * seq_len  # one boolean mask for all blocks
    chunks = parallel.pipeline().chunks

    whole = _blocks(config, parallel, layers, "none", seq_len, precision, document_mask)
    recomputed = n_tokens * max(all_of_it - part for all_of_it, part in zip(whole, of_block, strict=True))
    rows = n_tokens if tp > 1 else min(n_tokens, ROWS)
    logits = 3 * rows * config.vocab_size / tp * max(ACTIVATION_BYTES[precision], 4) if last else 0
    return {"activations": round(activations * kept / chunks), "transient": round(max(recomputed, logits))}


def _blocks(
    config: DeepSeekConfig,
    parallel: ParallelSettings,
    layers: list[int],
    recompute: str,
    seq_len: int,
    precision: str,
    document_mask: bool,
) -> list[float]:
    return [
        block_activations(
            config,
            layer,
            seq_len,
            tp=parallel.tp,
            sequence_parallel=parallel.sequence_parallel,
            recompute=recompute,
            precision=precision,
            document_mask=document_mask,
        )
        for layer in layers
    ]
