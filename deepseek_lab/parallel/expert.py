"""Expert parallelism: experts are spread over the ranks of a group, and tokens travel to their experts and back.

The one idea (GShard, arXiv 2006.16668, section 3.2): two all-to-alls.  *Dispatch* sends every token to the ranks that
hold its experts; *combine* sends the results back, and each token adds up its own.  In backward the two change places:
the gradient of a dispatch is combined, that of a combine is dispatched.

Nobody knows how many tokens come before they come, so the ranks exchange counts first.  No rank may leave out a
collective, whatever the counts: a rank without tokens still has to send its zeros.

A token goes to a rank once, however many of its experts live there, and one row comes back, already summed.  For that
its weights must travel with it, which is cheap (K columns beside D), and spares the token's rank from keeping the
results of all visits for backward, as it would have to if it weighed them at home.

Every expert sees the tokens of the whole group, so its gradient is complete on the rank that holds it; only its copies
in other groups (`edp`) have a part of it.

Shapes: T tokens, K experts a token, D width, E experts, R ranks, El = E/R experts here; n rows sent, M rows that
arrived, P places for experts on all ranks (E, unless some are held twice).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepseek_lab.model import moe
from deepseek_lab.plan import placement

from . import collectives, tensor


def tokens_for_ranks(index_TK, here, n_ranks):
    """Which tokens go to which rank, if rank r holds experts r·here to (r+1)·here - 1.

    A token goes once to every rank that holds any of its experts.  Number E, for E = here·R experts on R ranks, is
    nowhere: such a visit takes the token to no rank.

    Returns:
        token_n: (n,) the tokens in the order in which they are sent: by rank, and for each rank in their own order.
        sent_R: (R,) how many go to each rank.
    """
    ranks_R = torch.arange(n_ranks, device=index_TK.device)
    goes_RT = (index_TK // here == ranks_R[:, None, None]).any(dim=-1)
    return goes_RT.nonzero()[:, 1], goes_RT.sum(dim=1)


def exchange_counts(sent_R, group=None):
    """How many rows will come from each of the R ranks, (R,), when this one sends `sent_R` (R,) to them.

    One all-to-all, in which a rank learns only what concerns it.  Counts are int64, and travel so.
    """
    each = [1] * collectives.size_of(group)
    return collectives.all_to_all(sent_R, each, each, group)


class Dispatch(torch.autograd.Function):
    """Tokens to the ranks of their experts, with weights and expert numbers; in backward their gradients come home."""

    @staticmethod
    def forward(ctx, x_TD, weight_TK, index_TK, route):
        """This rank's tokens (T, D), weights and experts (T, K); the same of those that arrive here: M instead of T.

        Experts are numbered from the first of the rank where the row goes; one that lives elsewhere has number
        El = `route.here`, and weight 0.  Rows travel in the dtype of x; numbers arrive as int64.  For backward nothing
        is kept but where rows went.
        """
        ctx.route, (D, K) = route, (x_TD.shape[1], index_TK.shape[1])
        local_nK = route.local_numbers(index_TK)
        weight_nK = weight_TK[route.token_n].where(local_nK < route.here, 0)
        rows_nC = torch.cat([x_TD[route.token_n], weight_nK, local_nK.to(x_TD.dtype)], dim=1)
        rows_MC = collectives.all_to_all(rows_nC, route.sent, route.received, route.group)
        x_MD, weight_MK, local_MK = rows_MC.split([D, K, K], dim=1)
        return x_MD, weight_MK, local_MK.long()

    @staticmethod
    def backward(ctx, dx_MD, dweight_MK, _):
        """Gradients of what arrived; of x_TD and weight_TK.  Experts that live elsewhere have left 0 in dweight_MK."""
        route, D = ctx.route, dx_MD.shape[1]
        rows_MC = torch.cat([dx_MD, dweight_MK], dim=1)
        rows_nC = collectives.all_to_all(rows_MC, route.received, route.sent, route.group)
        sum_TC = route.add_up(rows_nC)
        return sum_TC[:, :D], sum_TC[:, D:], None, None


class Combine(torch.autograd.Function):
    """Results back to the ranks of their tokens, where each token adds up its own; in backward dy is dispatched."""

    @staticmethod
    def forward(ctx, y_MD, route):
        """What this rank's experts made of the rows that arrived, (M, D); the sums for this rank's tokens, (T, D).

        For backward nothing is kept but where rows went.
        """
        ctx.route = route
        return route.add_up(collectives.all_to_all(y_MD, route.received, route.sent, route.group))

    @staticmethod
    def backward(ctx, dy_TD):
        """The gradient of the sums (T, D); of the rows y_MD."""
        route = ctx.route
        return collectives.all_to_all(dy_TD[route.token_n], route.sent, route.received, route.group), None


def share_visits(index_TK, expert_P, rank=0):
    """The place (T, K) of every visit, when experts may have several: `expert_P` says which each of P places holds.

    Places are counted over all ranks.  The visits of an expert take turns among its places, as they come.  Rank r
    begins at turn r: otherwise the first place would get the odd visit of every rank.  Visits to nowhere, expert number
    E, stay nowhere, as place number P.
    """
    index_N = index_TK.flatten()
    expert_P = torch.cat([expert_P, expert_P.max()[None] + 1])  # nowhere is one more expert, with one place
    copies_E, places_P = expert_P.bincount(), expert_P.argsort(stable=True)  # places of expert 0, then of 1, ...
    first_E = copies_E.cumsum(0) - copies_E
    visits_E, order_N = index_N.bincount(minlength=len(copies_E)), index_N.argsort(stable=True)
    before_E = visits_E.cumsum(0) - visits_E
    turn_N = torch.empty_like(index_N)
    turn_N[order_N] = torch.arange(len(index_N), device=index_N.device) - before_E[index_N[order_N]]
    return places_P[first_E[index_N] + (turn_N + rank) % copies_E[index_N]].view_as(index_TK)


# --- the layer ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """How this rank's `n_tokens` travel: `token_n` in the order in which they are sent; rows `sent` to each rank,
    and `received` from each.  Every rank has `here` experts."""

    n_tokens: int
    here: int
    token_n: Tensor
    sent: list[int]
    received: list[int]
    group: object = None

    def local_numbers(self, index_TK: Tensor) -> Tensor:
        """For every row sent the numbers of its token's experts, counted from the receiver's first; El: not there."""
        first_n = torch.arange(len(self.sent)).repeat_interleave(torch.tensor(self.sent)) * self.here
        local_nK = index_TK[self.token_n] - first_n.to(index_TK.device)[:, None]
        return local_nK.where((local_nK >= 0) & (local_nK < self.here), self.here)

    def add_up(self, rows_nC: Tensor) -> Tensor:
        """For each token the sum of its rows: (T, C).

        Rank after rank: no token comes twice from one, so the order of the additions is always the same.
        """
        sum_TC = rows_nC.new_zeros(self.n_tokens, rows_nC.shape[1])
        for token, rows in zip(self.token_n.split(self.sent), rows_nC.split(self.sent), strict=True):
            sum_TC[token] += rows
        return sum_TC


def plan_route(index_TK: Tensor, here: int, group=None) -> Route:
    """The route of tokens to their experts `index_TK`, when every rank has `here` of them.

    Raises:
        ValueError: for more than 256 experts a rank: a row may be in bf16, which has no larger whole numbers.
    """
    if here > 256:
        raise ValueError(f"{here} experts on one rank: their numbers travel in bf16, up to 256; use more ranks")
    token_n, sent_R = tokens_for_ranks(index_TK, here, collectives.size_of(group))
    received_R = exchange_counts(sent_R, group)
    return Route(len(index_TK), here, token_n, sent_R.tolist(), received_R.tolist(), group)


class ExpertParallel(moe.Experts):
    """This rank's share of some routed experts; called as the whole is, with this rank's tokens."""

    def __init__(self, experts: moe.Experts, group=None):
        nn.Module.__init__(self)
        rank, n_ranks = collectives.rank_in(group), collectives.size_of(group)
        self.group, self.n_experts = group, len(experts.gate_proj)
        self.placement = placement.contiguous(self.n_experts, n_ranks)
        for name, w in experts.named_parameters():
            self.register_parameter(name, nn.Parameter(tensor.shard(w.detach(), 0, rank, n_ranks)))
        self.train(experts.training)

    @property
    def is_placed(self) -> bool:
        """Whether experts are elsewhere than in training (`place_experts`)."""
        return self.placement != placement.contiguous(self.n_experts, len(self.placement))

    def forward(self, x_TD: Tensor, weight_TK: Tensor, index_TK: Tensor, counts_E: Tensor) -> Tensor:
        """As `moe.Experts.forward`.  Collective: every rank of the group must call it, also without any tokens.

        Raises:
            RuntimeError: in training, when experts were moved by `place_experts`.
        """
        if self.is_placed:
            if self.training:
                raise RuntimeError(
                    "experts moved by place_experts are for evaluation: call eval(), or do not move them"
                )
            expert_P = torch.tensor(self.placement, device=index_TK.device).flatten()
            index_TK = share_visits(index_TK, expert_P, collectives.rank_in(self.group))
        if torch.is_autocast_enabled(x_TD.device.type):
            x_TD = x_TD.to(torch.get_autocast_dtype(x_TD.device.type))
        here = len(self.gate_proj)
        route = plan_route(index_TK, here, self.group)
        x_MD, weight_MK, index_MK = Dispatch.apply(x_TD, weight_TK.to(x_TD.dtype), index_TK, route)
        counts = index_MK.flatten().bincount(minlength=here + 1)[:here]
        return Combine.apply(super().forward(x_MD, weight_MK, index_MK, counts), route)


def apply_expert_parallel(model: nn.Module, group=None) -> None:
    """Spread the routed experts of a DeepSeekModel over `group`, in place: rank r keeps the r-th E/R of every layer.

    On the meta device too.  Comes before tensor parallelism, which then splits each expert.  With one rank nothing
    changes.

    Raises:
        ValueError: when the ranks do not divide the experts.
    """
    if collectives.size_of(group) > 1:
        for module in list(model.modules()):
            if isinstance(module, moe.MoE):
                module.experts = ExpertParallel(module.experts, group)


@torch.no_grad()
def place_experts(experts: ExpertParallel, expert_RS: Sequence[Sequence[int]]) -> None:
    """Move weights so that rank r holds experts `expert_RS[r]`, for evaluation and serving (see `plan.placement`).

    One all-to-all for each of the three matrices; an expert that a rank holds already stays there.  All ranks must give
    the same placement.  Not for training: each copy of an expert would find a part of its gradient only, and the parts
    would have to be summed over ranks that differ from expert to expert.  So training keeps experts contiguous.

    Raises:
        ValueError: when ranks have unequal numbers of places, or an expert has none.
    """
    old_RS = experts.placement
    placement.check(expert_RS, experts.n_experts, len(old_RS))
    rank = collectives.rank_in(experts.group)
    home_E = {e: r for r, held in reversed(list(enumerate(old_RS))) for e in held}

    def source(e: int, r: int) -> int:
        return r if e in old_RS[r] else home_E[e]

    give = [[old_RS[rank].index(e) for e in wanted if source(e, r) == rank] for r, wanted in enumerate(expert_RS)]
    sources = [source(e, rank) for e in expert_RS[rank]]
    places = sorted(range(len(sources)), key=sources.__getitem__)  # rows come in the order of the ranks
    sent, received = [len(rows) for rows in give], [sources.count(r) for r in range(len(old_RS))]
    for name, w in list(experts.named_parameters()):
        arrived = collectives.all_to_all(w[[row for rows in give for row in rows]], sent, received, experts.group)
        placed = torch.empty_like(arrived)
        placed[places] = arrived
        setattr(experts, name, nn.Parameter(placed, requires_grad=False))
    experts.placement = tuple(map(tuple, expert_RS))
