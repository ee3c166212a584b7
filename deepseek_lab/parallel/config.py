"""How the ranks are laid out.  The batch is set globally elsewhere; a layout only splits it."""

from __future__ import annotations

from dataclasses import dataclass

COLLECTIVES = ("gloo", "ring")


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism and who carries out collectives.

    `dp`: data-parallel ranks; None takes all there are.  `collectives`: "gloo" leaves them to the process group (NCCL
    on GPUs), "ring" uses the package's own ring over send and receive.
    """

    dp: int | None = None
    collectives: str = "gloo"

    def __post_init__(self) -> None:
        if self.dp is not None and self.dp < 1:
            raise ValueError(f"parallel.dp={self.dp} must be at least 1")
        if self.collectives not in COLLECTIVES:
            raise ValueError(
                f"parallel.collectives={self.collectives!r} is not known; use one of {', '.join(COLLECTIVES)}"
            )

    def check(self, world_size: int) -> None:
        """Raises ValueError when the layout does not use exactly the ranks that were launched."""
        if self.dp not in (None, world_size):
            raise ValueError(
                f"parallel.dp={self.dp} does not match the {world_size} ranks that were launched; set parallel.dp to "
                f"{world_size}, leave it out, or launch with --num_processes {self.dp}"
            )
