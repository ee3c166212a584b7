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


def all_reduce_gradients(parameters, group=None, bucket_bytes=25 * 2**20):
    """Add up every parameter's gradient over `group`, in place, in few large messages.

    Gradients are copied into flat buckets of about `bucket_bytes`, so that a message costs bandwidth and not latency;
    a parameter that got no gradient on this rank counts as zero, since others may have one.  The loss was already
    divided by the tokens of the whole batch: sums are what is wanted, and nothing is divided here.

    Args:
        parameters: the same parameters in the same order on every rank.
    """
    if collectives.size_of(group) == 1:
        return
    for parameter in (trainable := [p for p in parameters if p.requires_grad]):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in buckets([p.grad for p in trainable], bucket_bytes):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        collectives.all_reduce(flat, group)
        for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(total.view_as(gradient))


def buckets(tensors, bucket_bytes):
    """Consecutive tensors of one dtype in lists of at most `bucket_bytes`, or of a single larger tensor."""
    bucket, held = [], 0
    for tensor in tensors:
        if bucket and (held + tensor.nbytes > bucket_bytes or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.nbytes
    if bucket:
        yield bucket
