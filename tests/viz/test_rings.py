"""The pictures of chapter 02 say what the plans say."""

import matplotlib.text
import pytest

from deepseek_lab.plan import network
from deepseek_lab.viz import rings, theme


@pytest.mark.parametrize(("ranks", "row"), [(2, 0), (4, 0), (4, 3), (8, 5), (3, 7)])
def test_a_row_travels_from_behind_its_owner_to_its_owner(ranks, row):
    with theme.figure() as (figure, axes):
        rings.draw_row_journey(axes, ranks, row)
    arrows = [a for a in axes.get_children() if isinstance(a, matplotlib.text.Annotation)]
    place = {t.get_text(): t.get_position() for t in axes.texts if t.get_text().startswith("rank")}
    assert len(place) == ranks
    assert len(arrows) == ranks - 1
    assert arrows[0].xyann == pytest.approx(place[f"rank {(row + 1) % ranks}"])
    assert arrows[-1].xy == pytest.approx(place[f"rank {row % ranks}"])
    assert theme.png(figure)


@pytest.mark.parametrize("ranks", [3, 4, 4096])
def test_ring_and_tree_cross_where_the_plan_says(ranks):
    with theme.figure() as (_, axes):
        rings.draw_ring_and_tree(axes, ranks, 10)
    cross = network.ring_beats_tree_from(ranks, 10e-6, 50e9)
    marks = [line.get_xdata()[0] for line in axes.lines[2:]]
    assert marks == pytest.approx([] if ranks == 3 else [cross])


def test_measured_points_are_drawn_as_they_are():
    with theme.figure() as (figure, axes):
        rings.draw_shares(axes, {"star": {2: 1.0, 4: 3.0}, "ring": {2: 1.0, 4: 1.5}})
    assert [list(line.get_ydata()) for line in axes.lines] == [[1.0, 3.0], [1.0, 1.5]]
    with theme.figure() as (figure, axes):
        rings.draw_fits(axes, [1e3, 1e6], {"link": ([0.01, 0.02], 0.01, 1e8)})
        rings.draw_losses(axes, {"right": [1.0, 0.1], "wrong": [1.0, 2.0]})
    assert list(axes.lines[0].get_ydata()) == [10.0, 20.0]
    assert theme.png(figure)
