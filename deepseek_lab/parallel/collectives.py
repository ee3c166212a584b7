"""The one door for communication: everything that is sent between ranks goes through here.

Collectives are made of messages.  The ring algorithms below build them from one primitive, `exchange` (send to
one rank while receiving from another), as bandwidth-optimal all-reduce does (Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms", JPDC 2009).  By default the process group's own collectives do the work;
`set_algorithm("ring")` puts ours in their place.  `copy_to_group` and `reduce_from_group` are the f and g of
Megatron-LM (arXiv 1909.08053, section 3), `gather_sequence` and `scatter_sequence` their twins for activations that
are split along the sequence (arXiv 2205.05198, section 4.2.2: g and its conjugate).

`group=None` is the whole world.  Ranks are numbered within the group.  Without torch.distributed, or with one
rank, every function does what one rank alone would see, and records nothing.

Shapes: R ranks of the group, N rows, C elements of a chunk; B batch, T tokens (t: this rank's T/R), D width.
"""

import contextlib
import functools
import math
import pickle
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import meter
from .meter import Event, Link, Trace, record

__all__ = [
    "CopyToGroup",
    "Event",
    "GatherLastDim",
    "GatherSequence",
    "Link",
    "Pending",
    "ReduceFromGroup",
    "ScatterSequence",
    "Trace",
    "algorithm",
    "all_gather",
    "all_gather_object",
    "all_gather_sequence",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "copy_to_group",
    "exchange",
    "gather_last_dim",
    "gather_sequence",
    "pairwise_all_to_all",
    "rank_in",
    "ranks_of",
    "record",
    "recv",
    "reduce_from_group",
    "reduce_scatter",
    "reduce_scatter_sequence",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "scatter_sequence",
    "send",
    "set_algorithm",
    "size_of",
    "start_all_gather",
    "start_all_reduce",
    "start_recv",
    "start_reduce_scatter",
    "start_send",
]

# --- ring algorithms, from messages -------------------------------------------------------------------------


def ring_reduce_scatter(x_RC, group=None):
    """Sum `x_RC` over the ranks and keep one row: rank r returns row r of the sum, shape (C,).

    `x_RC` holds one row (chunk) per rank and stays as it is.  In each of R-1 steps every rank passes one row of
    partial sums to its right neighbour, and adds the row that arrives from its left neighbour to its own.  Row r
    starts at rank r+1 and travels round the ring, growing by one term at each stop, until it is complete at rank
    r.  Each rank sends R-1 rows.
    """
    rank, n_ranks = rank_in(group), size_of(group)
    right, left = (rank + 1) % n_ranks, (rank - 1) % n_ranks
    sum_RC = x_RC.clone()
    arrived_C = torch.empty_like(sum_RC[0])
    for step in range(n_ranks - 1):
        give = (rank - 1 - step) % n_ranks
        take = (rank - 2 - step) % n_ranks
        exchange(sum_RC[give], right, arrived_C, left, group)
        sum_RC[take] += arrived_C
    return sum_RC[rank]


def ring_all_gather(x_C, group=None):
    """Give every rank every rank's chunk: returns shape (R, C), where row r is the `x_C` of rank r.

    In each of R-1 steps every rank passes on to the right the row that it got last (first its own), and receives
    the next one from the left.  Each rank sends R-1 rows.
    """
    rank, n_ranks = rank_in(group), size_of(group)
    right, left = (rank + 1) % n_ranks, (rank - 1) % n_ranks
    gathered_RC = x_C.new_empty(n_ranks, *x_C.shape)
    gathered_RC[rank] = x_C
    for step in range(n_ranks - 1):
        give = (rank - step) % n_ranks
        take = (rank - 1 - step) % n_ranks
        exchange(gathered_RC[give], right, gathered_RC[take], left, group)
    return gathered_RC


def ring_all_reduce(x, group=None):
    """Sum `x` (any shape) over the ranks; every rank returns the whole sum as a new tensor.

    A reduce-scatter followed by an all-gather, on `x` flattened and padded with zeros to R equal chunks.  Each
    rank sends 2 (R-1)/R of the padded tensor.  No all-reduce gives its busiest rank less to send.
    """
    n_ranks = size_of(group)
    chunk = math.ceil(x.numel() / n_ranks)
    padded = F.pad(x.flatten(), (0, n_ranks * chunk - x.numel()))
    my_sum_C = ring_reduce_scatter(padded.view(n_ranks, chunk), group)
    sum_RC = ring_all_gather(my_sum_C, group)
    return sum_RC.flatten()[: x.numel()].view_as(x)


