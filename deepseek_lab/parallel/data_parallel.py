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


def plan_buckets(numels, bucket_numel):
    """Which gradients travel together: lists of indices into `numels`, in the order in which backward finishes them.

    Backward ends with the parameters that forward began with, so the last gradient is ready first, and the first bucket
    holds the last ones.  A bucket holds at most `bucket_numel` numbers, or a single gradient that is larger than that.
    """
    members, held = [[]], 0
    for i in reversed(range(len(numels))):
        if members[-1] and held + numels[i] > bucket_numel:
            members.append([])
            held = 0
        members[-1].append(i)
        held += numels[i]
    return [bucket for bucket in members if bucket]


def all_reduce_gradients(gradients, group=None, bucket_bytes=25 * 2**20):
    """Add up every gradient over `group`, in place, in few large messages.

    Gradients are copied into flat buckets of about `bucket_bytes`, so that a message costs bandwidth and not latency.
    The loss was already divided by the tokens of the whole batch: sums are what is wanted, and nothing is divided here.

    Args:
        gradients: tensors of one dtype, the same number and shapes on every rank; any strides.  None at all, or a
            group of one rank: nothing happens.
    """
    if collectives.size_of(group) == 1 or not gradients:
        return
    bucket_numel = bucket_bytes // gradients[0].element_size()
    for bucket in plan_buckets([g.numel() for g in gradients], bucket_numel):
        flat = torch.cat([gradients[i].flatten() for i in bucket])
        collectives.all_reduce(flat, group)
        for i, total in zip(bucket, flat.split([gradients[i].numel() for i in bucket]), strict=True):
            gradients[i].copy_(total.view_as(gradients[i]))


class Overlap:
    """Starts the communication of a bucket while backward still works on the rest.

    A bucket is started once all its gradients are ready *and* every bucket before it was started: ranks may finish
    gradients in different orders, but collectives must begin in the same one everywhere.

    Args:
        members: for every bucket the indices of its gradients, from `plan_buckets`.
        start: starts the communication of bucket b and returns what to `wait()` for, a `collectives.Pending`.
    """

    def __init__(self, members, start):
        self.start, self.pending = start, []
        self.bucket_of = {i: b for b, bucket in enumerate(members) for i in bucket}
        self.missing = [len(bucket) for bucket in members]

    def ready(self, i):
        """Gradient `i` is complete on this rank."""
        self.missing[self.bucket_of[i]] -= 1
        while len(self.pending) < len(self.missing) and self.missing[len(self.pending)] == 0:
            self.pending.append(self.start(len(self.pending)))

    def finish(self):
        """After backward: start all that has not started, then wait for all; returns the results by bucket."""
        while len(self.pending) < len(self.missing):
            self.pending.append(self.start(len(self.pending)))
        return [pending.wait() for pending in self.pending]
