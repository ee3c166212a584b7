"""What a grader says: passed or not, why, which misconception it recognised, and what was asked against what came out.

A grader returns `ok(...)` or `wrong(...)`.  A verdict draws itself: a coloured card in Jupyter, plain text elsewhere.
Colours are translucent, so the card can be read on a dark page and on a light one, and no meaning rests on colour
alone.
"""

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

Row = tuple[str, Any, Any]  # label, expected, got

PASSED, WRONG, OPEN = "0, 158, 115", "213, 94, 0", "86, 130, 180"  # as "red, green, blue"; colour-blind safe


@dataclass
class Verdict:
    """The outcome of one check.  `rows` holds (label, expected, got); `detail` is shown as it is, in fixed width."""

    passed: bool
    summary: str
    misconception: str | None = None
    rows: list[Row] = field(default_factory=list)
    detail: str = ""
    title: str = ""
    written: bool = True  # False: there was nothing to grade yet

    @property
    def headline(self) -> str:
        word = "passed" if self.passed else "not right yet" if self.written else "not yet"
        return f"{self.title}: {word}" if self.title else word

    def __repr__(self) -> str:
        lines = [self.headline, *_indent(self.summary)]
        if self.misconception:
            lines += _indent(f"Recognised: {self.misconception}.")
        for label, expected, got in self.rows:
            lines += _indent(f"{label}: expected {short(expected)}, got {short(got)}")
        return "\n".join(lines + _indent(self.detail))

    def _repr_html_(self) -> str:
        tone = PASSED if self.passed else WRONG if self.written else OPEN
        mark = "✓" if self.passed else "✗" if self.written else "○"
        state = "passed" if self.passed else "wrong" if self.written else "open"
        parts = [f'<div style="font-weight:600">{mark} {html.escape(self.headline)}</div>', _paragraph(self.summary)]
        if self.misconception:
            parts.append(_paragraph(f"Recognised: {self.misconception}.", "font-style:italic"))
        if self.rows:
            parts.append(_table(self.rows))
        if self.detail:
            parts.append(f'<pre style="margin:6px 0 0;white-space:pre-wrap">{html.escape(self.detail)}</pre>')
        return card("".join(parts), tone, f"lab-verdict lab-{state}")


def ok(summary: str, rows: Iterable[Row] = ()) -> Verdict:
    """The answer is right; `summary` says what was looked at, or what it cost."""
    return Verdict(True, summary, rows=list(rows))


def wrong(summary: str, misconception: str | None = None, rows: Iterable[Row] = ()) -> Verdict:
    """The answer is not right.  Name the `misconception` where a known one matches, in a few plain words."""
    return Verdict(False, summary, misconception, list(rows))


def distance(got: Any, expected: Any) -> float:
    """‖got - expected‖₂ / ‖expected‖₂ in fp64; absolute where `expected` is zero, infinite where shapes differ."""
    try:
        a, b = (_in_fp64(x) for x in (got, expected))
    except (TypeError, ValueError, RuntimeError):
        return float("inf")
    if a.shape != b.shape or not bool(torch.isfinite(a).all()):
        return float("inf")
    size = float(torch.linalg.vector_norm(b))
    return float(torch.linalg.vector_norm(a - b)) / (size or 1.0)


def _in_fp64(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", torch.float64)
    return torch.as_tensor(value, dtype=torch.float64)  # Python's floats would otherwise lose half their digits


def close(got: Any, expected: Any, tolerance: float = 1e-9) -> bool:
    """Whether two numbers, lists or tensors agree, norm-wise and relatively.  Numbers that equal pass any tolerance."""
    return distance(got, expected) <= tolerance


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The value itself, or what lies in its lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def kept_for_backward(y: Any) -> list[torch.Tensor]:
    """What the `autograd.Function` that made `y` keeps: saved, or left on ctx; nothing where none made it."""
    node = getattr(y, "grad_fn", None)
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return []
    return tensors_in([*node.saved_tensors, vars(node)])


def short(value: Any) -> str:
    """A value as one short line: numbers to six digits, small tensors whole, large ones by shape and norm."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.numel() <= 8:
            return short(value.tolist())
        kind = str(value.dtype).removeprefix("torch.")
        norm = float(torch.linalg.vector_norm(value.to(torch.float64)))
        return f"{kind} tensor of shape {tuple(value.shape)}, norm {norm:.6g}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(short(x) for x in value)
        text = f"[{inner}]" if isinstance(value, list) else f"({inner})"
    else:
        text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 120 else text[:117] + "…"


def card(inner: str, tone: str, classes: str = "") -> str:
    """An HTML box with a coloured edge; `tone` is "red, green, blue"."""
    style = (
        f"border-left:4px solid rgb({tone});background:rgba({tone},0.10);padding:8px 12px;margin:4px 0;"
        "border-radius:3px;max-width:60em;line-height:1.45"
    )
    return f'<div class="{classes}" style="{style}">{inner}</div>'


def code_in_text(text: str) -> str:
    """Escaped for HTML, with `code` in backquotes set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _paragraph(text: str, style: str = "") -> str:
    return f'<div style="margin-top:4px;white-space:pre-wrap;{style}">{code_in_text(text)}</div>'


def _table(rows: Sequence[Row]) -> str:
    cell = "padding:2px 14px 2px 0;text-align:left;vertical-align:top"
    head = "".join(f'<th style="{cell};font-weight:600">{name}</th>' for name in ("", "asked", "yours"))
    plain = '<tr style="background:transparent">'  # Jupyter would stripe it
    body = "".join(
        plain + "".join(f'<td style="{cell}">{html.escape(short(x))}</td>' for x in row) + "</tr>" for row in rows
    )
    table = "border-collapse:collapse;color:inherit;margin:6px 0 0;font-variant-numeric:tabular-nums"
    return f'<table style="{table}"><thead>{plain}{head}</tr></thead><tbody>{body}</tbody></table>'


def _indent(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]
