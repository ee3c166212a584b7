"""What communication costs, on paper: the α–β model.

A message of S bytes takes α + S/B seconds: a latency α that is paid per message, and a bandwidth B that is
shared by its bytes (β = 1/B; Hockney, "The communication challenge for MPP", Parallel Computing 1994).  A
collective is a few rounds of messages, so its cost is a count of rounds and a count of bytes (Thakur, Rabenseifner
and Gropp, "Optimization of collective communication operations in MPICH", 2005).  Adding numbers is taken as free.

`n_bytes` is always the whole tensor of one rank.
"""

import math
from collections.abc import Sequence

import numpy as np


def ring_all_reduce_seconds(n_bytes: float, n_ranks: int, latency_s: float, bytes_per_s: float) -> float:
    """Seconds for an all-reduce of `n_bytes` per rank on a ring: a reduce-scatter, then an all-gather.

    Every rank sends and receives at once, over a link of its own: a round takes as long as one message.  The bytes
    sent hardly depend on the number of ranks; the number of latencies grows with it.
    """
    n_rounds = 2 * (n_ranks - 1)
    return n_rounds * (latency_s + n_bytes / n_ranks / bytes_per_s)


def tree_all_reduce_seconds(n_bytes: float, n_ranks: int, latency_s: float, bytes_per_s: float) -> float:
    """Seconds for an all-reduce on a binary tree: up to the root and down again, 2 ⌈log2 R⌉ rounds of the whole tensor.

    Few latencies, many bytes.  (A tree that is cut into segments and pipelined comes near the ring's bytes.)  Exact
    where R is a power of two; for other R a little too high, as some ranks can start early.
    """
    n_rounds = 2 * math.ceil(math.log2(n_ranks))
    return n_rounds * (latency_s + n_bytes / bytes_per_s)


def all_to_all_seconds(n_bytes: float, n_ranks: int, latency_s: float, bytes_per_s: float) -> float:
    """Seconds for an even all-to-all of `n_bytes` per rank, pairwise: R-1 rounds, in each 1/R of the tensor."""
    return (n_ranks - 1) * (latency_s + n_bytes / n_ranks / bytes_per_s)


def ring_beats_tree_from(n_ranks: int, latency_s: float, bytes_per_s: float) -> float:
    """The tensor size, in bytes, from which the ring is the faster all-reduce; 0 if it always is (up to 3 ranks)."""
    tree_rounds, ring_rounds = math.ceil(math.log2(n_ranks)), n_ranks - 1
    if ring_rounds <= tree_rounds:
        return 0.0
    return latency_s * bytes_per_s * (ring_rounds - tree_rounds) / (tree_rounds - ring_rounds / n_ranks)


def fit_alpha_beta(n_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit seconds = α + n_bytes / B to measured messages; returns (α in seconds, B in bytes per second).

    Least squares on the *relative* errors: each equation is divided by its own measured time.  Otherwise the
    slowest messages, the large ones, would decide alone, and α, which only small ones show, would be noise.
    Raises ValueError for fewer than two sizes, times that are not positive, or times that do not grow with size.
    """
    sizes, times = np.asarray(n_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if sizes.shape != times.shape or len(set(sizes.tolist())) < 2 or not (times > 0).all():
        raise ValueError(f"fit_alpha_beta needs one positive time per message and at least two sizes, got {times} s")
    equations = np.stack([1 / times, sizes / times], axis=1)
    (latency_s, seconds_per_byte), *_ = np.linalg.lstsq(equations, np.ones_like(times), rcond=None)
    if seconds_per_byte <= 0:
        raise ValueError("fit_alpha_beta: larger messages were not slower; measure larger ones, or more often")
    return float(latency_s), float(1 / seconds_per_byte)
