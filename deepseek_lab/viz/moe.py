"""Pictures of chapter 07: who visits whom, how the load changes from step to step, and what is dropped."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from deepseek_lab.viz import theme

BLUE, VERMILION, GREEN = theme.TONES[:3]


def draw_visits(axes: Any, visits_E: Sequence[float]) -> None:
    """Visits of every expert, the busiest first, and the mean."""
    ordered = sorted(visits_E, reverse=True)
    mean = sum(ordered) / len(ordered)
    axes.bar(range(len(ordered)), ordered, color=BLUE, width=0.8)
    axes.axhline(mean, color=theme.INK, linestyle=":", linewidth=1.5, label=f"even: {mean:.0f}")
    axes.set(xlabel="experts, the busiest first", ylabel="visits", xticks=[])
    axes.legend()


def draw_learning(runs: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """By step: the "loss" of each run, and how far its router has "moved"."""
    with theme.figure(figsize=(7.5, 2.8), ncols=2) as (figure, (left, right)):
        for (name, run), tone, dashes in zip(runs.items(), (BLUE, VERMILION), ("-", "--"), strict=False):
            left.plot(run["loss"], color=tone, linestyle=dashes, label=name)
            right.plot([100 * m for m in run["moved"]], color=tone, linestyle=dashes, label=name)
        left.set(xlabel="step", ylabel="loss (nats a token)", title="What one looks at")
        right.set(xlabel="step", ylabel="router moved by\n(% of its size)", title="What one should look at")
        right.legend()
    return figure


def draw_loads(loads: Mapping[str, Sequence[Tensor]]) -> Figure:
    """For each run the load of every expert (down) at every step (across), as a multiple of the mean."""
    with theme.figure(figsize=(7.5, 2.9), ncols=len(loads), sharey=True, squeeze=False) as (figure, grid):
        for axes, (name, by_step) in zip(grid[0], loads.items(), strict=True):
            order = sum(by_step[-10:]).argsort()  # type: ignore[union-attr]
            table = [[step[e].item() for step in by_step] for e in order]
            image = axes.imshow(table, aspect="auto", origin="lower", cmap="cividis", vmin=0, vmax=4)
            axes.set(xlabel="step", title=name)
        grid[0][0].set_ylabel("expert, by its last load")
        bar = figure.colorbar(image, ax=list(grid[0]), label="visits, × the mean", ticks=[0, 1, 2, 3, 4])
        bar.ax.set_yticklabels(["0", "1", "2", "3", "4 or more"])
    return figure


def draw_busiest(axes: Any, loads: Mapping[str, Sequence[Tensor]]) -> None:
    """The load of the busiest expert at every step."""
    for (name, by_step), tone, dashes in zip(loads.items(), theme.TONES, ("-", "--", "-.", ":"), strict=False):
        axes.plot([step.max().item() for step in by_step], color=tone, linestyle=dashes, label=name)
    axes.axhline(1, color=theme.INK, linewidth=1, linestyle=":")
    axes.set(xlabel="step", ylabel="busiest expert\n(× the mean)", ylim=(0, None))
    axes.legend()


def draw_ranks(names: Sequence[str], visits_RE: Tensor) -> Figure:
    """Visits of every expert on each rank, and of all together, ordered by the sum; lines mark the means."""
    order = visits_RE.sum(dim=0).argsort(descending=True)
    rows = [*zip(names, visits_RE, strict=True), ("all", visits_RE.sum(dim=0))]
    with theme.figure(figsize=(7, 3.6), nrows=len(rows), sharex=True) as (figure, grid):
        for axes, (name, visits_E) in zip(grid, rows, strict=True):
            mean = visits_E.double().mean().item()
            tones = [VERMILION if visits > mean else BLUE for visits in visits_E[order].tolist()]
            axes.bar(range(len(order)), visits_E[order].tolist(), color=tones, width=0.8)
            axes.axhline(mean, color=theme.INK, linewidth=1, linestyle=":")
            axes.set_ylabel(name, rotation=0, ha="right", va="center")
            axes.set(yticks=[], xticks=[])
        grid[-1].set_xlabel("experts, by their visits on all ranks")
        figure.suptitle("Visits: above the mean (vermilion) and below it (blue)", color=theme.INK, fontsize="medium")
    return figure


def draw_dropped(axes: Any, dropped: Mapping[str, Sequence[float]]) -> None:
    """Per cent of the visits that capacity forbade, by step."""
    for (name, by_step), tone, dashes in zip(dropped.items(), (VERMILION, BLUE), ("--", "-"), strict=False):
        axes.plot([100 * share for share in by_step], color=tone, linestyle=dashes, label=name)
    axes.set(xlabel="step", ylabel="dropped visits (%)", ylim=(0, None))
    axes.legend()


def draw_capacity(axes: Any, wanted_E: Sequence[float], taken_E: Sequence[float], factor: float) -> None:
    """Visits of every expert in one sequence that were wanted and that took place, and the capacity."""
    order = sorted(range(len(wanted_E)), key=lambda e: -wanted_E[e])
    even = sum(wanted_E) / len(wanted_E)
    lost = [wanted_E[e] - taken_E[e] for e in order]
    axes.bar(range(len(order)), [taken_E[e] for e in order], color=BLUE, width=0.8, label="take place")
    axes.bar(
        range(len(order)), lost, bottom=[taken_E[e] for e in order], width=0.8, label="dropped",
        color="none", edgecolor=VERMILION, hatch="////", linewidth=0.8,
    )  # fmt: skip
    axes.axhline(factor * even, color=theme.INK, linestyle=":", linewidth=1.5)
    room = factor * sum(wanted_E)
    axes.set(xlabel="experts, the busiest first", ylabel="visits", xticks=[])
    axes.set_title(f"capacity {factor:g} × {even:g}: {sum(lost) / sum(wanted_E):.0%} of the visits dropped, "
                   f"{max(1 - sum(taken_E) / room, 0):.0%} of the room empty")  # fmt: skip
    axes.legend()
