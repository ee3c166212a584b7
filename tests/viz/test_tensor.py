"""The pictures of chapter 04 show the numbers that they are given."""

import pytest

from deepseek_lab.viz import tensor, theme


def curves(axes):
    return [list(line.get_ydata()) for line in axes.get_lines()]


def test_both_splits_show_every_rank():
    figure = tensor.draw_splits()
    for axes in figure.axes:
        ranks = [text.get_text() for text in axes.texts if text.get_text().isdigit()]
        assert ranks == ["0", "1", "2", "3"] * 2
    assert theme.png(figure)


def test_lines_are_the_numbers_given():
    costs = {"gather": [3072.0, 12288.0], "exchange": [18.0, 18.0]}
    assert curves(tensor.draw_vocabulary([1024, 4096], costs).axes[0]) == list(costs.values())
    crossing = {"dp 4": [16.0, 16.0], "inside": [11.0, 11.0], "across": [5.6, 20.6]}
    assert curves(tensor.draw_nodes([512, 2048], crossing).axes[0]) == list(crossing.values())


def test_an_even_split_starts_at_what_one_rank_keeps():
    kept = {"without": {1: 12.0, 2: 9.0, 4: 7.0}, "with": {1: 12.0, 2: 8.0, 4: 5.0}}
    without, with_it, even = curves(tensor.draw_kept(kept).axes[0])
    assert (without, with_it) == ([12.0, 9.0, 7.0], [12.0, 8.0, 5.0])
    assert even == pytest.approx([12.0, 6.0, 3.0])


def test_bars_carry_their_losses():
    losses = {"fresh": {"right": 8.3, "suspect": 8.4}, "trained": {"right": 4.2, "suspect": 9.5}}
    axes = tensor.draw_two_models(losses).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [8.3, 4.2, 8.4, 9.5]


def test_links_are_drawn_beside_the_matmuls():
    with theme.figure() as (figure, axes):
        tensor.draw_links(axes, [20.0, 10.0], {"fast": [1.0, 2.0], "slow": [5.0, 7.0]}, [2, 4])
    assert curves(axes) == [[20.0, 10.0], [1.0, 2.0], [5.0, 7.0]]
    assert theme.png(figure)