def pairwise_all_to_all(x, send_counts, recv_counts, group=None):
    """Send `send_counts[r]` rows of `x` to each rank r; return the rows received, in order of the sender.

    `recv_counts[r]` is how many rows rank r sends here.  Rows for oneself are copied.  In step s = 1 ... R-1 every
    rank sends to the rank s places on and receives from the rank s places back, so that all links are busy and
    no rank is everybody's target at once.
    """
    rank, n_ranks = rank_in(group), size_of(group)
    outgoing = x.split(list(send_counts))
    incoming = [x.new_empty(count, *x.shape[1:]) for count in recv_counts]
    incoming[rank].copy_(outgoing[rank])
    for step in range(1, n_ranks):
        dst, src = (rank + step) % n_ranks, (rank - step) % n_ranks
        exchange(outgoing[dst], dst, incoming[src], src, group)
    return torch.cat(incoming)


# --- what autograd sees of a collective ---------------------------------------------------------------------


class CopyToGroup(torch.autograd.Function):
    """f: the identity in forward, a sum over the group in backward.

    Place it where one tensor, the same on all ranks, enters work that differs from rank to rank: each rank then
    finds only its part of the gradient, and the parts must be added.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class ReduceFromGroup(torch.autograd.Function):
    """g: a sum over the group in forward, the identity in backward.

    Place it where the ranks' partial results are added: y = x_0 + x_1 + ..., so the gradient of each x_r is that
    of y, which every rank already holds.
    """

    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class GatherSequence(torch.autograd.Function):
    """The ranks' pieces of the sequence put together in forward, a reduce-scatter in backward.

    It stands where f does, when activations are split along the sequence: each rank finds its part of the gradient of
    the whole sequence; the parts are added, and each rank keeps the sum for its own piece.
    """

    @staticmethod
    def forward(ctx, x_BtD, group):
        ctx.group = group
        return all_gather_sequence(x_BtD, group)

    @staticmethod
    def backward(ctx, grad_BTD):
        return reduce_scatter_sequence(grad_BTD, ctx.group), None


class ScatterSequence(torch.autograd.Function):
    """A reduce-scatter over the sequence in forward, the pieces put together in backward.

    It stands where g does: the ranks' partial results are added, and each rank keeps its own piece of the sequence.
    """

    @staticmethod
    def forward(ctx, x_BTD, group):
        ctx.group = group
        return reduce_scatter_sequence(x_BTD, group)

    @staticmethod
    def backward(ctx, grad_BtD):
        return all_gather_sequence(grad_BtD, ctx.group), None


class GatherLastDim(torch.autograd.Function):
    """The ranks' slices of the last dim side by side in forward; backward takes this rank's slice of the gradient.

    For a result that every rank goes on to use in the same way, such as the logits of the whole vocabulary.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather(x[None], group).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(size_of(ctx.group), dim=-1)[rank_in(ctx.group)], None


def copy_to_group(x, group=None):
    """f: return `x`; in backward sum its gradient over `group` (see CopyToGroup)."""
    return CopyToGroup.apply(x, group)


def reduce_from_group(x, group=None):
    """g: return the sum of `x` over `group`; in backward pass the gradient through (see ReduceFromGroup)."""
    return ReduceFromGroup.apply(x, group)


def gather_sequence(x_BtD, group=None):
    """Join the ranks' pieces (B, T/R, D) to (B, T, D); in backward sum and split the gradient (see GatherSequence)."""
    return GatherSequence.apply(x_BtD, group)


def scatter_sequence(x_BTD, group=None):
    """Sum (B, T, D) over `group` and keep this rank's piece (B, T/R, D); in backward join (see ScatterSequence).

    Raises ValueError when the ranks do not divide T.
    """
    return ScatterSequence.apply(x_BTD, group)


def gather_last_dim(x, group=None):
    """Join the ranks' slices of the last dim; in backward keep this rank's slice (see GatherLastDim)."""
    return GatherLastDim.apply(x, group)


# --- the collectives that the package calls -----------------------------------------------------------------


