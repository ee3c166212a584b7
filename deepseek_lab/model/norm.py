"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467, equation 4).

Layer norm without the mean: divide each vector by its root mean square, then scale every component.
"""

import torch
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last dimension of `x` to a root mean square of one, then by `weight`.

    y = weight * x / sqrt(mean(x²) + eps).  Half precisions are normalised in fp32 and returned in their own
    dtype; fp32 and fp64 stay as they are.

    Args:
        x: (..., D).
        weight: (D,).
        eps: added to the mean square, so that a zero vector stays zero.

    Returns:
        (..., D), in the dtype of `x`.
    """
    x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean_square = torch.linalg.vector_norm(x_wide, dim=-1, keepdim=True).square() / x.shape[-1]
    scale = torch.rsqrt(mean_square + eps)
    return (x_wide * scale * weight).to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight, which starts at one."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
