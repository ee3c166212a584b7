"""Pictures of chapter 03: step time by bucket size, losses side by side, all-reduces by link, traffic by ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from deepseek_lab.viz import theme

STYLES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))
METHODS = {"none": "fp32", "int8": "int8", "topk": "top 1%"}


def draw_bucket_sizes(seconds: Mapping[int, float], latency_bytes: float) -> Figure:
    """Measured seconds of a step by bytes to a bucket; at `latency_bytes` latency and bandwidth cost the same."""
    with theme.figure(figsize=(7, 2.8)) as (fig, axes):
        sizes = sorted(seconds)
        axes.plot([size / 1e3 for size in sizes], [seconds[size] * 1e3 for size in sizes], "o-")
        words = "a message costs as much latency as bandwidth"
        axes.axvline(latency_bytes / 1e3, color=theme.INK, linestyle=":", linewidth=1, label=words)
        top = max(seconds.values()) * 1e3
        axes.set(xscale="log", ylim=(0, 1.15 * top), xlabel="bucket (kB)", ylabel="step (ms)")
        axes.legend(loc="lower right")
        axes.set_title("a step, its gradients sent while backward works")
        return fig


def draw_curves(
    curves: Mapping[str, Sequence[float]], *, every: int, title: str, ylabel: str = "loss (nats a byte)"
) -> Figure:
    """Losses by step, each point the mean of `every` steps.  A nat is a unit of information: 1.44 bits."""
    with theme.figure(figsize=(7, 3.2)) as (fig, axes):
        for n, ((name, values), style) in enumerate(zip(curves.items(), STYLES, strict=False)):
            means = [sum(values[i : i + every]) / every for i in range(0, len(values) - every + 1, every)]
            axes.plot(
                [every * (i + 1) for i in range(len(means))], means, linestyle=style, linewidth=3 - 0.4 * n, label=name
            )
        axes.set(xlabel="step", ylabel=ylabel, title=title)
        axes.legend()
        return fig


def draw_link_times(times: Mapping[str, Mapping[str, float]]) -> Figure:
    """Measured seconds of an all-reduce: {link: {method: seconds}}, bars in groups by link."""
    with theme.figure(figsize=(7, 3)) as (fig, axes):
        methods = list(next(iter(times.values())))
        width = 0.8 / len(methods)
        for n, method in enumerate(methods):
            places = np.arange(len(times)) + (n - (len(methods) - 1) / 2) * width
            heights = [by_method[method] * 1e3 for by_method in times.values()]
            bars = axes.bar(
                places,
                heights,
                width * 0.92,
                label=METHODS[method],
                hatch=("", "//", "..")[n],
                edgecolor=(1, 1, 1, 0.5),
            )
            axes.bar_label(bars, fmt="%.0f", fontsize=8)
        axes.set_xticks(range(len(times)), list(times))
        axes.set(ylabel="all-reduce of 4 MB (ms)", title="two ranks: sending, and compressing")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        return fig


def draw_bytes_by_ranks(axes: Any, density: float) -> None:
    """Bytes that a rank sends for each number of the gradient, over the number of ranks.  By formula."""
    ranks = np.unique(np.geomspace(2, 4096, 60).astype(int))
    ring = 2 * (ranks - 1) / ranks
    for (name, values), tone, style in zip(
        {"fp32": 4 * ring, "int8": (1 + 4 / 256) * ring, f"top {density:.2%}": 8 * density * (ranks - 1)}.items(),
        theme.TONES,
        STYLES,
        strict=False,
    ):
        axes.plot(ranks, values, linestyle=style, color=tone, label=name)
    axes.axvline(1 / density, color=theme.INK, linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="sent by a rank\n(bytes a parameter)", xlim=(2, 4096))
    axes.set_title(f"indices and values of {density:.2%} outgrow the whole gradient at {1 / density:,.0f} ranks")
    axes.legend()
