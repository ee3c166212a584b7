"""What a rank really sent: every operation of torch.distributed, also those that bypass our own door.

Graders count traffic, and a grader that trusts the meter of `parallel.collectives` can be walked around.  All
collectives and messages of torch.distributed pass torch's dispatcher as operations named `c10d::...`; a dispatch mode
sees them there, whatever name they were called by, in forward and in backward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepseek_lab.parallel import meter

# torch's name -> (the usual name, which argument holds what is sent)
_NAMES = {
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
}


@dataclass(frozen=True)
class Call:
    """One operation: its name, the bytes handed over and their type, and whether it went through our own door."""

    op: str
    payload_bytes: int
    our_door: bool
    dtype: torch.dtype | None = None


@contextmanager
def wiretap(before: Callable[[], object] = lambda: None) -> Iterator[list[Call]]:
    """Collect this rank's operations inside the block, in order: `with wiretap() as calls: ...`.

    `before` is called ahead of each, before it can wait for anybody.
    """
    tap = _Tap(before)
    with tap:
        yield tap.calls


class _Tap(TorchDispatchMode):
    def __init__(self, before: Callable[[], object]) -> None:
        super().__init__()
        self.before = before
        self.calls: list[Call] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler first: three seconds in every rank, and nothing is compiled here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            torch_name = func.name().partition("::")[2].partition(".")[0]
            op, payload = _NAMES.get(torch_name, (torch_name, 0))
            leaves = tree_leaves(args[payload]) if len(args) > payload else []
            leaves = [x for x in leaves if isinstance(x, torch.Tensor)]
            n_bytes, dtype = sum(x.nbytes for x in leaves), leaves[0].dtype if leaves else None
            self.calls.append(Call(op, n_bytes, meter.inside_operation(), dtype))
            self.before()
        return func(*args, **(kwargs or {}))
