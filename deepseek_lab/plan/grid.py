"""Which rank is where in the grid of all ranks.

The one idea: a rank's number is a number in mixed radix.  Its last digit is its place along the innermost axis, so that
neighbouring ranks differ there first; the innermost axis takes what talks most, since neighbours share the fast links.
(Megatron-LM, arXiv 2104.04473, section 3: tensor parallelism inside a node, the pipeline between nodes.)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping


def coordinates(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """The place of `rank` along every axis of a grid.

    Args:
        sizes: ranks along each axis, by its name, the outermost axis first; the product is the number of ranks.

    Returns:
        By axis, in the same order, a number from 0 to the axis's size, excluded.

    Raises:
        ValueError: when the grid has no such rank.
    """
    place, inside = {}, math.prod(sizes.values())
    if not 0 <= rank < inside:
        raise ValueError(f"rank={rank} is not in a grid of {dict(sizes)}; it has ranks 0 to {inside - 1}")
    for axis, size in sizes.items():
        inside //= size  # ranks from one step along this axis to the next
        place[axis], rank = divmod(rank, inside)
    return place


def members(rank: int, axes: Collection[str], sizes: Mapping[str, int]) -> list[int]:
    """The ranks that differ from `rank` along `axes` only, and itself, in order: its group."""

    def fixed(other: int) -> list[int]:
        return [n for axis, n in coordinates(other, sizes).items() if axis not in axes]

    return [other for other in range(math.prod(sizes.values())) if fixed(other) == fixed(rank)]
