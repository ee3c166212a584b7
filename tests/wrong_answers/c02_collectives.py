"""Ways to miss collectives, their cost, and their gradients."""

import functools
import math

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.collectives import exchange, rank_in, size_of
from deepseek_lab.plan import network
from tests.wrong_answers import Wrong

# 2.1 ----------------------------------------------------------------------------------------------------------


def _matrix(add):
    @functools.wraps(add)
    def traffic_matrix(traces, n_ranks):
        sent_RR = [[0] * n_ranks for _ in range(n_ranks)]
        for place, trace in enumerate(traces):
            for event in trace.events:
                add(sent_RR, event, place)
        return sent_RR

    return traffic_matrix


@_matrix
def transposed(sent_RR, event, place):
    if event.peer is not None:
        sent_RR[event.peer][event.rank] += event.wire_bytes


@_matrix
def counts_messages(sent_RR, event, place):
    if event.peer is not None and event.wire_bytes:
        sent_RR[event.rank][event.peer] += 1


@_matrix
def last_message_only(sent_RR, event, place):
    if event.peer is not None and event.wire_bytes:
        sent_RR[event.rank][event.peer] = event.wire_bytes


@_matrix
def both_ends(sent_RR, event, place):
    if event.peer is not None:
        sent_RR[event.rank][event.peer] += event.payload_bytes


@_matrix
def without_steps(sent_RR, event, place):
    if event.peer is not None and event.within is None:
        sent_RR[event.rank][event.peer] += event.wire_bytes


@_matrix
def place_in_the_list(sent_RR, event, place):
    if event.peer is not None:
        sent_RR[place][event.peer] += event.wire_bytes


@_matrix
def collectives_too(sent_RR, event, place):
    sent_RR[event.rank][event.peer or 0] += event.wire_bytes or 0


@_matrix
def nothing_to_rank_0(sent_RR, event, place):
    if event.peer:
        sent_RR[event.rank][event.peer] += event.wire_bytes


@_matrix
def one_row_for_all(sent_RR, event, place):
    sent_RR[:] = [sent_RR[0]] * len(sent_RR)
    if event.peer is not None:
        sent_RR[event.rank][event.peer] += event.wire_bytes


# 2.2 ----------------------------------------------------------------------------------------------------------


def _ring(group):
    rank, n_ranks = rank_in(group), size_of(group)
    return rank, n_ranks, (rank + 1) % n_ranks, (rank - 1) % n_ranks


def rows_end_one_place_off(x_RC, group=None):
    rank, n_ranks, right, left = _ring(group)
    sum_RC, arrived_C = x_RC.clone(), torch.empty_like(x_RC[0])
    for step in range(n_ranks - 1):
        exchange(sum_RC[(rank - step) % n_ranks], right, arrived_C, left, group)
        sum_RC[(rank - step - 1) % n_ranks] += arrived_C
    return sum_RC[(rank + 1) % n_ranks]


def replaces_instead_of_adding(x_RC, group=None):
    rank, n_ranks, right, left = _ring(group)
    sum_RC = x_RC.clone()
    for step in range(n_ranks - 1):
        arrived_C = torch.empty_like(sum_RC[0])
        exchange(sum_RC[(rank - 1 - step) % n_ranks], right, arrived_C, left, group)
        sum_RC[(rank - 2 - step) % n_ranks] = arrived_C
    return sum_RC[rank]


def sends_its_own_rows(x_RC, group=None):
    rank, n_ranks, right, left = _ring(group)
    sum_RC, arrived_C = x_RC.clone(), torch.empty_like(x_RC[0])
    for step in range(n_ranks - 1):
        exchange(x_RC[(rank - 1 - step) % n_ranks], right, arrived_C, left, group)
        sum_RC[(rank - 2 - step) % n_ranks] += arrived_C
    return sum_RC[rank]


def one_step_too_few(x_RC, group=None):
    rank, n_ranks, right, left = _ring(group)
    sum_RC, arrived_C = x_RC.clone(), torch.empty_like(x_RC[0])
    for step in range(1, n_ranks - 1):
        exchange(sum_RC[(rank - 1 - step) % n_ranks], right, arrived_C, left, group)
        sum_RC[(rank - 2 - step) % n_ranks] += arrived_C
    return sum_RC[rank]


