"""A pipeline's picture shows what was simulated or recorded: each bar where its span was, numbered, in its colour."""

import pytest
from matplotlib.colors import to_rgba

from deepseek_lab.parallel.pipeline import Span
from deepseek_lab.plan.schedules import Action, build_schedule, simulate
from deepseek_lab.viz import pipeline, theme


def bars(figure):
    (axes,) = figure.axes
    return [(bar.get_x(), bar.get_width(), bar.get_facecolor()) for bar in axes.patches], axes


def test_simulated_and_recorded_spans_give_one_picture():
    timeline = simulate(build_schedule("zb_h1", 2, 3))
    recorded = [[Span(s.action, 7 + s.start / 1e3, 7 + s.end / 1e3) for s in row] for row in timeline.spans]
    simulated, axes = bars(pipeline.draw_schedule(timeline, title="zb_h1"))
    real, real_axes = bars(pipeline.draw_schedule(recorded))
    assert [bar[2] for bar in real] == [bar[2] for bar in simulated]
    for place in (0, 1):
        assert [bar[place] for bar in real] == pytest.approx([bar[place] for bar in simulated])
    assert len(simulated) == 2 * 3 * 3
    assert {bar[2] for bar in simulated} == {to_rgba(pipeline.KINDS[kind][1]) for kind in "FIW"}
    assert [text.get_text() for text in axes.texts[:3]] == ["0", "1", "0"]
    assert (axes.get_xlabel(), real_axes.get_xlabel()) == ("time (units)", "time (ms)")
    assert theme.png(pipeline.draw_schedule(timeline))


def test_an_overlap_is_two_bars_at_the_same_time_and_an_update_a_mark():
    both = Action("OVERLAP", 2, 0, parts=(Action("F", 2), Action("B", 1, 1)))
    drawn, axes = bars(pipeline.draw_schedule([[Span(both, 1.0, 1.5), Span(Action("U", 1), 1.5, 1.5)]]))
    (forward_x, forward_width, _), (backward_x, backward_width, _) = drawn
    assert (forward_x, forward_width) == (backward_x, backward_width)
    assert forward_width == pytest.approx(500)
    assert [text.get_text() for text in axes.texts] == ["2", "1"]
    assert len(axes.lines) == 1


def test_utilization_is_work_over_time():
    """GPipe and 1F1B work m / (m + p - 1) of the time."""
    for name in ("gpipe", "1f1b"):
        timeline = simulate(build_schedule(name, 4, 9))
        assert pipeline.utilization(timeline) == pytest.approx(9 / 12)
        assert pipeline.utilization(timeline) == pytest.approx(1 - timeline.bubble_rate)


def test_a_choice_that_cannot_be_is_explained():
    with theme.figure() as (_, axes):
        pipeline.draw_choice(axes, "interleaved", 4, 6, 2, 1.0)
    assert "multiple of ranks=4" in axes.texts[0].get_text()
    for schedule in ("1f1b", "interleaved", "dualpipe_v"):
        with theme.figure() as (_, axes):
            pipeline.draw_choice(axes, schedule, 4, 8, 2, 1.0)
        assert "working" in axes.get_title()