def all_reduce(x, group=None, op="sum"):
    """Reduce `x` over the ranks, in place, and return it.  `x` must be contiguous; `op` is sum, max, min or avg.

    With `set_algorithm("ring")` sums go through `ring_all_reduce`.
    """
    if op not in ("sum", "max", "min", "avg"):
        raise ValueError(f"all_reduce: op={op!r} is unknown; use sum, max, min or avg")
    n_ranks = size_of(group)
    _require_contiguous(x, "all_reduce")
    if n_ranks == 1:
        return x
    with _collective("all_reduce", x, group, 2 * (n_ranks - 1), ring=op == "sum") as ours:
        if ours:
            return x.copy_(ring_all_reduce(x, group))
        if op == "avg" and x.device.type == "cpu":  # gloo knows no average
            dist.all_reduce(x, dist.ReduceOp.SUM, group=group)
            return x.div_(n_ranks)
        dist.all_reduce(x, getattr(dist.ReduceOp, op.upper()), group=group)
        return x


def all_gather(x, group=None):
    """Concatenate the ranks' `x` (the same shape on all) along dim 0, in rank order: (N, ...) -> (R*N, ...)."""
    n_ranks = size_of(group)
    if n_ranks == 1:
        return x.clone()
    x = x.contiguous()
    with _collective("all_gather", x, group, n_ranks - 1, n_bytes=(n_ranks - 1) * x.nbytes) as ours:
        if ours:
            return ring_all_gather(x, group).flatten(0, 1)
        gathered = x.new_empty(n_ranks * x.shape[0], *x.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered, x, group=group)
        return gathered


