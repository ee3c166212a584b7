"""Next-token cross-entropy with label smoothing (Szegedy et al., arXiv 1512.00567, section 7).

The loss comes as a sum and a count, never as a mean: only the sum over all ranks and micro-batches, divided by the
count over all of them, weighs every token the same.
"""

import torch
from torch import Tensor

IGNORE_INDEX = -100


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
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = labels != ignore_index
    log_z = wide.logsumexp(dim=-1)
    picked = wide.gather(-1, labels.where(valid, 0)[..., None]).squeeze(-1)
    if label_smoothing:
        picked = (1 - label_smoothing) * picked + label_smoothing * wide.mean(dim=-1)
    return (log_z - picked).where(valid, 0).sum(), valid.sum()
