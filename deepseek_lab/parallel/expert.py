"""Expert parallelism: experts are spread over the ranks of a group, and tokens travel to their experts and back.

The one idea (GShard, arXiv 2006.16668, section 3.2): two all-to-alls.  *Dispatch* sends every visit of a token to the
rank that holds the expert; *combine* sends the results back, and each token adds up its own.  In backward the two
change places: the gradient of a dispatch is combined, that of a combine is dispatched.

Nobody knows how many tokens come before they come, so the ranks exchange counts first.  No rank may leave out a
collective, whatever the counts: a rank without tokens still has to send its zeros.

A visit's weight travels with it, as one more column.  That is 1/D more bytes, and spares the token's rank from keeping
the results of all its visits for backward, which it would need to find the gradient of the weights at home.

Every expert sees the tokens of the whole group, so its gradient is complete on the rank that holds it; only copies of
the expert in other groups (`edp`) have a part of it.

Shapes: T tokens, K experts a token, N = T·K visits, n those that take place; D width, E experts, R ranks, El = E/R
experts here; M rows that arrived, P places for experts on all ranks (E, unless some are held twice).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepseek_lab.model import moe
from deepseek_lab.plan import placement

from . import collectives, tensor


def exchange_counts(counts_E, group=None):
    """How many rows each rank will send to each of this rank's experts: (R, El) int64.

    `counts_E` (E,) says how many visits of this rank's tokens go to each expert; rank r holds the r-th E/R of them.
    One all-to-all, in which a rank learns only what concerns it.
    """
    n_ranks = collectives.size_of(group)
    counts_RE = counts_E.view(n_ranks, -1)
    return collectives.all_to_all(counts_RE, [1] * n_ranks, [1] * n_ranks, group)


class Dispatch(torch.autograd.Function):
    """A row for every visit, sent to the rank that holds its expert; in backward the gradients come home.

    The visit's weight is the row's last column.  A token's gradient is the sum over its visits.
    """

    @staticmethod
    def forward(ctx, x_TD, weight_TK, route):
        """Tokens (T, D) and weights (T, K) of this rank; what arrives here: (M, D) and (M, 1)."""
        ctx.route = route
        weight_n1 = weight_TK.flatten()[route.visit_n, None]
        rows_nC = torch.cat([x_TD[route.token_n], weight_n1], dim=1)
        rows_MC = collectives.all_to_all(rows_nC, route.sent, route.received, route.group)
        return rows_MC[:, :-1], rows_MC[:, -1:]

    @staticmethod
    def backward(ctx, dx_MD, dweight_M1):
        route = ctx.route
        rows_MC = torch.cat([dx_MD, dweight_M1], dim=1)
        rows_nC = collectives.all_to_all(rows_MC, route.received, route.sent, route.group)
        dweight_N = rows_nC.new_zeros(route.T * route.K)
        dweight_N[route.visit_n] = rows_nC[:, -1]
        return route.sum_visits(rows_nC[:, :-1]), dweight_N.view(route.T, route.K), None


class Combine(torch.autograd.Function):
    """Results sent back to their tokens' ranks, where each token adds up its own; in backward dy is dispatched."""

    @staticmethod
    def forward(ctx, y_MD, route):
        """Results (M, D) of this rank's experts, in the order of arrival; for its own tokens (T, D)."""
        ctx.route = route
        y_nD = collectives.all_to_all(y_MD, route.received, route.sent, route.group)
        return route.sum_visits(y_nD)

    @staticmethod
    def backward(ctx, dy_TD):
        route = ctx.route
        return collectives.all_to_all(dy_TD[route.token_n], route.sent, route.received, route.group), None


def share_visits(index_TK, expert_P, rank=0):
    """The place (T, K) of every visit, when some experts have several: `expert_P` says which expert each place holds.

    The visits of an expert take turns among its places, as they come.  Rank r begins at turn r: otherwise the first
    place would get the odd visit of every rank.  Visits to nowhere, expert number E, go to nowhere, place number P.
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
    """How the visits of this rank's tokens travel, and what comes here.

    `order_N`: this rank's visits, numbered t·K + k, sorted by expert; the first n take place, the others go nowhere.
    `sent`, `received`: rows to and from each rank.  `arrived_REl`: the latter for each expert here.
    """

    T: int
    K: int
    order_N: Tensor
    sent: list[int]
    received: list[int]
    arrived_REl: Tensor
    group: object = None

    @property
    def visit_n(self) -> Tensor:
        """The visits that take place, in the order in which they are sent."""
        return self.order_N[: sum(self.sent)]

    @property
    def token_n(self) -> Tensor:
        """The token of each of them."""
        return self.visit_n // self.K

    def sum_visits(self, y_nD: Tensor) -> Tensor:
        """For each token the sum over its visits: (T, D)."""
        if nowhere := len(self.order_N) - len(y_nD):
            y_nD = F.pad(y_nD, (0, 0, 0, nowhere))
        return moe.sum_visits(y_nD, self.order_N, self.K)

    def visits_here(self) -> tuple[Tensor, Tensor]:
        """The expert (M, 1), counted from this rank's first, of every row that arrived; and how many each has, (El,).

        Rows come in the order of the ranks, and from each in the order of the experts.
        """
        n_ranks, here = self.arrived_REl.shape
        index_El = torch.arange(here, device=self.arrived_REl.device)
        index_M = index_El.repeat(n_ranks).repeat_interleave(self.arrived_REl.flatten(), output_size=sum(self.received))
        return index_M[:, None], self.arrived_REl.sum(dim=0)


def plan_route(index_TK: Tensor, counts_E: Tensor, group=None) -> Route:
    """The route of visits to experts `index_TK` (number E: nowhere), of which `counts_E` go to each expert."""
    arrived_REl = exchange_counts(counts_E, group)
    sent_R, received_R = counts_E.view(len(arrived_REl), -1).sum(dim=1), arrived_REl.sum(dim=1)
    order_N = index_TK.flatten().argsort(stable=True)
    T, K = index_TK.shape
    return Route(T, K, order_N, sent_R.tolist(), received_R.tolist(), arrived_REl, group)


class ExpertParallel(moe.Experts):
    """This rank's share of some routed experts; called as the whole is, with this rank's tokens."""

    def __init__(self, experts: moe.Experts, group=None):
        nn.Module.__init__(self)
        rank, n_ranks = collectives.rank_in(group), collectives.size_of(group)
        self.group, self.n_experts = group, len(experts.gate_proj)
        self.placement = placement.contiguous(self.n_experts, n_ranks)
        for name, w in experts.named_parameters():
            self.register_parameter(name, nn.Parameter(tensor.shard(w.detach(), 0, rank, n_ranks)))

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
            counts_E = index_TK.flatten().bincount(minlength=len(expert_P) + 1)[: len(expert_P)]
        if torch.is_autocast_enabled(x_TD.device.type):
            x_TD = x_TD.to(torch.get_autocast_dtype(x_TD.device.type))
        route = plan_route(index_TK, counts_E, self.group)
        x_MD, weight_M1 = Dispatch.apply(x_TD, weight_TK.to(x_TD.dtype), route)
        return Combine.apply(super().forward(x_MD, weight_M1, *route.visits_here()), route)


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
