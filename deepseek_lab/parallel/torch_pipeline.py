"""Pipelines in PyTorch's hands: `torch.distributed.pipelining` over the same stages, for `engine: torch`.

Its stages want micro-batches of one shape, a module for each stage, and a loss that follows the last one.  So rows of
padding fill micro-batches up, a `StageModule` holds the parts of one stage, and the last returns its summed loss, which
is divided by the tokens of the whole batch, as everywhere; PyTorch's own division by micro-batches is switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from deepseek_lab.data.batches import IGNORE, PADDING, Batch
from deepseek_lab.parallel.mesh import Mesh
from deepseek_lab.parallel.pipeline import StagedModel

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
}


class StageModule(nn.Module):
    """One stage of a StagedModel as a module of its own; its parameters belong to the model, too."""

    model: StagedModel

    def __init__(self, model: StagedModel, chunk: int):
        super().__init__()
        object.__setattr__(self, "model", model)
        self.chunk, self.stage = chunk, model.stages[chunk]
        self.blocks = nn.ModuleList(model.layers[layer] for layer in model.stage_layers[self.stage])
        self.ends = nn.ModuleList([model.embed_tokens] if self.stage == 0 else [])
        if self.stage == model.last_stage:
            self.ends.extend([model.norm, model.lm_head])
        self.through: Callable[..., Any] | None = None  # what takes a micro-batch through a chunk of the model

    def forward(
        self, x: Tensor | None = None, *, call: Callable[[], Any] | None = None, **batch: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """A micro-batch, given by its fields, through this stage; or whatever `call` does with the stage's weights."""
        if call is not None:
            return call()
        assert self.through is not None
        result = self.through(self.chunk, x if self.stage else None, Batch(**batch))
        return result[0][None] if self.stage == self.model.last_stage else result


class TorchPipeline:
    """Runs the steps of a pipeline; schedules are made anew for each number and shape of micro-batches."""

    def __init__(self, modules: Sequence[StageModule], name: str, mesh: Mesh, device: torch.device):
        self.modules, self.name, self.mesh, self.device = modules, name, mesh, device
        self.model = modules[0].model
        self.n_tokens = 1
        self.made: dict[tuple[int, ...], Any] = {}

    def run_stage(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        """As `StagedModel.run_stage`, with the stage's weights gathered."""
        return self.modules[chunk](call=lambda: StagedModel.run_stage(self.model, chunk, *args, **kwargs))

    def step(
        self,
        micros: Sequence[Batch],
        through: Callable[..., Any],
        n_tokens: int,
        boundary: torch.Size,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward of `micros`; the summed loss and how many labels counted, zeros but on the last stage.

        Args:
            boundary: the shape of what travels between stages, of type `dtype`.
        """
        filled, self.n_tokens = fill_rows(micros), n_tokens
        for module in self.modules:
            module.through = through
        key = (len(filled), *boundary)
        if key not in self.made:
            self.made[key] = self._schedule(len(filled), filled[0], boundary, dtype)
        batch = {
            name: torch.cat([getattr(micro, name) for micro in filled]).to(self.device)
            for name in ("input_ids", "labels", "doc_ids")
        }
        losses: list[Tensor] = []
        first = [batch["input_ids"]] if 0 in self.model.stages else []
        self.made[key].step(*first, target=batch["labels"], losses=losses, return_outputs=False, **batch)
        if self.model.last_stage not in self.model.stages:
            return torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
        loss_sum = torch.stack(losses).detach().double().sum() * n_tokens
        return loss_sum, (batch["labels"] != IGNORE).sum()

    def _schedule(self, n: int, micro: Batch, boundary: torch.Size, dtype: torch.dtype) -> Any:
        between = torch.empty(boundary, dtype=dtype, device="meta", requires_grad=True)
        loss_1 = between.new_empty(1, requires_grad=True)
        stages = [
            pipelining.PipelineStage(
                module,
                module.stage,
                self.model.place.stages,
                self.device,
                input_args=between if module.stage else micro.input_ids.to("meta"),
                output_args=between if module.stage < self.model.last_stage else loss_1,
                group=self.mesh.group("pp"),
            )
            for module in self.modules
        ]
        schedule = SCHEDULES[self.name]
        only: Any = stages if self.name == "interleaved" else stages[0]
        return schedule(only, n, loss_fn=lambda loss_1, _: loss_1.sum() / self.n_tokens, scale_grads=False)


def fill_rows(micros: Sequence[Batch]) -> list[Batch]:
    """The same micro-batches, each with as many rows as the largest has."""
    rows, filled = max(len(micro) for micro in micros), []
    for micro in micros:
        ids = torch.zeros(rows - len(micro), micro.input_ids.shape[1], dtype=torch.int64)
        filled.append(
            Batch(
                torch.cat([micro.input_ids, ids]),
                torch.cat([micro.labels, torch.full_like(ids, IGNORE)]),
                torch.cat([micro.doc_ids, torch.full_like(ids, PADDING, dtype=micro.doc_ids.dtype)]),
            )
        )
    return filled
