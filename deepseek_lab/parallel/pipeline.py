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
from torch import Tensor, nn

from deepseek_lab.model import DeepSeekConfig, DeepSeekModel, split_backward
from deepseek_lab.model.attention import LatentCache
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


def forward_only(place: Schedule, micro_batches: int) -> Schedule:
    """Forwards alone, for evaluation, over the ranks and chunks of `place`: a group of micro-batches at a time."""
    order = [
        Action("F", m, chunk)
        for start in range(0, micro_batches, place.ranks)
        for chunk in range(place.chunks)
        for m in range(start, min(start + place.ranks, micro_batches))
    ]
    compute = tuple(tuple(order) for _ in range(place.ranks))
    return dataclasses.replace(place, name="forward only", micro_batches=micro_batches, compute=compute)


# --- cutting a model ------------------------------------------------------------------------------------------


class Elsewhere(nn.Module):
    """Stands where another rank of the pipeline holds a part of the model."""

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        raise RuntimeError(
            "this part of the model is on another rank of the pipeline; call the whole model, or run_stage"
        )


class StagedModel(DeepSeekModel):
    """As much of a DeepSeekModel as one rank of a pipeline holds, under the names of the whole.

    With tied embeddings the first stage and the last both hold the table.

    Args:
        place: a schedule, for where each stage is.
        layers: the blocks of every stage, from `split_layers`.
        group: the pipeline's ranks.
    """

    def __init__(
        self, config: DeepSeekConfig, place: Schedule, layers: Sequence[range], group: dist.ProcessGroup | None = None
    ):
        super().__init__(config)
        self.place, self.stage_layers, self.group = place, list(layers), group
        self.rank, self.last_stage = collectives.rank_in(group), place.stages - 1
        self.stages = [place.stage(self.rank, chunk) for chunk in range(place.chunks)]
        here = {layer for stage in self.stages for layer in layers[stage]}
        for layer in set(range(config.num_hidden_layers)) - here:
            self.layers[layer] = Elsewhere()
        if self.last_stage not in self.stages:
            self.norm, self.lm_head = Elsewhere(), Elsewhere()  # type: ignore[assignment]
        if not self.holds_table():
            self.embed_tokens = Elsewhere()  # type: ignore[assignment]

    def holds_table(self) -> bool:
        """Whether the embedding's table is here, be it for the embedding or, tied, for the head."""
        return 0 in self.stages or (self.config.tie_word_embeddings and self.last_stage in self.stages)

    def run_stage(
        self,
        chunk: int,
        x_BTD: Tensor | None,
        input_ids: Tensor,
        labels: Tensor | None = None,
        doc_ids: Tensor | None = None,
        real_BT: Tensor | None = None,
        label_smoothing: float = 0.0,
        caches: list[LatentCache] | None = None,
    ):
        """This rank's stage number `chunk`: `x_BTD` is what the stage before gave, None on the first.

        Returns:
            What the next stage reads, (B, T, D); of the last stage what the head returns: logits, or with `labels` the
            summed loss and how many of them counted.
        """
        stage = self.stages[chunk]
        x_BTD = self.embed_tokens(input_ids) if x_BTD is None else x_BTD
        x_BTD = self.run_blocks(self.stage_layers[stage], x_BTD, input_ids, doc_ids, caches, real_BT)
        return self.lm_head(self.norm(x_BTD), labels, label_smoothing) if stage == self.last_stage else x_BTD

    def forward(
        self, input_ids: Tensor, doc_ids: Tensor | None = None, caches: list[LatentCache] | None = None
    ) -> Tensor:
        """Logits (B, T, V), the same on every rank; all ranks of the pipeline must call it.  Not differentiable."""
        if self.last_stage == 0:
            return super().forward(input_ids, doc_ids, caches)
        dtype = next(self.parameters()).dtype
        x = torch.empty(*input_ids.shape, self.config.hidden_size, dtype=dtype, device=input_ids.device)
        logits = x.new_empty(*input_ids.shape, self.config.vocab_size)
        holders = [self.place.holder(stage)[0] for stage in range(self.place.stages)]
        for stage, holder in enumerate(holders):
            if holder != self.rank:
                continue
            if stage and holders[stage - 1] != self.rank:
                collectives.recv(x, holders[stage - 1], self.group)
            chunk = self.stages.index(stage)
            result = self.run_stage(chunk, x if stage else None, input_ids, doc_ids=doc_ids, caches=caches).detach()
            if stage == self.last_stage:
                logits.copy_(result)
            else:
                x = result
                if holders[stage + 1] != self.rank:
                    collectives.send(x, holders[stage + 1], self.group)
        return collectives.broadcast(logits, holders[-1], self.group)
