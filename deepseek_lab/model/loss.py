"""Next-token cross-entropy with label smoothing (Szegedy et al., arXiv 1512.00567, section 7).

The loss comes as a sum and a count, never as a mean: only the sum over all ranks and micro-batches, divided by the
count over all of them, weighs every token the same.

`head_loss_sum` applies the output head and the loss together, a few rows at a time, so that training never holds the
logits of a whole batch: with V = 129,280 those would be by far the largest activation, and even on a small model they
are what does not fit in cache.
"""

import torch
from torch import Tensor

IGNORE_INDEX = -100
ROWS = 512  # rows of logits alive at a time in `head_loss_sum`


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, ignore_index: int = IGNORE_INDEX
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of `labels` under softmax(`logits`), and how many labels counted.

    With smoothing ε the target puts 1 - ε on the label and ε/V on each of the V classes, the label included.

    Args:
        logits: (..., V); half precisions are widened to fp32.
        labels: (...) int64; positions equal to `ignore_index` add nothing.

    Returns:
        loss_sum: scalar, nats.
        n_valid: scalar int64.
    """
    valid = labels != ignore_index
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    picked = log_p.gather(-1, labels.where(valid, 0)[..., None]).squeeze(-1)
    if label_smoothing:
        picked = (1 - label_smoothing) * picked + label_smoothing * log_p.mean(dim=-1)
    return -picked.where(valid, 0).sum(), valid.sum()


def head_loss_sum(x: Tensor, w_VD: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """`cross_entropy_sum(x @ w.T, labels)`, without the (..., V) logits: x is (..., D), labels (...)."""
    return HeadLoss.apply(x, w_VD, labels, label_smoothing, torch.is_grad_enabled())


class HeadLoss(torch.autograd.Function):
    """Works out the gradients of each chunk of rows while its logits are at hand; backward only scales them."""

    @staticmethod
    def forward(ctx, x: Tensor, w_VD: Tensor, labels: Tensor, label_smoothing: float, keep_gradients: bool):
        x_TD, labels_T = x.flatten(0, -2), labels.flatten()
        totals = []
        dx_TD = torch.zeros_like(x_TD) if keep_gradients else None
        dw_VD = torch.zeros_like(w_VD) if keep_gradients else None
        for rows in torch.arange(len(x_TD)).split(ROWS):
            here = slice(int(rows[0]), int(rows[-1]) + 1)
            logits_tV = (x_TD[here] @ w_VD.T).requires_grad_(keep_gradients)
            with torch.set_grad_enabled(keep_gradients):
                loss_sum, n_valid = cross_entropy_sum(logits_tV, labels_T[here], label_smoothing)
            totals.append((loss_sum.detach(), n_valid))
            if dx_TD is not None and dw_VD is not None:
                (g_tV,) = torch.autograd.grad(loss_sum, logits_tV)
                dx_TD[here] = g_tV @ w_VD
                if g_tV.dtype == dw_VD.dtype:
                    dw_VD.addmm_(g_tV.T, x_TD[here])
                else:  # under autocast
                    dw_VD += g_tV.T @ x_TD[here]
        if dx_TD is not None:
            ctx.save_for_backward(dx_TD.view_as(x), dw_VD)
        loss_sum, n_valid = (torch.stack(parts).sum() for parts in zip(*totals, strict=True))
        ctx.mark_non_differentiable(n_valid)
        return loss_sum, n_valid

    @staticmethod
    def backward(ctx, g: Tensor, _):
        dx, dw_VD = ctx.saved_tensors
        return dx * g, dw_VD * g, None, None, None
