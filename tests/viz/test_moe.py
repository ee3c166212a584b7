"""The pictures of chapter 07 show the numbers that they are given."""

import torch

from deepseek_lab.viz import moe, theme


def heights(axes):
    return [bar.get_height() for bar in axes.patches]


def test_visits_stand_in_order_with_their_mean():
    with theme.figure() as (figure, axes):
        moe.draw_visits(axes, [1, 5, 3])
    assert heights(axes) == [5, 3, 1]
    assert list(axes.get_lines()[0].get_ydata()) == [3, 3]
    assert theme.png(figure)


def test_learning_shows_loss_and_movement():
    figure = moe.draw_learning({"a": {"loss": [3.0, 2.0], "moved": [0.0, 0.5]}})
    left, right = figure.axes
    assert list(left.get_lines()[0].get_ydata()) == [3.0, 2.0]
    assert list(right.get_lines()[0].get_ydata()) == [0.0, 50.0]


def test_loads_have_a_row_for_each_expert_and_a_column_for_each_step():
    loads = [torch.tensor([2.0, 0.0, 1.0])] * 4
    image = moe.draw_loads({"run": loads}).axes[0].get_images()[0]
    assert image.get_array().tolist() == [[0.0] * 4, [1.0] * 4, [2.0] * 4]


def test_lines_are_the_busiest_and_the_dropped():
    with theme.figure(ncols=2) as (figure, (left, right)):
        moe.draw_busiest(left, {"run": [torch.tensor([2.0, 0.0]), torch.tensor([0.5, 1.5])]})
        moe.draw_dropped(right, {"run": [0.5, 0.25]})
    assert list(left.get_lines()[0].get_ydata()) == [2.0, 1.5]
    assert list(right.get_lines()[0].get_ydata()) == [50.0, 25.0]
    assert theme.png(figure)


def test_ranks_share_one_order_and_the_last_row_is_their_sum():
    figure = moe.draw_ranks(["rank 0", "rank 1"], torch.tensor([[4, 0, 1], [0, 2, 3]]))
    assert [heights(axes) for axes in figure.axes] == [[4, 1, 0], [0, 3, 2], [4, 4, 2]]


def test_capacity_names_what_is_lost_and_what_stays_empty():
    with theme.figure() as (_, axes):
        moe.draw_capacity(axes, [6, 2, 0, 0], [3, 2, 0, 0], 1.5)
    assert heights(axes) == [3, 2, 0, 0, 3, 0, 0, 0]
    assert list(axes.get_lines()[0].get_ydata()) == [3.0, 3.0]
    lost, empty = 3 / 8, 1 - 5 / 12
    assert axes.get_title() == f"capacity 1.5 × 2: {lost:.0%} of the visits dropped, {empty:.0%} of the room empty"
