"""One look for every figure: transparent, mid-grey ink, colour-blind safe tones, so that it reads on dark and on light.

with theme.figure(figsize=(7, 3)) as (fig, ax):
    ax.plot(...)
# fig is an ordinary matplotlib figure, not shown yet; theme.png(fig) gives its bytes
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's tones, those that stand out from white and from near-black alike
TONES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
INK = "#808080"
DOTS_PER_INCH = 100  # on the page; stored at twice that, for sharp screens

STYLE: Any = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.prop_cycle": cycler(color=TONES),
    **dict.fromkeys(["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"], INK),
    "axes.titlecolor": INK,
    "axes.titlesize": "medium",
    "grid.color": INK,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


@contextmanager
def figure(*, figsize: tuple[float, float] = (7, 3), **subplots: Any) -> Iterator[tuple[Figure, Any]]:
    """A styled figure and its axes, as from `plt.subplots(**subplots)`, but owned by the caller and never left open."""
    with mpl.rc_context(STYLE):
        fig = Figure(figsize=figsize, layout="constrained")
        FigureCanvasAgg(fig)
        yield fig, fig.subplots(**subplots)


def png(fig: Figure) -> bytes:
    """The figure as PNG bytes, at twice the resolution of the page and without a date in it."""
    with mpl.rc_context(STYLE), io.BytesIO() as stream:
        fig.savefig(stream, format="png", dpi=2 * DOTS_PER_INCH, metadata={"Software": None})
        return stream.getvalue()
