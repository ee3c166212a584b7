"""Who sent how much to whom, drawn from recorded events.

`traffic_matrix` counts only bytes that were measured: those that our own messages carried.  A collective that torch
carries out shows its payload only; what a ring would send for it is drawn beside, and labelled "modelled".
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from deepseek_lab.viz import theme

Traces = Sequence[Any]  # one `parallel.collectives.Trace` per rank


def traffic_matrix(traces, n_ranks):
    """Bytes sent from each rank to each other, shape (R, R): row = sender, column = receiver.

    `traces` are those of the ranks, in any order: `event.rank` says whose an event is.  What counts is what was sent,
    measured: the `wire_bytes` of each event that has a `peer`.  Collectives have none (`peer` is None; 0 is a rank);
    the receiver's own event for a message has no wire bytes.
    """
    sent_RR = [[0] * n_ranks for _ in range(n_ranks)]
    for trace in traces:
        for event in trace.events:
            if event.peer is not None and event.wire_bytes:
                sent_RR[event.rank][event.peer] += event.wire_bytes
    return sent_RR


def modelled_matrix(traces: Traces, n_ranks: int) -> list[list[float]]:
    """Bytes that a ring would send for the collectives that torch carried out, shape (R, R)."""
    sent_RR = [[0.0] * n_ranks for _ in range(n_ranks)]
    for event in _events(traces):
        if event.wire_bytes is None and event.op in _RING_SHARE:
            n, here = len(event.group_ranks), event.group_ranks.index(event.rank)
            right = event.group_ranks[(here + 1) % n]
            sent_RR[event.rank][right] += _RING_SHARE[event.op](n) * event.payload_bytes
    return sent_RR


# What each rank sends on a ring, as a share of its payload, by the number of ranks
_RING_SHARE = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: n - 1,
}


def traffic_table(traces: Traces) -> list[tuple[str, str, str, str, str]]:
    """One row per operation: (operation, times, payload, sent, ms), each the largest over the ranks."""
    totals: dict[str, dict[int, list[float]]] = {}
    for event in _events(traces):
        name = f"{event.within} › {event.op}" if event.within else event.op
        row = totals.setdefault(name, {}).setdefault(event.rank, [0, 0, 0, 0])
        sent = -1 if event.wire_bytes is None else event.wire_bytes
        for column, value in enumerate((1, event.payload_bytes, sent, event.seconds * 1e3)):
            row[column] += value
    rows = []
    for name, by_rank in totals.items():
        times, payload, sent, ms = (max(column) for column in zip(*by_rank.values(), strict=True))
        rows.append(
            (
                name,
                f"{times:g}",
                n_bytes(payload) if payload else "–",
                n_bytes(sent) if sent >= 0 else "not seen",
                f"{ms:.1f}",
            )
        )
    return rows


def draw_traffic(traces: Traces) -> Figure:
    """Draw the traffic of some ranks: the matrix of bytes sent, and a table of the operations.

    `traces`: what `record()` gave on each rank, as returned by `run_ranks`; None for ranks that recorded nothing.
    """
    events = list(_events(traces))
    ranks = {rank for event in events for rank in event.group_ranks}
    n_ranks = max([*ranks, len(list(traces)) - 1]) + 1
    measured = traffic_matrix([trace for trace in traces if trace is not None], n_ranks)
    modelled = modelled_matrix(traces, n_ranks)
    panels = [("measured: bytes sent", measured)] if np.any(measured) or not np.any(modelled) else []
    if np.any(modelled):
        panels.append(("modelled: bytes a ring would send", modelled))
    side = 0.8 + 0.6 * max(n_ranks, 3)
    rows = traffic_table(traces)
    ratios = [side] * len(panels) + [4.4]
    with theme.figure(
        figsize=(sum(ratios), max(side, 0.8 + 0.25 * len(rows))), ncols=len(ratios), width_ratios=ratios
    ) as (fig, axes):
        for ax, (title, matrix) in zip(axes, panels, strict=False):
            draw_matrix(ax, np.asarray(matrix), title)
        _draw_table(axes[-1], rows)
    return fig


def draw_matrix(ax: Any, sent_RR: np.ndarray, title: str, top: float | None = None) -> None:
    """Bytes from each rank to each other; `top` has the fullest shade, by default the largest of them."""
    n_ranks = len(sent_RR)
    top = top or sent_RR.max() or 1
    cells = np.zeros((n_ranks, n_ranks, 4))
    cells[..., :3] = [int(theme.TONES[0][i : i + 2], 16) / 255 for i in (1, 3, 5)]
    share_RR = sent_RR / top
    # no middling shades: on them neither grey nor white could be read
    cells[..., 3] = np.where(share_RR > 0.5, 0.7 + 0.3 * share_RR, 0.04 + 0.3 * share_RR)
    cells[sent_RR == 0, 3] = 0  # nothing, whatever the background
    ax.imshow(cells)
    for (sender, receiver), value in np.ndenumerate(sent_RR):
        text = n_bytes(value, "\n") if value else "·"
        colour = "white" if share_RR[sender, receiver] > 0.5 else theme.INK
        ax.text(receiver, sender, text, ha="center", va="center", fontsize=8, color=colour)
    ax.set(xticks=range(n_ranks), yticks=range(n_ranks), xlabel="to rank", ylabel="from rank", title=title)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)


def _draw_table(ax: Any, rows: list[tuple[str, str, str, str, str]]) -> None:
    ax.axis("off")
    head = ("operation", "times", "payload", "sent", "ms")
    edges = (0.0, 0.50, 0.69, 0.88, 1.0)  # right edges, but for the first column
    for y, row in enumerate([head, *rows]):
        for x, text in enumerate(row):
            where = {"ha": "left" if x == 0 else "right", "va": "top", "transform": ax.transAxes}
            ax.text(
                edges[x],
                0.98 - y / max(len(rows) + 1, 9),
                text,
                fontsize=9,
                weight="bold" if y == 0 else "normal",
                **where,
            )
    ax.set_title("per operation, the most on any rank")


def _events(traces: Traces) -> Iterable[Any]:
    return (event for trace in traces if trace is not None for event in trace.events)


def n_bytes(value: float, gap: str = " ") -> str:
    """A number of bytes for a person: 1,536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.4g}{gap}{unit}"
        value /= 1024
    return f"{value:.4g}{gap}GiB"
