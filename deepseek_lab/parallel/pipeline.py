"""Pipeline parallelism: ranks hold consecutive stages of the model, and micro-batches travel through them.

The one idea: a schedule is a list of actions (`plan/schedules.py`), and one executor carries out any of them.  It keeps
each micro-batch's input and output from forward to backward, hands results on, and knows nothing of models: a `Stage`
does.  Between two stages only an activation travels, and its gradient back.

A backward that the schedule splits in two is walked once, as I; what W does later was put off by
`model/split_backward.py`.  Messages are posted where the schedule says, and waited for when they are needed, so that
they travel while the rank computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from deepseek_lab.model import split_backward
from deepseek_lab.model.split_backward import WeightParts
from deepseek_lab.plan.schedules import Action, Schedule, direction

from . import collectives

MOST_SENDS = 8  # messages on their way at once; each holds its tensor


class Stage:
    """What the executor needs of one chunk of the model on this rank."""

    def forward(self, m: int, x: Tensor | None) -> Tensor:
        """Micro-batch `m` through this stage: what the next one reads, or on the last stage the loss, a scalar.

        `x` is what the stage before gave, None on the first.
        """
        raise NotImplementedError

    def input_like(self, m: int) -> Tensor:
        """An empty tensor of the shape and type of micro-batch `m`'s input."""
        raise NotImplementedError

    def around_backward(self, m: int, kind: str, parts: WeightParts) -> contextlib.AbstractContextManager:
        """Entered around the backward of `m`, of kind B, I or W; `parts`: what W is going to work out."""
        return contextlib.nullcontext()

    def update(self, m: int) -> None:
        """Update the weights after the backward of `m`, where the schedule does so at once (U)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Span:
    """One recorded action of this rank, from `start_s` to `end_s` on `time.monotonic()`."""

    action: Action
    start_s: float
    end_s: float


class Executor:
    """Carries out one rank's part of a schedule.

    Args:
        stages: one for each chunk of this rank.
        group: the pipeline's ranks, in order.

    Raises:
        ValueError: when the number of ranks or of stages is not the schedule's.
    """

    def __init__(self, schedule: Schedule, stages: Sequence[Stage], group: dist.ProcessGroup | None = None):
        if collectives.size_of(group) != schedule.ranks or len(stages) != schedule.chunks:
            raise ValueError(
                f"{schedule.name} is for {schedule.ranks} ranks of {schedule.chunks} chunks, "
                f"not for {collectives.size_of(group)} ranks of {len(stages)}"
            )
        self.schedule, self.stages, self.group = schedule, stages, group
        self.rank = collectives.rank_in(group)
        self.splits = any(step.kind == "W" for action in schedule.compute[self.rank] for step in action.steps())
        self.spans: list[Span] = []
        self.peak_activations = 0
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # (micro-batch, chunk): input and output
        self._parts: dict[tuple[int, int], WeightParts] = {}
        self._made: dict[tuple[str, int, int], Tensor] = {}  # (direction, micro-batch, stage): results of this rank
        self._coming: dict[tuple[str, int, int], collectives.Pending] = {}
        self._sends: deque[collectives.Pending] = deque()

    def run(self) -> None:
        """One step: every action, in order."""
        actions = self.schedule.actions[self.rank]
        for n, action in enumerate(actions):
            if action.kind == "SEND":
                self._send(action)
            elif action.kind == "RECV":
                self._receive(action)
            else:
                self._wait_for_input(action.steps()[0])
                start_s = time.monotonic()
                for step in action.steps():
                    self._compute(step)
                    if action.parts:  # while the other part computes, this one's result travels
                        self._send_early(step, actions[n + 1 :])
                self.spans.append(Span(action, start_s, time.monotonic()))
        while self._sends:
            self._sends.popleft().wait()

    # --- computing --------------------------------------------------------------------------------------------

    def _compute(self, step: Action) -> None:
        m, chunk, stage = step.micro_batch, step.chunk, self.schedule.stage(self.rank, step.chunk)
        if step.kind == "F":
            x = self._take("F", m, stage - 1) if stage else None
            if x is not None and torch.is_grad_enabled():
                x.requires_grad_()
            with split_backward.deferrable(self.splits):
                y = self.stages[chunk].forward(m, x)
            if torch.is_grad_enabled():
                self._kept[m, chunk] = x, y
                self.peak_activations = max(self.peak_activations, len(self._kept.keys() | self._parts.keys()))
            if stage + 1 < self.schedule.stages:
                self._made["F", m, stage] = y.detach()
        elif step.kind == "W":
            parts = self._parts[m, chunk]
            with self.stages[chunk].around_backward(m, "W", parts):
                parts.run()
            del self._parts[m, chunk]
        elif step.kind == "U":
            self.stages[chunk].update(m)
        else:
            x, y = self._kept.pop((m, chunk))
            dy = self._take("B", m, stage + 1) if stage + 1 < self.schedule.stages else None
            parts = WeightParts()
            put_off = split_backward.deferring(parts) if step.kind == "I" else contextlib.nullcontext()
            with self.stages[chunk].around_backward(m, step.kind, parts), put_off:
                torch.autograd.backward(y, dy)
            if step.kind == "I":
                self._parts[m, chunk] = parts
            if x is not None:
                assert x.grad is not None
                self._made["B", m, stage] = x.grad

    def _wait_for_input(self, step: Action) -> None:
        """So that a span shows work, not the wait for its input."""
        before = self.schedule.stage(self.rank, step.chunk) + (-1 if step.kind == "F" else 1)
        key = direction(step), step.micro_batch, before
        if step.kind in "FBI" and key in self._coming:
            self._made[key] = self._coming.pop(key).wait()

    def _take(self, of: str, m: int, stage: int) -> Tensor:
        """What `stage` made: of a neighbour, or of this rank's own other chunk."""
        pending = self._coming.pop((of, m, stage), None)
        return pending.wait() if pending is not None else self._made.pop((of, m, stage))

    # --- messages ---------------------------------------------------------------------------------------------

    def _tag(self, of: str, m: int, stage: int) -> int:
        """No two messages of a step have the same: equal tags would be matched in the order of posting."""
        return 2 * (m * self.schedule.stages + stage) + (of == "B")

    def _send(self, action: Action) -> None:
        key = action.of, action.micro_batch, self.schedule.stage(self.rank, action.chunk)
        if key not in self._made:
            return  # sent early
        while len(self._sends) >= MOST_SENDS:
            self._sends.popleft().wait()
        self._sends.append(collectives.start_send(self._made.pop(key), action.peer, self.group, self._tag(*key)))

    def _send_early(self, step: Action, following: Sequence[Action]) -> None:
        for action in itertools.takewhile(lambda action: action.kind == "SEND", following):
            if (action.of, action.micro_batch, action.chunk) == (direction(step), step.micro_batch, step.chunk):
                self._send(action)

    def _receive(self, action: Action) -> None:
        stage = self.schedule.stage(self.rank, action.chunk) + (-1 if action.of == "F" else 1)
        key = action.of, action.micro_batch, stage
        buffer = self.stages[action.chunk].input_like(action.micro_batch)
        if action.of == "B":
            buffer = torch.empty_like(self._kept[action.micro_batch, action.chunk][1])
        self._coming[key] = collectives.start_recv(buffer, action.peer, self.group, self._tag(*key))


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule alone: for evaluation."""
    forwards = tuple(
        tuple(step for action in actions for step in action.steps() if step.kind == "F") for actions in schedule.compute
    )
    return dataclasses.replace(schedule, name=f"{schedule.name}, forward only", compute=forwards)


# --- cutting a model ------------------------------------------------------------------------------------------


def split_layers(n_layers: int, stages: int, given: Sequence[int] | None = None) -> list[range]:
    """Which blocks each stage holds: consecutive, `given` many each, or as equally many as can be.

    Where they cannot be equal the middle stages have one more: the first holds the embedding and the last the head.

    Raises:
        ValueError: when there are fewer blocks than stages, or `given` does not name each block once.
    """
    if given is None:
        if n_layers < stages:
            raise ValueError(f"num_hidden_layers={n_layers} is too few for {stages} pipeline stages")
        more = n_layers % stages
        first = (stages - more + 1) // 2
        given = [n_layers // stages + (first <= stage < first + more) for stage in range(stages)]
    if len(given) != stages or sum(given) != n_layers or min(given) < 1:
        raise ValueError(
            f"parallel.stage_layers={list(given)} must be {stages} numbers of at least 1, one for each stage, which "
            f"add up to num_hidden_layers={n_layers}"
        )
    ends = [sum(given[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, given, strict=True)]
