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
        return NormWithGradient.apply(x, self.weight, self.eps)


class NormWithGradient(torch.autograd.Function):
    """`rms_norm`, with the gradients written out: autograd takes three times as long over its many small steps.

    With n = x / rms(x):  dw = sum of dy · n over the vectors,  dx = (w · dy - n · mean(w · dy · n)) / rms(x).
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        x_ND, dy_ND, w_D = x.to(wide).flatten(0, -2), dy.to(wide).flatten(0, -2), weight.to(wide)
        scale_N = inverse_rms(x_ND, ctx.eps)
        product_ND = dy_ND * x_ND
        dw_D = scale_N @ product_ND
        along_x_N = scale_N.pow(3) * (product_ND @ w_D) / -len(w_D)
        dx_ND = (dy_ND * w_D).mul_(scale_N[:, None]).addcmul_(x_ND, along_x_N[:, None])
        return dx_ND.view(x.shape).to(x.dtype), dw_D.to(weight.dtype), None


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x²) + eps) over the last dimension, (...)."""
    return torch.rsqrt(torch.linalg.vector_norm(x, dim=-1).square() / x.shape[-1] + eps)
