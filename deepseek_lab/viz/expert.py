"""Pictures of chapter 08: who goes where, how even the load is, and what travels before and after experts moved."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepseek_lab.plan import placement
from deepseek_lab.viz import theme, traffic

BLUE, VERMILION, GREEN = theme.TONES[:3]


def draw_routes(axes: Any, index_TK: Sequence[Sequence[int]], token_n: Sequence[int], sent_R: Sequence[int]) -> None:
    """Tokens of rank 0 from left to right, experts from top to bottom: a dot for a visit, a box for a row to a rank.

    Rows for rank 0 itself have an empty box: they stay.  `index_TK`: experts of each token; `token_n`, `sent_R`: what
    `tokens_for_ranks` made of them.
    """
    n_ranks = len(sent_R)
    here = -(-(max(map(max, index_TK)) + 1) // n_ranks)
    start = 0
    for rank, n_rows in enumerate(sent_R):
        for token in token_n[start : start + n_rows]:
            x, y = token - 0.42, rank * here - 0.45
            axes.add_patch(_box(x, y, 0.84, here - 0.1, theme.TONES[rank % 6], filled=rank > 0))
        start += n_rows
    visits = [(t, e) for t, experts in enumerate(index_TK) for e in experts]
    axes.scatter(*zip(*visits, strict=True), s=16, color=theme.INK, zorder=3)
    for rank in range(1, n_ranks):
        axes.axhline(rank * here - 0.5, color=theme.INK, linewidth=0.6, linestyle=":")
    axes.set(xlim=(-0.7, len(index_TK) - 0.3), ylim=(n_ranks * here - 0.5, -0.5), xlabel="token")
    axes.set_yticks(range(n_ranks * here), [f"rank {e // here}, expert {e}" for e in range(n_ranks * here)], fontsize=8)
    away = len(token_n) - sent_R[0]
    axes.set_title(
        f"{len(index_TK)} tokens of rank 0, {len(visits)} visits (dots): "
        f"{away} rows travel (filled boxes), {sent_R[0]} stay (empty boxes)"
    )


def _box(x: float, y: float, width: float, height: float, tone: str, filled: bool) -> Any:
    from matplotlib.patches import FancyBboxPatch

    look: dict[str, Any] = (
        {"facecolor": tone, "alpha": 0.45, "linewidth": 0} if filled else {"fill": False, "edgecolor": tone}
    )
    return FancyBboxPatch((x + 0.1, y + 0.1), width - 0.2, height - 0.2, boxstyle="round,pad=0.1", **look)


def draw_loads(axes: Any, loads: Mapping[str, Sequence[float]], n_ranks: int) -> None:
    """Visits of every expert as a multiple of the mean, one line of fields for each kind of text."""
    share = np.array([np.asarray(load, dtype=float) / np.mean(load) for load in loads.values()])
    cells = np.zeros((*share.shape, 4))
    cells[..., :3] = [int(BLUE[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    cells[..., 3] = np.where(share > 1.5, 0.6 + 0.4 * share / share.max(), 0.3 * share / 1.5)
    axes.imshow(cells, aspect="auto")
    for (row, e), value in np.ndenumerate(share):
        axes.text(e, row, f"{value:.1f}", ha="center", va="center", color="white" if value > 1.5 else theme.INK)
    here = share.shape[1] // n_ranks
    for rank in range(1, n_ranks):
        axes.axvline(rank * here - 0.5, color=theme.INK, linewidth=1.5)
    labels = [f"expert {e}" if e % here else f"rank {e // here}\nexpert {e}" for e in range(share.shape[1])]
    axes.set_xticks(range(share.shape[1]), labels, fontsize=8)
    axes.set_yticks(range(len(loads)), list(loads))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title("visits of an expert, as a multiple of the mean")


def draw_rank_loads(axes: Any, loads: Mapping[str, Sequence[float]]) -> None:
    """What every rank has to do, one group of bars a placement, over the mean; the busiest is what all wait for."""
    n_ranks, width = len(next(iter(loads.values()))), 0.8 / len(loads)
    for i, (name, load_R) in enumerate(loads.items()):
        mean = sum(load_R) / n_ranks
        places = [rank + (i + 0.5) * width - 0.4 for rank in range(n_ranks)]
        label = f"{name}: busiest {max(load_R) / mean:.2f} × mean"
        axes.bar(places, [load / mean for load in load_R], width=0.92 * width, color=theme.TONES[i % 6], label=label)
    axes.axhline(1, color=theme.INK, linewidth=1, linestyle=":")
    axes.set_xticks(range(n_ranks), [f"rank {rank}" if n_ranks <= 8 else f"{rank}" for rank in range(n_ranks)])
    axes.set_ylabel("load, × mean")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))


def draw_balance(axes: Any, ranks: int, skew: float, spare: int) -> None:
    """64 experts with loads that differ by exp(skew · a normal deviate), on `ranks` ranks with `spare` more places."""
    rng = random.Random(0)
    load_E = [rng.lognormvariate(0, skew) for _ in range(64)]
    contiguous = placement.contiguous(64, ranks)
    copies_E = placement.copies_for(load_E, 64 + spare * ranks, ranks)
    loads = {
        "as in training": placement.rank_loads(load_E, contiguous),
        f"spare places a rank: {spare}": placement.rank_loads(load_E, placement.pack(load_E, copies_E, ranks)),
    }
    draw_rank_loads(axes, loads)


def draw_matrices(axes: Sequence[Any], matrices: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Bytes from rank to rank, one field each, all in one scale; above each the most that comes to one rank."""
    top = max(max(map(max, matrix)) for matrix in matrices.values())
    for ax, (name, matrix) in zip(axes, matrices.items(), strict=True):
        sent_RR = np.asarray(matrix, dtype=float)
        most = traffic.n_bytes(sent_RR.sum(axis=0).max())
        traffic.draw_matrix(ax, sent_RR, f"{name}\nto the busiest rank: {most}", top)


def draw_suspect(axes: Sequence[Any], losses: Mapping[str, Sequence[float]], norms: Mapping[str, dict[int, float]]):
    """Left the losses of runs {name: losses}; right the gradient norms of a first step {name: {ranks: norm}}."""
    for name, tone, style in zip(losses, theme.TONES, ("-", "--"), strict=False):
        axes[0].plot(losses[name], color=tone, linestyle=style, label=name)
        axes[1].plot(list(norms[name]), list(norms[name].values()), "o", color=tone, linestyle=style, label=name)
    top = 1.1 * max(max(by_ranks.values()) for by_ranks in norms.values())
    axes[0].set(xlabel="step", ylabel="loss on 4 ranks (nats)", ylim=(0, None))
    axes[1].set(xlabel="ranks that share the same batch", ylabel="gradient norm, first step", ylim=(0, top))
    axes[1].set_xticks(list(next(iter(norms.values()))))
    axes[0].legend()
