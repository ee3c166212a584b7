"""The α–β formulas against a simulation, message by message, and the fit against data whose answer is known."""

import math

import numpy as np
import pytest

from deepseek_lab.plan import network

LATENCY_S, BYTES_PER_S = 3e-3, 2e6


def play(n_ranks, rounds):
    """Simulate rounds of messages, each round {sender: (receiver, bytes)}.  Returns when the last rank is done.

    A rank sends and receives at once, and starts its next round when it has done both.
    """
    clock = [0.0] * n_ranks
    for messages in rounds:
        done = list(clock)
        for sender, (receiver, n_bytes) in messages.items():
            arrives_s = clock[sender] + LATENCY_S + n_bytes / BYTES_PER_S
            done[sender] = max(done[sender], arrives_s)
            done[receiver] = max(done[receiver], arrives_s)
        clock = done
    return max(clock)


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 7, 8, 64])
def test_ring_formula_equals_a_simulated_ring(n_ranks):
    n_bytes = 840_000
    one_round = {rank: ((rank + 1) % n_ranks, n_bytes / n_ranks) for rank in range(n_ranks)}
    simulated = play(n_ranks, [one_round] * (2 * (n_ranks - 1)))
    assert network.ring_all_reduce_seconds(n_bytes, n_ranks, LATENCY_S, BYTES_PER_S) == pytest.approx(simulated)


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 7, 8, 64])
def test_tree_formula_equals_a_simulated_tree(n_ranks):
    n_bytes, up = 840_000, []
    stride = 1
    while stride < n_ranks:  # in each round every second of the remaining ranks hands its sum to the one before it
        up.append({rank: (rank - stride, n_bytes) for rank in range(stride, n_ranks, 2 * stride)})
        stride *= 2
    down = [{receiver: (sender, size) for sender, (receiver, size) in messages.items()} for messages in reversed(up)]
    simulated, formula = (
        play(n_ranks, up + down),
        network.tree_all_reduce_seconds(n_bytes, n_ranks, LATENCY_S, BYTES_PER_S),
    )
    if math.log2(n_ranks).is_integer():
        assert formula == pytest.approx(simulated)
    else:  # ranks with nothing to do in the first round start early, but cannot save a whole level
        assert network.tree_all_reduce_seconds(n_bytes, n_ranks // 2 + 1, LATENCY_S, BYTES_PER_S) <= simulated < formula


@pytest.mark.parametrize("n_ranks", [1, 2, 5, 8])
def test_all_to_all_formula_equals_simulated_pairs(n_ranks):
    n_bytes = 840_000
    rounds = [{r: ((r + step) % n_ranks, n_bytes / n_ranks) for r in range(n_ranks)} for step in range(1, n_ranks)]
    assert network.all_to_all_seconds(n_bytes, n_ranks, LATENCY_S, BYTES_PER_S) == pytest.approx(play(n_ranks, rounds))


def test_the_ring_sends_almost_the_same_for_any_number_of_ranks():
    seconds = [network.ring_all_reduce_seconds(1e9, n, 0.0, 1e9) for n in (2, 4, 1024)]
    assert seconds == pytest.approx([1.0, 1.5, 2 * 1023 / 1024])


@pytest.mark.parametrize("n_ranks", [4, 8, 1024])
def test_where_ring_and_tree_cross(n_ranks):
    at = network.ring_beats_tree_from(n_ranks, LATENCY_S, BYTES_PER_S)

    def tree_minus_ring(n_bytes):
        arguments = (n_bytes, n_ranks, LATENCY_S, BYTES_PER_S)
        return network.tree_all_reduce_seconds(*arguments) - network.ring_all_reduce_seconds(*arguments)

    assert tree_minus_ring(at / 2) < 0 < tree_minus_ring(at * 2)
    assert tree_minus_ring(at) == pytest.approx(0, abs=1e-9 * network.tree_all_reduce_seconds(at, n_ranks, 1, 1))
    assert network.ring_beats_tree_from(3, LATENCY_S, BYTES_PER_S) == 0


def test_the_fit_finds_exact_constants_over_nine_orders_of_magnitude():
    sizes = [10.0**k for k in range(10)]
    for latency_s, bytes_per_s in [(1e-6, 1e11), (3e-3, 2e6), (0.05, 1e9)]:
        seconds = [latency_s + n / bytes_per_s for n in sizes]
        assert network.fit_alpha_beta(sizes, seconds) == pytest.approx((latency_s, bytes_per_s), rel=1e-6)


def test_the_fit_minimises_relative_errors():
    """Times that are off by a few per cent each: no nearby (α, B) has a smaller sum of squared relative errors."""
    sizes = np.logspace(3, 8, 12)
    seconds = (2e-4 + sizes / 5e8) * (1 + 0.05 * np.sin(7 * np.arange(12)))

    def error(latency_s, bytes_per_s):
        return (((latency_s + sizes / bytes_per_s) / seconds - 1) ** 2).sum()

    latency_s, bytes_per_s = network.fit_alpha_beta(sizes, seconds)
    assert latency_s == pytest.approx(2e-4, rel=0.05)  # within the noise; unweighted least squares is off by tens of %
    best = error(latency_s, bytes_per_s)
    for f in (0.99, 1.01):
        assert error(latency_s * f, bytes_per_s) > best
        assert error(latency_s, bytes_per_s * f) > best


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [([1e3], [1.0]), ([1e3, 1e3], [1.0, 1.1]), ([1e3, 1e6], [1.0, 0.0]), ([1e3, 1e6], [2.0, 1.0]), ([1, 2, 3], [1, 2])],
)
def test_measurements_that_cannot_be_fitted_are_refused(sizes, seconds):
    with pytest.raises(ValueError, match="fit_alpha_beta"):
        network.fit_alpha_beta(sizes, seconds)


def test_one_rank_costs_nothing():
    for cost in (network.ring_all_reduce_seconds, network.tree_all_reduce_seconds, network.all_to_all_seconds):
        assert cost(1e9, 1, LATENCY_S, BYTES_PER_S) == 0
    assert math.isfinite(network.ring_beats_tree_from(2, LATENCY_S, BYTES_PER_S))
