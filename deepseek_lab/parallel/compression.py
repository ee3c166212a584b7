"""Gradients made smaller before they travel: 8-bit blocks, or only the largest entries.

The one idea: what a compressed message leaves out is not dropped but kept, and added to the next step's gradient.  With
this *error feedback* everything arrives in the end, only later (Seide et al., "1-bit stochastic gradient descent",
Interspeech 2014; Karimireddy et al., arXiv 1901.09847, algorithm 2; Lin et al., arXiv 1712.01887, for the largest
entries).  Scales are per block, so that one large entry spoils the precision of its own block only (ZeRO++, arXiv
2306.10013, section 3).

`get(name)` gives an all-reduce of flat buckets; what it sends really is int8, or int32 indices with their values.  An
inf or nan stays visible: its block (of int8), or itself (it is the largest entry), is not finite on any rank.

Shapes: N numbers of a bucket, M blocks, R ranks, P padded so that every rank owns whole blocks, C = P / R, K sent.
"""

import math

import torch
import torch.nn.functional as F

from . import collectives

# --- two ways to make a gradient small ------------------------------------------------------------------------


def quantize_int8(x_N, block=256):
    """Write `x_N` as q · scale: one int8 for each number, and one scale for each block of `block` numbers.

    The scale maps the largest magnitude of its block to 127; numbers are rounded to the nearest step, so that none is
    off by more than half a scale.  A block of zeros has scale 0.

    Args:
        x_N: (N,) floating point; the last block may be shorter than the others.

    Returns:
        q_N: (N,) int8, from -127 to 127: 255 values, 254 steps.
        scale_M: (ceil(N / block),) in fp32, or in fp64 if `x_N` is.  Not finite for a block that is not.
    """
    wide_N = x_N.to(torch.promote_types(x_N.dtype, torch.float32))
    x_Mb = F.pad(wide_N, (0, -len(x_N) % block)).view(-1, block)
    scale_M = x_Mb.abs().amax(dim=1) / 127
    q_Mb = (x_Mb / scale_M.where(scale_M > 0, 1)[:, None]).round_()
    return q_Mb.to(torch.int8).flatten()[: len(x_N)], scale_M


def dequantize_int8(q_N, scale_M, block=256):
    """The numbers that `quantize_int8` wrote down, (N,) in the dtype of the scales."""
    q_Mb = F.pad(q_N, (0, -len(q_N) % block)).view(-1, block)
    return (q_Mb * scale_M[:, None]).flatten()[: len(q_N)]


def top_k(x_N, k):
    """The `k` numbers of largest magnitude: their places, (K,) int32, and the numbers themselves, (K,), with signs."""
    index_K = x_N.abs().topk(k, sorted=False).indices
    return index_K.to(torch.int32), x_N[index_K]


def scatter(index_K, value_K, n):
    """The inverse of `top_k`: (n,) with the values in their places, and zeros elsewhere."""
    return value_K.new_zeros(n).index_copy_(0, index_K.long(), value_K)


def with_error_feedback(x_N, residual_N, compress, decompress):
    """Compress `x_N` plus what earlier steps left out, and keep what this one leaves out.

    Args:
        x_N: this step's numbers; left as they are.
        residual_N: what has not been sent yet; updated in place.
        compress: takes (N,), returns a message, a tuple of tensors; they may share memory with what it was given.
        decompress: takes the parts of the message, returns (N,), what its receivers will read.

    Returns:
        The message.
    """
    wanted_N = x_N + residual_N
    message = compress(wanted_N)
    residual_N.copy_(wanted_N - decompress(*message))
    return message


# --- all-reduces of one bucket --------------------------------------------------------------------------------


