"""Pictures of chapter 09: which ranks form a group, and which gradients a mistake spoils."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import Rectangle

from deepseek_lab.plan import grid
from deepseek_lab.viz import theme

BLUE = theme.TONES[0]
DATA = ("edp", "ep")  # the two axes that are one, "dp", for all but experts


def draw_groups(axes: Any, sizes: Mapping[str, int], axis: str, node: int) -> None:
    """All ranks, a row of squares for each node of `node` ranks; a colour stands for a group along `axis`.

    Where there are more groups than colours, only the group of rank 0 has one.

    Args:
        sizes: ranks along each axis, outermost first; `axis` may also be "dp", for "edp" and "ep" together.
    """
    world = math.prod(sizes.values())
    along = DATA if axis == "dp" else (axis,)
    group_of = [tuple(grid.members(rank, along, sizes)) for rank in range(world)]
    groups = list(dict.fromkeys(group_of))
    few = len(groups) <= len(theme.TONES)
    for rank, group in enumerate(group_of):
        row, column = divmod(rank, node)
        number = groups.index(group)
        tone = theme.TONES[number] if few or number == 0 else "none"
        axes.add_patch(Rectangle((column + 0.05, row + 0.08), 0.9, 0.84, facecolor=tone, edgecolor=theme.INK))
        ink = theme.INK if tone == "none" else "white"
        axes.text(column + 0.5, row + 0.5, rank, ha="center", va="center", color=ink, weight="bold", fontsize=8)
    across = sum(len({rank // node for rank in group}) > 1 for group in groups)
    rows = math.ceil(world / node)
    axes.set(xlim=(0, min(node, world)), ylim=(rows, 0), xticks=[])
    axes.set_yticks([n + 0.5 for n in range(rows)], [f"node {n}" for n in range(rows)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    words = f"{len(groups)} group{'s' * (len(groups) > 1)} of {len(groups[0])}"
    axes.set_title(f"{axis}: {words}\n{across or 'none'} across nodes")


def draw_choice(axes: Any, tp: int, pp: int, ep: int, axis: str, ranks: int = 32, node: int = 8) -> None:
    """What sliders choose, on `ranks` ranks; or why it cannot be."""
    if ranks % (tp * pp * ep):
        words = f"tp {tp} x pp {pp} x ep {ep} = {tp * pp * ep} does not divide {ranks} ranks"
        axes.text(0.5, 0.5, words, ha="center", va="center", transform=axes.transAxes)
        axes.axis("off")
        return
    draw_groups(axes, {"pp": pp, "edp": ranks // (tp * pp * ep), "ep": ep, "tp": tp}, axis, node)


def draw_deviations(axes: Any, found: Mapping[str, Mapping[str, float]]) -> None:
    """A table: how far the gradients of each kind of parameter (across) are off in each run (down), relatively.

    What is off by no more than rounding has no colour.
    """
    kinds = list(next(iter(found.values())))
    for row, by_kind in enumerate(found.values()):
        for column, kind in enumerate(kinds):
            off = by_kind[kind]
            spoilt = off > 1e-9
            look: Any = {"facecolor": theme.TONES[1] if spoilt else "none", "edgecolor": theme.INK, "linewidth": 0.5}
            axes.add_patch(Rectangle((column, row), 1, 1, **look))
            words = f"{off:.0%}" if spoilt else f"{off:.0e}"
            tone = "white" if spoilt else theme.INK
            axes.text(column + 0.5, row + 0.5, words, ha="center", va="center", fontsize=8, color=tone)
    axes.set(xlim=(0, len(kinds)), ylim=(len(found), 0))
    axes.set_xticks([n + 0.5 for n in range(len(kinds))], kinds)
    axes.set_yticks([n + 0.5 for n in range(len(found))], list(found))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw_waiting(axes: Any, by_axis: Mapping[str, Mapping[str, float]]) -> None:
    """Of a recorded step, for each axis of the mesh: the share that a rank waited (bars), the bytes that it sent."""
    order: Sequence[str] = sorted(by_axis, key=lambda axis: by_axis[axis]["share"])
    shares = [100 * by_axis[axis]["share"] for axis in order]
    axes.barh(order, shares, color=BLUE, height=0.6)
    for row, axis in enumerate(order):
        axes.text(shares[row], row, f" {by_axis[axis]['bytes'] / 1e3:,.0f} kB", va="center", fontsize=8)
    axes.set(
        xlabel="waited for messages (% of the step); written: what a rank handed over", xlim=(0, 1.25 * max(shares))
    )
