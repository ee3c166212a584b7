"""PipeDream: a pipeline that is never drained, and so trains on stale weights.

The one idea: a stage updates its weights after every micro-batch, while the next ones are still on their way through
the others.  A micro-batch must meet the same weights in its backward as in its forward, or its gradient is one of no
model at all.  So a stage keeps old versions as long as a micro-batch needs them: weight stashing.  Stage s of S then
makes the step

    w_s(t + 1) = w_s(t) - lr · ∂loss/∂w_s at (w_0(t - S + 1), …, w_s(t - S + 1 + s), …, w_{S-1}(t))

(PipeDream, arXiv 1806.03377, "Effective learning").  The order is `plan.schedules.pipedream`, the executor that of
every other schedule.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from deepseek_lab.plan.schedules import build_schedule

from . import collectives, pipeline


def train_pipedream(
    stages: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    lr: float,
    group: dist.ProcessGroup | None = None,
    *,
    stash: bool = True,
) -> StaleStage:
    """SGD over all micro-batches, one update each, with stage r on rank r of `group`.

    Args:
        stages: all of them on every rank; each takes one tensor and gives one.  A rank uses its own only, as it is now,
            and does not change it.
        inputs, targets: of every micro-batch, on every rank.
        loss_fn: (what the last stage gives, target) -> scalar.
        stash: False lets backward meet whatever weights there are by then, to see what comes of it.

    Returns:
        this rank's stage: `losses` (on the last rank), `weights`, `most_versions` and `spans`.

    Raises:
        ValueError: when there are not as many stages as ranks.
    """
    rank, ranks = collectives.rank_in(group), collectives.size_of(group)
    if len(stages) != ranks:
        raise ValueError(f"{len(stages)} stages cannot go to {ranks} ranks, one to each; cut the model into {ranks}")
    weights_type = StashedWeights if stash else OverwrittenWeights
    stage = StaleStage(stages, rank, inputs, targets, loss_fn, lr, weights_type)
    executor = pipeline.Executor(build_schedule("pipedream", ranks, len(inputs)), [stage], group)
    executor.run()
    stage.spans = executor.spans
    return stage


class StashedWeights:
    """One stage's weights, and the older versions that micro-batches on their way still need.

    A version is a dictionary of tensors that require a gradient, and never changes: an update makes a new one,
    `newest`.  The first is a copy: the tensors that were given stay as they are.  `met`, a dictionary, has for each
    micro-batch m on its way the version that it met in its forward.  Backward leaves its gradients on the tensors of
    that version, which several micro-batches may share.  No version is kept that no micro-batch needs any more.
    """

    def __init__(self, weights):
        self.newest = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
        self.met = {}

    def forward(self, m):
        """The version that micro-batch `m` meets: the newest there is."""
        self.met[m] = self.newest
        return self.newest

    def update(self, m, lr):
        """After the backward of `m`: one step of SGD from the newest version, by the gradients left on m's own.

        `m` is then no longer on its way, and the `.grad` of its version is None again.  Any m may be the next.
        """
        met = self.met.pop(m)
        with torch.no_grad():
            self.newest = {name: (w - lr * met[name].grad).requires_grad_() for name, w in self.newest.items()}
        for w in met.values():
            w.grad = None


class OverwrittenWeights(StashedWeights):
    """Without stashing: one version, which changes under the micro-batches that are on their way."""

    def update(self, m, lr):
        """One step in place.  Autograd would refuse the backward of a changed tensor; `.data` hides the change."""
        for w in self.met.pop(m).values():
            w.data -= lr * w.grad
            w.grad = None


class StaleStage(pipeline.Stage):
    """A module whose weights come from a `StashedWeights`; see `train_pipedream`."""

    def __init__(self, stages, rank, inputs, targets, loss_fn, lr, weights_type):
        self.before = nn.Sequential(*copy.deepcopy(list(stages[:rank]))).to("meta")  # they give our input's shape
        self.module, self.last = stages[rank], rank == len(stages) - 1
        self.inputs, self.targets, self.loss_fn, self.lr = inputs, targets, loss_fn, lr
        self.weights = weights_type(dict(self.module.named_parameters()))
        self.losses, self.spans = [], []
        self.most_versions = 0

    def forward(self, m: int, x: Tensor | None) -> Tensor:
        version = self.weights.forward(m)
        self.most_versions = max(self.most_versions, len({id(v) for v in self.weights.met.values()}))
        y = functional_call(self.module, version, (self.inputs[m] if x is None else x,))
        if not self.last:
            return y
        loss = self.loss_fn(y, self.targets[m])
        self.losses.append(loss.item())
        return loss

    def input_like(self, m: int) -> Tensor:
        return torch.empty_like(self.before(self.inputs[m].to("meta")), device=self.inputs[m].device)

    def update(self, m: int) -> None:
        self.weights.update(m, self.lr)
