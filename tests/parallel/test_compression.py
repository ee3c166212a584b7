"""Compressed sums: errors bounded, nothing lost for good, small on the wire, the same bits on every rank."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from deepseek_lab.learn.ranks import run_ranks
from deepseek_lab.learn.wiretap import wiretap
from deepseek_lab.parallel import collectives, compression, meter
from deepseek_lab.parallel.collectives import record

cloudpickle.register_pickle_by_value(sys.modules[__name__])
R = 4


def gaussian(n, seed=0, dtype=torch.float32):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# --- one tensor -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "block"), [(1, 4), (8, 4), (10, 4), (1000, 256), (256, 256)])
def test_int8_is_off_by_half_a_step_at_most(n, block, dtype):
    x_N = gaussian(n, dtype=dtype)
    before = x_N.clone()
    q_N, scale_M = compression.quantize_int8(x_N, block)
    assert torch.equal(x_N, before)
    assert q_N.dtype == torch.int8
    assert q_N.shape == (n,)
    assert scale_M.dtype == torch.promote_types(dtype, torch.float32)
    assert scale_M.shape == (-(-n // block),)
    assert q_N.abs().max() == 127  # the largest of a block uses the whole range
    got_N = compression.dequantize_int8(q_N, scale_M, block)
    step_N = scale_M.repeat_interleave(block)[:n]
    # Half a step; x / scale, up to 127, and q · scale are each rounded to the scale's precision.
    slack = 1 + 4 * 127 * torch.finfo(scale_M.dtype).eps
    assert ((got_N - x_N).abs() <= step_N / 2 * slack).all()


def test_blocks_of_zeros_and_of_one_value_are_exact():
    x_N = torch.tensor([0.0, 0, 0, 0, -127, -127, -127, -127, 0, 254, 2, -2])
    q_N, scale_M = compression.quantize_int8(x_N, 4)
    assert torch.equal(compression.dequantize_int8(q_N, scale_M, 4), x_N)
    assert scale_M.tolist() == [0.0, 1.0, 2.0]


def test_one_large_number_spoils_its_own_block_only():
    x_N = gaussian(512)
    x_N[0] = 1e6
    got_N = compression.dequantize_int8(*compression.quantize_int8(x_N, 256), 256)
    assert (got_N[1:256] == 0).all()
    assert (got_N[256:] - x_N[256:]).norm() < 0.01 * x_N[256:].norm()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_block_that_is_not_finite_stays_so_and_others_do_not_notice(bad):
    x_N = gaussian(12)
    x_N[5] = bad
    got_N = compression.dequantize_int8(*compression.quantize_int8(x_N, 4), 4)
    assert not got_N[5].isfinite()
    assert got_N[:4].isfinite().all()
    assert got_N[8:].isfinite().all()


def test_numbers_next_to_zero_do_not_become_large():
    tiny_N = torch.tensor([1e-45, -1e-45, 0.0, 0.0])
    got_N = compression.dequantize_int8(*compression.quantize_int8(tiny_N, 4), 4)
    assert got_N.abs().max() <= 2e-45


def test_top_k_keeps_magnitudes_and_signs():
    x_N = torch.tensor([0.1, -5.0, 3.0, 0.0, -4.0], dtype=torch.float64)
    index_K, value_K = compression.top_k(x_N, 3)
    assert index_K.dtype == torch.int32
    assert value_K.dtype == torch.float64
    assert dict(zip(index_K.tolist(), value_K.tolist(), strict=True)) == {1: -5.0, 2: 3.0, 4: -4.0}
    assert compression.scatter(index_K, value_K, 5).tolist() == [0, -5, 3, 0, -4]


METHODS = {
    "int8": (lambda x: compression.quantize_int8(x, 16), lambda q, s: compression.dequantize_int8(q, s, 16)),
    "topk": (lambda x: compression.top_k(x, 3), lambda i, v: compression.scatter(i, v, 50)),
}


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_lost_what_was_sent_and_what_was_kept_add_up(method):
    compress, decompress = METHODS[method]
    residual_N, sent_N, given_N = (torch.zeros(50, dtype=torch.float64) for _ in range(3))
    for step in range(40):
        x_N = gaussian(50, step, torch.float64)
        given_N += x_N
        sent_N += decompress(*compression.with_error_feedback(x_N, residual_N, compress, decompress))
        assert torch.equal(x_N, gaussian(50, step, torch.float64))
        # 120 sums and differences of numbers below 100 have been rounded by now
        assert (sent_N + residual_N - given_N).abs().max() < 120 * 100 * torch.finfo(torch.float64).eps


# --- over ranks -----------------------------------------------------------------------------------------------


def sums(name, n, dtype, steps, group=None):
    """This rank's all-reduce after some steps, and for each step the sum that it gave beside the true one."""
    all_reduce, seen = compression.get(name), []
    for step in range(steps):
        x_N = gaussian(n, 100 * step + dist.get_rank(), dtype)
        before = x_N.clone()
        total_N = all_reduce(x_N, 0, group)
        assert torch.equal(x_N, before)
        true_N = sum(gaussian(n, 100 * step + r, dtype).double() for r in collectives.ranks_of(group))
        seen.append((total_N, true_N))
    return all_reduce, seen


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["int8", "topk"])
def test_all_ranks_end_with_the_same_bits(name):
    """For every type, for sizes that neither blocks nor ranks divide, over the world and in groups of two."""

    def compare():
        pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
        for group in (None, pair):
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                for n in (1, 1001, 4096):
                    for total_N, true_N in sums(name, n, dtype, 3, group)[1]:
                        assert total_N.dtype == dtype
                        assert total_N.shape == true_N.shape
                        every_RN = collectives.all_gather(total_N[None], group)
                        assert (every_RN == total_N).all()

    run_ranks(compare, R)


