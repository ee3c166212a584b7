"""What chapters share on the page.

`cost_box` opens a chapter, `claims_table` shows the claims and what became of them, `show_figure` shows a figure of
`viz.theme`, and `slider_figure` is a figure with sliders that keeps its picture without a kernel.
"""

import base64
import csv
import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets
from IPython.display import Image, display
from matplotlib.figure import Figure

from deepseek_lab.learn.verdict import OPEN, PASSED, WRONG, card, code_in_text
from deepseek_lab.viz import theme, traffic


class Html:
    """HTML for Jupyter with a plain text beside it."""

    def __init__(self, page: str, text: str) -> None:
        self.page, self.text = page, text

    def _repr_html_(self) -> str:
        return self.page

    def __repr__(self) -> str:
        return self.text


def cost_box(*, minutes: float, ranks: int, memory: str, at_scale: str, before: str) -> Html:
    """The box that opens a chapter: what it costs here, what it would be at scale, what to have done before.

    `minutes` of a laptop's time for the cells alone; `memory` such as "300 MB"; `before` such as "chapter 01".
    """
    facts = [
        ("Running it", f"{minutes:g} min on a laptop with two cores"),
        ("Ranks", f"{ranks}" if ranks > 1 else "1, this kernel"),
        ("Peak memory", memory),
        ("On 8 GPUs", at_scale),
        ("Before this", before),
    ]
    cell = "padding:1px 16px 1px 0;text-align:left;vertical-align:top"
    dim = f"{cell};opacity:0.75"
    plain = '<tr style="background:transparent">'  # Jupyter would stripe it
    rows = "".join(f'{plain}<td style="{dim}">{k}</td><td style="{cell}">{code_in_text(v)}</td></tr>' for k, v in facts)
    table = f'<table style="color:inherit;border-collapse:collapse;margin:0"><tbody>{rows}</tbody></table>'
    return Html(card(table, OPEN, "lab-cost"), "\n".join(f"{k + ':':<13}{v}" for k, v in facts))


def claims_table(chapter: str | None = None) -> Html:
    """The claims that the course tests, with verdict, the number measured and the command that prints it.

    `chapter` such as "01" keeps those of one chapter.  Read from docs/claims.csv (id, chapter, claim, verdict,
    measured, command); a claim without a verdict is open, and open ones are folded away when there are many.
    Raises FileNotFoundError outside of a checkout.
    """
    rows = [r for r in read_claims() if chapter is None or chapter in _numbers(r["chapter"])]
    settled, still_open = [r for r in rows if r["verdict"]], [r for r in rows if not r["verdict"]]
    count = f"{len(rows)} claim{'s' * (len(rows) != 1)}: {len(settled)} settled, {len(still_open)} open"
    page = [f'<div class="lab-claims"><b>{count}</b>']
    if settled or len(rows) <= 6:
        page.append(_claims(settled or rows, ("", "chapter", "claim", "verdict", "measured")))
    if still_open and (settled or len(rows) > 6):
        fold = '<summary style="cursor:pointer">those still open</summary>'
        page.append(f'<details style="margin:6px 0">{fold}{_claims(still_open, ("", "chapter", "claim"))}</details>')
    lines = [f"{r['id']:<4} {r['verdict'] or 'open'}: {r['claim']} {r['measured']}".rstrip() for r in rows]
    return Html("".join([*page, "</div>"]), "\n".join([count, *lines]))


def _claims(rows: list[dict[str, str]], columns: tuple[str, ...]) -> str:
    cell = "padding:4px 14px 4px 0;text-align:left;vertical-align:top"
    head = "".join(f'<th style="{cell}">{name}</th>' for name in columns)
    lines = ("".join(f'<td style="{cell}">{x}</td>' for x in _claim_cells(row)[: len(columns)]) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<table style="color:inherit;border-collapse:collapse">{table}</table>'


def read_claims(file: Path | None = None) -> list[dict[str, str]]:
    """The rows of docs/claims.csv, stripped.  A verdict of "open" or nothing both come out as ""."""
    file = file or Path(__file__).resolve().parents[2] / "docs" / "claims.csv"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: the claims table needs a checkout, not only the installed package")
    with file.open(encoding="utf-8", newline="") as stream:
        rows = [{k: (v or "").strip() for k, v in row.items()} for row in csv.DictReader(stream)]
    for row in rows:
        row["verdict"] = "" if row["verdict"].lower() == "open" else row["verdict"]
    return rows


def _numbers(chapters: str) -> list[str]:
    return [part.strip() for part in chapters.replace(";", ",").split(",")]


def _claim_cells(row: dict[str, str]) -> list[str]:
    tone = {"": OPEN, "confirmed": PASSED}.get(row["verdict"].lower(), WRONG)
    edge = f"border-left:3px solid rgb({tone});padding-left:6px"
    verdict = f'<span style="{edge}">{code_in_text(row["verdict"] or "open")}</span>'
    command = f'<div style="opacity:0.75"><code>{html.escape(row["command"])}</code></div>' if row["command"] else ""
    measured = code_in_text(row["measured"]) + command
    return [f"<b>{row['id']}</b>", code_in_text(row["chapter"]), code_in_text(row["claim"]), verdict, measured]


def show_figure(figure: Figure) -> None:
    """Show a figure made with `viz.theme.figure`, sharp, and readable on dark and light pages."""
    width = int(figure.get_figwidth() * theme.DOTS_PER_INCH)
    display(Image(theme.png(figure), format="png", width=width))


def show_traffic(traces: traffic.Traces) -> None:
    """Show who sent how much to whom: `traces` are the `record()`s that ranks returned (viz.traffic.draw_traffic)."""
    show_figure(traffic.draw_traffic(traces))


def slider_figure(
    draw: Callable[..., None], *, figsize: tuple[float, float] = (7, 3), **sliders: ipywidgets.Widget
) -> None:
    """Show what `draw(axes, **values)` draws, above one slider per value, and redraw it as they move.

    The sliders are ipywidgets with a description.  The first picture is stored in the notebook beside the live one,
    so that the page makes sense without a kernel.
    """

    def picture() -> bytes:
        with theme.figure(figsize=figsize) as (figure, axes):
            draw(axes, **{name: slider.value for name, slider in sliders.items()})
            return theme.png(figure)

    first = picture()
    width = int(figsize[0] * theme.DOTS_PER_INCH)
    image = ipywidgets.Image(value=first, format="png", width=width)
    image.add_class("lab-figure")

    def redraw(_: Any) -> None:
        image.value = picture()

    for slider in sliders.values():
        slider.style.description_width, slider.layout.width = "13em", "34em"
        slider.continuous_update = (
            False  # a figure takes a quarter of a second: draw the last value, not all on the way
        )
        slider.observe(redraw, names="value")
    live = ipywidgets.VBox([image, *sliders.values()])
    words = f"a figure with sliders for {', '.join(sliders)}"
    bundle = {**live._repr_mimebundle_(), "image/png": base64.b64encode(first).decode(), "text/plain": words}
    display(bundle, raw=True, metadata={"image/png": {"width": width}})
