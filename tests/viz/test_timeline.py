"""Timelines show what was recorded: each bar where and as long as its span, one colour a kind."""

import time

import pytest

from deepseek_lab.parallel.meter import Event, Trace
from deepseek_lab.viz import theme, timeline
from deepseek_lab.viz.timeline import Span


def test_bars_stand_where_their_spans_were():
    ranks = [
        [Span("forward", 10.0, 0.1), Span("backward", 10.1, 0.2), Span("all-reduce", 10.15, 0.3, "network", "0")],
        [Span("forward", 10.05, 0.1), Span("backward", 10.2, 0.2)],
    ]
    figure = timeline.draw_timeline(ranks, title="a step")
    (axes,) = figure.axes
    bars = [(bar.get_x(), bar.get_width(), bar.get_y()) for bar in axes.patches]
    assert [bar[0] for bar in bars] == pytest.approx([0, 100, 150, 50, 200])
    assert [bar[1] for bar in bars] == pytest.approx([100, 200, 300, 100, 200])
    forward, backward, reduce, *others = (bar[2] for bar in bars)
    assert forward == backward < reduce < min(others)  # lanes of rank 0, then rank 1
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["forward", "backward", "all-reduce"]
    assert axes.get_xlim() == pytest.approx((0, 450))
    assert theme.png(figure)


def test_a_block_is_timed():
    spans = []
    with timeline.span(spans, "sleep", label="s"):
        time.sleep(0.01)
    assert spans[0].seconds >= 0.01
    assert (spans[0].kind, spans[0].lane, spans[0].label) == ("sleep", "compute", "s")


def test_operations_stand_one_after_the_other_and_their_steps_are_left_out():
    def event(op, start_s, within=None):
        return Event(op, (0, 1), 0, None, 8, None, start_s, 0.5, within)

    trace = Trace([event("all_reduce", 1.2), event("exchange", 1.0, "all_reduce"), event("all_gather", 1.0)])
    gather, reduce = timeline.network_spans(trace)
    assert (gather.kind, gather.label, gather.start_s, gather.stop_s) == ("all-gather", "0", 1.0, 1.5)
    assert (reduce.kind, reduce.label, reduce.start_s) == ("all-reduce", "1", 1.5)
    assert reduce.stop_s == pytest.approx(1.7)


def test_hidden_is_what_lies_under_other_work():
    spans = [
        Span("backward", 0.0, 10.0),
        Span("all-reduce", 8.0, 4.0, "network"),
        Span("all-reduce", 9.0, 7.0, "network"),  # together from 8 to 16, of which 2 under backward
    ]
    assert timeline.hidden_share(spans, "backward") == pytest.approx(2 / 8)
    assert timeline.hidden_share(spans, "forward") == 0
    assert timeline.hidden_share([], "backward") == 0