class Int8AllReduce:
    """Sum buckets over the ranks with int8 on the wire: about a quarter of the bytes of fp32.

    Every rank owns a part of the bucket.  The parts travel as int8 to their owners (all-to-all), which add them up at
    full precision; the sums travel back as int8 (all-gather).  Both roundings are fed back: the first by the sender of
    a part, the second by the owner of a sum.
    """

    def __init__(self, block=256):
        self.block = block
        self.unsent = {}  # bucket -> residual of what this rank sends
        self.unsent_sum = {}  # bucket -> residual of the sum that it owns

    def __call__(self, flat_N, bucket=0, group=None):
        """The sum of `flat_N` over `group`, the same bits on every rank; one name or number for each bucket."""
        n_ranks = collectives.size_of(group)
        if n_ranks == 1:
            return flat_N
        padded_P = F.pad(flat_N, (0, -len(flat_N) % (n_ranks * self.block)))
        q_P, scale_M = self._compress(self.unsent, bucket, padded_P)
        one_each = [1] * n_ranks
        sent_Rb = pack(q_P.view(n_ranks, -1), scale_M.view(n_ranks, -1))
        q_RC, scale_Rm = unpack(collectives.all_to_all(sent_Rb, one_each, one_each, group), self.block, scale_M.dtype)
        sum_C = dequantize_int8(q_RC.flatten(), scale_Rm.flatten(), self.block).view_as(q_RC).sum(0)
        q_C, scale_m = self._compress(self.unsent_sum, bucket, sum_C)
        gathered_Rb = collectives.all_gather(pack(q_C[None], scale_m[None]), group)
        q_RC, scale_Rm = unpack(gathered_Rb, self.block, scale_M.dtype)
        return dequantize_int8(q_RC.flatten(), scale_Rm.flatten(), self.block)[: len(flat_N)].to(flat_N.dtype)

    def _compress(self, residuals, bucket, x_N):
        residual_N = _residual(residuals, bucket, x_N)
        message = with_error_feedback(
            x_N, residual_N, lambda x: quantize_int8(x, self.block), lambda q, s: dequantize_int8(q, s, self.block)
        )
        _forget_what_is_not_finite(residual_N)
        return message


class TopKAllReduce:
    """Sum buckets over the ranks where each sends only its largest entries, `density` of all, as index and value.

    An all-gather of what the ranks chose, which each adds up for itself.  The ranks choose differently, so every rank
    receives all choices: unlike an all-reduce, what a rank sends grows with the number of ranks.
    """

    def __init__(self, density=0.01):
        self.density = density
        self.unsent = {}  # bucket -> residual

    def __call__(self, flat_N, bucket=0, group=None):
        """The sum over `group` of what the ranks sent, the same bits on every rank."""
        n_ranks, n = collectives.size_of(group), len(flat_N)
        if n_ranks == 1:
            return flat_N
        k = math.ceil(self.density * n)
        residual_N = _residual(self.unsent, bucket, flat_N)
        index_K, value_K = with_error_feedback(
            flat_N, residual_N, lambda x: top_k(x, k), lambda index, value: scatter(index, value, n)
        )
        _forget_what_is_not_finite(residual_N)
        index_RK = collectives.all_gather(index_K, group).view(n_ranks, k).long()
        value_RK = collectives.all_gather(value_K, group).view(n_ranks, k)
        sum_N = torch.zeros_like(residual_N)
        for index_K, value_K in zip(index_RK, value_RK, strict=True):  # rank by rank: the same order everywhere
            sum_N[index_K] += value_K
        return sum_N.to(flat_N.dtype)


def get(name):
    """The all-reduce called `name` ("int8" or "topk"), with residuals of its own; None for "none".

    Raises ValueError for any other name.
    """
    known = {"none": lambda: None, "int8": Int8AllReduce, "topk": TopKAllReduce}
    if name not in known:
        raise ValueError(f"compression {name!r} is not known; use one of {', '.join(known)}")
    return known[name]()


def pack(q_RC, scale_Rm):
    """Put the scales behind the int8s, row by row, so that both travel in one message: (R, b) int8."""
    return torch.cat([q_RC, scale_Rm.contiguous().view(torch.int8)], dim=1)


def unpack(packed_Rb, block, dtype):
    """The inverse of `pack`, for scales of `dtype` and whole blocks."""
    n_blocks = packed_Rb.shape[1] // (block + dtype.itemsize)
    q_RC, scale_bytes = packed_Rb.split([n_blocks * block, n_blocks * dtype.itemsize], dim=1)
    return q_RC, scale_bytes.contiguous().view(dtype)


def _residual(residuals, bucket, like_N):
    """The residual of a bucket, zeros at first; fp32 at least, or small remainders would round to nothing."""
    if bucket not in residuals:
        residuals[bucket] = torch.zeros_like(like_N, dtype=torch.promote_types(like_N.dtype, torch.float32))
    if len(residuals[bucket]) != len(like_N):
        raise ValueError(
            f"bucket {bucket!r} had {len(residuals[bucket])} numbers before and {len(like_N)} now: what was left out "
            "belongs to the same places in every step, so buckets must not change"
        )
    return residuals[bucket]


def _forget_what_is_not_finite(residual_N):
    """An inf was sent, and everybody has seen it; kept, it would come back as nan in every later step."""
    residual_N.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
