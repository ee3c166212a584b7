"""The curve of a run: training loss and validation text, in bits per byte, over the tokens seen."""

from __future__ import annotations

import math
from typing import Any, Protocol

from matplotlib.figure import Figure

from deepseek_lab.viz import theme


class Text(Protocol):
    """As much of a token file as the drawing needs."""

    @property
    def n_tokens(self) -> int: ...

    @property
    def n_bytes(self) -> int: ...


def draw_loss(lines: list[dict[str, Any]], text: Text, baselines: dict[str, float]) -> Figure:
    """Draw recorded steps.

    Args:
        lines: objects of `metrics.jsonl`; those that were evaluated have `val_bits_per_byte`.
        text: the validation tokens, whose bytes a token turn nats a token into bits a byte.
        baselines: bits per byte by name, drawn as level lines.
    """
    bits_per_nat = text.n_tokens / text.n_bytes / math.log(2)
    seen, counts = 0, []
    for line in lines:
        seen += line["tokens"]
        counts.append(seen)
    scale, unit = (1e6, "millions") if seen >= 1e6 else (1e3, "thousands")
    tokens = [count / scale for count in counts]
    with theme.figure(figsize=(8, 4.2)) as (fig, ax):
        losses = [line["loss"] * bits_per_nat for line in lines]
        ax.plot(tokens, losses, lw=1, alpha=0.7, label="training batches")
        points = [(x, line["val_bits_per_byte"]) for x, line in zip(tokens, lines, strict=True) if "val_loss" in line]
        if points:
            ax.plot(*zip(*points, strict=True), "o-", label="validation text")
        for name, bits in baselines.items():
            ax.axhline(bits, lw=1, ls=":", color=theme.INK)
            ax.annotate(name, (1, bits), xycoords=("axes fraction", "data"), fontsize=8, va="center")
        shown = [*losses, *baselines.values(), *(bits for _, bits in points)]
        ax.set_ylim(0.9 * min(shown), min(max(losses), 4.5) * 1.02)
        ax.set_xlabel(f"tokens seen, {unit}")
        ax.set_ylabel("bits per byte")
        ax.legend(loc="upper center")
        return fig