def last_step_missing(x_RC, group=None):
    return _reduce_scatter(x_RC, group, steps=size_of(group) - 2)


def returns_its_working_tensor(x_RC, group=None):
    sum_RC = x_RC.clone()
    sum_RC[rank_in(group)] = _reduce_scatter(x_RC, group)
    return sum_RC


def a_table_of_one_row(x_RC, group=None):
    return _reduce_scatter(x_RC, group)[None]


def adds_into_the_row_it_sent(x_RC, group=None):
    rank, n_ranks, right, left = _ring(group)
    sum_RC, arrived_C = x_RC.clone(), torch.empty_like(x_RC[0])
    for step in range(n_ranks - 1):
        give = (rank - 1 - step) % n_ranks
        exchange(sum_RC[give], right, arrived_C, left, group)
        sum_RC[give] += arrived_C
    return sum_RC[rank]


def returns_all_rows(x_RC, group=None):
    return collectives.ring_all_gather(_reduce_scatter(x_RC, group), group)


def _reduce_scatter(x_RC, group=None, steps=None):
    rank, n_ranks, right, left = _ring(group)
    sum_RC, arrived_C = x_RC.clone(), torch.empty_like(x_RC[0])
    for step in range(n_ranks - 1 if steps is None else steps):
        exchange(sum_RC[(rank - 1 - step) % n_ranks], right, arrived_C, left, group)
        sum_RC[(rank - 2 - step) % n_ranks] += arrived_C
    return sum_RC[rank]


def mean_of_rows(x_RC, group=None):
    return _reduce_scatter(x_RC, group) / size_of(group)


def adds_into_its_input(x_RC, group=None):
    rank, n_ranks, right, left = _ring(group)
    arrived_C = torch.empty_like(x_RC[0])
    for step in range(n_ranks - 1):
        exchange(x_RC[(rank - 1 - step) % n_ranks], right, arrived_C, left, group)
        x_RC[(rank - 2 - step) % n_ranks] += arrived_C
    return x_RC[rank].clone()


def passes_the_whole_tensor(x_RC, group=None):
    rank, n_ranks, right, left = _ring(group)
    sum_RC, passing_RC = x_RC.clone(), x_RC.clone()
    for _ in range(n_ranks - 1):
        arrived_RC = torch.empty_like(x_RC)
        exchange(passing_RC, right, arrived_RC, left, group)
        passing_RC = arrived_RC
        sum_RC += arrived_RC
    return sum_RC[rank]


def adds_up_on_rank_0(x_RC, group=None):
    rank, n_ranks, *_ = _ring(group)
    mine_C = torch.empty_like(x_RC[0])
    if rank:
        collectives.send(x_RC, 0, group)
        return collectives.recv(mine_C, 0, group)
    sum_RC, arrived_RC = x_RC.clone(), torch.empty_like(x_RC)
    for src in range(1, n_ranks):
        sum_RC += collectives.recv(arrived_RC, src, group)
    for dst in range(1, n_ranks):
        collectives.send(sum_RC[dst], dst, group)
    return sum_RC[0]


def calls_a_collective(x_RC, group=None):
    return collectives.reduce_scatter(x_RC, group)[0]


def isends_past_our_door(x_RC, group=None):
    rank, n_ranks, right, left = _ring(group)
    sum_RC, arrived_C = x_RC.clone(), torch.empty_like(x_RC[0])
    for step in range(n_ranks - 1):
        work = dist.isend(sum_RC[(rank - 1 - step) % n_ranks], group=group, group_dst=right)
        dist.recv(arrived_C, group=group, group_src=left)
        work.wait()
        sum_RC[(rank - 2 - step) % n_ranks] += arrived_C
    return sum_RC[rank]


def ring_of_the_whole_world(x_RC, group=None):
    return _reduce_scatter(x_RC)


