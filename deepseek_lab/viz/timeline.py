"""What every rank did when: bars over time, drawn from spans that were recorded.

with span(spans, "forward"):
    ...
draw_timeline([spans + network_spans(trace), ...])      # one list for each rank

A rank has one row for each of its lanes, such as "compute" and "network": work of different lanes can go on at the same
time.  A colour and a hatch stand for a kind of work.  All times are `time.monotonic()`, one clock for all ranks of a
machine.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from deepseek_lab.viz import theme

HATCHES = ("", "//", "\\\\", "..", "xx", "--")
EDGE = (1, 1, 1, 0.4)  # of bars, and of hatches: faint, so that labels stand out
NARROW = 0.02  # share of the whole time below which a bar is too narrow for its label


@dataclass(frozen=True)
class Span:
    """One piece of work of one rank.  `kind` gives its colour and its legend entry, `label` stands in the bar."""

    kind: str
    start_s: float
    seconds: float
    lane: str = "compute"
    label: str = ""

    @property
    def stop_s(self) -> float:
        """When it ended."""
        return self.start_s + self.seconds


@contextmanager
def span(spans: list[Span], kind: str, lane: str = "compute", label: str = "") -> Iterator[None]:
    """Append to `spans` how long the block took."""
    start_s = time.monotonic()
    yield
    spans.append(Span(kind, start_s, time.monotonic() - start_s, lane, label))


def network_spans(trace: Any, lane: str = "network") -> list[Span]:
    """The operations of a `record()`, numbered in the order in which they began; steps of a collective are left out.

    One that was started while another was still under way is drawn from the end of that one.
    """
    events = sorted((e for e in trace.events if e.within is None), key=lambda e: e.start_s)
    spans: list[Span] = []
    for n, e in enumerate(events):
        start_s = max(e.start_s, spans[-1].stop_s) if spans else e.start_s
        seconds = max(e.start_s + e.seconds - start_s, 0.0)
        spans.append(Span(e.op.replace("_", "-"), start_s, seconds, lane, str(n) if len(events) > 1 else ""))
    return spans


def draw_timeline(
    spans_by_rank: Sequence[Sequence[Span]], *, title: str = "", lanes: Sequence[str] = (), until_s: float | None = None
) -> Figure:
    """A figure of all ranks' spans, time running from the first of them.

    Args:
        lanes: the rows of a rank, from top to bottom; by default those that occur, in order of appearance.
        until_s: where the time axis ends, to compare figures; by default with the last span.
    """
    every = [s for spans in spans_by_rank for s in spans]
    lanes = list(lanes) or list(dict.fromkeys(s.lane for s in every))
    kinds = list(dict.fromkeys(s.kind for s in every))
    zero_s = min(s.start_s for s in every)
    end_s = max(s.stop_s for s in every) - zero_s if until_s is None else until_s
    n_ranks = len(spans_by_rank)
    with theme.figure(figsize=(8, 0.9 + n_ranks * (0.22 * len(lanes) + 0.16))) as (fig, axes):
        for rank, spans in enumerate(spans_by_rank):
            for s in spans:
                row = rank * (len(lanes) + 0.7) + lanes.index(s.lane)
                _bar(axes, s, row, zero_s, end_s, kinds.index(s.kind))
        centres = [rank * (len(lanes) + 0.7) + (len(lanes) - 1) / 2 for rank in range(n_ranks)]
        axes.set_yticks(centres, [f"rank {rank}" for rank in range(n_ranks)])
        axes.set(
            xlim=(0, end_s * 1e3), ylim=(centres[-1] + len(lanes) / 2 + 0.2, -0.8), xlabel="time (ms)", title=title
        )
        axes.tick_params(axis="y", length=0)
        axes.legend(
            handles=[_patch(kind, n) for n, kind in enumerate(kinds)], loc="center left", bbox_to_anchor=(1, 0.5)
        )
        return fig


def hidden_share(spans: Sequence[Span], behind: str, lane: str = "network") -> float:
    """Which part of the time in `lane` passed while a span of kind `behind` was running, from 0 to 1."""
    covers = [s for s in spans if s.kind == behind]
    busy = _union([(s.start_s, s.stop_s) for s in spans if s.lane == lane])
    total_s = sum(stop - start for start, stop in busy)
    both_s = sum(
        max(0.0, min(stop, cover.stop_s) - max(start, cover.start_s)) for start, stop in busy for cover in covers
    )
    return both_s / total_s if total_s else 0.0


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _bar(axes: Any, s: Span, row: float, zero_s: float, end_s: float, number: int) -> None:
    left, width = (s.start_s - zero_s) * 1e3, s.seconds * 1e3
    axes.barh(row, width, left=left, height=0.9, linewidth=0.6, **_look(number))
    if s.label and s.seconds > NARROW * end_s and s.start_s - zero_s < end_s:
        axes.text(left + width / 2, row, s.label, ha="center", va="center", fontsize=7, color="white", weight="bold")


def _patch(kind: str, number: int) -> Patch:
    return Patch(label=kind, **_look(number))


def _look(number: int) -> dict[str, Any]:
    tone, hatch = theme.TONES[number % len(theme.TONES)], HATCHES[number % len(HATCHES)]
    return {"facecolor": tone, "edgecolor": EDGE, "hatch": hatch}
