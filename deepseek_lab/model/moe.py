"""Mixture of experts: each token is sent to a few of many feed-forward layers (DeepSeek-V3, arXiv 2412.19437, 2.1.2).

Data flow, with N = T · K visits of tokens to experts:
    scores_TE   = router(x_TD)                      how well each expert suits each token
    index_TK    = the K best experts of each token  (biased, and limited to the best groups)
    x_ND        = the tokens, sorted by expert      so that each expert sees one contiguous block
    y_ND        = experts(x_ND, weight_N)           each block through its expert, weighted
    y_TD        = the sum of each token's visits, plus the shared experts, which every token visits
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepseek_lab.model.config import DeepSeekConfig
from deepseek_lab.model.mlp import SwiGLU


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
    """The routed experts, their weights stacked: SwiGLU layers over contiguous blocks of tokens."""

    def __init__(self, config: DeepSeekConfig):
        super().__init__()
        E, F_, D = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_proj = nn.Parameter(torch.empty(E, F_, D))
        self.up_proj = nn.Parameter(torch.empty(E, F_, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, F_))

    def forward(self, x_ND: Tensor, weight_N: Tensor, counts_E: Tensor) -> Tensor:
        """Apply expert 0 to the first counts[0] rows, expert 1 to the next counts[1], …, and weigh row n by weight[n].

        Under autocast, as linear layers do, in the narrower type.
        """
        inputs: tuple[Tensor, ...] = (x_ND, weight_N.to(x_ND.dtype), self.gate_proj, self.up_proj, self.down_proj)
        if torch.is_autocast_enabled(x_ND.device.type):
            inputs = tuple(t.to(torch.get_autocast_dtype(x_ND.device.type)) for t in inputs)
        return GroupedSwiGLU.apply(*inputs, counts_E)


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
        index_N = index_TK.flatten()
        counts_E = index_N.bincount(minlength=self.gate.weight.shape[0])
        if self.training and torch.is_grad_enabled():
            self.gate.visits_E += counts_E
        # Stable, so that the order inside a block, and with it every rounding, is the tokens' own.
        order_N = index_N.argsort(stable=True)
        x_ND = Dispatch.apply(x_TD, order_N, index_TK.shape[1])
        y_ND = self.experts(x_ND, weight_TK.flatten().index_select(0, order_N), counts_E)
        y_TD = Combine.apply(y_ND, order_N, index_TK.shape[1])
        if hasattr(self, "shared_experts"):
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD.view_as(x_BTD)


def copy_to_experts(x_TD: Tensor, order_N: Tensor, k: int) -> Tensor:
    """Row n of the result is the token of visit `order[n]`, visits being numbered token by token, `k` each."""
    return x_TD.index_select(0, order_N // k)


def sum_from_experts(y_ND: Tensor, order_N: Tensor, k: int) -> Tensor:
    """For every token the sum of its `k` visits: the transpose of `copy_to_experts`, by reads and no scattered adds."""
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return F.embedding_bag(inverse_N.view(-1, k), y_ND, mode="sum")  # gathers and adds in one pass


class Dispatch(torch.autograd.Function):
    """`copy_to_experts`, whose gradient is `sum_from_experts`."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, order_N: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order_N)
        ctx.k = k
        return copy_to_experts(x_TD, order_N, k)

    @staticmethod
    def backward(ctx, g_ND: Tensor) -> tuple[Tensor, None, None]:
        (order_N,) = ctx.saved_tensors
        return sum_from_experts(g_ND, order_N, ctx.k), None, None


class Combine(torch.autograd.Function):
    """`sum_from_experts`, whose gradient is `copy_to_experts`."""

    @staticmethod
    def forward(ctx, y_ND: Tensor, order_N: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order_N)
        ctx.k = k
        return sum_from_experts(y_ND, order_N, k)

    @staticmethod
    def backward(ctx, g_TD: Tensor) -> tuple[Tensor, None, None]:
        (order_N,) = ctx.saved_tensors
        return copy_to_experts(g_TD, order_N, ctx.k), None, None


class GroupedSwiGLU(torch.autograd.Function):
    """y = down_e((silu(gate_e x) · up_e x) · weight), expert e on its own block of rows, one block after the other.

    A block's intermediate values stay in cache from matmul to matmul, and only x, gate x and up x are kept for
    backward, which works the rest out again.  An expert without rows gets a gradient of zeros.
    """

    @staticmethod
    def forward(ctx, x_ND, weight_N, gate_EFD, up_EFD, down_EDF, counts_E: Tensor) -> Tensor:
        counts = counts_E.tolist()
        g_NF = x_ND.new_empty(x_ND.shape[0], gate_EFD.shape[1])
        u_NF, y_ND = torch.empty_like(g_NF), torch.empty_like(x_ND)
        blocks = (t.split(counts) for t in (x_ND, weight_N[:, None], g_NF, u_NF, y_ND))
        for e, (x, weight, g, u, y) in enumerate(zip(*blocks, strict=True)):
            torch.mm(x, gate_EFD[e].T, out=g)
            torch.mm(x, up_EFD[e].T, out=u)
            h = F.silu(g).mul_(u).mul_(weight)
            torch.mm(h, down_EDF[e].T, out=y)
        ctx.save_for_backward(x_ND, weight_N, gate_EFD, up_EFD, down_EDF, g_NF, u_NF)
        ctx.counts = counts
        return y_ND

    @staticmethod
    def backward(ctx, dy_ND: Tensor):
        x_ND, weight_N, gate_EFD, up_EFD, down_EDF, g_NF, u_NF = ctx.saved_tensors
        dx_ND, dweight_N = torch.empty_like(x_ND), torch.empty_like(weight_N)
        dgate_EFD, dup_EFD, ddown_EDF = (torch.empty_like(w) for w in (gate_EFD, up_EFD, down_EDF))
        rows = (x_ND, weight_N[:, None], g_NF, u_NF, dy_ND.contiguous(), dx_ND, dweight_N)
        blocks = (t.split(ctx.counts) for t in rows)
        for e, (x, weight, g, u, dy, dx, dweight) in enumerate(zip(*blocks, strict=True)):
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
        return dx_ND, dweight_N, dgate_EFD, dup_EFD, ddown_EDF, None