def everybody_sends_first(x_RC, group=None):
    rank, n_ranks, right, left = _ring(group)
    sum_RC, arrived_C = x_RC.clone(), torch.empty_like(x_RC[0])
    for step in range(n_ranks - 1):
        collectives.send(sum_RC[(rank - 1 - step) % n_ranks], right, group)
        collectives.recv(arrived_C, left, group)
        sum_RC[(rank - 2 - step) % n_ranks] += arrived_C
    return sum_RC[rank]


def element_by_element(x_RC, group=None):
    columns = [_reduce_scatter(x_RC[:, i].contiguous()[:, None], group) for i in range(x_RC.shape[1])]
    return torch.cat(columns)


# 2.3 ----------------------------------------------------------------------------------------------------------


def _gather(x_C, group=None, steps=None, place=None, own=True, passes_on=True):
    rank, n_ranks, right, left = _ring(group)
    gathered_RC = torch.zeros(n_ranks, *x_C.shape, dtype=x_C.dtype)
    if own:
        gathered_RC[place(rank, 0) if place else rank] = x_C
    passing_C = x_C.clone()
    for step in range(n_ranks - 1 if steps is None else steps):
        arrived_C = torch.empty_like(x_C)
        exchange(passing_C if passes_on else x_C, right, arrived_C, left, group)
        gathered_RC[place(rank, step + 1) if place else (rank - 1 - step) % n_ranks] = arrived_C
        passing_C = arrived_C
    return gathered_RC


def own_row_every_time(x_C, group=None):
    return _gather(x_C, group, passes_on=False)


def own_row_missing(x_C, group=None):
    return _gather(x_C, group, own=False)


def order_of_arrival(x_C, group=None):
    return _gather(x_C, group, place=lambda rank, step: step)


def last_row_missing(x_C, group=None):
    return _gather(x_C, group, steps=size_of(group) - 2)


def one_buffer_for_all(x_C, group=None):
    rank, gathered_RC = rank_in(group), _gather(x_C, group)
    last_C = gathered_RC[(rank + 1) % size_of(group)]
    return torch.stack([x_C if row == rank else last_C for row in range(size_of(group))])


def rows_run_together(x_C, group=None):
    return _gather(x_C, group).flatten()


def everyone_to_everyone(x_C, group=None):
    rank, n_ranks, *_ = _ring(group)
    gathered_RC = x_C.new_empty(n_ranks, *x_C.shape)
    gathered_RC[rank] = x_C
    for step in range(1, n_ranks):
        dst, src = (rank + step) % n_ranks, (rank - step) % n_ranks
        exchange(x_C, dst, gathered_RC[src], src, group)
    return gathered_RC


def gathers_with_a_collective(x_C, group=None):
    return collectives.all_gather(x_C[None], group)


def sends_all_that_it_has(x_C, group=None):
    rank, n_ranks, right, left = _ring(group)
    gathered_RC = torch.zeros(n_ranks, *x_C.shape, dtype=x_C.dtype)
    gathered_RC[rank] = x_C
    for step in range(n_ranks - 1):
        arrived_RC = torch.empty_like(gathered_RC)
        exchange(gathered_RC, right, arrived_RC, left, group)
        take = (rank - 1 - step) % n_ranks
        gathered_RC[take] = arrived_RC[take]
    return gathered_RC


# 2.4 ----------------------------------------------------------------------------------------------------------


def _padded(x, n_ranks):
    return F.pad(x.flatten(), (0, -x.numel() % n_ranks)).view(n_ranks, -1)


def _ring_sum(x, group=None):
    return collectives.ring_all_gather(
        collectives.ring_reduce_scatter(_padded(x, size_of(group)), group), group
    ).flatten()


def without_padding(x, group=None):
    my_sum_C = collectives.ring_reduce_scatter(x.view(size_of(group), -1), group)
    return collectives.ring_all_gather(my_sum_C, group).view_as(x)


def one_row_of_padding_too_many(x, group=None):
    n_ranks = size_of(group)
    padded = F.pad(x.flatten(), (0, n_ranks - x.numel() % n_ranks))
    return _ring_sum(padded, group)[: x.numel()].view_as(x)


