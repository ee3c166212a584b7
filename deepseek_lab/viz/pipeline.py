"""A pipeline's timeline, one row a rank: one picture for what was simulated and for what ranks recorded.

draw_schedule(simulate(schedule))                       # from plan/schedules.py, in units of its durations
draw_schedule(run_ranks(lambda: ... executor.spans))    # from parallel/pipeline.py, one list of spans a rank

A colour stands for a kind of action, the number in a bar is the micro-batch.  Where a rank holds several chunks, bars
of those beyond the first are hatched.  What is blank is the bubble.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from deepseek_lab.plan.schedules import Action, Timeline, build_schedule, simulate
from deepseek_lab.viz import theme
from deepseek_lab.viz.timeline import EDGE, NARROW

KINDS = {
    "F": ("forward", theme.TONES[0]),
    "B": ("backward", theme.TONES[1]),
    "I": ("its input part", theme.TONES[4]),
    "W": ("its weight part", theme.TONES[2]),
    "U": ("update", theme.TONES[3]),
}
HATCH = "////"  # of the bars of later chunks

Bar = tuple[Action, float, float]  # what, from, to
Spans = Timeline | Sequence[Sequence[Any]]


def draw_schedule(spans: Spans, title: str = "") -> Figure:
    """A figure of a simulated `Timeline`, or of the spans that an executor recorded on each rank.

    Recorded spans have `action`, `start_s` and `end_s`; their time runs from the first of them, in ms.
    """
    n_ranks = len(bars_of(spans))
    with theme.figure(figsize=(8, 0.9 + 0.32 * n_ranks)) as (figure, axes):
        draw_bars(axes, spans)
        axes.set_title(title)
        return figure


def draw_bars(axes: Any, spans: Spans, until: float | None = None) -> None:
    """The same on given axes; `until`: where the time axis ends, to compare pictures."""
    rows = bars_of(spans)
    zero = min(start for row in rows for _, start, _ in row)
    end = max(end for row in rows for _, _, end in row) - zero
    until = end if until is None else until
    for rank, row in enumerate(rows):
        for action, start, stop in row:
            for n, step in enumerate(action.steps()):  # the parts of an overlap lie one above the other
                height = 0.86 / len(action.steps())
                _bar(axes, step, rank - 0.43 + height * (n + 0.5), height, start - zero, stop - start, until)
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    axes.set(xlim=(0, until), ylim=(len(rows) - 0.4, -0.6))
    axes.set_xlabel("time (units)" if isinstance(spans, Timeline) else "time (ms)")
    axes.tick_params(axis="y", length=0)
    seen = {step.kind for row in rows for action, _, _ in row for step in action.steps()}
    handles = [Patch(label=f"{k}: {name}", color=tone) for k, (name, tone) in KINDS.items() if k in seen]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5))


def utilization(spans: Spans) -> float:
    """The share of the time in which ranks work, a rank's time running from its first start to its last end.

    Of the rank that takes longest, as in `Timeline.bubble_rate`: 1 - that, where all ranks have equal work.
    """
    rows = bars_of(spans)
    busy = sum(end - start for row in rows for _, start, end in row) / len(rows)
    return busy / max(row[-1][2] - row[0][1] for row in rows)


def bars_of(spans: Spans) -> list[list[Bar]]:
    """Every rank's bars: in the timeline's own unit, or in ms."""
    if isinstance(spans, Timeline):
        return [[(span.action, span.start, span.end) for span in row] for row in spans.spans]
    return [[(span.action, span.start_s * 1e3, span.end_s * 1e3) for span in row] for row in spans]


def draw_choice(axes: Any, schedule: str, ranks: int, micro_batches: int, chunks: int, weight_part: float) -> None:
    """What sliders choose, simulated: the timeline, utilization and peak of activations in its title, or the refusal.

    A stage's forward and the input part of its backward take one unit, shared out over the chunks of a rank.
    """
    chunks = chunks if schedule == "interleaved" else 2 if schedule == "dualpipe_v" else 1
    try:
        chosen = build_schedule(schedule, ranks, micro_batches, chunks)
    except ValueError as refusal:
        axes.text(0.5, 0.5, str(refusal).replace("; ", "\n"), ha="center", va="center", transform=axes.transAxes)
        axes.axis("off")
        return
    timeline = simulate(chosen, t_f=1 / chunks, t_b=1 / chunks, t_w=weight_part / chunks)
    draw_bars(axes, timeline)
    share, peak = utilization(timeline), max(timeline.peak_activations) / chunks
    axes.set_title(f"working {share:.0%} of the time; activations of at most {peak:g} micro-batches on a rank")


def _bar(axes: Any, step: Action, row: float, height: float, start: float, width: float, whole: float) -> None:
    _, tone = KINDS[step.kind]
    if step.kind == "U":  # takes no time: a mark
        axes.plot([start, start], [row - height / 2, row + height / 2], color=tone, linewidth=1.5)
        return
    hatch = HATCH if step.chunk else ""
    axes.barh(row, width, left=start, height=height, facecolor=tone, edgecolor=EDGE, linewidth=0.6, hatch=hatch)
    if width > NARROW * whole * 0.8 and start < whole:
        axes.text(
            start + width / 2, row, step.micro_batch, ha="center", va="center", fontsize=7, color="white", weight="bold"
        )