def reduce_scatter(x, group=None):
    """Sum `x` over the ranks and return this rank's slice of dim 0: (R*N, ...) -> (N, ...)."""
    n_ranks = size_of(group)
    if x.shape[0] % n_ranks:
        raise ValueError(f"reduce_scatter: the {n_ranks} ranks do not divide dim 0 of shape {tuple(x.shape)}; pad it")
    if n_ranks == 1:
        return x.clone()
    x = x.contiguous()
    with _collective("reduce_scatter", x, group, n_ranks - 1) as ours:
        if ours:
            return ring_reduce_scatter(x.unflatten(0, (n_ranks, -1)), group)
        my_sum = x.new_empty(x.shape[0] // n_ranks, *x.shape[1:])
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(my_sum, x, group=group)
        return my_sum


def all_gather_sequence(x_BtD, group=None):
    """Join the ranks' pieces of a sequence in rank order: (B, T/R, D) -> (B, T, D)."""
    return all_gather(x_BtD[None], group).transpose(0, 1).flatten(1, 2)


def reduce_scatter_sequence(x_BTD, group=None):
    """Sum `x_BTD` over the ranks and keep this rank's piece of the sequence: (B, T, D) -> (B, T/R, D).

    Raises ValueError when the ranks do not divide T.
    """
    n_ranks, length = size_of(group), x_BTD.shape[1]
    if length % n_ranks:
        raise ValueError(
            f"{n_ranks} ranks cannot share a sequence of {length} tokens; use a length that {n_ranks} divides"
        )
    return reduce_scatter(x_BTD.unflatten(1, (n_ranks, -1)).transpose(0, 1), group)[0]


def all_to_all(x, send_counts, recv_counts, group=None):
    """Send `send_counts[r]` rows of `x` to rank r; return the rows received, `recv_counts[r]` from each rank r."""
    n_ranks, rank = size_of(group), rank_in(group)
    send_counts, recv_counts = [int(c) for c in send_counts], [int(c) for c in recv_counts]
    if not (len(send_counts) == len(recv_counts) == n_ranks and sum(send_counts) == x.shape[0]):
        raise ValueError(
            f"all_to_all over {n_ranks} ranks: send_counts={send_counts} and recv_counts={recv_counts} need one "
            f"count per rank, and send_counts must add up to the {x.shape[0]} rows of x"
        )
    if n_ranks == 1:
        return x.clone()
    x = x.contiguous()
    row_bytes = math.prod(x.shape[1:]) * x.element_size()
    sent_bytes = (x.shape[0] - send_counts[rank]) * row_bytes
    with _collective("all_to_all", x, group, n_ranks - 1, n_bytes=sent_bytes) as ours:
        if ours:
            return pairwise_all_to_all(x, send_counts, recv_counts, group)
        received = x.new_empty(sum(recv_counts), *x.shape[1:])
        dist.all_to_all_single(received, x, recv_counts, send_counts, group=group)
        return received


class Pending:
    """A collective that was started; `wait()` returns its result, and may be called once."""

    def __init__(self, result, finish=None):
        self._result, self._finish = result, finish

    def wait(self):
        """The result, once it is complete."""
        if self._finish is not None:
            self._finish()
        return self._result


def start_all_reduce(x, group=None) -> Pending:
    """Start adding `x` up over the ranks, in place; leave it alone until `wait()`, which returns it."""
    _require_contiguous(x, "start_all_reduce")
    if size_of(group) == 1 or _algorithm == "ring":
        return Pending(all_reduce(x, group))
    steps = 2 * (size_of(group) - 1)
    return _start("all_reduce", x, x, group, steps, None, lambda: dist.all_reduce(x, group=group, async_op=True))


def start_all_gather(x, group=None, out=None) -> Pending:
    """Start `all_gather`; `out`, if given, is the contiguous tensor (R*N, ...) to gather into."""
    n_ranks, x = size_of(group), x.contiguous()
    if n_ranks == 1 or _algorithm == "ring":
        gathered = all_gather(x, group)
        return Pending(gathered if out is None else out.copy_(gathered))
    gathered = x.new_empty(n_ranks * x.shape[0], *x.shape[1:]) if out is None else out
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    n_bytes = (n_ranks - 1) * x.nbytes
    return _start(
        "all_gather", x, gathered, group, n_ranks - 1, n_bytes, lambda: gather(gathered, x, group=group, async_op=True)
    )


def start_reduce_scatter(x, group=None) -> Pending:
    """Start `reduce_scatter`; leave `x` alone until `wait()`."""
    n_ranks = size_of(group)
    if n_ranks == 1 or _algorithm == "ring" or x.shape[0] % n_ranks:
        return Pending(reduce_scatter(x, group))
    x = x.contiguous()
    my_sum = x.new_empty(x.shape[0] // n_ranks, *x.shape[1:])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return _start(
        "reduce_scatter", x, my_sum, group, n_ranks - 1, None, lambda: scatter(my_sum, x, group=group, async_op=True)
    )


def _start(op, x, result, group, steps, n_bytes, post) -> Pending:
    """Post a collective; it is metered, and held back to the chosen link, when somebody waits for it."""
    ranks, link, start_s = ranks_of(group), meter.current_link(), time.monotonic()
    n_bytes = steps * x.nbytes / len(ranks) if n_bytes is None else n_bytes
    done_s = []
    with meter.posting(op):
        work = post()
        with contextlib.suppress(RuntimeError):  # gloo's reduce-scatter does not tell when it is done
            work.get_future().add_done_callback(lambda _: done_s.append(time.monotonic()))
        if link:
            starts_s = _clock(x, meter.departure(n_bytes))
            starts_work = dist.all_reduce(starts_s, dist.ReduceOp.MAX, group=group, async_op=True)

    def finish():
        what = f"{op} {_size(x)} {_dtype(x)} over {len(ranks)} ranks, started earlier"
        mine = ranks[rank_in(group)]
        with meter.operation(op, what, ranks, mine, payload_bytes=x.nbytes, start_s=start_s) as current:
            work.wait()
            if link:
                starts_work.wait()
                current.not_before = starts_s.item() + link.seconds(n_bytes, steps)
            current.done_s = done_s[0] if done_s else current.not_before or None

    return Pending(result, finish)


def broadcast(x, src=0, group=None):
    """Overwrite `x` on every rank with the one of rank `src`, in place, and return it."""
    n_ranks = size_of(group)
    _require_contiguous(x, "broadcast")
    if n_ranks == 1:
        return x
    steps = math.ceil(math.log2(n_ranks))
    with _collective("broadcast", x, group, steps, n_bytes=steps * x.nbytes, ring=False):
        dist.broadcast(x, group_src=src, group=group)
        return x


def barrier(group=None):
    """Return once every rank has come here."""
    n_ranks = size_of(group)
    if n_ranks > 1:
        with _collective("barrier", torch.empty(0), group, math.ceil(math.log2(n_ranks)), ring=False):
            dist.barrier(group)


def all_gather_object(value, group=None) -> list:
    """The ranks' values, of any picklable type, in rank order.  For small things: they travel as pickles."""
    n_ranks = size_of(group)
    if n_ranks == 1:
        return [value]
    pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    n_bytes = (n_ranks - 1) * pickled.nbytes
    with _collective("all_gather_object", pickled, group, n_ranks - 1, n_bytes=n_bytes, ring=False):
        values = [None] * n_ranks
        dist.all_gather_object(values, value, group=group)
        return values


def set_algorithm(name: str) -> None:
    """Who carries out this rank's collectives from now on: "gloo" (the process group) or "ring" (we, by exchange).

    Broadcasts, barriers, objects and reductions other than sums stay with the process group.
    """
    global _algorithm
    if name not in ("gloo", "ring"):
        raise ValueError(f"set_algorithm({name!r}): unknown; use 'gloo' (the process group's own) or 'ring'")
    _algorithm = name


def algorithm() -> str:
    """What `set_algorithm` chose."""
    return _algorithm


_algorithm = "gloo"

# --- messages -----------------------------------------------------------------------------------------------


def exchange(send_x, dst, recv_x, src, group=None, tag=0):
    """Send `send_x` to rank `dst` while receiving `recv_x`, in place, from rank `src`; returns `recv_x`.

    The two need not be the same rank, size or type.  Nobody waits for a turn, so a whole ring may exchange at
    once.  Both ends must agree on size, dtype and tag: gloo does not check.  Raises ValueError where `dst` or `src`
    is this rank itself or is not in the group.
    """
    if size_of(group) == 1:
        return recv_x.copy_(send_x)
    what = f"exchange: send {_size(send_x)} to rank {dst}, receive {_size(recv_x)} {_dtype(recv_x)} from rank {src}"
    send_x = send_x.contiguous()
    with _message("exchange", what, group, (dst, src), send_x.nbytes, send_x.nbytes) as current:
        _transfer(current, group, tag, send_x, dst, recv_x, src)
        return recv_x


def send(x, dst, group=None, tag=0):
    """Send `x` to rank `dst`.  May wait until the receiver is there."""
    x = x.contiguous()
    with _message("send", f"send {_size(x)} {_dtype(x)} to rank {dst}", group, (dst,), x.nbytes, x.nbytes) as current:
        _transfer(current, group, tag, send_x=x, dst=dst)


def recv(x, src, group=None, tag=0):
    """Receive into `x`, in place, what rank `src` sends; returns `x`.  Size, dtype and tag must be the sender's."""
    with _message("recv", f"recv {_size(x)} {_dtype(x)} from rank {src}", group, (src,), x.nbytes, 0) as current:
        _transfer(current, group, tag, recv_x=x, src=src)
        return x


def start_send(x, dst, group=None, tag=0) -> Pending:
    """Start `send`; leave `x` alone until `wait()`."""
    x = x.contiguous()
    what = f"send {_size(x)} {_dtype(x)} to rank {dst}, started earlier"
    return _start_message("send", what, group, dst, x.nbytes, x.nbytes, x, send_x=x, dst=dst, tag=tag)


def start_recv(x, src, group=None, tag=0) -> Pending:
    """Start `recv`; `x` holds what rank `src` sent once `wait()` returns it."""
    what = f"recv {_size(x)} {_dtype(x)} from rank {src}, started earlier"
    return _start_message("recv", what, group, src, x.nbytes, 0, x, recv_x=x, src=src, tag=tag)


def _start_message(op, what, group, peer, payload_bytes, wire_bytes, result, **how) -> Pending:
    start_s = time.monotonic()
    metered = functools.partial(_message, op, what, group, (peer,), payload_bytes, wire_bytes)
    metered(start_s=start_s)  # refuses peers that cannot be
    with meter.posting(op):
        transfer = _Transfer(group, **how)

    def finish():
        with metered(start_s=start_s) as current:
            transfer.wait()
            current.not_before = transfer.not_before
            current.done_s = transfer.not_before or None

    return Pending(result, finish)


_STAMP_TAG = 1 << 20  # with a chosen Link, the time of departure travels beside each message


def _transfer(current, group, tag, send_x=None, dst=None, recv_x=None, src=None):
    """Both directions of a message, at once."""
    transfer = _Transfer(group, send_x, dst, recv_x, src, tag)
    transfer.wait()
    current.not_before = transfer.not_before


class _Transfer:
    """A message in one direction or both, posted; a dropped Work would lose its message, so all are kept."""

    def __init__(self, group, send_x=None, dst=None, recv_x=None, src=None, tag=0):
        self.link, self.not_before, self.received, self.left_s = meter.current_link(), 0.0, recv_x, None
        self.posts = posts = []
        if send_x is not None and send_x.numel():
            posts.append((dist.isend, send_x, dst, tag))
            if self.link:
                leaves_s = meter.departure(send_x.nbytes)
                self.not_before = leaves_s + self.link.seconds(send_x.nbytes)
                posts.append((dist.isend, _clock(send_x, leaves_s), dst, tag + _STAMP_TAG))
        if recv_x is not None and recv_x.numel():
            _require_contiguous(recv_x, "receive")
            posts.append((dist.irecv, recv_x, src, tag))
            if self.link:
                self.left_s = _clock(recv_x)
                posts.append((dist.irecv, self.left_s, src, tag + _STAMP_TAG))
        if any(x.is_cuda for _, x, _, _ in posts):  # NCCL wants them posted as one
            p2p = [dist.P2POp(op, x, group=group, group_peer=peer, tag=tag) for op, x, peer, tag in posts]
            self.works = dist.batch_isend_irecv(p2p)
        else:
            peers = {dist.isend: "group_dst", dist.irecv: "group_src"}
            self.works = [op(x, group=group, tag=tag, **{peers[op]: peer}) for op, x, peer, tag in posts]

    def wait(self):
        """Return once all has been sent and received; `not_before` is then when the chosen link could have done it."""
        for work in self.works:
            work.wait()
        if self.left_s is not None:
            arrives_s = self.left_s.item() + self.link.seconds(self.received.nbytes)
            self.not_before = max(self.not_before, arrives_s)


# --- groups and metering ------------------------------------------------------------------------------------


def size_of(group=None) -> int:
    """Number of ranks in `group`; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def rank_in(group=None) -> int:
    """This rank's number within `group`; 0 without torch.distributed."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def ranks_of(group=None) -> tuple[int, ...]:
    """The global ranks of `group`, in order."""
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD)) if size_of(group) > 1 else (0,)


