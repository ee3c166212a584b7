"""How a model is cut into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence


def split_layers(n_layers: int, stages: int, given: Sequence[int] | None = None) -> list[range]:
    """Which blocks each stage of a pipeline holds: consecutive, `given` many each, or as equally many as can be.

    Where they cannot be equal the middle stages have one more, and the last, with the head, not before the first.

    Raises:
        ValueError: when there are fewer blocks than stages, or `given` does not name each block once.
    """
    if given is None:
        if n_layers < stages:
            raise ValueError(
                f"num_hidden_layers={n_layers} is too few for {stages} pipeline stages, parallel.pp x parallel.chunks"
            )
        more = n_layers % stages
        first = (stages - more) // 2
        given = [n_layers // stages + (first <= stage < first + more) for stage in range(stages)]
    if len(given) != stages or sum(given) != n_layers or min(given) < 1:
        raise ValueError(
            f"parallel.stage_layers={list(given)} must be {stages} numbers of at least 1, one for each stage, which "
            f"add up to num_hidden_layers={n_layers}"
        )
    ends = [sum(given[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, given, strict=True)]
