"""The pictures of chapter 03 show the numbers that they are given, and formulas where they say so."""

import numpy as np
import pytest

from deepseek_lab.viz import data_parallel, theme


def test_measured_numbers_are_drawn_as_they_are():
    (axes,) = data_parallel.draw_bucket_sizes({2000: 0.3, 1000: 0.2}, latency_bytes=1500).axes
    assert [list(values) for values in axes.lines[0].get_data()] == [[1.0, 2.0], [200.0, 300.0]]
    assert axes.lines[1].get_xdata()[0] == 1.5
    (axes,) = data_parallel.draw_curves({"a": [4.0, 2.0, 3.0, 1.0, 9.0]}, every=2, title="losses").axes
    assert [list(values) for values in axes.lines[0].get_data()] == [
        [2, 4],
        [3.0, 2.0],
    ]  # an unfinished mean is left out
    times = {"fast": {"none": 0.1, "int8": 0.2}, "slow": {"none": 1.0, "int8": 0.5}}
    figure = data_parallel.draw_link_times(times)
    (axes,) = figure.axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([100, 1000, 200, 500])
    assert theme.png(figure)


@pytest.mark.parametrize("density", [0.001, 0.01])
def test_top_k_meets_the_whole_gradient_where_the_title_says(density):
    with theme.figure() as (figure, axes):
        data_parallel.draw_bytes_by_ranks(axes, density)
    whole, top = axes.lines[0].get_data(), axes.lines[2].get_data()
    ranks = np.asarray(whole[0])
    less = np.asarray(top[1]) < np.asarray(whole[1])
    assert (less == (ranks < 1 / density)).all()
    assert theme.png(figure)