@pytest.mark.ranks
def test_int8_sums_are_within_the_two_roundings():
    """Every term is off by half a step of its own block at most, and the sum by half a step of the sum's block."""
    total_N, true_N = run_ranks(sums, R, "int8", 1024, torch.float64, 1)[0][1][0]
    terms_RMb = torch.stack([gaussian(1024, r, torch.float64) for r in range(R)]).view(R, -1, 256)
    terms_M = (terms_RMb.abs().amax(-1) / 127 / 2).sum(0)
    sum_M = (true_N.view(-1, 256).abs().amax(-1) + terms_M) / 127 / 2
    assert ((total_N - true_N).view(-1, 256).abs().amax(-1) <= (terms_M + sum_M) * (1 + 1e-12)).all()


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["int8", "topk"])
def test_over_many_steps_everything_arrives(name):
    """All that was summed, and all that ranks still keep back, are together what they were given."""
    n, steps = 1001, 20
    ranks = run_ranks(sums, R, name, n, torch.float64, steps)
    summed_N, true_N = (torch.stack(part).sum(0) for part in zip(*ranks[0][1], strict=True))
    kept_N = sum(all_reduce.unsent[0][:n] for all_reduce, _ in ranks)
    if name == "int8":
        kept_N = kept_N + torch.cat([all_reduce.unsent_sum[0] for all_reduce, _ in ranks])[:n]
    # a few hundred roundings of numbers below 1000
    assert (summed_N + kept_N - true_N).abs().max() < 500 * 1000 * torch.finfo(torch.float64).eps
    assert (summed_N - true_N).abs().max() > 1e-3


@pytest.mark.ranks
def test_what_travels_is_small():
    """Measured on the ring and by the dispatcher: int8 with a scale a block, or an index and a value an entry."""

    def traffic(name, n):
        collectives.set_algorithm("ring")
        x_N = gaussian(n, dist.get_rank())
        with record() as trace, wiretap() as calls:
            compression.get(name)(x_N)
        assert all(call.our_door for call in calls)
        return trace.wire_bytes(), sum(call.payload_bytes for call in calls if call.op == "send")

    n = 64 * 1024
    for sent in run_ranks(traffic, R, "int8", n):
        assert sent == (2 * (R - 1) / R * n * (1 + 4 / 256),) * 2
    k = 656  # 1% of n, rounded up
    for sent in run_ranks(traffic, R, "topk", n):
        assert sent == ((R - 1) * k * 8,) * 2


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["int8", "topk"])
def test_an_overflow_on_one_rank_is_seen_by_all_and_forgotten_afterwards(name):
    def three_steps():
        all_reduce, seen = compression.get(name), []
        for bad in (1.0, float("inf"), 1.0):
            x_N = torch.ones(2048)
            if dist.get_rank() == 1:
                x_N[3] = bad
            seen.append(all_reduce(x_N))
        return seen

    for before, during, after in run_ranks(three_steps, R):
        assert before.isfinite().all()
        assert not during[3].isfinite()
        assert after.isfinite().all()


@pytest.mark.ranks
def test_residuals_are_kept_by_bucket_and_buckets_must_not_change():
    def two_buckets():
        all_reduce = compression.TopKAllReduce(density=0.5)
        first, second = all_reduce(torch.tensor([4.0, 1.0]), 0), all_reduce(torch.tensor([0.0, 2.0]), 1)
        later = all_reduce(torch.zeros(2), 0)
        try:
            all_reduce(torch.zeros(3), 0)
        except ValueError as error:
            return first, second, later, str(error)

    first, second, later, error = run_ranks(two_buckets, 2)[0]
    assert first.tolist() == [8.0, 0.0]
    assert second.tolist() == [0.0, 4.0]
    assert later.tolist() == [0.0, 2.0]
    assert "buckets must not change" in error


def test_one_rank_alone_sends_and_changes_nothing():
    x_N = gaussian(10)
    assert compression.get("none") is None
    for name in ("int8", "topk"):
        with meter.record() as trace:
            assert torch.equal(compression.get(name)(x_N), x_N)
        assert not trace.events
    with pytest.raises(ValueError, match="use one of none, int8, topk"):
        compression.get("int4")
