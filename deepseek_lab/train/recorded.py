"""One step, looked at closely: which axis of the mesh it waited for, and what each pipeline rank did when."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.mesh import Mesh


@dataclass(frozen=True)
class RecordedStep:
    """What all ranks recorded of one step.

    `axes`: for each axis of the mesh how long a rank stood still for its messages, the mean over ranks as a share of
    the step, and how many bytes a rank handed over.  `pipeline`: the spans of the ranks of one pipeline, first to last.
    """

    step: int
    seconds: float
    axes: dict[str, dict[str, float]]
    pipeline: list[list[Any]]


def gather(step: int, seconds: float, trace: collectives.Trace, spans: list[Any], mesh: Mesh) -> RecordedStep:
    """Put together what every rank recorded; collective."""
    waited: defaultdict[str, float] = defaultdict(float)
    handed: defaultdict[str, float] = defaultdict(float)
    for event in trace.events:
        if event.within is None:
            axis = axis_of(event, mesh)
            waited[axis] += event.blocked_s
            handed[axis] += event.payload_bytes if event.op != "recv" else 0
    shown = spans if mesh.rank("dp") == mesh.rank("tp") == 0 else []
    every = collectives.all_gather_object((seconds, waited, handed, mesh.rank("pp"), shown), mesh.group("world"))
    axes = sorted({axis for _, theirs, _, _, _ in every for axis in theirs})
    by_stage = sorted((stage, theirs) for _, _, _, stage, theirs in every if theirs)
    return RecordedStep(
        step,
        max(seconds for seconds, *_ in every),
        {
            axis: {
                "share": sum(theirs[axis] / took for took, theirs, *_ in every) / len(every),
                "bytes": sum(theirs[axis] for _, _, theirs, _, _ in every) / len(every),
            }
            for axis in axes
        },
        [theirs for _, theirs in by_stage],
    )


def axis_of(event: collectives.Event, mesh: Mesh) -> str:
    """The axis of the mesh that an operation of this rank went along: that whose group has `event.group_ranks`.

    Several axes can have the same ranks.  Then what was sent tells them apart: only experts exchange tokens, by
    all-to-all.  (So do int8 sums of gradients, which are put down to "ep" where dp has the same ranks.)  And the two
    ends of a pipeline add up, while its stages send and receive.

    Args:
        event: a whole operation, never a step of one.  Its `op` is a name such as "all_to_all", "all_reduce",
            "all_gather", "reduce_scatter", "send" or "recv".

    Returns:
        "tp", "pp", "dp", "edp", "ep" or "ends": one with more than one rank (`mesh.size`), whose group (`mesh.group`)
        has these ranks (`collectives.ranks_of`); "dp" where dp and edp are one.  "world" only if there is no such axis.
    """
    axes = {"all_to_all": ["ep"], "all_reduce": ["ends"]}.get(event.op, [])
    for axis in [*axes, "tp", "pp", "dp", "edp", "ep"]:
        if mesh.size(axis) > 1 and collectives.ranks_of(mesh.group(axis)) == event.group_ranks:
            return axis
    return "world"
