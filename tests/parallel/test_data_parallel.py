"""Buckets, and communication that begins while backward still works."""

import time

import pytest
import torch

from deepseek_lab.learn import Link, run_ranks
from deepseek_lab.parallel import collectives, data_parallel
from deepseek_lab.parallel.data_parallel import Overlap, plan_buckets


@pytest.mark.parametrize(
    ("numels", "size", "expected"),
    [
        ([3, 2, 4, 1], 5, [[3, 2], [1, 0]]),
        ([3, 2, 9, 1], 5, [[3], [2], [1, 0]]),  # what is larger than a bucket travels alone
        ([1, 1, 1], 100, [[2, 1, 0]]),
        ([], 5, []),
    ],
)
def test_buckets_hold_what_backward_finishes_together(numels, size, expected):
    assert plan_buckets(numels, size) == expected


class Started:
    def __init__(self, bucket, log):
        self.bucket, self.log = bucket, log
        log.append(f"start {bucket}")

    def wait(self):
        self.log.append(f"wait {self.bucket}")
        return self.bucket


def test_buckets_start_when_complete_and_in_one_order():
    log = []
    overlap = Overlap([[3, 2], [1, 0]], lambda b: Started(b, log))
    for i in (1, 0):  # this rank is done with the second bucket first; others may not be
        overlap.ready(i)
    assert log == []
    overlap.ready(2)
    assert log == []
    overlap.ready(3)
    assert log == ["start 0", "start 1"]
    assert overlap.finish() == [0, 1]
    assert log == ["start 0", "start 1", "wait 0", "wait 1"]


def test_a_gradient_that_never_comes_holds_nothing_up():
    log = []
    overlap = Overlap([[3, 2], [1, 0]], lambda b: Started(b, log))
    for i in (3, 1, 0):  # parameter 2 was not used on this rank
        overlap.ready(i)
    assert log == []
    assert overlap.finish() == [0, 1]
    assert log == ["start 0", "start 1", "wait 0", "wait 1"]


def reduce_in_another_order_on_every_rank():
    """Rank r finishes gradients in its own order, and rank 0 never gets one of them."""
    rank, n_ranks = collectives.rank_in(), collectives.size_of()
    gradients = [torch.full((4,), float(10**i)) for i in range(6)]
    buckets = plan_buckets([g.numel() for g in gradients], 8)
    flats = [torch.cat([gradients[i] for i in bucket]) for bucket in buckets]
    overlap = Overlap(buckets, lambda b: collectives.start_all_reduce(flats[b]))
    order = torch.randperm(6, generator=torch.Generator().manual_seed(rank)).tolist()
    for i in order:
        if (rank, i) != (0, 3):
            overlap.ready(i)
    return [flat.tolist() for flat in overlap.finish()], [n_ranks * flat for flat in (10**5 + 10**4, 10**3 + 10**2, 11)]


@pytest.mark.ranks
def test_ranks_that_differ_in_order_still_add_up_the_same():
    for sums, expected in run_ranks(reduce_in_another_order_on_every_rank, 4):
        assert [sum(bucket) / 4 for bucket in sums] == expected


def send_early(n_messages):
    """Start several all-reduces on a slow link, work meanwhile, then wait."""
    x = [torch.ones(1000) for _ in range(n_messages)]
    collectives.barrier()
    with collectives.record() as trace:
        pending = [collectives.start_all_reduce(part) for part in x]
        time.sleep(0.5)
        sums = [p.wait() for p in pending]
    return sums[-1][0].item(), [(event.seconds, event.blocked_s) for event in trace.events]


@pytest.mark.ranks
def test_what_was_started_early_is_waited_for_less():
    """An event's `seconds` are those of the transfer; `blocked_s` is what the rank stood still."""
    for total, events in run_ranks(send_early, 2, 2, link=Link(latency_s=0.1, bytes_per_s=1e9)):
        assert total == 2.0
        for seconds, blocked_s in events:
            assert seconds >= 0.2  # two messages one after the other
            assert blocked_s < seconds


def summed(gradients, bucket_bytes):
    with collectives.record() as trace:
        data_parallel.all_reduce_gradients(gradients, None, bucket_bytes)
    return gradients, [event.payload_bytes for event in trace.events]


@pytest.mark.ranks
def test_gradients_are_summed_in_few_messages():
    gradients = [torch.ones(3, 2, dtype=torch.float64), torch.full((5,), 2.0, dtype=torch.float64)]
    for sums, messages in run_ranks(summed, 3, gradients, 10**6):
        assert torch.equal(sums[0], torch.full((3, 2), 3.0, dtype=torch.float64))
        assert torch.equal(sums[1], torch.full((5,), 6.0, dtype=torch.float64))
        assert messages == [11 * 8]
    assert run_ranks(summed, 2, gradients, 48)[0][1] == [40, 48]
