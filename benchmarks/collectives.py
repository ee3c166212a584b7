"""Our ring against the group's own all-reduce, and α and B of messages here: `python benchmarks/collectives.py`.

Medians over ranks and repeats.  On one machine all ranks share its memory and cores, so neither is what a network
would show; the ring's bytes are what counts there.
"""

import statistics
import time

import torch

from deepseek_lab.learn import run_ranks
from deepseek_lab.parallel import collectives
from deepseek_lab.plan import network

SIZES = [2**k for k in range(10, 25, 2)]  # bytes
REPEATS = 9


def seconds_of(operation) -> float:
    times = []
    for _ in range(REPEATS + 1):
        collectives.barrier()
        start_s = time.perf_counter()
        operation()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[1:])  # the first one also connects the ranks


def all_reduces() -> list[tuple[float, float]]:
    found = []
    for n_bytes in SIZES:
        x = torch.zeros(n_bytes // 4)
        found.append((seconds_of(lambda x=x: collectives.all_reduce(x)), seconds_of(lambda x=x: ring(x))))
    return found


def ring(x: torch.Tensor) -> None:
    collectives.set_algorithm("ring")
    collectives.all_reduce(x)
    collectives.set_algorithm("gloo")


def messages() -> list[float]:
    right, left = 1 - collectives.rank_in(), 1 - collectives.rank_in()
    buffers = [(torch.zeros(n_bytes // 4), torch.zeros(n_bytes // 4)) for n_bytes in SIZES]
    return [seconds_of(lambda x=x, y=y: collectives.exchange(x, right, y, left)) for x, y in buffers]


def main() -> None:
    print("all_reduce, 4 ranks, ms        gloo     ring   ratio")
    by_rank = run_ranks(all_reduces, 4, timeout=300)
    for n_bytes, *times in zip(SIZES, *by_rank, strict=True):
        gloo_s, ring_s = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{n_bytes / 1024:12,.0f} KiB      {gloo_s * 1e3:12.2f} {ring_s * 1e3:8.2f} {ring_s / gloo_s:7.2f}")
    seconds = run_ranks(messages, 2, timeout=300)[0]
    latency_s, bytes_per_s = network.fit_alpha_beta(SIZES, seconds)
    print(f"messages between 2 ranks: α = {latency_s * 1e3:.2f} ms, B = {bytes_per_s / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
