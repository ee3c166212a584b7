"""Pictures of chapter 04: matrices in bands, what a vocabulary and a layout cost, links against matmuls."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator

from deepseek_lab.viz import theme

BLUE, VERMILION, GREEN = theme.TONES[:3]
TONES = theme.TONES[:4]


def draw_splits() -> Figure:
    """One matmul, twice: the weight cut by its outputs, and by its inputs; one colour a rank."""
    with theme.figure(figsize=(9.4, 4.4), nrows=2) as (figure, (columns, rows)):
        columns.add_patch(Rectangle((0, -0.6), 1.8, 1.2, facecolor=theme.INK, alpha=0.5))
        columns.text(0.9, 0, "all", ha="center", va="center", color="white", fontsize=8)
        columns.text(0.9, -0.95, "X, T × D", ha="center", va="center", fontsize=9)
        columns.text(2.05, 0, "·", ha="center", va="center", fontsize=14)
        _bands(columns, 3.2, 1.8, "Wᵀ", "D × F", upright=True)
        columns.text(4.5, 0, "=", ha="center", va="center", fontsize=14)
        _bands(columns, 6.0, 2.2, "Y", "T × F", upright=True)
        _words(columns, 9.0, "X is whole on every rank.\nEach rank gets its own\ncolumns of Y: nothing is sent.")
        columns.set_title("column parallel: W is cut by its outputs")

        _bands(rows, 1.0, 2.0, "X", "T × F", upright=True)
        rows.text(2.32, 0, "·", ha="center", va="center", fontsize=14)
        _bands(rows, 3.05, 0.8, "Wᵀ", "F × D", upright=False)
        rows.text(3.65, 0, "=", ha="center", va="center", fontsize=14)
        for rank, tone in enumerate(TONES):
            x = 3.85 + 1.02 * rank
            rows.add_patch(Rectangle((x, -0.6), 0.8, 1.2, facecolor=tone, alpha=0.8))
            rows.text(x + 0.91, 0, "+" if rank < 3 else "=", ha="center", va="center")
        rows.text(5.78, -0.95, "partial products, each T × D", ha="center", va="center", fontsize=9)
        rows.add_patch(Rectangle((7.93, -0.6), 0.8, 1.2, facecolor=theme.INK, alpha=0.5))
        rows.text(8.33, -0.95, "Y, T × D", ha="center", va="center", fontsize=9)
        _words(rows, 9.0, "Each rank has a part of\nevery number of Y:\none sum over the ranks.")
        rows.set_title("row parallel: W is cut by its inputs")
        for axes in (columns, rows):
            axes.set(xlim=(-0.2, 11.8), ylim=(-1.2, 1.1), aspect="equal", xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        return figure


def _bands(axes: Any, middle: float, width: float, name: str, shape: str, upright: bool) -> None:
    for rank, tone in enumerate(TONES):
        if upright:
            corner, size = (middle - width / 2 + rank * width / 4, -0.6), (width / 4 - 0.03, 1.2)
        else:
            corner, size = (middle - width / 2, 0.6 - (rank + 1) * 0.3), (width, 0.27)
        axes.add_patch(Rectangle(corner, *size, facecolor=tone, alpha=0.8))
        centre = (corner[0] + size[0] / 2, corner[1] + size[1] / 2)
        axes.text(*centre, f"{rank}", ha="center", va="center", color="white", fontsize=8)
    axes.text(middle, -0.95, f"{name}, {shape}", ha="center", va="center", fontsize=9)


def _words(axes: Any, left: float, text: str) -> None:
    axes.text(left, 0, text, ha="left", va="center", fontsize=9)


def draw_vocabulary(vocabularies: Sequence[int], bytes_per_token: Mapping[str, Sequence[float]]) -> Figure:
    """What a token's loss costs in bytes, over the size of the vocabulary, one line for each way."""
    with theme.figure(figsize=(7, 2.8)) as (figure, axes):
        for (name, values), style in zip(bytes_per_token.items(), ("o-", "s--"), strict=False):
            axes.plot(vocabularies, values, style, markersize=4, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(vocabularies, [f"{v:,}" for v in vocabularies])
        axes.set(yscale="log", xlabel="vocabulary", ylabel="bytes a token, each rank")
        axes.set_title("the loss of one token on four ranks")
        axes.legend()
        return figure


def draw_kept(kept: Mapping[str, Mapping[int, float]]) -> Figure:
    """Bytes kept for backward by ranks, {way: {tp: MiB}}, beside an even split of what one rank keeps."""
    with theme.figure(figsize=(7, 2.8)) as (figure, axes):
        for (name, by_ranks), style in zip(kept.items(), ("o-", "s--"), strict=False):
            axes.plot(list(by_ranks), list(by_ranks.values()), style, markersize=5, label=name)
        first = next(iter(kept.values()))
        axes.plot(list(first), [first[1] / n for n in first], ":", color=theme.INK, label="an even split")
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(first), [str(n) for n in first])
        axes.set(xlabel="tensor-parallel ranks", ylabel="kept for backward\n(MiB on each rank)", ylim=(0, None))
        axes.set_title("activations of one step, measured")
        axes.legend()
        return figure


def draw_two_models(losses: Mapping[str, Mapping[str, float]]) -> Figure:
    """Loss of a fresh and of a trained model, with the right linear layers and with suspect ones."""
    with theme.figure(figsize=(7, 2.8)) as (figure, axes):
        names = list(losses)
        for place, (kind, tone) in enumerate(zip(losses[names[0]], (BLUE, VERMILION), strict=True)):
            at = [i + (place - 0.5) * 0.36 for i in range(len(names))]
            bars = axes.bar(at, [losses[name][kind] for name in names], width=0.34, color=tone, label=kind)
            axes.bar_label(bars, fmt="%.3f")
        axes.set_xticks(range(len(names)), names)
        axes.set(ylabel="loss (nats a token)", ylim=(0, 1.2 * max(v for by in losses.values() for v in by.values())))
        axes.set_title("the same text, the same weights")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        return figure


def draw_nodes(tokens: Sequence[int], crossing: Mapping[str, Sequence[float]]) -> Figure:
    """MiB that cross between two nodes in one step, over the tokens of the step; one line for each layout."""
    with theme.figure(figsize=(7, 2.8)) as (figure, axes):
        for (name, values), style in zip(crossing.items(), ("o-", "s--", "^:"), strict=False):
            axes.plot(tokens, values, style, markersize=5, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [f"{n:,}" for n in tokens])
        axes.set(xlabel="tokens in a step", ylabel="between the nodes\n(MiB in a step)", ylim=(0, None))
        axes.set_title("two nodes of two ranks, measured")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        return figure


def draw_links(
    axes: Any, matmul_ms: Sequence[float], links: Mapping[str, Sequence[float]], ranks: Sequence[int]
) -> None:
    """Time of one block over the number of ranks: its matmuls, and its four all-reduces on each link.  By formula."""
    axes.plot(ranks, matmul_ms, "o-", markersize=4, color=BLUE, label="matmuls")
    for (name, values), style, tone in zip(links.items(), ("s--", "^:"), (GREEN, VERMILION), strict=False):
        axes.plot(ranks, values, style, markersize=4, color=tone, label=f"all-reduces, {name}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.set(yscale="log", xlabel="tensor-parallel ranks", ylabel="one block,\nforward and backward (ms)")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
