"""Rotary position embedding (Su et al., arXiv 2104.09864, section 3.2.2) and YaRN (Peng et al., arXiv 2309.00071).

Position is a rotation: pair i of a query or key at position t turns by the angle t · θ^(-2i/d), so that the product of
a query and a key depends only on how far apart they are.  DeepSeek keeps each pair in neighbouring components.
YaRN stretches the slow rotations, which have not completed a turn in training, and leaves the fast ones alone.
"""

import math

import torch
from torch import Tensor

from deepseek_lab.model.config import DeepSeekConfig


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[0], x[1]), (x[2], x[3]), … of the last dimension by the angles of their position.

    Args:
        x: (..., T, d) with d even.
        cos, sin: (T, d/2), the cosine and sine of each position's angles.

    Returns:
        (..., T, d) in the dtype of `x`: pair (a, b) becomes (a cos - b sin, a sin + b cos), which is the complex
        product (a + ib)(cos + i sin).  Half precisions are rotated in fp32.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    pairs = torch.view_as_complex(wide.contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2).to(x.dtype)


def rope_tables(config: DeepSeekConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape (T, qk_rope_head_dim/2) for `positions` (T,), worked out in fp64, cast to `dtype`."""
    angles = positions.to(torch.float64)[:, None] * frequencies(config).to(positions.device)
    magnitude = 1.0
    if config.rope_scaling is not None:
        factor = config.rope_scaling["factor"]
        magnitude = yarn_mscale(factor, config.rope_scaling.get("mscale", 1.0))
        magnitude /= yarn_mscale(factor, config.rope_scaling.get("mscale_all_dim", 0.0))
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def frequencies(config: DeepSeekConfig) -> Tensor:
    """Angle per position of each pair, (qk_rope_head_dim/2,), radians, fp64; YaRN's "NTK-by-parts" where configured.

    YaRN (section 3.2): a pair that turns more than `beta_fast` times within the original context keeps its frequency,
    one that turns fewer than `beta_slow` times is slowed by `factor`, and those between are blended linearly.
    """
    d = config.qk_rope_head_dim
    pair = torch.arange(d // 2, dtype=torch.float64)
    plain = config.rope_theta ** (-2 * pair / d)
    scaling = config.rope_scaling
    if scaling is None:
        return plain

    def pair_that_turns(times: float) -> float:
        context = scaling["original_max_position_embeddings"]
        return d * math.log(context / (times * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = max(math.floor(pair_that_turns(scaling.get("beta_fast") or 32)), 0)
    high = min(math.ceil(pair_that_turns(scaling.get("beta_slow") or 1)), d - 1)
    slowed = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - slowed) + plain / scaling["factor"] * slowed


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much YaRN sharpens attention over a context `factor` times longer (section 3.3, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_scale(config: DeepSeekConfig) -> float:
    """What query-key products are multiplied by: 1/sqrt(qk_head_dim), times YaRN's squared scale when configured."""
    scale = config.qk_head_dim**-0.5
    scaling = config.rope_scaling or {}
    if scaling.get("mscale_all_dim"):
        scale *= yarn_mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
    return scale
