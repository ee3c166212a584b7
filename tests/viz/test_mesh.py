"""The pictures of chapter 09 show the groups, deviations and shares that they are given."""

from deepseek_lab.viz import mesh, theme

SIZES = {"pp": 2, "edp": 1, "ep": 2, "tp": 2}


def tones_of(axes):
    return [patch.get_facecolor() for patch in axes.patches]


def test_a_colour_is_a_group():
    with theme.figure(ncols=3) as (figure, panels):
        for axes, axis in zip(panels, ("tp", "dp", "pp"), strict=True):
            mesh.draw_groups(axes, SIZES, axis, node=4)
        tp, dp, pp = (tones_of(axes) for axes in panels)
    assert [tp.index(tone) for tone in tp] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert [dp.index(tone) for tone in dp] == [0, 1, 0, 1, 4, 5, 4, 5]
    assert [pp.index(tone) for tone in pp] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [axes.get_title() for axes in panels] == [
        "tp: 4 groups of 2\nnone across nodes",
        "dp: 4 groups of 2\nnone across nodes",
        "pp: 4 groups of 2\n4 across nodes",
    ]
    assert theme.png(figure)


def test_with_more_groups_than_colours_only_the_first_has_one():
    with theme.figure() as (_, axes):
        mesh.draw_groups(axes, {"pp": 1, "edp": 8, "ep": 1, "tp": 4}, "tp", node=8)
    assert [tone[3] > 0 for tone in tones_of(axes)] == [True] * 4 + [False] * 28


def test_a_choice_that_cannot_be_says_why():
    with theme.figure(ncols=2) as (_, (left, right)):
        mesh.draw_choice(left, tp=8, pp=4, ep=2, axis="tp")
        mesh.draw_choice(right, tp=16, pp=2, ep=1, axis="tp")
    assert left.texts[0].get_text() == "tp 8 x pp 4 x ep 2 = 64 does not divide 32 ranks"
    assert right.get_title() == "tp: 2 groups of 16\n2 across nodes"


def test_what_is_only_rounding_has_no_colour():
    with theme.figure() as (figure, axes):
        mesh.draw_deviations(axes, {"right": {"a": 1e-16, "b": 0.0}, "wrong": {"a": 2e-16, "b": 0.5}})
    assert [tone[3] > 0 for tone in tones_of(axes)] == [False, False, False, True]
    assert [text.get_text() for text in axes.texts] == ["1e-16", "0e+00", "2e-16", "50%"]
    assert theme.png(figure)


def test_waiting_is_drawn_longest_on_top():
    with theme.figure() as (figure, axes):
        mesh.draw_waiting(axes, {"tp": {"share": 0.3, "bytes": 2e3}, "dp": {"share": 0.1, "bytes": 5e6}})
    assert [bar.get_width() for bar in axes.patches] == [10.0, 30.0]
    assert [text.get_text() for text in axes.texts] == [" 5,000 kB", " 2 kB"]
    assert theme.png(figure)
