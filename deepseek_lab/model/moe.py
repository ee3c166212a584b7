"""Mixture of experts: each token is sent to a few of many feed-forward layers (DeepSeek-V3, arXiv 2412.19437, 2.1.2).

Data flow, with N = T · K visits of tokens to experts:
    scores_TE   = router(x_TD)                      how well each expert suits each token
    index_TK    = the K best experts of each token  (biased, and limited to the best groups)
    x_ND        = the tokens, sorted by expert      so that each expert sees one contiguous block
    y_ND        = experts(x_ND, counts_E)           three grouped matmuls
    y_TD        = Σ_K weight_TK · y of that visit, plus the shared experts, which every token visits
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

    def forward(self, x_ND: Tensor, counts_E: Tensor) -> Tensor:
        """Apply expert 0 to the first counts[0] rows, expert 1 to the next counts[1], …; (N, D) to (N, D)."""
        gate_NF = grouped_linear(x_ND, self.gate_proj, counts_E)
        up_NF = grouped_linear(x_ND, self.up_proj, counts_E)
        return grouped_linear(F.silu(gate_NF) * up_NF, self.down_proj, counts_E)


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
        K = index_TK.shape[1]
        counts_E = index_TK.flatten().bincount(minlength=self.gate.weight.shape[0])
        if self.training and torch.is_grad_enabled():
            self.gate.visits_E += counts_E
        # Stable, so that the order inside a block, and with it every rounding, is the tokens' own.
        order_N = index_TK.flatten().argsort(stable=True)
        inverse_N = torch.empty_like(order_N)
        inverse_N[order_N] = torch.arange(len(order_N), device=order_N.device)
        x_ND = Permute.apply(x_TD.repeat_interleave(K, dim=0), order_N, inverse_N)
        y_ND = self.experts(x_ND, counts_E)
        y_TKD = Permute.apply(y_ND, inverse_N, order_N).unflatten(0, (-1, K))
        y_TD = (weight_TK[:, None].to(y_TKD.dtype) @ y_TKD).squeeze(1)
        if hasattr(self, "shared_experts"):
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD.view_as(x_BTD)


class Permute(torch.autograd.Function):
    """x[order]; its gradient is g[inverse], a read where plain indexing would scatter and add."""

    @staticmethod
    def forward(ctx, x_ND: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        return x_ND.index_select(0, order_N)

    @staticmethod
    def backward(ctx, g_ND: Tensor) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return g_ND.index_select(0, inverse_N), None, None


def grouped_linear(x_ND: Tensor, w_EFD: Tensor, counts_E: Tensor) -> Tensor:
    """y = x @ w[e].T over consecutive blocks of rows, block e of `counts_E[e]` rows: (N, D) to (N, F).

    An expert without tokens does nothing, and gets a gradient of zeros.  Under autocast, as `F.linear`, in the
    narrower type.
    """
    if torch.is_autocast_enabled(x_ND.device.type):
        narrow = torch.get_autocast_dtype(x_ND.device.type)
        x_ND, w_EFD = x_ND.to(narrow), w_EFD.to(narrow)
    return GroupedLinear.apply(x_ND, w_EFD, counts_E)


class GroupedLinear(torch.autograd.Function):
    """The matmuls of `grouped_linear`, each written straight into its block of one output."""

    @staticmethod
    def forward(ctx, x_ND: Tensor, w_EFD: Tensor, counts_E: Tensor) -> Tensor:
        counts = counts_E.tolist()
        ctx.save_for_backward(x_ND, w_EFD)
        ctx.counts = counts
        y_NF = x_ND.new_empty(x_ND.shape[0], w_EFD.shape[1])
        for x, y, w_FD in zip(x_ND.split(counts), y_NF.split(counts), w_EFD, strict=True):
            torch.mm(x, w_FD.T, out=y)
        return y_NF

    @staticmethod
    def backward(ctx, g_NF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_ND, w_EFD = ctx.saved_tensors
        g_NF = g_NF.contiguous()
        dx_ND = torch.empty_like(x_ND) if ctx.needs_input_grad[0] else None
        dw_EFD = torch.empty_like(w_EFD) if ctx.needs_input_grad[1] else None
        if dx_ND is not None:
            for g, dx, w_FD in zip(g_NF.split(ctx.counts), dx_ND.split(ctx.counts), w_EFD, strict=True):
                torch.mm(g, w_FD, out=dx)
        if dw_EFD is not None:
            for g, x, dw_FD in zip(g_NF.split(ctx.counts), x_ND.split(ctx.counts), dw_EFD, strict=True):
                torch.mm(g.T, x, out=dw_FD)
        return dx_ND, dw_EFD, None
