"""Pictures of chapter 02: a row on its way round the ring, bytes by number of ranks, and messages against their fit."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepseek_lab.plan import network
from deepseek_lab.viz import theme

BLUE, VERMILION, GREEN = theme.TONES[:3]


def draw_row_journey(axes: Any, ranks: int, row: int) -> None:
    """The way of one row in a ring reduce-scatter: where it starts, grows and ends."""
    row %= ranks
    angle = [math.pi / 2 - 2 * math.pi * rank / ranks for rank in range(ranks)]
    place = [(math.cos(a), math.sin(a)) for a in angle]
    for rank, (x, y) in enumerate(place):
        last = rank == row
        axes.text(x, y, f"rank {rank}", ha="center", va="center", color="white" if last else theme.INK, zorder=3)
        axes.scatter(x, y, s=1500, color=BLUE if last else "none", edgecolor=BLUE, linewidth=1.5, zorder=2)
    for step in range(ranks - 1):
        sender = (row + 1 + step) % ranks
        (x0, y0), (x1, y1) = place[sender], place[(sender + 1) % ranks]
        style = {"arrowstyle": "-|>", "color": VERMILION, "shrinkA": 24, "shrinkB": 24, "linewidth": 1 + step * 0.6}
        axes.annotate("", (x1, y1), (x0, y0), arrowprops=style)
        middle = angle[sender] - math.pi / ranks
        words = f"step {step}\n{step + 1} term{'s' if step else ''}"
        reach = 1.18 if ranks > 2 else 0.3
        axes.text(reach * math.cos(middle), reach * math.sin(middle), words, ha="center", va="center", fontsize=8)
    axes.set(xlim=(-2.6, 2.6), ylim=(-1.35, 1.35), aspect="equal", xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_title(f"row {row} of {ranks}: {ranks - 1} messages until it is complete, on rank {row}")


def draw_shares(axes: Any, shares: Mapping[str, Mapping[int, float]]) -> None:
    """What the busiest rank sent, as a multiple of the tensor: {algorithm: {number of ranks: share}}, measured."""
    for place, (name, by_ranks) in enumerate(shares.items()):
        # hollow and ever smaller marks, so that curves which coincide are all seen
        look = {"marker": "os^D"[place], "markersize": 12 - 3 * place, "fillstyle": "none", "color": theme.TONES[place]}
        axes.plot(list(by_ranks), list(by_ranks.values()), linewidth=1, label=name, **look)
    axes.set(xlabel="ranks", ylabel="sent by the busiest rank\n(multiples of the tensor)", ylim=(0, None))
    axes.set_xticks(sorted({n for by_ranks in shares.values() for n in by_ranks}))
    axes.set_title("all-reduce: measured traffic")
    axes.legend()


def draw_fits(axes: Any, n_bytes: Sequence[float], fits: Mapping[str, tuple[Sequence[float], float, float]]) -> None:
    """Measured messages as points, and α + S/B as a line: {name: (seconds, α, B)}."""
    sizes = np.geomspace(min(n_bytes), max(n_bytes), 200)
    for (name, (seconds, latency_s, bytes_per_s)), marker, tone in zip(fits.items(), "os^", theme.TONES, strict=False):
        axes.plot(n_bytes, np.multiply(seconds, 1e3), marker, color=tone, label=name)
        words = f"α = {latency_s * 1e3:.2g} ms, B = {bytes_per_s / 1e6:,.0f} MB/s"
        axes.plot(sizes, (latency_s + sizes / bytes_per_s) * 1e3, color=tone, linewidth=1, label=words)
    axes.set(xscale="log", yscale="log", xlabel="message (bytes)", ylabel="time (ms)")
    axes.set_title("points are measured, lines are fitted")
    axes.legend(fontsize=8)


def draw_ring_and_tree(axes: Any, ranks: int, latency_us: float, bytes_per_s: float = 50e9) -> None:
    """Time of an all-reduce by ring and by tree over tensor size, and where the two cross.  By formula."""
    sizes = np.geomspace(1e3, 1e11, 300)
    for name, seconds, tone, style in [
        ("ring", network.ring_all_reduce_seconds, BLUE, "-"),
        ("tree", network.tree_all_reduce_seconds, VERMILION, "--"),
    ]:
        times = [seconds(size, ranks, latency_us * 1e-6, bytes_per_s) * 1e3 for size in sizes]
        axes.plot(sizes, times, style, color=tone, label=name)
    cross = network.ring_beats_tree_from(ranks, latency_us * 1e-6, bytes_per_s)
    if cross:
        axes.axvline(cross, color=theme.INK, linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="tensor (bytes)", ylabel="all-reduce (ms)")
    axes.set_title(f"{ranks} ranks, α = {latency_us:g} µs, B = 50 GB/s: the ring is faster from {cross / 1e6:,.3g} MB")
    axes.legend()


def draw_losses(axes: Any, losses: Mapping[str, Sequence[float]]) -> None:
    """Training losses by step: {name: losses}."""
    for (name, values), tone, style in zip(losses.items(), theme.TONES, ["-", "--", "-.", ":"], strict=False):
        axes.plot(values, style, color=tone, label=name)
    axes.set(xlabel="step", ylabel="loss (mean squared error)", yscale="log", title="four ranks, one model")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
