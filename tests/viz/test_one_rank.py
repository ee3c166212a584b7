"""The drawings of chapter 01 show the numbers that they are given, and mark what their captions speak of."""

import pytest

from deepseek_lab.viz import one_rank, theme


def curves(axes):
    return [list(line.get_ydata()) for line in axes.get_lines()]


def test_depth_and_scores_show_every_number():
    sizes = {"plain": [1.0, 10.0, 100.0], "normed": [1.0, 2.0, 3.0]}
    assert curves(one_rank.draw_depth(sizes).axes[0]) == list(sizes.values())
    scores = {200: ([0, 3], [16.0, 11.0]), 4000: ([0, 3], [16.0, 11.0])}
    assert curves(one_rank.draw_scores(scores).axes[0]) == [[16.0, 11.0]] * 2


def test_only_a_lowest_point_inside_the_range_gets_a_dot():
    axes = one_rank.draw_confidence([0, 1, 2, 3], {0.0: [4, 3, 2, 1], 0.1: [4, 2, 1, 3]}).axes[0]
    assert curves(axes) == [[4, 3, 2, 1], [4, 2, 1, 3], [1]]


def test_negative_rates_are_inside_the_picture():
    with theme.figure() as (_, axes):
        one_rank.draw_schedules(axes, {"up": lambda step: step / 100, "down": lambda step: -step / 50}, 100)
        assert axes.get_ylim()[0] <= -99 / 50
        assert min(curves(axes)[1]) == pytest.approx(-99 / 50)


def test_shares_and_utilization_are_drawn_in_per_cent():
    assert curves(one_rank.draw_context_cost([256, 512], {"tiny": [0.1, 0.2]}).axes[0]) == [[10.0, 20.0]]
    axes = one_rank.draw_utilization({"high": 0.6, "low": 0.2}, target=0.5).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [20.0, 60.0]
    assert axes.get_lines()[0].get_xdata()[0] == 50


def test_next_token_bars_and_curves_by_step():
    with theme.figure() as (_, axes):
        one_rank.draw_next_token(axes, ["a", "b"], [0.5, 0.3], [0.9, 0.1])
        assert [bar.get_height() for bar in axes.patches] == [0.5, 0.3, 0.9, 0.1]
    line = one_rank.draw_curves({"seen": [3.0, 2.0]}, 5, "bits", "title").axes[0].get_lines()[0]
    assert list(line.get_xdata()) == [5, 10]
