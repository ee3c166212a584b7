"""Start-up of ranks from a warm kernel: `python benchmarks/ranks.py [calls]`.

Each call starts the ranks, joins them in a process group, runs an empty function, fetches its results and ends them.
The first call of a session also waits for the fork server to load torch; it is printed apart.
"""

import statistics
import sys
import time

from deepseek_lab.learn import run_ranks

TARGET_S = {4: 0.3, 8: 0.6}


def start_up_seconds(n_ranks: int) -> float:
    start_s = time.perf_counter()
    run_ranks(int, n_ranks)
    return time.perf_counter() - start_s


def main(calls: int = 20) -> None:
    print(f"first call of the session, 4 ranks: {start_up_seconds(4):.2f} s")
    print("ranks   median    min    max  (s, warm)   target")
    for n_ranks, target_s in TARGET_S.items():
        seconds = [start_up_seconds(n_ranks) for _ in range(calls)]
        spread = f"{statistics.median(seconds):8.3f} {min(seconds):6.3f} {max(seconds):6.3f}"
        print(f"{n_ranks:5} {spread}              < {target_s}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
