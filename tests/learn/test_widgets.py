"""What chapters show: it must make sense with a kernel and without one, in HTML and in plain text."""

import base64

import ipywidgets
import pytest

from deepseek_lab.learn import widgets
from deepseek_lab.learn.chapters import chapters
from deepseek_lab.learn.course import COURSE, course_map
from deepseek_lab.viz import theme

HEAD = "id,chapter,claim,verdict,measured,command\n"


@pytest.fixture
def shown(monkeypatch):
    calls = []
    monkeypatch.setattr(widgets, "display", lambda *args, **kwargs: calls.append((args, kwargs)))
    return calls


@pytest.fixture
def claims(tmp_path, monkeypatch):
    def write(*lines):
        file = tmp_path / "claims.csv"
        file.write_text(HEAD + "\n".join(lines) + "\n")
        rows = widgets.read_claims(file)
        monkeypatch.setattr(widgets, "read_claims", lambda: rows)

    return write


def test_a_slider_redraws_the_figure_and_leaves_a_picture_behind(shown):
    drawn = []
    slider = ipywidgets.IntSlider(3, description="n")
    widgets.slider_figure(lambda axes, n: (drawn.append(n), axes.plot([0, n])), n=slider)
    ((bundle,), _) = shown[0]
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    slider.value = 5
    assert drawn == [3, 5]


def test_claims_are_counted_and_open_ones_folded(claims):
    claims("E1,05,big,confirmed,42 GB,make x", *(f"P{i},0{i},open one {i},open,," for i in range(1, 8)))
    table = widgets.claims_table()
    page = table._repr_html_()
    assert "8 claims: 1 settled, 7 open" in page
    assert page.index("42 GB") < page.index("<details")
    assert "make x" in page
    assert "E1   confirmed: big 42 GB" in repr(table)


def test_claims_of_one_chapter(claims):
    claims("P1,09;20,layout,open,,", "E1,05,big,open,,")
    assert "1 claim: 0 settled" in repr(widgets.claims_table("20"))
    assert "layout" in repr(widgets.claims_table("09"))


def test_shipped_claims_are_complete():
    rows = widgets.read_claims()
    assert len({row["id"] for row in rows}) == len(rows) == 40
    for row in rows:
        assert row["claim"]
        assert row["chapter"]
        if row["verdict"]:
            starts = ("confirmed", "holds only if", "corrected", "cannot be tested here")
            assert row["verdict"].startswith(starts), row
            assert row["measured"], f"{row['id']} is settled without a number"
            assert row["command"], f"{row['id']} is settled without a command"


def test_cost_box_says_the_same_in_both_forms():
    box = widgets.cost_box(minutes=2, ranks=4, memory="1 GB", at_scale="an `hour`", before="chapter 01")
    for fact in ("2 min", "1 GB", "chapter 01"):
        assert fact in repr(box)
        assert fact in box._repr_html_()
    assert "<code>hour</code>" in box._repr_html_()


def test_the_map_has_every_chapter_once():
    names = [entry.name for entries in COURSE.values() for entry in entries]
    assert [name[:2] for name in names] == [f"{n:02d}" for n in range(25)]
    assert {chapter.name for chapter in chapters()} <= set(names)
    assert repr(course_map()).count("(to come)") == 25 - len(chapters())


def test_figures_are_transparent_and_the_same_every_time():
    """Stored outputs must not change because of a date or a version in the file."""

    def draw():
        with theme.figure(figsize=(2, 1)) as (figure, axes):
            axes.plot([1, 2])
            assert figure.get_facecolor()[3] == axes.get_facecolor()[3] == 0
            return theme.png(figure)

    assert draw() == draw()
    assert b"Software" not in draw()
