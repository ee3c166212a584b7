"""Mixture of experts: each token is sent to a few of many feed-forward layers (DeepSeek-V3, arXiv 2412.19437, 2.1.2).

Data flow, with N = T · K visits of tokens to experts:
    scores_TE   = router(x_TD)                      how well each expert suits each token
    index_TK    = the K best experts of each token  (biased, and limited to the best groups)
    y_ND        = the visits, sorted by expert, so that each expert works on one block: weight · expert(token)
    y_TD        = the sum of each token's visits, plus the shared experts, which every token visits
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepseek_lab.model.config import DeepSeekConfig
from deepseek_lab.model.mlp import SwiGLU

_counting = True


@contextlib.contextmanager
def not_counting() -> Iterator[None]:
    """Inside, routers do not count visits: for a pass that repeats another, or that holds no tokens of the batch."""
    global _counting
    before, _counting = _counting, False
    try:
        yield
    finally:
        _counting = before


class Router(nn.Module):
    """Chooses experts and their weights.

    `e_score_correction_bias` is added to the scores for choosing only, never to the weights: raised for idle experts
    and lowered for busy ones, it balances the load without an auxiliary loss (arXiv 2408.15664).  `visits_E` counts
    the visits seen in training, for whoever adjusts that bias once an optimizer step.
    """

    e_score_correction_bias: Tensor
    visits_E: Tensor

    def __init__(self, config: DeepSeekConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        if config.topk_method == "noaux_tc":
            self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.register_buffer("visits_E", torch.zeros(config.n_routed_experts, dtype=torch.long), persistent=False)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (T, K) and expert numbers (T, K) for each token; scored in fp32 when `x` is narrower."""
        config = self.config
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F.linear(x_TD.to(wide), self.weight.to(wide))
        scores_TE = logits_TE.sigmoid() if config.scoring_func == "sigmoid" else logits_TE.softmax(dim=-1)
        with torch.no_grad():
            index_TK = self.choose(scores_TE)
        weight_TK = scores_TE.gather(1, index_TK)
        if config.norm_topk_prob:
            weight_TK = weight_TK / (weight_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return weight_TK * config.routed_scaling_factor, index_TK

    def choose(self, scores_TE: Tensor) -> Tensor:
        """The K experts of each token: the best of the best groups."""
        config = self.config
        biased_TE = scores_TE
        if config.topk_method == "noaux_tc":
            biased_TE = scores_TE + self.e_score_correction_bias
        if config.topk_method != "greedy" and config.topk_group < config.n_group:
            in_groups_TGe = biased_TE.unflatten(-1, (config.n_group, -1))
            members = 2 if config.topk_method == "noaux_tc" else 1
            group_scores_TG = in_groups_TGe.topk(members, dim=-1).values.sum(dim=-1)
            kept_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool)
            kept_TG.scatter_(1, group_scores_TG.topk(config.topk_group, dim=-1).indices, True)
            biased_TE = in_groups_TGe.masked_fill(~kept_TG[..., None], float("-inf")).flatten(-2)
        return biased_TE.topk(config.num_experts_per_tok, dim=-1).indices


class Experts(nn.Module):
    """The routed experts, SwiGLU layers with their weights stacked."""

    def __init__(self, config: DeepSeekConfig):
        super().__init__()
        E, F_, D = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_proj = nn.Parameter(torch.empty(E, F_, D))
        self.up_proj = nn.Parameter(torch.empty(E, F_, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, F_))

    def forward(self, x_TD: Tensor, weight_TK: Tensor, index_TK: Tensor, counts_E: Tensor) -> Tensor:
        """For each token the sum over its K visits of weight · expert(token); `counts_E` visits go to each expert.

        Under autocast, as linear layers do, in the narrower type.
        """
        inputs: tuple[Tensor, ...] = (x_TD, weight_TK.to(x_TD.dtype), self.gate_proj, self.up_proj, self.down_proj)
        if torch.is_autocast_enabled(x_TD.device.type):
            inputs = tuple(t.to(torch.get_autocast_dtype(x_TD.device.type)) for t in inputs)
        return GroupedSwiGLU.apply(*inputs, index_TK, counts_E)


