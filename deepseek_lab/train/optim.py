"""The optimizer, the bound on its gradients, and the balance of the experts: what happens after backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from deepseek_lab.model import DeepSeekModel, moe
from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.engine import Engine
from deepseek_lab.parallel.mesh import Mesh
from deepseek_lab.train.config import OptimConfig


def build_optimizer(matrices: list[Tensor], vectors: list[Tensor], config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with weight decay on matrices only, or plain SGD.

    Norm weights, the only vectors, keep their size: decaying a scale towards zero shrinks the signal, not the function.
    """
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(engine: Engine, max_norm: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm` (0: leave them), and return the norm before.

    The norm is over every parameter once, of gradients already added up over the ranks, so that all ranks see the same.
    """
    norm = engine.grad_norm()
    if max_norm:
        engine.scale_gradients((max_norm / norm).clamp(max=1.0))
    return norm


def expert_metrics(model: DeepSeekModel, mesh: Mesh) -> dict[str, float]:
    """The auxiliary loss of the step (mean over sequences, all layers), and the share of visits that capacity dropped.

    Of the global batch, in one message; nothing if the model has neither.
    """
    config, routers = model.config, model.routers().values()
    if not (config.aux_loss_alpha or config.capacity_factor):
        return {}
    totals = torch.zeros(3, dtype=torch.float64, device=next(model.parameters()).device)
    for router in routers if mesh.rank("tp") == 0 else ():  # the ranks of a tp group saw the same tokens
        aux_loss = config.aux_loss_alpha * router.aux_loss_sum / router.n_sequences
        totals += torch.stack([n.double() for n in (aux_loss, router.dropped_E.sum(), router.visits_E.sum())])
    aux_loss, dropped, visits = collectives.all_reduce(totals, mesh.group("world")).tolist()
    found = {"aux_loss": aux_loss} if config.aux_loss_alpha else {}
    return found | ({"dropped": dropped / max(visits, 1)} if config.capacity_factor else {})


def balance_experts(model: DeepSeekModel, rate: float, group: dist.ProcessGroup | None = None) -> None:
    """Once a step, move the bias of every router that has one by `moe.router_bias_step`, and count from zero again.

    The visits are those of the global batch, added up over `group`, so that the bias does not depend on how the batch
    was split; all routers share one all-reduce.
    """
    routers = [router for router in model.routers().values() if hasattr(router, "e_score_correction_bias")]
    if not routers:
        return
    visits_LE = torch.stack([router.visits_E for router in routers])
    collectives.all_reduce(visits_LE, group)
    for router, visits_E in zip(routers, visits_LE, strict=True):
        bias_E = router.e_score_correction_bias
        bias_E.copy_(moe.router_bias_step(bias_E, visits_E, rate))
        router.visits_E.zero_()