def _message(op, what, group, peers, payload_bytes, wire_bytes, start_s=None):
    """Meter a message to or from the first of `peers`, all of which must be other ranks of the group."""
    ranks = ranks_of(group)
    if len(ranks) == 1:
        raise RuntimeError(f"{what}: there is only one rank; start some with run_ranks or `accelerate launch`")
    rank = rank_in(group)
    for peer in peers:
        if not 0 <= peer < len(ranks):
            raise ValueError(f"{op}: rank {peer} is not in a group of {len(ranks)} (ranks 0 to {len(ranks) - 1})")
        if peer == rank:
            raise ValueError(f"{op}: rank {rank} cannot send to itself or receive from itself; copy the tensor instead")
    mine, theirs = ranks[rank], ranks[peers[0]]
    return meter.operation(
        op, what, ranks, mine, peer=theirs, payload_bytes=payload_bytes, wire_bytes=wire_bytes, start_s=start_s
    )


class _collective:
    """Meter a collective; the value of `with` says whether the ring carries it out.

    `steps` and `n_bytes` are what a good algorithm needs per rank (default: the ring's `steps` chunks of x/R).
    A collective that torch carries out is held back to that on the chosen link, counted from the last rank's start.
    """

    def __init__(self, op, x, group, steps, n_bytes=None, ring=True):
        self.x, self.group, self.steps = x, group, steps
        self.ours = ring and _algorithm == "ring"
        ranks = ranks_of(group)
        self.n_bytes = steps * x.nbytes / len(ranks) if n_bytes is None else n_bytes
        what = f"{op} {_size(x)} {_dtype(x)} over {len(ranks)} ranks" if x.numel() else f"{op} over {len(ranks)} ranks"
        self.operation = meter.operation(op, what, ranks, ranks[rank_in(group)], payload_bytes=x.nbytes)

    def __enter__(self):
        current = self.operation.__enter__()
        if (link := meter.current_link()) and not self.ours:
            starts_s = _clock(self.x, meter.departure(self.n_bytes))
            dist.all_reduce(starts_s, dist.ReduceOp.MAX, group=self.group)
            current.not_before = starts_s.item() + link.seconds(self.n_bytes, self.steps)
        return self.ours

    def __exit__(self, *error):
        return self.operation.__exit__(*error)


def _clock(like, seconds=0.0):
    return torch.tensor([seconds or time.monotonic()], dtype=torch.float64, device=like.device)


def _require_contiguous(x, op):
    if not x.is_contiguous():
        raise ValueError(f"{op} works in place and needs a contiguous tensor, not strides {x.stride()}; copy it first")


def _size(x):
    n_bytes = x.nbytes
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            break
        n_bytes, unit = n_bytes / 1024, {"B": "KiB", "KiB": "MiB", "MiB": "GiB"}[unit]
    return f"{n_bytes} B" if unit == "B" else f"{n_bytes:.1f} {unit}"


def _dtype(x):
    return str(x.dtype).removeprefix("torch.")
