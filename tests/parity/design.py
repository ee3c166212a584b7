"""Which layouts to try, when all of them are too many: covering designs.

The one idea: mistakes come from two or three settings meeting, hardly ever from five.  A design of strength t contains
every possible combination of any t settings in at least one of its cells (Cohen et al., "The AETG system", IEEE TSE
1997).  Built greedily, and without chance: the same axes always give the same cells.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Axes = Mapping[str, Sequence[Any]]
Cell = dict[str, Any]
Setting = tuple[str, Any]

AXES: dict[str, tuple[Any, ...]] = {
    "dp": (1, 2, 4),
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "ep": (1, 2, 4),
    "schedule": ("1f1b", "gpipe", "interleaved", "zb_h1", "zb_h2", "dualpipe_v"),
    "zero_stage": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "accumulation": (1, 3),
    "recompute": ("none", "selective", "full"),
    "tied": (False, True),
    "q_lora_rank": (24, None),
    "capacity_factor": (None, 1.0),
    "uneven": (False, True),
    "collectives": ("gloo", "ring"),
    "overlap": (True, False),
}
MOST_RANKS = 8


def world_size(cell: Cell) -> int:
    return cell.get("dp", 1) * cell.get("tp", 1) * cell.get("pp", 1)


def possible(cell: Cell, most_ranks: int = MOST_RANKS) -> bool:
    """Whether a cell, or some of its settings, can be run."""
    if world_size(cell) > most_ranks:
        return False
    if cell.get("sequence_parallel") and cell.get("tp") == 1:
        return False
    if cell.get("dp", 4) % cell.get("ep", 1):
        return False
    if most_ranks // cell.get("tp", 1) // cell.get("pp", 1) < cell.get("ep", 1):  # no room for as large a dp
        return False
    if cell.get("engine") == "torch" and cell.get("pp", 1) > 1 and cell.get("tied"):
        return False
    return not (cell.get("schedule", "1f1b") != "1f1b" and cell.get("pp") == 1)  # one rank has nothing to schedule


def of_sixteen(cell: Cell) -> bool:
    """Whether a cell is possible on 16 ranks, all of them in use."""
    degrees = [cell.get(axis) for axis in ("dp", "tp", "pp")]
    return possible(cell, 16) and (None in degrees or math.prod(degrees) == 16)  # type: ignore[type-var]


def covering(axes: Axes, strength: int, possible: Callable[[Cell], bool] = possible) -> list[Cell]:
    """Cells in which every possible combination of settings of any `strength` axes occurs."""
    missing = dict.fromkeys(
        together
        for names in combinations(axes, strength)
        for together in _settings({name: axes[name] for name in names})
        if any(True for _ in completions(dict(together), axes, possible))
    )
    cells = []
    while missing:
        cell = dict(next(iter(missing)))
        for name in sorted((name for name in axes if name not in cell), key=lambda name: -len(axes[name])):
            choices = [{**cell, name: value} for value in axes[name]]
            fit = [c for c in choices if any(True for _ in completions(c, axes, possible))]
            cell = max(fit, key=lambda c: len(_covered(c, name, missing)))
        cells.append({name: cell[name] for name in axes})
        for together in [t for t in missing if t <= frozenset(cell.items())]:
            del missing[together]
    return cells


def _settings(axes: Axes) -> Iterator[frozenset[Setting]]:
    for values in product(*axes.values()):
        yield frozenset(zip(axes, values, strict=True))


def _covered(cell: Cell, newest: str, missing: Mapping[frozenset[Setting], None]) -> list[frozenset[Setting]]:
    """The missing combinations that `cell` holds thanks to its newest setting."""
    settings, new = frozenset(cell.items()), (newest, cell[newest])
    return [together for together in missing if new in together and together <= settings]


def completions(cell: Cell, axes: Axes, possible: Callable[[Cell], bool]) -> Iterator[Cell]:
    """The possible cells that have the settings of `cell`."""
    if not possible(cell):
        return
    open_axes = [name for name in axes if name not in cell]
    if not open_axes:
        yield cell
        return
    for value in axes[open_axes[0]]:
        yield from completions({**cell, open_axes[0]: value}, axes, possible)
