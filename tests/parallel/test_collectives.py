"""Collectives: equal to torch.distributed's own, right gradients, bytes counted to the byte, links obeyed.

Ranks are numbered within a group, so every property is tried on the world and on a group of some of its ranks.
"""

import math
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from deepseek_lab.learn.ranks import RankError, run_ranks
from deepseek_lab.learn.wiretap import wiretap
from deepseek_lab.parallel import collectives, data_parallel, meter
from deepseek_lab.parallel.collectives import Link, record

pytestmark = pytest.mark.ranks
cloudpickle.register_pickle_by_value(sys.modules[__name__])
R = 4


def numbers(*shape, dtype=torch.float64, rank=None):
    """This rank's own random numbers: whole, so that sums are exact in any order."""
    rank = collectives.rank_in() if rank is None else rank
    return torch.randint(-1000, 1000, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def groups():
    """The groups that this rank is in: the world, and one in which ranks have other numbers than in the world."""
    some = dist.new_group([1, 2, 3])
    return [None, some] if dist.get_rank() else [None]


# --- values ---------------------------------------------------------------------------------------------------


def compare_with_torch():
    for algorithm in ("gloo", "ring"):
        collectives.set_algorithm(algorithm)
        for group in groups():
            n, rank = collectives.size_of(group), collectives.rank_in(group)
            ranks = collectives.ranks_of(group)
            for shape in [(n, 3), (2 * n,), (n * 5, 2, 2)]:
                mine = numbers(*shape, rank=dist.get_rank())
                everyone = [numbers(*shape, rank=r) for r in ranks]
                total = torch.stack(everyone).sum(0)
                x = mine.clone()
                assert collectives.all_reduce(x, group) is x
                assert torch.equal(x, total)
                assert torch.equal(collectives.all_gather(mine, group), torch.cat(everyone))
                assert torch.equal(collectives.reduce_scatter(mine, group), total.chunk(n)[rank])
                assert torch.equal(mine, everyone[rank])  # inputs are left alone
            for op, reduce in [("max", torch.amax), ("min", torch.amin), ("avg", torch.mean)]:
                everyone = torch.stack([numbers(7, rank=r) for r in ranks])
                assert torch.equal(
                    collectives.all_reduce(numbers(7, rank=dist.get_rank()), group, op), reduce(everyone, 0)
                )
            assert torch.equal(
                collectives.broadcast(numbers(3, rank=dist.get_rank()), 1, group), numbers(3, rank=ranks[1])
            )
            assert collectives.all_gather_object({"rank": rank}, group) == [{"rank": r} for r in range(n)]
            collectives.barrier(group)


def test_collectives_equal_what_one_process_computes():
    run_ranks(compare_with_torch, R)


def ring_against_torch(n_elements, dtype):
    for group in groups():
        x = numbers(n_elements, dtype=dtype, rank=dist.get_rank())
        expected = x.clone()
        dist.all_reduce(expected, group=group)
        before = x.clone()
        total = collectives.ring_all_reduce(x, group)
        assert torch.equal(x, before)
        assert torch.equal(total, expected)
        assert total.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_ring_all_reduce_of_sizes_that_ranks_do_not_divide(dtype):
    def sizes():
        for n_elements in (1, 2, 3, 5, 8, 12, 13):
            ring_against_torch(n_elements, dtype) if dtype != torch.bfloat16 else bf16_sum(n_elements)

    def bf16_sum(n_elements):
        x = torch.full((n_elements,), 2.0 ** collectives.rank_in(), dtype=torch.bfloat16)
        assert torch.equal(collectives.ring_all_reduce(x), torch.full_like(x, 2.0**R - 1))

    run_ranks(sizes, R)


def test_ring_gives_the_same_bits_on_every_rank():
    """Floating-point sums depend on the order; a replica that adds in another order drifts away from the others."""

    def total():
        x = torch.randn(1001, generator=torch.Generator().manual_seed(dist.get_rank()))
        return collectives.ring_all_reduce(x)

    first, *others = run_ranks(total, R)
    assert all(torch.equal(first, other) for other in others)


def uneven_all_to_all():
    for algorithm in ("gloo", "ring"):
        collectives.set_algorithm(algorithm)
        for group in groups():
            n, rank = collectives.size_of(group), collectives.rank_in(group)
            count = lambda src, dst: (src * 2 + dst) % 3  # noqa: E731 (some are zero)
            send_counts = [count(rank, dst) for dst in range(n)]
            recv_counts = [count(src, rank) for src in range(n)]
            rows = [[float(100 * rank + dst)] * 5 for dst in range(n) for _ in range(send_counts[dst])]
            x = torch.tensor(rows).reshape(-1, 5)
            expected = [[float(100 * src + rank)] * 5 for src in range(n) for _ in range(recv_counts[src])]
            received = collectives.all_to_all(x, send_counts, recv_counts, group)
            assert torch.equal(received, torch.tensor(expected).reshape(-1, 5))
    nobody = [0] * R
    assert collectives.all_to_all(torch.empty(0, 5), nobody, nobody).shape == (0, 5)


def test_all_to_all_with_uneven_and_empty_parts():
    run_ranks(uneven_all_to_all, R)


def test_messages():
    def pass_on():
        for group in groups():
            n, rank = collectives.size_of(group), collectives.rank_in(group)
            got = collectives.exchange(
                torch.full((3,), rank), (rank + 1) % n, torch.empty(3, dtype=torch.int64), (rank - 1) % n, group
            )
            assert got.tolist() == [(rank - 1) % n] * 3
            if rank == 0:
                collectives.send(torch.tensor([1.0]), dst=1, group=group, tag=1)
                collectives.send(torch.tensor([2.0]), dst=1, group=group, tag=2)
            elif rank == 1:
                first, second = torch.empty(1), torch.empty(1)
                collectives.recv(first, src=0, group=group, tag=1)
                collectives.recv(second, src=0, group=group, tag=2)
                assert (first.item(), second.item()) == (1.0, 2.0)

    run_ranks(pass_on, R)


def test_non_contiguous_tensors_are_copied_or_refused():
    def try_both():
        x = torch.arange(12.0).view(3, 4).T
        assert torch.equal(collectives.all_gather(x), torch.cat([x, x]))
        assert torch.equal(collectives.reduce_from_group(x), 2 * x)
        collectives.all_reduce(x)

    with pytest.raises(RankError, match="all_reduce works in place and needs a contiguous tensor"):
        run_ranks(try_both, 2)


# --- one rank, and mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["gloo", "ring"])
def test_without_ranks_everything_is_what_one_rank_sees(algorithm):
    collectives.set_algorithm(algorithm)
    try:
        x = torch.arange(6.0).view(2, 3)
        with record() as trace:
            assert collectives.all_reduce(x) is x
            assert collectives.broadcast(x) is x
            for one in (collectives.all_gather, collectives.reduce_scatter, collectives.ring_all_reduce):
                assert torch.equal(one(x), x)
                assert one(x) is not x
            assert torch.equal(collectives.ring_reduce_scatter(x[None]), x)
            assert torch.equal(collectives.ring_all_gather(x), x[None])
            assert torch.equal(collectives.all_to_all(x, [2], [2]), x)
            assert torch.equal(collectives.pairwise_all_to_all(x, [2], [2]), x)
            assert collectives.all_gather_object(3) == [3]
            collectives.barrier()
        assert trace.events == []
        with pytest.raises(RuntimeError, match="only one rank"):
            collectives.send(x, 1)
    finally:
        collectives.set_algorithm("gloo")


def exchange_on_rank_0(dst, src):
    if collectives.rank_in() == 0:
        collectives.exchange(torch.ones(1), dst, torch.ones(1), src)


def test_wrong_arguments_say_what_to_do():
    with pytest.raises(ValueError, match="use sum, max, min or avg"):
        collectives.all_reduce(torch.ones(1), op="product")
    with pytest.raises(ValueError, match="use 'gloo'"):
        collectives.set_algorithm("tree")
    with pytest.raises(ValueError, match="one count per rank"):
        collectives.all_to_all(torch.ones(3, 2), [1, 2], [3])
    with pytest.raises(RankError, match="2 ranks do not divide dim 0 of shape"):
        run_ranks(lambda: collectives.reduce_scatter(torch.ones(3)), 2)
    for peer, message in [(2, "rank 2 is not in a group of 2"), (-1, "rank -1 is not in a group"), (0, "to itself")]:
        with pytest.raises(RankError, match=f"ValueError: exchange: .*{message}"):
            run_ranks(exchange_on_rank_0, 2, peer, 1)
    with pytest.raises(RankError, match="ValueError: exchange: rank 4 is not in a group"):
        run_ranks(exchange_on_rank_0, 2, 1, 4)
    for latency_s, bytes_per_s in [(0, 1), (1, 0), (-1, 1), (math.nan, 1)]:
        with pytest.raises(ValueError, match="must be positive"):
            Link(latency_s, bytes_per_s)


# --- gradients ------------------------------------------------------------------------------------------------


def test_gradients_of_f_and_g_by_finite_differences():
    """y = sum over ranks r of tanh(w_r x): f where x enters the ranks' own work, g where the results are added."""

    def parallel(x, w_r):
        partial = torch.tanh(collectives.copy_to_group(x) * w_r)
        return collectives.reduce_from_group(partial).square().sum()

    def gradients(x, weights):
        x = x.clone().requires_grad_()
        w_r = weights[collectives.rank_in()].clone().requires_grad_()
        loss = parallel(x, w_r)
        loss.backward()
        return loss.item(), x.grad, w_r.grad

    def serial(x, weights):
        return torch.tanh(weights[:, None] * x).sum(0).square().sum()

    def by_differences(loss, at, step=1e-6):
        steps = step * torch.eye(len(at), dtype=at.dtype)
        return torch.stack([(loss(at + d) - loss(at - d)) / (2 * step) for d in steps])

    x = torch.linspace(-1, 1, 5, dtype=torch.float64)
    weights = torch.linspace(0.5, 2, R, dtype=torch.float64)
    expected_x = by_differences(lambda x: serial(x, weights), x)
    expected_w = by_differences(lambda w: serial(x, w), weights)
    for rank, (loss, x_grad, w_grad) in enumerate(run_ranks(gradients, R, x, weights)):
        assert loss == pytest.approx(serial(x, weights).item(), rel=1e-12)
        # central differences: an error of step² from the third derivative, and of eps / step from rounding
        torch.testing.assert_close(x_grad, expected_x, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(w_grad, expected_w[rank], rtol=1e-8, atol=1e-8)


def test_f_and_g_each_send_in_one_direction_only():
    def traffic(pair):
        x = torch.ones(8, requires_grad=True)
        with wiretap() as forward:
            y = pair(x)
        with wiretap() as backward:
            y.sum().backward()
        return [c.op for c in forward], [c.op for c in backward], y.tolist(), x.grad.tolist()

    assert run_ranks(traffic, 2, collectives.copy_to_group)[0] == ([], ["all_reduce"], [1.0] * 8, [2.0] * 8)
    assert run_ranks(traffic, 2, collectives.reduce_from_group)[0] == (["all_reduce"], [], [2.0] * 8, [1.0] * 8)


def test_backward_leaves_a_shared_gradient_alone():
    """autograd may hand the same gradient tensor to two branches; summing it in place would double the other's."""

    def shared():
        x = torch.ones(3, requires_grad=True)
        y = torch.ones(3, requires_grad=True)
        (collectives.copy_to_group(x) + y).sum().backward()
        return x.grad.tolist(), y.grad.tolist()

    assert run_ranks(shared, 2) == [([2.0] * 3, [1.0] * 3)] * 2


def test_gradients_of_the_trainer_go_through_the_slots_of_chapter_02():
    calls = []

    def counted(name):
        own = getattr(collectives, name)

        def learners(x, group=None):
            calls.append(name)
            return own(x, group)

        return learners

    def synchronise():
        collectives.set_algorithm("ring")
        gradient = torch.full((5,), float(collectives.rank_in()))
        data_parallel.all_reduce_gradients([gradient])
        return gradient.tolist(), calls

    names = ["ring_all_reduce", "ring_reduce_scatter", "ring_all_gather"]
    overrides = {f"deepseek_lab.parallel.collectives.{name}": counted(name) for name in names}
    for gradient, called in run_ranks(synchronise, R, overrides=overrides):
        assert gradient == [6.0] * 5
        assert called == names


# --- metering -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_elements", [12, 13, 1000, 4097])
def test_ring_sends_2_n_minus_1_over_n_of_the_padded_payload_to_the_byte(n_elements):
    def sent():
        x = numbers(n_elements, dtype=torch.float32)
        with record() as trace, wiretap() as calls:
            collectives.ring_all_reduce(x)
        assert sum(c.payload_bytes for c in calls if c.op == "send") == trace.wire_bytes()
        return trace.wire_bytes(), len(trace.events), {e.peer for e in trace.events}

    chunk_bytes = 4 * math.ceil(n_elements / R)
    padded_bytes = R * chunk_bytes
    for rank, (n_bytes, n_messages, peers) in enumerate(run_ranks(sent, R)):
        assert n_bytes == 2 * (R - 1) * padded_bytes // R
        assert n_messages == 2 * (R - 1)
        assert peers == {(rank + 1) % R}


def test_events_tell_payload_from_measured_bytes():
    def events(algorithm):
        collectives.set_algorithm(algorithm)
        with record() as outer:
            with record() as inner:
                collectives.all_reduce(torch.ones(8))
            collectives.barrier()
        assert [e.op for e in outer.events][: len(inner.events)] == [e.op for e in inner.events]
        assert outer.events[-1].op == "barrier"
        return inner

    gloo = run_ranks(events, R, "gloo")[1]
    (event,) = gloo.events
    assert (event.op, event.rank, event.group_ranks, event.peer) == ("all_reduce", 1, (0, 1, 2, 3), None)
    assert (event.payload_bytes, event.wire_bytes, event.within) == (32, None, None)
    assert event.seconds > 0
    assert gloo.wire_bytes() == 0  # nothing that we could measure

    ring = run_ranks(events, R, "ring")[1]
    *steps, total = ring.events
    assert [e.op for e in steps] == ["exchange"] * 6
    assert {(e.payload_bytes, e.wire_bytes, e.peer, e.within) for e in steps} == {(8, 8, 2, "all_reduce")}
    assert (total.op, total.payload_bytes, total.wire_bytes) == ("all_reduce", 32, 48)
    assert ring.wire_bytes() == 48  # counted once


def test_groups_are_recorded_by_global_ranks():
    def event():
        *_, group = groups()
        if group is None:
            return None
        with record() as trace:
            collectives.exchange(
                torch.ones(2),
                (collectives.rank_in(group) + 1) % 3,
                torch.empty(2),
                (collectives.rank_in(group) - 1) % 3,
                group,
            )
        (only,) = trace.events
        return only.group_ranks, only.rank, only.peer

    assert run_ranks(event, R) == [None, ((1, 2, 3), 1, 2), ((1, 2, 3), 2, 3), ((1, 2, 3), 3, 1)]


def test_a_failed_operation_leaves_the_meter_usable():
    def fail_then_work():
        other = 1 - collectives.rank_in()
        with record() as trace:
            with pytest.raises(ValueError, match="contiguous"):
                collectives.exchange(torch.ones(2), other, torch.ones(2, 2).T[0], other)
            assert not meter.inside_operation()
            collectives.all_reduce(torch.ones(1))
        return [e.op for e in trace.events]

    assert run_ranks(fail_then_work, 2)[0] == ["all_reduce"]


# --- links ----------------------------------------------------------------------------------------------------

LINK = Link(latency_s=0.01, bytes_per_s=1e6)


@pytest.mark.parametrize("algorithm", ["gloo", "ring"])
def test_no_operation_completes_earlier_than_the_link_allows(algorithm):
    n_bytes = 8000

    def timed():
        collectives.set_algorithm(algorithm)
        x = torch.ones(n_bytes // 4)
        with record() as trace:
            collectives.all_reduce(x)
            collectives.all_gather(x)
            collectives.reduce_scatter(x)
            collectives.all_to_all(x, [x.numel() // R] * R, [x.numel() // R] * R)
            collectives.broadcast(x)
            collectives.exchange(
                x, (collectives.rank_in() + 1) % R, torch.empty_like(x), (collectives.rank_in() - 1) % R
            )
        return {e.op: e.seconds for e in trace.events if e.within is None}

    part = n_bytes / R
    least = {  # steps of the best known algorithm, and the bytes that a rank must send in it
        "all_reduce": LINK.seconds(2 * (R - 1) * part, 2 * (R - 1)),
        "all_gather": LINK.seconds((R - 1) * n_bytes, R - 1),
        "reduce_scatter": LINK.seconds((R - 1) * part, R - 1),
        "all_to_all": LINK.seconds((R - 1) * part, R - 1),
        "broadcast": LINK.seconds(2 * n_bytes, 2),
        "exchange": LINK.seconds(n_bytes),
    }
    for seconds in run_ranks(timed, R, link=LINK):
        for op, bound_s in least.items():
            assert seconds[op] >= bound_s, op


def test_a_message_needs_the_link_from_when_it_left_also_if_its_receiver_came_early():
    def late_sender():
        if collectives.rank_in() == 0:
            time.sleep(0.1)
            left_s = time.monotonic()
            collectives.send(torch.ones(1000), dst=1)
            return left_s
        collectives.recv(torch.empty(1000), src=0)
        return time.monotonic()

    left_s, arrived_s = run_ranks(late_sender, 2, link=LINK)
    assert arrived_s - left_s >= LINK.seconds(4000)


def test_a_collective_counts_from_the_last_rank_that_came():
    def late_rank():
        if collectives.rank_in() == 2:
            time.sleep(0.1)
        start_s = time.monotonic()
        collectives.all_reduce(torch.ones(4))
        return start_s, time.monotonic()

    times = run_ranks(late_rank, 3, link=LINK)
    last_start_s = max(start_s for start_s, _ in times)
    assert min(end_s for _, end_s in times) - last_start_s >= LINK.seconds(4 * 4 / 3 * 4, 4)
