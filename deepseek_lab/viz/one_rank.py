"""Drawings of chapter 01. Each takes numbers that a cell has just measured, or a function to be drawn."""

from collections.abc import Callable, Sequence

from matplotlib.figure import Figure

from deepseek_lab.viz import theme

BLUE, VERMILION, GREEN, PINK = theme.TONES[:4]


def draw_depth(sizes: dict[str, list[float]]) -> Figure:
    """Root mean square of the residual stream after each block, one line for each way to build the blocks."""
    with theme.figure(figsize=(7, 2.8)) as (fig, axes):
        for (name, values), style in zip(sizes.items(), ("o-", "s--", "^:"), strict=False):
            axes.plot(range(len(values)), values, style, markersize=3, label=name)
        axes.set(
            yscale="log", xlabel="blocks passed", ylabel="root mean square of x", title="What a norm keeps in hand"
        )
        axes.legend()
        return fig


def draw_scores(scores: dict[int, tuple[Sequence[int], Sequence[float]]]) -> Figure:
    """Query-key products over the distance, one set of markers for each position of the query."""
    with theme.figure(figsize=(7, 2.8)) as (fig, axes):
        for (position, (distances, values)), marker, size in zip(scores.items(), "os^", (9, 6, 3), strict=False):
            axes.plot(distances, values, marker, markersize=size, fillstyle="none", label=f"query at {position:,}")
        axes.set(
            xlabel="distance from query to key (tokens)",
            ylabel="query · key\n(both vectors of ones)",
            title="Only the distance matters",
        )
        axes.legend()
        return fig


def draw_confidence(margins: Sequence[float], losses: dict[float, list[float]]) -> Figure:
    """Loss over the lead that the right class has; with smoothing there is a lead that is too large."""
    with theme.figure(figsize=(7, 2.8)) as (fig, axes):
        for (epsilon, values), style in zip(losses.items(), ("-", "--", ":"), strict=False):
            axes.plot(margins, values, style, label=f"smoothing {epsilon:g}")
            lowest = min(range(len(values)), key=values.__getitem__)
            if 0 < lowest < len(values) - 1:
                axes.plot(margins[lowest], values[lowest], "o", color=theme.INK)
        axes.set(xlabel="lead of the right logit over the others", ylabel="loss (nats)")
        axes.set_title("Smoothing puts a price on being too sure")
        axes.legend()
        return fig


def draw_schedules(axes, schedules: dict[str, Callable[[int], float]], total_steps: int) -> None:
    """Learning rates over a run; what is below zero is shaded."""
    steps = range(0, total_steps, max(total_steps // 500, 1))
    for (name, schedule), style in zip(schedules.items(), ("-", "--", ":"), strict=False):
        axes.plot([step / 1e3 for step in steps], [schedule(step) for step in steps], style, label=name)
    axes.axhline(0, color=theme.INK, lw=0.8)
    bottom = min(axes.get_ylim()[0], 0)
    axes.axhspan(bottom, 0, color=VERMILION, alpha=0.08, lw=0)
    axes.set(xlim=(0, total_steps / 1e3), ylim=(bottom, None), xlabel="step (thousands)", ylabel="learning rate")
    axes.legend(loc="upper right")


def draw_context_cost(lengths: Sequence[int], shares: dict[str, list[float]]) -> Figure:
    """Share of attention proper in the FLOPs of a token, over the length of the context."""
    with theme.figure(figsize=(7, 2.8)) as (fig, axes):
        for (name, values), style in zip(shares.items(), ("-", "--", ":"), strict=False):
            axes.plot(lengths, [100 * value for value in values], style, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        axes.set(ylim=(0, 100), xlabel="tokens of context", ylabel="attention (% of FLOPs)")
        axes.set_title("Weights cost the same at any length, attention does not")
        axes.legend()
        return fig


def draw_utilization(runs: dict[str, float], target: float) -> Figure:
    """Bars of model FLOPs utilization, and a line at the target."""
    with theme.figure(figsize=(7, 0.32 * len(runs) + 1)) as (fig, axes):
        names = sorted(runs, key=runs.__getitem__)
        bars = axes.barh(names, [100 * runs[name] for name in names], color=BLUE, alpha=0.7)
        axes.bar_label(bars, fmt="%.0f", label_type="center", color="white")
        axes.axvline(100 * target, color=VERMILION, ls="--", zorder=0)
        axes.annotate("target", (100 * target, 0), (6, -3), textcoords="offset points", color=VERMILION)
        axes.set(xlim=(0, 70), xlabel="model FLOPs utilization (% of the dense peak)")
        return fig


def draw_next_token(axes, tokens: Sequence[str], before: Sequence[float], after: Sequence[float]) -> None:
    """The likeliest next tokens: what the model says, and what the sampler will draw from."""
    places = range(len(tokens))
    axes.bar(places, before, width=0.8, color=theme.INK, alpha=0.5, label="the model's probabilities")
    axes.bar(places, after, width=0.45, color=BLUE, label="share of 400 draws")
    axes.set_xticks(places, tokens, rotation=60, ha="right", fontsize=8)
    axes.set(ylabel="probability", ylim=(0, max(*before, *after) * 1.1))
    axes.legend(loc="upper right")


def draw_curves(curves: dict[str, Sequence[float]], every: int, ylabel: str, title: str) -> Figure:
    """Values recorded every so many steps."""
    with theme.figure(figsize=(7, 2.8)) as (fig, axes):
        for (name, values), style in zip(curves.items(), ("-", "--", ":", "-."), strict=False):
            axes.plot([every * (i + 1) for i in range(len(values))], values, style, label=name)
        axes.set(xlabel="step", ylabel=ylabel, title=title)
        axes.legend()
        return fig
