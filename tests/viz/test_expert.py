"""The pictures of chapter 08 show the numbers that they are given."""

import pytest

from deepseek_lab.viz import expert, theme


def test_a_dot_for_every_visit_and_a_box_for_every_row():
    with theme.figure() as (figure, axes):
        expert.draw_routes(axes, [[0, 1], [3, 0]], token_n=[0, 1, 1], sent_R=[2, 1])
    assert axes.get_title() == (
        "2 tokens of rank 0, 4 visits (dots): 1 rows travel (filled boxes), 2 stay (empty boxes)"
    )
    assert [box.get_fill() for box in axes.patches] == [False, False, True]
    assert axes.collections[0].get_offsets().tolist() == [[0, 0], [0, 1], [1, 3], [1, 0]]
    assert theme.png(figure)


def test_loads_are_multiples_of_the_mean():
    with theme.figure() as (figure, axes):
        expert.draw_loads(axes, {"a": [1, 3, 0, 0], "b": [2, 2, 2, 2]}, n_ranks=2)
    assert [text.get_text() for text in axes.texts] == ["1.0", "3.0", "0.0", "0.0", "1.0", "1.0", "1.0", "1.0"]
    assert theme.png(figure)


def test_the_busiest_rank_is_named():
    with theme.figure() as (_, axes):
        expert.draw_rank_loads(axes, {"before": [6, 2], "after": [4, 4]})
    assert [bar.get_height() for bar in axes.patches] == [1.5, 0.5, 1.0, 1.0]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["before: busiest 1.50 × mean", "after: busiest 1.00 × mean"]


@pytest.mark.parametrize(("ranks", "spare"), [(4, 0), (32, 4)])
def test_the_slider_goes_to_its_ends(ranks, spare):
    with theme.figure() as (figure, axes):
        expert.draw_balance(axes, ranks, skew=1.5, spare=spare)
    assert len(axes.patches) == 2 * ranks
    assert theme.png(figure)


def test_matrices_share_one_scale():
    with theme.figure(ncols=2) as (figure, axes):
        expert.draw_matrices(axes, {"before": [[0, 2048], [1024, 0]], "after": [[0, 1024], [1024, 0]]})
    assert axes[0].get_title() == "before\nto the busiest rank: 2 KiB"
    full, half = (ax.images[0].get_array()[0, 1, 3] for ax in axes)
    assert full > half
    assert theme.png(figure)


def test_lines_are_the_numbers_given():
    losses, norms = (
        {"right": [2.0, 1.0], "suspect": [2.0, 1.1]},
        {"right": {1: 3.0, 2: 3.0}, "suspect": {1: 3.0, 2: 4.0}},
    )
    with theme.figure(ncols=2) as (figure, axes):
        expert.draw_suspect(axes, losses, norms)
    curves = [[list(line.get_ydata()) for line in ax.get_lines()] for ax in axes]
    assert curves == [[[2.0, 1.0], [2.0, 1.1]], [[3.0, 3.0], [3.0, 4.0]]]
    assert theme.png(figure)
