"""Mixture of experts: each token is sent to a few of many feed-forward layers (DeepSeek-V3, arXiv 2412.19437, 2.1.2).

Data flow, with N = T · K visits of tokens to experts:
    scores_TE   = router(x_TD)                      how well each expert suits each token
    index_TK    = the K best experts of each token  (biased, and limited to the best groups)
    weight_TK   = their scores                      through which the router learns
    y_ND        = the visits, sorted by expert, so that each expert works on one block: weight · expert(token)
    y_TD        = the sum of each token's visits, plus the shared experts, which every token visits

A visit that does not take place, of a padding token or one beyond an expert's capacity, has weight 0 and goes
"nowhere": to expert number E.  What keeps the load even is a bias that only the choice sees, adjusted once a step, or
an auxiliary loss, or both; see `Router`.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepseek_lab.model import split_backward
from deepseek_lab.model.config import DeepSeekConfig
from deepseek_lab.model.mlp import SwiGLU

_counting = True


@contextlib.contextmanager
def not_counting() -> Iterator[None]:
    """Inside, routers count nothing: for a pass that repeats another, or that holds no tokens of the batch."""
    global _counting
    before, _counting = _counting, False
    try:
        yield
    finally:
        _counting = before


# --- decisions of the router ----------------------------------------------------------------------------------


def choose_experts(scores_TE: Tensor, k: int, n_group: int = 1, topk_group: int = 1, members: int = 1) -> Tensor:
    """Numbers (T, K) of each token's `k` best experts, best first, all in its `topk_group` best groups of `n_group`.

    Experts of a group are neighbours, and live on one machine; few groups mean few messages.  The score of a group is
    the sum over its `members` best experts (DeepSeek-V2, arXiv 2405.04434, 2.2.2, takes one, V3's code two).
    """
    if topk_group < n_group:
        in_groups_TGe = scores_TE.unflatten(-1, (n_group, -1))
        group_scores_TG = in_groups_TGe.topk(members, dim=-1).values.sum(dim=-1)
        kept_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool)
        kept_TG.scatter_(1, group_scores_TG.topk(topk_group, dim=-1).indices, True)
        scores_TE = in_groups_TGe.masked_fill(~kept_TG[..., None], float("-inf")).flatten(-2)
    return scores_TE.topk(k, dim=-1).indices


def combine_weights(scores_TE: Tensor, index_TK: Tensor, normalise: bool, scale: float) -> Tensor:
    """What the outputs of a token's K experts are multiplied by before they are added: (T, K).

    Their scores, with `normalise` divided by their sum; then times `scale`.  No choice of the largest has a gradient:
    it is through these weights that the router learns (arXiv 2412.19437, equations 13 to 16).
    """
    weight_TK = scores_TE.gather(1, index_TK)
    if normalise:
        weight_TK = weight_TK / (weight_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return weight_TK * scale


def router_bias_step(bias_E: Tensor, visits_E: Tensor, rate: float) -> Tensor:
    """The bias for the next step: lower by `rate` for experts visited more than the mean, higher for those below it.

    Auxiliary-loss-free balancing (Wang et al., arXiv 2408.15664, algorithm 1); both may have leading dimensions.
    """
    error_E = visits_E.double().mean(dim=-1, keepdim=True) - visits_E
    return bias_E + rate * error_E.sign().to(bias_E.dtype)


def sequence_balance_loss(scores_BTE: Tensor, index_BTK: Tensor, real_BT: Tensor) -> Tensor:
    """For each sequence the sum over experts of f · P, (B,): 1 when all experts have equal shares, E/K when K take all.

    f is an expert's share of the visits, as a multiple of the mean, and has no gradient; P is its mean score, after
    each token's scores were divided by their sum (arXiv 2412.19437, equations 17 to 20, for the experts as chosen).
    Only tokens in `real_BT` count; a sequence without any has loss 0.
    """
    E, K = scores_BTE.shape[-1], index_BTK.shape[-1]
    n_real_B1 = real_BT.sum(dim=1, keepdim=True).clamp(min=1)
    visits_BTE = torch.zeros_like(scores_BTE).scatter(2, index_BTK, 1.0) * real_BT[..., None]
    f_BE = visits_BTE.sum(dim=1) * E / (K * n_real_B1)
    share_BTE = scores_BTE / scores_BTE.sum(dim=-1, keepdim=True)
    P_BE = (share_BTE * real_BT[..., None]).sum(dim=1) / n_real_B1
    return (f_BE * P_BE).sum(dim=-1)


def drop_beyond_capacity(scores_BTE: Tensor, index_BTK: Tensor, real_BT: Tensor, factor: float) -> Tensor:
    """`index_BTK` with E in place of every visit that does not take place.

    In each sequence an expert receives at most C = ceil(factor · K · real tokens / E) visits, those with the highest
    scores, of equal ones the earlier; tokens outside `real_BT` visit nobody (GShard, arXiv 2006.16668, 2.2; the lowest
    scores are dropped, as in DeepSeek-V2, arXiv 2405.04434, 2.2.4).
    """
    E, K = scores_BTE.shape[-1], index_BTK.shape[-1]
    capacity_B = (real_BT.sum(dim=1) * K * factor / E).ceil()
    chosen_BTE = torch.zeros_like(scores_BTE, dtype=torch.bool).scatter(2, index_BTK, True) & real_BT[..., None]
    best_first_BTE = scores_BTE.masked_fill(~chosen_BTE, float("-inf")).argsort(dim=1, descending=True, stable=True)
    place_BTE = best_first_BTE.argsort(dim=1)
    taken_BTE = chosen_BTE & (place_BTE < capacity_B[:, None, None])
    return index_BTK.where(taken_BTE.gather(2, index_BTK), E)


# --- layers ---------------------------------------------------------------------------------------------------


class Router(nn.Module):
    """Chooses experts and their weights.

    `e_score_correction_bias` is added to the scores for choosing only, never to the weights: raised for idle experts
    and lowered for busy ones, it balances the load without an auxiliary loss (arXiv 2408.15664).  `visits_E` counts
    the visits chosen in training, for whoever adjusts that bias once an optimizer step.

    The auxiliary loss, `aux_loss_alpha` times the mean over the `n_sequences` of the global batch, never joins the
    model's: in backward the router receives its gradient as well (`AddGradient`), so that none of it has to travel.
    With `seq_aux` off, the tokens of a micro-batch are balanced as if they were one sequence, and how the batch was
    split changes the result.

    In training `capacity_factor` limits an expert's visits.  In evaluation nothing does: who is dropped depends on
    later tokens.

    Attributes:
        n_sequences: how many sequences the global batch has; whoever trains sets it.
        aux_share: this rank's share of the auxiliary gradient, where ranks work out the same and add theirs up.
        visits_E, dropped_E: visits chosen, and those of them that capacity forbade.
        aux_loss_sum: sum over sequences of the auxiliary loss, before alpha.
    """

    e_score_correction_bias: Tensor
    visits_E: Tensor
    dropped_E: Tensor
    aux_loss_sum: Tensor

    def __init__(self, config: DeepSeekConfig):
        super().__init__()
        self.config = config
        self.n_sequences = 1
        self.aux_share = 1.0
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        if config.topk_method == "noaux_tc":
            self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.reset_counts()

    def reset_counts(self, device: torch.device | str | None = None) -> None:
        """Counters at zero, as new tensors."""
        for name in ("visits_E", "dropped_E"):
            zeros_E = torch.zeros(self.config.n_routed_experts, dtype=torch.long, device=device)
            self.register_buffer(name, zeros_E, persistent=False)
        self.register_buffer("aux_loss_sum", torch.zeros((), dtype=torch.float64, device=device), persistent=False)

    @property
    def counting(self) -> bool:
        """Whether this pass is one whose visits count."""
        return self.training and torch.is_grad_enabled() and _counting

    def forward(self, x_BTD: Tensor, real_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights (B·T, K) and expert numbers (B·T, K) for each token; scored in fp32 when `x` is narrower.

        Visits that do not take place have weight 0 and number E.

        Args:
            x_BTD: (B, T, D), or (T, D), one sequence.
            real_BT: (B, T), which tokens are text and not padding; by default all.
        """
        config = self.config
        x_TD = x_BTD.flatten(0, -2)
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F.linear(x_TD.to(wide), self.weight.to(wide))
        scores_TE = logits_TE.sigmoid() if config.scoring_func == "sigmoid" else logits_TE.softmax(dim=-1)
        with torch.no_grad():
            index_TK = self.choose(scores_TE)
        weight_TK = combine_weights(scores_TE, index_TK, config.norm_topk_prob, config.routed_scaling_factor)
        if real_BT is None:
            if not self.training or not (config.aux_loss_alpha or config.capacity_factor):
                return weight_TK, index_TK
            real_BT = x_TD.new_ones(x_BTD.shape[:-1], dtype=torch.bool)
        sequences = real_BT.view(-1, x_BTD.shape[-2])
        return self._limit(self._balance(weight_TK, scores_TE, index_TK, sequences), scores_TE, index_TK, sequences)

    def _balance(self, weight_TK: Tensor, scores_TE: Tensor, index_TK: Tensor, real_BT: Tensor) -> Tensor:
        """`weight_TK`, which also brings the gradient of the auxiliary loss to the scores."""
        config = self.config
        if not config.aux_loss_alpha or not self.training or not torch.is_grad_enabled():
            return weight_TK
        shape = real_BT.shape if config.seq_aux else (1, -1)
        loss_B = sequence_balance_loss(scores_TE.unflatten(0, shape), index_TK.unflatten(0, shape), real_BT.view(shape))
        loss_sum = loss_B.sum() if config.seq_aux else loss_B.sum() * real_BT.any(dim=1).sum()
        if self.counting:
            self.aux_loss_sum += loss_sum.detach()
        return AddGradient.apply(weight_TK, loss_sum, self.aux_share * config.aux_loss_alpha / self.n_sequences)

    def _limit(self, weight_TK: Tensor, scores_TE: Tensor, chosen_TK: Tensor, real_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts when neither padding nor visits beyond capacity take place."""
        config, nowhere = self.config, self.config.n_routed_experts
        index_TK = chosen_TK.where(real_BT.view(-1, 1), nowhere)
        if self.training and config.capacity_factor:
            wanted_TK = index_TK
            index_BTK = drop_beyond_capacity(
                scores_TE.detach().unflatten(0, real_BT.shape),
                chosen_TK.unflatten(0, real_BT.shape),
                real_BT,
                config.capacity_factor,
            )
            index_TK = index_BTK.flatten(0, 1)
            if self.counting:
                dropped_E = wanted_TK[index_TK != wanted_TK].bincount(minlength=nowhere)
                self.dropped_E += dropped_E
                self.visits_E += dropped_E  # the layer counts those that take place
        return weight_TK.where(index_TK < nowhere, 0), index_TK

    def choose(self, scores_TE: Tensor) -> Tensor:
        """The K experts of each token: the best, after the bias, of the best groups."""
        config = self.config
        with_bias = config.topk_method == "noaux_tc"
        if with_bias:
            scores_TE = scores_TE + self.e_score_correction_bias
        groups = (1, 1) if config.topk_method == "greedy" else (config.n_group, config.topk_group)
        return choose_experts(scores_TE, config.num_experts_per_tok, *groups, members=2 if with_bias else 1)


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

        Visits to expert number E do not take place.  Under autocast, as linear layers do, in the narrower type.
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

    def forward(self, x_BTD: Tensor, real_BT: Tensor | None = None) -> Tensor:
        """(B, T, D) to (B, T, D); tokens outside `real_BT` (B, T) visit the shared experts only, and count nowhere."""
        E = self.gate.weight.shape[0]
        weight_TK, index_TK = self.gate(x_BTD, real_BT)
        counts_E = index_TK.flatten().bincount(minlength=E + 1)[:E]
        if self.gate.counting:
            self.gate.visits_E += counts_E
        x_TD = x_BTD.flatten(0, -2)
        y_TD = self.experts(x_TD, weight_TK, index_TK, counts_E)
        if hasattr(self, "shared_experts"):
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD.view_as(x_BTD)


class AddGradient(torch.autograd.Function):
    """`x`, unchanged; in backward `loss` (scalar) receives the gradient `scale`, as if scale · loss had been added."""

    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx: Tensor):
        (loss,) = ctx.saved_tensors
        return dx, torch.full_like(loss, ctx.scale), None


class GroupedSwiGLU(torch.autograd.Function):
    """y_t = sum over the visits of token t of weight · down_e(silu(gate_e x_t) · up_e x_t), expert after expert.

    An expert's tokens are gathered just before its matmuls, and its intermediate values stay in cache from one to the
    next.  Only gate x and up x are kept for backward, which works the rest out again; the sorted copies of the tokens
    never exist as a whole.  An expert without visits gets a gradient of zeros; visits to number E, which are sorted to
    the end, add nothing.
    """

    @staticmethod
    def forward(ctx, x_TD, weight_TK, gate_EFD, up_EFD, down_EDF, index_TK: Tensor, counts_E: Tensor) -> Tensor:
        # Stable, so that the order inside a block, and with it every rounding, is the tokens' own.
        order_N = index_TK.flatten().argsort(stable=True)
        token_N, weight_N1 = order_N // index_TK.shape[1], weight_TK.flatten()[order_N, None]
        counts = counts_E.tolist()
        taken = sum(counts)
        g_NF = x_TD.new_empty(taken, gate_EFD.shape[1])
        u_NF, y_ND = torch.empty_like(g_NF), x_TD.new_empty(taken + 1, x_TD.shape[1])
        y_ND[taken] = 0
        blocks = (t[:taken].split(counts) for t in (token_N, weight_N1, g_NF, u_NF, y_ND))
        for e, (token, weight, g, u, y) in enumerate(zip(*blocks, strict=True)):
            x = x_TD.index_select(0, token)
            torch.mm(x, gate_EFD[e].T, out=g)
            torch.mm(x, up_EFD[e].T, out=u)
            h = F.silu(g).mul_(u).mul_(weight)
            torch.mm(h, down_EDF[e].T, out=y)
        ctx.save_for_backward(x_TD, gate_EFD, up_EFD, down_EDF, order_N, token_N, weight_N1, g_NF, u_NF)
        ctx.counts, ctx.k, ctx.weights = counts, index_TK.shape[1], (gate_EFD, up_EFD, down_EDF)
        return sum_visits(y_ND, order_N, ctx.k)

    @staticmethod
    def backward(ctx, dy_TD: Tensor):
        x_TD, gate_EFD, up_EFD, down_EDF, order_N, token_N, weight_N1, g_NF, u_NF = ctx.saved_tensors
        taken = sum(ctx.counts)
        dx_ND, dweight_N = x_TD.new_empty(taken + 1, x_TD.shape[1]), torch.empty_like(weight_N1[:, 0])
        parts, put_off = split_backward.deferred(*ctx.weights), []
        gradients = [None if parts else torch.empty_like(w) for w in ctx.weights]
        dx_ND[taken], dweight_N[taken:] = 0, 0
        blocks = (t[:taken].split(ctx.counts) for t in (token_N, weight_N1, g_NF, u_NF, dx_ND, dweight_N))
        for e, (token, weight, g, u, dx, dweight) in enumerate(zip(*blocks, strict=True)):
            x, dy = x_TD.index_select(0, token), dy_TD.index_select(0, token)
            s = F.silu(g)
            h = s * u
            dh = dy @ down_EDF[e]  # of h · weight
            torch.sum(dh * h, dim=1, out=dweight)
            h.mul_(weight)
            dh.mul_(weight)
            du = s.mul_(dh)
            dg = torch.ops.aten.silu_backward(dh.mul_(u), g)
            torch.mm(dg, gate_EFD[e], out=dx).addmm_(du, up_EFD[e])
            if parts:
                put_off.append((e, x, dy, h, dg, du))
            else:
                expert_weight_part(gradients, e, x, dy, h, dg, du)

        def weight_part() -> list[Tensor]:
            later = [torch.empty_like(w) for w in ctx.weights]
            for visits in put_off:
                expert_weight_part(later, *visits)
            return later

        if parts:
            parts.put(ctx.weights, weight_part)
        dweight_TK = torch.empty_like(dweight_N).index_copy_(0, order_N, dweight_N).view(-1, ctx.k)
        return sum_visits(dx_ND, order_N, ctx.k), dweight_TK, *gradients, None, None


def expert_weight_part(gradients, e: int, x: Tensor, dy: Tensor, h: Tensor, dg: Tensor, du: Tensor) -> None:
    """Write the gradients of expert `e`'s gate, up and down weights, from what its visits gave."""
    dgate_EFD, dup_EFD, ddown_EDF = gradients
    torch.mm(dg.T, x, out=dgate_EFD[e])
    torch.mm(du.T, x, out=dup_EFD[e])
    torch.mm(dy.T, h, out=ddown_EDF[e])


def sum_visits(y_ND: Tensor, order_N: Tensor, k: int) -> Tensor:
    """For every token the sum of its `k` visits, which `order` sorted by expert; by reads and no scattered adds.

    The last row of `y_ND` stands for all visits beyond the rows.
    """
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(len(order_N), device=order_N.device).clamp(max=len(y_ND) - 1)
    return F.embedding_bag(place_N.view(-1, k), y_ND, mode="sum")  # gathers and adds in one pass
