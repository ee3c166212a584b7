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
        if rms_norm is own_rms_norm:
            return NormWithGradient.apply(x, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps)  # a learner's fills the slot: autograd finds its gradient


own_rms_norm = rms_norm


class NormWithGradient(torch.autograd.Function):
    """`rms_norm`, with its gradients written out: autograd takes three times as long over its many small steps.

    With s = 1 / sqrt(mean(x²) + eps):
        dw = the sum of s · dy · x over the vectors
        dx = s · w · dy - s³ · mean(w · dy · x) · x
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
        s_N = torch.rsqrt(torch.linalg.vector_norm(x_ND, dim=-1).square() / len(w_D) + ctx.eps)
        product_ND = dy_ND * x_ND
        dw_D = s_N @ product_ND
        along_x_N = s_N.pow(3) * (product_ND @ w_D) / len(w_D)
        dx_ND = (dy_ND * w_D).mul_(s_N[:, None]).addcmul_(x_ND, along_x_N[:, None], value=-1)
        return dx_ND.view(x.shape).to(x.dtype), dw_D.to(weight.dtype), None
