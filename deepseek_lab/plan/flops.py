"""Arithmetic of training: FLOPs per token, parameters that a token meets, and utilization.

The one idea: a matmul weight costs two FLOPs a token forward and four backward, so that training costs 6 per *active*
parameter (Kaplan et al., arXiv 2001.08361, section 2.1), plus attention, which grows with the context.
"""

from __future__ import annotations

from deepseek_lab.model.config import DeepSeekConfig

# Dense peaks of tensor cores, FLOP/s, from NVIDIA's data sheets: figures "with sparsity" are twice these, and no
# training run can reach them.
PEAK_FLOPS_PER_S: dict[str, dict[str, float]] = {
    "V100": {"fp32": 15.7e12, "fp16": 125e12},
    "A100": {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12},
    "H100": {"fp32": 67e12, "tf32": 494.5e12, "bf16": 989e12, "fp16": 989e12, "fp8": 1979e12},
    "H200": {"fp32": 67e12, "tf32": 494.5e12, "bf16": 989e12, "fp16": 989e12, "fp8": 1979e12},
    "H800": {"fp32": 67e12, "tf32": 494.5e12, "bf16": 989e12, "fp16": 989e12, "fp8": 1979e12},
}


def flops_per_token(config: DeepSeekConfig, seq_len: int) -> float:
    """Training FLOPs, forward and backward, for one token in a causal context of `seq_len` tokens.

    6 for each parameter of a matmul that the token takes part in: attention projections, the dense feed-forward or the
    shared and *chosen* experts, the router, the output head; not the embedding, which is a look-up.  Attention itself
    costs, in every layer, 6 · (query-key + value dimensions) · heads for every token looked at, which are seq_len/2 on
    average.
    So counted, DeepSeek-V3 at 4,096 tokens costs 250 GFLOPs a token (arXiv 2505.09343, table 2).
    """
    looked_at = seq_len / 2
    per_layer = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim) * looked_at
    return 6 * (active_matmul_parameters(config) + config.num_hidden_layers * per_layer)


def active_matmul_parameters(config: DeepSeekConfig) -> int:
    """Weights that one token is multiplied with: norms, embedding and experts not chosen are left out."""
    D, H = config.hidden_size, config.num_attention_heads
    if config.q_lora_rank is None:
        queries = D * H * config.qk_head_dim
    else:
        queries = config.q_lora_rank * (D + H * config.qk_head_dim)
    keys_and_values = D * (config.kv_lora_rank + config.qk_rope_head_dim)
    keys_and_values += config.kv_lora_rank * H * (config.qk_nope_head_dim + config.v_head_dim)
    attention = queries + keys_and_values + H * config.v_head_dim * D
    dense = 3 * D * config.intermediate_size
    visited = config.num_experts_per_tok + config.n_shared_experts
    experts = 3 * D * config.moe_intermediate_size * visited + D * config.n_routed_experts
    n_dense = min(config.first_k_dense_replace, config.num_hidden_layers)
    n_moe = config.num_hidden_layers - n_dense
    return config.num_hidden_layers * attention + n_dense * dense + n_moe * experts + D * config.vocab_size


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops_per_s: float) -> float:
    """Model FLOPs utilization: the share of the hardware's peak spent on the model's own arithmetic.

    What was recomputed, padded or spent on communication does not count (Chowdhery et al., arXiv 2204.02311,
    appendix B).  `tokens_per_s` and `peak_flops_per_s` must be of the same devices: all ranks, or one.

    Raises:
        ValueError: when the peak is not positive.
    """
    if peak_flops_per_s <= 0:
        raise ValueError(f"peak_flops_per_s={peak_flops_per_s} must be positive; measure it, or look it up")
    return tokens_per_s * flops_per_token / peak_flops_per_s


def peak_of(device_name: str, precision: str) -> float | None:
    """Dense peak, FLOP/s, of a GPU by the name its driver reports; None when it is not in the table."""
    for name, peaks in PEAK_FLOPS_PER_S.items():
        if name in device_name:
            return peaks.get(precision)
    return None