class MoE(nn.Module):
    """Routed experts plus `n_shared_experts` that every token visits (as one wider SwiGLU)."""

    def __init__(self, config: DeepSeekConfig):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        if config.n_shared_experts:
            self.shared_experts = SwiGLU(config.hidden_size, config.n_shared_experts * config.moe_intermediate_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_TD = x_BTD.flatten(0, -2)
        weight_TK, index_TK = self.gate(x_TD)
        counts_E = index_TK.flatten().bincount(minlength=self.gate.weight.shape[0])
        if self.training and torch.is_grad_enabled() and _counting:
            self.gate.visits_E += counts_E
        y_TD = self.experts(x_TD, weight_TK, index_TK, counts_E)
        if hasattr(self, "shared_experts"):
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD.view_as(x_BTD)


class GroupedSwiGLU(torch.autograd.Function):
    """y_t = sum over the visits of token t of weight · down_e(silu(gate_e x_t) · up_e x_t), expert after expert.

    An expert's tokens are gathered just before its matmuls, and its intermediate values stay in cache from one to the
    next.  Only gate x and up x are kept for backward, which works the rest out again; the sorted copies of the tokens
    never exist as a whole.  An expert without visits gets a gradient of zeros.
    """

    @staticmethod
    def forward(ctx, x_TD, weight_TK, gate_EFD, up_EFD, down_EDF, index_TK: Tensor, counts_E: Tensor) -> Tensor:
        # Stable, so that the order inside a block, and with it every rounding, is the tokens' own.
        order_N = index_TK.flatten().argsort(stable=True)
        token_N, weight_N1 = order_N // index_TK.shape[1], weight_TK.flatten()[order_N, None]
        g_NF = x_TD.new_empty(len(order_N), gate_EFD.shape[1])
        u_NF, y_ND = torch.empty_like(g_NF), x_TD.new_empty(len(order_N), x_TD.shape[1])
        counts = counts_E.tolist()
        blocks = (t.split(counts) for t in (token_N, weight_N1, g_NF, u_NF, y_ND))
        for e, (token, weight, g, u, y) in enumerate(zip(*blocks, strict=True)):
            x = x_TD.index_select(0, token)
            torch.mm(x, gate_EFD[e].T, out=g)
            torch.mm(x, up_EFD[e].T, out=u)
            h = F.silu(g).mul_(u).mul_(weight)
            torch.mm(h, down_EDF[e].T, out=y)
        ctx.save_for_backward(x_TD, gate_EFD, up_EFD, down_EDF, order_N, token_N, weight_N1, g_NF, u_NF)
        ctx.counts = counts
        return sum_visits(y_ND, order_N, index_TK.shape[1])

    @staticmethod
    def backward(ctx, dy_TD: Tensor):
        x_TD, gate_EFD, up_EFD, down_EDF, order_N, token_N, weight_N1, g_NF, u_NF = ctx.saved_tensors
        dx_ND, dweight_N = x_TD.new_empty(len(order_N), x_TD.shape[1]), torch.empty_like(weight_N1[:, 0])
        dgate_EFD, dup_EFD, ddown_EDF = (torch.empty_like(w) for w in (gate_EFD, up_EFD, down_EDF))
        blocks = (t.split(ctx.counts) for t in (token_N, weight_N1, g_NF, u_NF, dx_ND, dweight_N))
        for e, (token, weight, g, u, dx, dweight) in enumerate(zip(*blocks, strict=True)):
            x, dy = x_TD.index_select(0, token), dy_TD.index_select(0, token)
            s = F.silu(g)
            h = s * u
            dh = dy @ down_EDF[e]  # of h · weight
            torch.sum(dh * h, dim=1, out=dweight)
            torch.mm(dy.T, h.mul_(weight), out=ddown_EDF[e])
            dh.mul_(weight)
            du = s.mul_(dh)
            dg = torch.ops.aten.silu_backward(dh.mul_(u), g)
            torch.mm(dg.T, x, out=dgate_EFD[e])
            torch.mm(du.T, x, out=dup_EFD[e])
            torch.mm(dg, gate_EFD[e], out=dx).addmm_(du, up_EFD[e])
        k = len(order_N) // len(x_TD)
        dweight_TK = torch.empty_like(dweight_N).index_copy_(0, order_N, dweight_N).view(-1, k)
        return sum_visits(dx_ND, order_N, k), dweight_TK, dgate_EFD, dup_EFD, ddown_EDF, None, None


def sum_visits(y_ND: Tensor, order_N: Tensor, k: int) -> Tensor:
    """For every token the sum of its `k` visits, which `order` sorted by expert; by reads and no scattered adds."""
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return F.embedding_bag(place_N.view(-1, k), y_ND, mode="sum")  # gathers and adds in one pass
