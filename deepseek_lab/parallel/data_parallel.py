"""Data parallelism: every rank holds the whole model and a share of the batch.

The one idea: loss and gradient are means *per token of the whole batch*, so ranks add up sums and counts, and divide
once.  A mean of the ranks' means weighs a token more the fewer neighbours it has (the mistake of
huggingface/transformers issue 34191).
"""

import torch

from . import collectives


def global_token_mean(loss_sum, n_tokens, group=None):
    """Mean loss per token over all ranks of `group`; the same number on every rank.

    Args:
        loss_sum: this rank's sum of token losses, a tensor of one element.
        n_tokens: how many tokens that sum is over; ranks may differ, and a rank may have none.

    Returns:
        A scalar tensor in fp64, not differentiable.  One all-reduce of two numbers.
    """
    totals = torch.tensor([float(loss_sum), float(n_tokens)], dtype=torch.float64, device=loss_sum.device)
    global_loss_sum, global_n_tokens = collectives.all_reduce(totals, group)
    return global_loss_sum / global_n_tokens
