"""The architecture of a DeepSeek model as one dataclass.

Field names are those of Hugging Face's `DeepseekV3Config`, so that a `config.json` travels both ways.  More fields say
what that class cannot: `scoring_func` and `topk_method`, spelt as in DeepSeek's own `config.json` files, choose between
the router of V3 (sigmoid scores and a bias, arXiv 2412.19437, section 2.1.2) and those of V2 (softmax scores, arXiv
2405.04434, section 2.2); `aux_loss_alpha` and `seq_aux`, spelt so too, and our own `capacity_factor` act in training
only.

`DeepSeekConfig.preset(name)` gives the models the course uses, from `tiny` (a laptop) to `deepseek_v3` (the real one).
"""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, fields
from typing import Any

SCORING_FUNCS = ("sigmoid", "softmax")
TOPK_METHODS = ("noaux_tc", "group_limited_greedy", "greedy")


@dataclass(frozen=True)
class DeepSeekConfig:
    """Shape and hyper-parameters of a `DeepSeekModel`; the defaults are those of the `tiny` preset.

    `num_attention_heads` heads have keys of `qk_nope_head_dim + qk_rope_head_dim` and values of `v_head_dim`.
    Layers before `first_k_dense_replace` have a dense feed-forward of `intermediate_size`, the others
    `n_shared_experts` + `n_routed_experts` experts of `moe_intermediate_size`, of which each token visits
    `num_experts_per_tok`, found in the best `topk_group` of `n_group` groups.  `aux_loss_alpha` weighs the loss that
    balances them, over each sequence or, with `seq_aux` off, over each micro-batch, which depends on how the batch was
    split; `capacity_factor` bounds an expert's visits in a sequence, as a multiple of the mean.

    Raises:
        ValueError: when a value is impossible, naming the field, what it was and what it may be.
    """

    vocab_size: int = 4096
    hidden_size: int = 128
    intermediate_size: int = 256
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    n_shared_experts: int = 1
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    first_k_dense_replace: int = 1
    n_group: int = 4
    topk_group: int = 2
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    aux_loss_alpha: float = 0.0
    seq_aux: bool = True
    capacity_factor: float | None = None
    q_lora_rank: int | None = 64
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DeepSeekConfig:
        """Build a config from field names and values; an unknown name is refused, with the nearest one that exists."""
        names = [field.name for field in fields(cls)]
        for key in values:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"unknown model field {key!r}{hint}")
        return cls(**values)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> DeepSeekConfig:
        """The named architecture, with single fields replaced by `overrides`."""
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
        return cls.from_dict({**PRESETS[name], **overrides})

    def __post_init__(self) -> None:
        positive = [f.name for f in fields(self) if f.name.endswith(("_size", "_dim", "_rank", "_layers", "_heads"))]
        for name in [*positive, "n_group", "max_position_embeddings", "rope_theta", "rms_norm_eps"]:
            value = getattr(self, name)
            if not (name == "q_lora_rank" and value is None) and value <= 0:
                raise ValueError(f"{name}={value} must be positive")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim={self.qk_rope_head_dim} must be even: RoPE rotates pairs")
        if self.first_k_dense_replace < 0:
            raise ValueError(f"first_k_dense_replace={self.first_k_dense_replace} must not be negative")
        _one_of("scoring_func", self.scoring_func, SCORING_FUNCS)
        _one_of("topk_method", self.topk_method, TOPK_METHODS)
        if self.first_k_dense_replace < self.num_hidden_layers:
            self._check_router()
        if self.rope_scaling is not None:
            _check_yarn(self.rope_scaling)

    def _check_router(self) -> None:
        experts, groups = self.n_routed_experts, self.n_group
        if experts < 1:
            raise ValueError(f"n_routed_experts={experts} must be at least 1 (or raise first_k_dense_replace)")
        if self.n_shared_experts < 0:
            raise ValueError(f"n_shared_experts={self.n_shared_experts} must not be negative")
        if experts % groups:
            divisors = [n for n in range(1, experts + 1) if experts % n == 0]
            raise ValueError(f"n_group={groups} does not divide n_routed_experts={experts}; use one of {divisors}")
        if not 1 <= self.topk_group <= groups:
            raise ValueError(f"topk_group={self.topk_group} must be from 1 to n_group={groups}")
        if self.aux_loss_alpha < 0:
            raise ValueError(f"aux_loss_alpha={self.aux_loss_alpha} must not be negative; 0 turns the loss off")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ValueError(f"capacity_factor={self.capacity_factor} must be positive, or None: drop nothing")
        reachable = experts if self.topk_method == "greedy" else experts // groups * self.topk_group
        if not 1 <= self.num_experts_per_tok <= reachable:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be from 1 to {reachable}, "
                f"the experts that a token can reach in topk_group={self.topk_group} of n_group={groups} groups"
            )
        if self.topk_method == "noaux_tc" and groups > 1 and experts // groups < 2:
            raise ValueError(
                f"topk_method=noaux_tc scores a group by its two best experts, but n_group={groups} leaves one "
                f"expert a group; use n_group <= {experts // 2} or topk_method=group_limited_greedy"
            )


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(choices)}")


def _check_yarn(scaling: dict[str, Any]) -> None:
    kind = scaling.get("type", scaling.get("rope_type"))
    if kind != "yarn":
        raise ValueError(f"rope_scaling type {kind!r} is not known; use 'yarn', or leave rope_scaling out")
    for key in ("factor", "original_max_position_embeddings"):
        if scaling.get(key, 0) <= 0:
            raise ValueError(f"rope_scaling needs a positive {key!r}; got {scaling.get(key)!r}")


def _yarn(mscale: float) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


_V2_AND_V3: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}
_V2: dict[str, Any] = {
    **_V2_AND_V3,
    "vocab_size": 102400,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "rope_scaling": _yarn(0.707),
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "small": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "q_lora_rank": 128,
    },
    "deepseek_v2_lite": {
        **_V2,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "n_routed_experts": 64,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "q_lora_rank": None,
    },
    "deepseek_v2": {
        **_V2,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "n_routed_experts": 160,
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0,
        "q_lora_rank": 1536,
    },
    "deepseek_v3": {
        **_V2_AND_V3,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "rope_scaling": _yarn(1.0),
    },
}