def contiguous_only(x, group=None):
    return _ring_sum(x.view(-1), group)[: x.numel()].view_as(x)


def remainder_cut_off(x, group=None):
    return _ring_sum(x.flatten()[: x.numel() // size_of(group) * size_of(group)], group)


def padding_left_in(x, group=None):
    return _ring_sum(x, group)


def shape_lost(x, group=None):
    return _ring_sum(x, group)[: x.numel()]


def mean_of_all(x, group=None):
    return _ring_sum(x, group)[: x.numel()].view_as(x) / size_of(group)


def no_gather(x, group=None):
    return collectives.ring_reduce_scatter(_padded(x, size_of(group)), group)


def chunks_rolled(x, group=None):
    total = collectives.ring_all_gather(collectives.ring_reduce_scatter(_padded(x, size_of(group)), group), group)
    return total.flatten()[: x.numel()].flip(0).view_as(x)


def reduces_to_rank_0(x, group=None):
    total, arrived = x.clone(), torch.empty_like(x)
    for src in range(1, size_of(group)):
        if rank_in(group) == src:
            collectives.send(x, 0, group)
        elif rank_in(group) == 0:
            total += collectives.recv(arrived, src, group)
    return total


def into_its_input(x, group=None):
    return x.copy_(_ring_sum(x, group)[: x.numel()].view_as(x))


def gathers_and_adds(x, group=None):
    return collectives.ring_all_gather(x, group).sum(0)


def fp32_on_the_wire(x, group=None):
    return _ring_sum(x.float(), group)[: x.numel()].view_as(x).to(x.dtype)


def calls_all_reduce(x, group=None):
    return collectives.all_reduce(x.clone(), group)


# 2.5 ----------------------------------------------------------------------------------------------------------


def _pairs(x, send_counts, recv_counts, group, partner):
    rank, n_ranks, *_ = _ring(group)
    outgoing = x.split(list(send_counts))
    incoming = [x.new_empty(count, *x.shape[1:]) for count in recv_counts]
    incoming[rank].copy_(outgoing[rank])
    for step in range(1, n_ranks):
        dst, src = partner(rank, step, n_ranks)
        exchange(outgoing[dst], dst, incoming[src], src, group)
    return incoming


def receives_from_whom_it_sends_to(x, send_counts, recv_counts, group=None):
    return torch.cat(_pairs(x, send_counts, recv_counts, group, lambda rank, step, n: ((rank + step) % n,) * 2))


def pairs_by_xor(x, send_counts, recv_counts, group=None):
    return torch.cat(_pairs(x, send_counts, recv_counts, group, lambda rank, step, n: (rank ^ step,) * 2))


def rows_as_they_come(x, send_counts, recv_counts, group=None):
    rank, n_ranks, *_ = _ring(group)
    incoming = _pairs(x, send_counts, recv_counts, group, lambda r, s, n: ((r + s) % n, (r - s) % n))
    return torch.cat([incoming[(rank - step) % n_ranks] for step in range(n_ranks)])


def forgets_its_own_rows(x, send_counts, recv_counts, group=None):
    incoming = _pairs(x, send_counts, recv_counts, group, lambda r, s, n: ((r + s) % n, (r - s) % n))
    return torch.cat([rows for src, rows in enumerate(incoming) if src != rank_in(group)])


def expects_what_it_sends(x, send_counts, recv_counts, group=None):
    rows = torch.cat(_pairs(x, send_counts, recv_counts, group, lambda r, s, n: ((r + s) % n, (r - s) % n)))
    missing = len(x) - len(rows)
    return F.pad(rows, (0, 0, 0, missing)) if missing > 0 else rows[: len(x)]


def all_begin_with_rank_0(x, send_counts, recv_counts, group=None):
    def in_rank_order(rank, step, n_ranks):
        return ([peer for peer in range(n_ranks) if peer != rank][step - 1],) * 2

    return torch.cat(_pairs(x, send_counts, recv_counts, group, in_rank_order))


def everything_to_everybody(x, send_counts, recv_counts, group=None):
    rank, n_ranks, *_ = _ring(group)
    counts = [list(send_counts)] * n_ranks
    for step in range(1, n_ranks):
        arrived = torch.empty(n_ranks, dtype=torch.int64)
        exchange(torch.tensor(send_counts), (rank + step) % n_ranks, arrived, (rank - step) % n_ranks, group)
        counts[(rank - step) % n_ranks] = arrived.tolist()
    incoming = [x] * n_ranks
    for step in range(1, n_ranks):
        src = (rank - step) % n_ranks
        incoming[src] = exchange(x, (rank + step) % n_ranks, x.new_empty(sum(counts[src]), *x.shape[1:]), src, group)
    return torch.cat([incoming[src].split(counts[src])[rank] for src in range(n_ranks)])


def all_to_all_by_torch(x, send_counts, recv_counts, group=None):
    return collectives.all_to_all(x, send_counts, recv_counts, group)


# 2.6 ----------------------------------------------------------------------------------------------------------


def half_of_it(n_bytes, n_ranks, latency_s, bytes_per_s):
    return (n_ranks - 1) * (latency_s + n_bytes / n_ranks / bytes_per_s)


def whole_tensor(n_bytes, n_ranks, latency_s, bytes_per_s):
    return 2 * (n_ranks - 1) * (latency_s + n_bytes / bytes_per_s)


def one_latency(n_bytes, n_ranks, latency_s, bytes_per_s):
    return latency_s + 2 * (n_ranks - 1) / n_ranks * n_bytes / bytes_per_s


def one_latency_for_each_half(n_bytes, n_ranks, latency_s, bytes_per_s):
    return 2 * (latency_s + (n_ranks - 1) / n_ranks * n_bytes / bytes_per_s)


def two_rounds_too_many(n_bytes, n_ranks, latency_s, bytes_per_s):
    return 2 * n_ranks * (latency_s + n_bytes / n_ranks / bytes_per_s)


def bits(n_bytes, n_ranks, latency_s, bytes_per_s):
    return 2 * (n_ranks - 1) * (latency_s + 8 * n_bytes / n_ranks / bytes_per_s)


def no_latency(n_bytes, n_ranks, latency_s, bytes_per_s):
    return 2 * (n_ranks - 1) * n_bytes / n_ranks / bytes_per_s


def a_tree(n_bytes, n_ranks, latency_s, bytes_per_s):
    return network.tree_all_reduce_seconds(n_bytes, n_ranks, latency_s, bytes_per_s)


def in_turn(n_bytes, n_ranks, latency_s, bytes_per_s):
    return 4 * (n_ranks - 1) * (latency_s + n_bytes / n_ranks / bytes_per_s)


# 2.7 ----------------------------------------------------------------------------------------------------------


def unweighted(n_bytes, seconds):
    slope, intercept = np.polyfit(n_bytes, seconds, 1)
    if len(set(n_bytes)) < 2 or slope <= 0:
        raise ValueError("cannot be fitted")
    return intercept, 1 / slope


def two_points(n_bytes, seconds):
    slope = (seconds[-1] - seconds[0]) / (n_bytes[-1] - n_bytes[0])
    return seconds[0] - n_bytes[0] * slope, 1 / slope


def seconds_per_byte(n_bytes, seconds):
    latency_s, bytes_per_s = network.fit_alpha_beta(n_bytes, seconds)
    return latency_s, 1 / bytes_per_s


def swapped(n_bytes, seconds):
    return network.fit_alpha_beta(n_bytes, seconds)[::-1]


def through_the_origin(n_bytes, seconds):
    return 0.0, float(np.mean(np.asarray(n_bytes) / np.asarray(seconds)))


def smallest_message(n_bytes, seconds):
    latency_s = min(seconds)
    return latency_s, (n_bytes[-1] - n_bytes[0]) / (seconds[-1] - latency_s)


def accepts_anything(n_bytes, seconds):
    n_bytes, seconds = np.asarray(n_bytes), np.asarray(seconds)
    equations = np.stack([1 / seconds, n_bytes / seconds], 1)
    latency_s, beta = np.linalg.lstsq(equations, np.ones(len(seconds)), rcond=None)[0]
    return latency_s, 1 / beta


def logarithms(n_bytes, seconds):
    slope, intercept = np.polyfit(np.log(n_bytes), np.log(seconds), 1)
    return math.exp(intercept), math.exp(-slope)


# 2.8 ----------------------------------------------------------------------------------------------------------


def _f(name, forward=None, backward=None, nones=1):
    def keep(ctx, x, group):
        ctx.group = group
        return forward(x, group) if forward else x.view_as(x)

    def back(ctx, grad):
        return (backward(grad, ctx.group) if backward else grad), *([None] * nones)

    return type(name, (torch.autograd.Function,), {"forward": staticmethod(keep), "backward": staticmethod(back)})


def _summed(x, group):
    return collectives.all_reduce(x.clone(), group)


def _past_the_door(grad, group):
    total = grad.clone()
    dist.all_reduce(total, group=group)
    return total


NothingInBackward = _f("NothingInBackward")
SumsInForward = _f("SumsInForward", forward=_summed)
Averages = _f("Averages", backward=lambda grad, group: _summed(grad, group) / size_of(group))
SumsInPlace = _f("SumsInPlace", backward=lambda grad, group: collectives.all_reduce(grad, group))
WholeWorld = _f("WholeWorld", backward=lambda grad, group: _summed(grad, None))
PastTheDoor = _f("PastTheDoor", backward=_past_the_door)
ForgetsTheGroup = _f("ForgetsTheGroup", backward=_summed, nones=0)
InFp32 = _f("InFp32", backward=lambda grad, group: _summed(grad.float(), group))
GathersGradients = _f("GathersGradients", backward=lambda grad, group: collectives.all_gather(grad[None], group).sum(0))


WRONG = [
    Wrong("2.1", transposed, "rows and columns are swapped"),
    Wrong("2.1", counts_messages, "messages are counted, not bytes"),
    Wrong("2.1", last_message_only, "the last message overwrites those before"),
    Wrong("2.1", both_ends, "a message is counted at both ends"),
    Wrong("2.1", without_steps, "steps of a collective are left out"),
    Wrong("2.1", place_in_the_list, "a trace's place in the list is taken for its rank"),
    Wrong("2.1", collectives_too),
    Wrong("2.1", nothing_to_rank_0, "what goes to rank 0 is left out: the number 0 counts as false"),
    Wrong("2.1", one_row_for_all, "all rows are one and the same list"),
    Wrong("2.2", rows_end_one_place_off, "the right rows on the wrong ranks"),
    Wrong("2.2", replaces_instead_of_adding, "what arrives replaces the partial sum"),
    Wrong("2.2", sends_its_own_rows, "it sends its own rows, not partial sums"),
    Wrong("2.2", one_step_too_few, "one step too few"),
    Wrong("2.2", last_step_missing, "nothing arrives in the row that is returned"),
    Wrong("2.2", returns_its_working_tensor, "it returns its whole working tensor"),
    Wrong("2.2", a_table_of_one_row, "a table of one row, not a row"),
    Wrong("2.2", adds_into_the_row_it_sent),
    Wrong("2.2", returns_all_rows, "it returns all rows"),
    Wrong("2.2", mean_of_rows, "a mean, not a sum"),
    Wrong("2.2", adds_into_its_input, "it overwrites its input"),
    Wrong("2.2", passes_the_whole_tensor, "more bytes than needed"),
    Wrong("2.2", adds_up_on_rank_0, "a star, not a ring"),
    Wrong("2.2", calls_a_collective, "a collective is built from a collective"),
    Wrong("2.2", isends_past_our_door, "it goes past our own door"),
    Wrong("2.2", ring_of_the_whole_world, "it ignores the group"),
    Wrong("2.2", everybody_sends_first, "everybody sends first: nobody is there to receive"),
    Wrong("2.2", element_by_element, "too many small messages"),
    Wrong("2.3", own_row_every_time, "it sends its own row every time"),
    Wrong("2.3", own_row_missing, "its own row is missing"),
    Wrong("2.3", order_of_arrival, "rows in order of arrival, not of rank"),
    Wrong("2.3", last_row_missing, "one step too few"),
    Wrong("2.3", rows_run_together, "the rows are run together"),
    Wrong("2.3", one_buffer_for_all, "one buffer for all that arrives"),
    Wrong("2.3", everyone_to_everyone, "everyone sends to everyone"),
    Wrong("2.3", gathers_with_a_collective, "a collective is built from a collective"),
    Wrong("2.3", sends_all_that_it_has, "more bytes than needed"),
    Wrong("2.4", without_padding, "it needs sizes that the ranks divide"),
    Wrong("2.4", padding_left_in, "the padding is not cut off"),
    Wrong("2.4", one_row_of_padding_too_many, "padding where none is needed"),
    Wrong("2.4", contiguous_only, "it needs a contiguous tensor"),
    Wrong("2.4", remainder_cut_off, "the remainder is cut off"),
    Wrong("2.4", shape_lost, "the shape is lost"),
    Wrong("2.4", mean_of_all, "a mean, not a sum"),
    Wrong("2.4", no_gather, "the all-gather is missing"),
    Wrong("2.4", chunks_rolled, "chunks in the wrong order"),
    Wrong("2.4", reduces_to_rank_0, "only rank 0 has it"),
    Wrong("2.4", fp32_on_the_wire, "fp64 is lost on the way"),
    Wrong("2.4", into_its_input, "it overwrites its input"),
    Wrong("2.4", gathers_and_adds, "more bytes than needed"),
    Wrong("2.4", calls_all_reduce, "a collective is built from a collective"),
    Wrong("2.5", receives_from_whom_it_sends_to, "sends and receives do not match"),
    Wrong("2.5", pairs_by_xor, "partners by XOR: only for a power of two"),
    Wrong("2.5", rows_as_they_come, "rows in order of arrival, not of rank"),
    Wrong("2.5", all_begin_with_rank_0, "a queue at one rank"),
    Wrong("2.5", forgets_its_own_rows, "its own rows are missing"),
    Wrong("2.5", expects_what_it_sends, "it expects as many rows as it sends"),
    Wrong("2.5", everything_to_everybody, "more bytes than needed"),
    Wrong("2.5", all_to_all_by_torch, "a collective is built from a collective"),
    Wrong("2.6", half_of_it, "half of it: the all-gather is missing"),
    Wrong("2.6", whole_tensor, "the whole tensor in every round"),
    Wrong("2.6", one_latency, "one latency for all rounds"),
    Wrong("2.6", one_latency_for_each_half, "one latency for each half"),
    Wrong("2.6", two_rounds_too_many, "2 R rounds: two too many"),
    Wrong("2.6", bits, "bytes taken for bits"),
    Wrong("2.6", no_latency, "no latency"),
    Wrong("2.6", a_tree, "a tree, not a ring"),
    Wrong("2.6", in_turn, "send and receive in turn"),
    Wrong("2.7", unweighted, "absolute errors: the largest messages decide alone"),
    Wrong("2.7", two_points, "only the first and the last point are used"),
    Wrong("2.7", seconds_per_byte, "seconds per byte, not bytes per second"),
    Wrong("2.7", swapped, "the two are swapped"),
    Wrong("2.7", through_the_origin, "no latency"),
    Wrong("2.7", smallest_message, "the time of the smallest message is taken for α"),
    Wrong("2.7", accepts_anything, "it fits the impossible"),
    Wrong("2.7", logarithms),
    Wrong("2.8", NothingInBackward, "nothing is summed in backward"),
    Wrong("2.8", SumsInForward, "g, not f: it sums in forward"),
    Wrong("2.8", Averages, "a mean, not a sum"),
    Wrong("2.8", SumsInPlace, "it sums in place a gradient that others use"),
    Wrong("2.8", WholeWorld, "it ignores the group"),
    Wrong("2.8", ForgetsTheGroup, "the None for the group is missing"),
    Wrong("2.8", PastTheDoor, "it goes past our own door"),
    Wrong("2.8", InFp32, "fp64 is lost on the way"),
    Wrong("2.8", GathersGradients, "more traffic than one all-reduce"),
]
