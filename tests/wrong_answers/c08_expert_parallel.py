"""Ways to send tokens to the wrong place, too often, or only there and not back."""

import torch
import torch.distributed as dist

from deepseek_lab.parallel import collectives, expert
from deepseek_lab.plan import placement
from tests.wrong_answers import Wrong

own_counts, OwnDispatch, OwnCombine = expert.exchange_counts, expert.Dispatch, expert.Combine  # whatever fills the slot

# 8.1 ----------------------------------------------------------------------------------------------------------


def _goes_RT(index_TK, here, n_ranks):
    return (index_TK // here == torch.arange(n_ranks)[:, None, None]).any(dim=-1)


def a_row_for_every_visit(index_TK, here, n_ranks):
    rank_N = index_TK.flatten() // here
    order_N = rank_N.argsort(stable=True)
    counts = rank_N.bincount(minlength=n_ranks + 1)[:n_ranks]
    return order_N[: counts.sum()] // index_TK.shape[1], counts


def by_token(index_TK, here, n_ranks):
    goes_RT = _goes_RT(index_TK, here, n_ranks)
    return goes_RT.T.nonzero()[:, 0], goes_RT.sum(dim=1)


def best_expert_only(index_TK, here, n_ranks):
    return expert.tokens_for_ranks(index_TK[:, :1], here, n_ranks)


def two_best_experts(index_TK, here, n_ranks):
    return expert.tokens_for_ranks(index_TK[:, :2], here, n_ranks)


def dealt_like_cards(index_TK, here, n_ranks):
    rank_TK = (index_TK % n_ranks).where(index_TK < here * n_ranks, n_ranks)
    return expert.tokens_for_ranks(rank_TK, 1, n_ranks)


def leaves_out_idle_ranks(index_TK, here, n_ranks):
    rank_n, token_n = _goes_RT(index_TK, here, n_ranks).nonzero(as_tuple=True)
    return token_n, rank_n.unique(return_counts=True)[1]


def nowhere_is_a_rank(index_TK, here, n_ranks):
    return expert.tokens_for_ranks(index_TK, here, n_ranks + 1)


def last_rank_gets_nowhere(index_TK, here, n_ranks):
    return expert.tokens_for_ranks(index_TK.clamp(max=here * n_ranks - 1), here, n_ranks)


def by_expert(index_TK, here, n_ranks):
    tokens = []
    for rank in range(n_ranks):
        mine = {}
        for e in range(rank * here, (rank + 1) * here):
            mine |= dict.fromkeys((index_TK == e).any(dim=-1).nonzero().flatten().tolist())
        tokens += mine
    return torch.tensor(tokens, dtype=torch.long), _goes_RT(index_TK, here, n_ranks).sum(dim=1)


def numbers_of_visits(index_TK, here, n_ranks):
    hit_RTK = index_TK // here == torch.arange(n_ranks)[:, None, None]
    goes_RT = hit_RTK.any(dim=-1)
    first_RT = hit_RTK.int().argmax(dim=-1)
    rank_n, token_n = goes_RT.nonzero(as_tuple=True)
    return token_n * index_TK.shape[1] + first_RT[rank_n, token_n], goes_RT.sum(dim=1)


def everywhere(index_TK, here, n_ranks):
    T = len(index_TK)
    return torch.arange(T).repeat(n_ranks), torch.full((n_ranks,), T)


def rewrites_its_argument(index_TK, here, n_ranks):
    answer = expert.tokens_for_ranks(index_TK, here, n_ranks)
    index_TK //= here
    return answer


def counts_as_floats(index_TK, here, n_ranks):
    token_n, sent_R = expert.tokens_for_ranks(index_TK, here, n_ranks)
    return token_n, sent_R.float()


# 8.2 ----------------------------------------------------------------------------------------------------------


def my_own(sent_R, group=None):
    return sent_R.clone()


def all_gather_and_pick(sent_R, group=None):
    table_RR = collectives.all_gather(sent_R[None], group)
    return table_RR[:, collectives.rank_in(group)].contiguous()


def whole_table(sent_R, group=None):
    return collectives.all_gather(sent_R, group)


def sum_of_all(sent_R, group=None):
    return collectives.all_reduce(sent_R.clone(), group)


def nothing_to_say(sent_R, group=None):
    return own_counts(sent_R, group) if sent_R.any() else torch.zeros_like(sent_R)


def one_by_one(sent_R, group=None):
    rank, n_ranks = collectives.rank_in(group), collectives.size_of(group)
    received_R = sent_R.clone()
    for step in range(1, n_ranks):
        dst, src = (rank + step) % n_ranks, (rank - step) % n_ranks
        collectives.exchange(sent_R[dst : dst + 1], dst, received_R[src : src + 1], src, group)
    return received_R


def past_the_door(sent_R, group=None):
    received_R = torch.empty_like(sent_R)
    dist.all_to_all_single(received_R, sent_R, group=group)
    return received_R


def floats(sent_R, group=None):
    return own_counts(sent_R.double(), group)


def narrow(sent_R, group=None):
    return own_counts(sent_R.int(), group)


def as_floats_on_the_way(sent_R, group=None):
    return own_counts(sent_R.double(), group).long()


def narrow_on_the_way(sent_R, group=None):
    return own_counts(sent_R.int(), group).long()


def over_its_argument(sent_R, group=None):
    return sent_R.copy_(own_counts(sent_R, group))


def counts_in_the_world(sent_R, group=None):
    whole_R = torch.zeros(collectives.size_of(), dtype=torch.long)
    whole_R[: len(sent_R)] = sent_R
    return own_counts(whole_R)[: len(sent_R)]


# 8.3 ----------------------------------------------------------------------------------------------------------


def _pack(x_TD, weight_TK, index_TK, route):
    """What the package's own forward sends, in parts."""
    local_nK = route.local_numbers(index_TK)
    weight_nK = weight_TK[route.token_n].where(local_nK < route.here, 0)
    return [x_TD[route.token_n], weight_nK, local_nK.to(x_TD.dtype)]


def _send(rows, route, group=None):
    return collectives.all_to_all(rows, route.sent, route.received, route.group if group is None else group)


def _split(rows_MC, D, K):
    x_MD, weight_MK, local_MK = rows_MC.split([D, K, K], dim=1)
    return x_MD, weight_MK, local_MK.long()


class CountsStay(OwnDispatch):
    @staticmethod
    def backward(ctx, dx_MD, dweight_MK, _):
        route = ctx.route
        rows_nC = collectives.all_to_all(torch.cat([dx_MD, dweight_MK], 1), route.sent, route.received, route.group)
        sum_TC = route.add_up(rows_nC)
        return sum_TC[:, : dx_MD.shape[1]], sum_TC[:, dx_MD.shape[1] :], None, None


class LastRowWins(OwnDispatch):
    @staticmethod
    def backward(ctx, dx_MD, dweight_MK, _):
        route, D = ctx.route, dx_MD.shape[1]
        rows = torch.cat([dx_MD, dweight_MK], 1)
        rows_nC = collectives.all_to_all(rows, route.received, route.sent, route.group)
        dx_TD = rows_nC.new_zeros(route.n_tokens, D)
        for token, row in zip(route.token_n.tolist(), rows_nC, strict=True):
            dx_TD[token] = row[:D]
        return dx_TD, route.add_up(rows_nC)[:, D:], None, None


class WeightsLearnNothing(OwnDispatch):
    @staticmethod
    def backward(ctx, dx_MD, dweight_MK, _):
        dx_TD, *_ = OwnDispatch.backward(ctx, dx_MD, dweight_MK, _)
        return dx_TD, None, None, None


class KeepsTokens(OwnDispatch):
    @staticmethod
    def forward(ctx, x_TD, weight_TK, index_TK, route):
        ctx.inputs = (x_TD, weight_TK)
        return OwnDispatch.forward(ctx, x_TD, weight_TK, index_TK, route)


class AveragesGradients(OwnDispatch):
    @staticmethod
    def backward(ctx, dx_MD, dweight_MK, _):
        dx_TD, dweight_TK, *_ = OwnDispatch.backward(ctx, dx_MD, dweight_MK, _)
        return dx_TD / len(ctx.route.sent), dweight_TK / len(ctx.route.sent), None, None


class KeepsGradients(OwnDispatch):
    @staticmethod
    def backward(ctx, dx_MD, dweight_MK, _):
        dx_TD, dweight_TK, *_ = OwnDispatch.backward(ctx, dx_MD, dweight_MK, _)
        return dx_TD * 0, dweight_TK * 0, None, None


class AllWeights(OwnDispatch):
    @staticmethod
    def forward(ctx, x_TD, weight_TK, index_TK, route):
        ctx.route = route
        x_nD, _, local_nK = _pack(x_TD, weight_TK, index_TK, route)
        rows_MC = _send(torch.cat([x_nD, weight_TK[route.token_n], local_nK], 1), route)
        return _split(rows_MC, x_TD.shape[1], index_TK.shape[1])


class NumbersOfTheModel(OwnDispatch):
    @staticmethod
    def forward(ctx, x_TD, weight_TK, index_TK, route):
        ctx.route = route
        x_nD, weight_nK, _ = _pack(x_TD, weight_TK, index_TK, route)
        rows_MC = _send(torch.cat([x_nD, weight_nK, index_TK[route.token_n].to(x_TD.dtype)], 1), route)
        return _split(rows_MC, x_TD.shape[1], index_TK.shape[1])


class ThreeMessages(OwnDispatch):
    @staticmethod
    def forward(ctx, x_TD, weight_TK, index_TK, route):
        ctx.route = route
        x_nD, weight_nK, _ = _pack(x_TD, weight_TK, index_TK, route)
        return _send(x_nD, route), _send(weight_nK, route), _send(route.local_numbers(index_TK), route)


class InDoublePrecision(OwnDispatch):
    @staticmethod
    def forward(ctx, x_TD, weight_TK, index_TK, route):
        ctx.route = route
        rows_MC = _send(torch.cat(_pack(x_TD, weight_TK, index_TK, route), 1).double(), route)
        return _split(rows_MC.to(x_TD.dtype), x_TD.shape[1], index_TK.shape[1])


class ArrivesInDouble(OwnDispatch):
    @staticmethod
    def forward(ctx, x_TD, weight_TK, index_TK, route):
        ctx.route = route
        rows_MC = _send(torch.cat(_pack(x_TD, weight_TK, index_TK, route), 1), route).double()
        return _split(rows_MC, x_TD.shape[1], index_TK.shape[1])


class GathersAllTokens(OwnDispatch):
    @staticmethod
    def forward(ctx, x_TD, weight_TK, index_TK, route):
        ctx.route = route
        rows_nC = torch.cat(_pack(x_TD, weight_TK, index_TK, route), 1)
        rank, n_ranks = collectives.rank_in(route.group), collectives.size_of(route.group)
        sent_RR = collectives.all_gather(torch.tensor(route.sent)[None], route.group)
        longest = int(sent_RR.sum(dim=1).max())
        padded = torch.cat([rows_nC, rows_nC.new_zeros(longest - len(rows_nC), rows_nC.shape[1])])
        every_RNC = collectives.all_gather(padded[None], route.group)
        mine = [every_RNC[src, sent_RR[src, :rank].sum() : sent_RR[src, : rank + 1].sum()] for src in range(n_ranks)]
        return _split(torch.cat(mine), x_TD.shape[1], index_TK.shape[1])


class DispatchPastTheDoor(OwnDispatch):
    @staticmethod
    def forward(ctx, x_TD, weight_TK, index_TK, route):
        ctx.route = route
        rows_nC = torch.cat(_pack(x_TD, weight_TK, index_TK, route), 1)
        rows_MC = rows_nC.new_empty(sum(route.received), rows_nC.shape[1])
        dist.all_to_all_single(rows_MC, rows_nC, route.received, route.sent, group=route.group)
        return _split(rows_MC, x_TD.shape[1], index_TK.shape[1])


class InOrderOfTokens(OwnDispatch):
    @staticmethod
    def forward(ctx, x_TD, weight_TK, index_TK, route):
        ctx.route = route
        x_nD, weight_nK, local_nK = _pack(x_TD, weight_TK, index_TK, route)
        x_nD = x_TD[route.token_n.sort().values]
        return _split(_send(torch.cat([x_nD, weight_nK, local_nK], 1), route), x_TD.shape[1], index_TK.shape[1])


class InSinglePrecision(OwnDispatch):
    @staticmethod
    def forward(ctx, x_TD, weight_TK, index_TK, route):
        ctx.route = route
        narrow = torch.float32 if x_TD.dtype == torch.float64 else x_TD.dtype
        rows_MC = _send(torch.cat(_pack(x_TD, weight_TK, index_TK, route), 1).to(narrow), route)
        return _split(rows_MC.to(x_TD.dtype), x_TD.shape[1], index_TK.shape[1])


class ZeroesWeightsInPlace(OwnDispatch):
    @staticmethod
    def forward(ctx, x_TD, weight_TK, index_TK, route):
        answer = OwnDispatch.forward(ctx, x_TD, weight_TK, index_TK, route)
        weight_TK[index_TK >= route.here * len(route.sent)] = 0
        return answer


class LosesARow(OwnDispatch):
    @staticmethod
    def forward(ctx, x_TD, weight_TK, index_TK, route):
        return tuple(part[:-1] for part in OwnDispatch.forward(ctx, x_TD, weight_TK, index_TK, route))


class DispatchInTheWorld(OwnDispatch):
    @staticmethod
    def forward(ctx, x_TD, weight_TK, index_TK, route):
        ctx.route = route
        rows_nC = torch.cat(_pack(x_TD, weight_TK, index_TK, route), 1)
        rows_MC = collectives.all_to_all(rows_nC, route.sent, route.received)
        return _split(rows_MC, x_TD.shape[1], index_TK.shape[1])


def _skips_dispatch(leave):
    """A Dispatch that stays at home in forward when `leave(route)`."""

    class Skips(OwnDispatch):
        @staticmethod
        def forward(ctx, x_TD, weight_TK, index_TK, route):
            ctx.route = route
            if leave(route):
                return x_TD.new_zeros(0, x_TD.shape[1]), weight_TK.new_zeros(0, weight_TK.shape[1]), index_TK[:0]
            return OwnDispatch.forward(ctx, x_TD, weight_TK, index_TK, route)

    return Skips


def _skips_dispatch_back(leave):
    """The same in backward."""

    class Skips(OwnDispatch):
        @staticmethod
        def backward(ctx, dx_MD, dweight_MK, _):
            if leave(ctx.route):
                n_tokens = ctx.route.n_tokens
                zeros = dx_MD.new_zeros(n_tokens, dx_MD.shape[1]), dweight_MK.new_zeros(n_tokens, dweight_MK.shape[1])
                return *zeros, None, None
            return OwnDispatch.backward(ctx, dx_MD, dweight_MK, _)

    return Skips


def _sends_none(route):
    return sum(route.sent) == 0


def _receives_none(route):
    return sum(route.received) == 0


def _neither(route):
    return sum(route.sent) == sum(route.received) == 0


# 8.4 ----------------------------------------------------------------------------------------------------------


def _home(y_MD, route):
    return collectives.all_to_all(y_MD, route.received, route.sent, route.group)


class KeepsTheLast(OwnCombine):
    @staticmethod
    def forward(ctx, y_MD, route):
        ctx.route = route
        y_TD = y_MD.new_zeros(route.n_tokens, y_MD.shape[1])
        for token, row in zip(route.token_n.tolist(), _home(y_MD, route), strict=True):
            y_TD[token] = row
        return y_TD


class Mean(OwnCombine):
    @staticmethod
    def forward(ctx, y_MD, route):
        y_TD = OwnCombine.forward(ctx, y_MD, route)
        rows_T = route.token_n.bincount(minlength=route.n_tokens).clamp(min=1)
        return y_TD / rows_T[:, None].to(y_TD.dtype)


class CombineCountsStay(OwnCombine):
    @staticmethod
    def forward(ctx, y_MD, route):
        ctx.route = route
        return route.add_up(collectives.all_to_all(y_MD, route.sent, route.received, route.group))


class SendsNothingBack(OwnCombine):
    @staticmethod
    def backward(ctx, dy_TD):
        return OwnCombine.backward(ctx, dy_TD)[0] * 0, None


class KeepsResults(OwnCombine):
    @staticmethod
    def forward(ctx, y_MD, route):
        ctx.save_for_backward(y_MD)
        return OwnCombine.forward(ctx, y_MD, route)


class AveragesBack(OwnCombine):
    @staticmethod
    def backward(ctx, dy_TD):
        return OwnCombine.backward(ctx, dy_TD)[0] / len(ctx.route.sent), None


class CombineInDouble(OwnCombine):
    @staticmethod
    def forward(ctx, y_MD, route):
        return OwnCombine.forward(ctx, y_MD.double(), route).to(y_MD.dtype)


class ReturnsDouble(OwnCombine):
    @staticmethod
    def forward(ctx, y_MD, route):
        return OwnCombine.forward(ctx, y_MD, route).double()


class SumsOverRanks(OwnCombine):
    """Every rank lays its results out for the tokens of all, and one all-reduce adds them up."""

    @staticmethod
    def forward(ctx, y_MD, route):
        ctx.route = route
        rank, n_ranks = collectives.rank_in(route.group), collectives.size_of(route.group)
        info = collectives.all_gather_object((route.n_tokens, route.sent, route.token_n), route.group)
        whole = [y_MD.new_zeros(n, y_MD.shape[1]) for n, *_ in info]
        for src, rows in enumerate(y_MD.split(route.received)):
            _, sent, token_n = info[src]
            whole[src][token_n.split(sent)[rank]] = rows
        summed = collectives.all_reduce(torch.cat(whole), route.group)
        return summed.split([n for n, *_ in info])[rank] if n_ranks > 1 else summed


class CombinePastTheDoor(OwnCombine):
    @staticmethod
    def forward(ctx, y_MD, route):
        ctx.route = route
        y_nD = y_MD.new_empty(sum(route.sent), y_MD.shape[1])
        dist.all_to_all_single(y_nD, y_MD.contiguous(), route.sent, route.received, group=route.group)
        return route.add_up(y_nD)


class CombineOverwrites(OwnCombine):
    @staticmethod
    def forward(ctx, y_MD, route):
        y_TD = OwnCombine.forward(ctx, y_MD, route)
        y_MD.zero_()
        return y_TD


class DividedByRanks(OwnCombine):
    @staticmethod
    def forward(ctx, y_MD, route):
        return OwnCombine.forward(ctx, y_MD, route) / len(route.sent)


class CombineInSingle(OwnCombine):
    @staticmethod
    def forward(ctx, y_MD, route):
        ctx.route = route
        narrow = torch.float32 if y_MD.dtype == torch.float64 else y_MD.dtype
        return route.add_up(_home(y_MD.to(narrow), route).to(y_MD.dtype))


class RowsNotAddedUp(OwnCombine):
    @staticmethod
    def forward(ctx, y_MD, route):
        ctx.route = route
        return _home(y_MD, route)


class CombineInTheWorld(OwnCombine):
    @staticmethod
    def forward(ctx, y_MD, route):
        ctx.route = route
        return route.add_up(collectives.all_to_all(y_MD, route.received, route.sent))


def _skips_combine(leave):
    """A Combine that stays at home in forward when `leave(route)`."""

    class Skips(OwnCombine):
        @staticmethod
        def forward(ctx, y_MD, route):
            ctx.route = route
            return (
                y_MD.new_zeros(route.n_tokens, y_MD.shape[1]) if leave(route) else OwnCombine.forward(ctx, y_MD, route)
            )

    return Skips


def _skips_combine_back(leave):
    """The same in backward."""

    class Skips(OwnCombine):
        @staticmethod
        def backward(ctx, dy_TD):
            rows = sum(ctx.route.received)
            return (
                (dy_TD.new_zeros(rows, dy_TD.shape[1]), None) if leave(ctx.route) else OwnCombine.backward(ctx, dy_TD)
            )

    return Skips


# 8.5 ----------------------------------------------------------------------------------------------------------


def _copies(worth, most=lambda n_places, n_ranks: n_ranks, pick=max, order=iter):
    def copies_for(load_E, n_places, n_ranks):
        placement.copies_for(load_E, n_places, n_ranks)  # which refuses what cannot be
        copies = [1] * len(load_E)
        for _ in range(n_places - len(load_E)):
            free = [e for e in order(list(range(len(load_E)))) if copies[e] < most(n_places, n_ranks)]
            copies[pick(free, key=lambda e: worth(load_E[e], copies[e]))] += 1
        return copies

    return copies_for


def rounded_shares(load_E, n_places, n_ranks):
    return [max(1, round(n_places * load / sum(load_E))) for load in load_E]


def only_the_spare_ones(load_E, n_places, n_ranks):
    return [copies - 1 for copies in placement.copies_for(load_E, n_places, n_ranks)]


def takes_any_number(load_E, n_places, n_ranks):
    n_places = min(max(n_places, len(load_E)), len(load_E) * n_ranks)
    return placement.copies_for(load_E, n_places, n_ranks)


def halves_loads_in_place(load_E, n_places, n_ranks):
    copies = placement.copies_for(load_E, n_places, n_ranks)
    for e, c in enumerate(copies):
        load_E[e] /= c
    return copies


def refuses_the_most(load_E, n_places, n_ranks):
    if n_places >= len(load_E) * n_ranks:
        raise ValueError("too many places")
    return placement.copies_for(load_E, n_places, n_ranks)


def copies_as_floats(load_E, n_places, n_ranks):
    return [float(copies) for copies in placement.copies_for(load_E, n_places, n_ranks)]


def asserts_what_can_be(load_E, n_places, n_ranks):
    assert len(load_E) <= n_places <= len(load_E) * n_ranks
    return placement.copies_for(load_E, n_places, n_ranks)


# 8.6 ----------------------------------------------------------------------------------------------------------


def _packing(key=None, load=lambda load, c: load / c, rank_load=True, limit=True, distinct=True):
    def pack(load_E, copies_E, n_ranks):
        placement.pack(load_E, copies_E, n_ranks)  # which refuses what cannot be
        share = [load(x, c) for x, c in zip(load_E, copies_E, strict=True)]
        held, loads, places = [[] for _ in range(n_ranks)], [0.0] * n_ranks, sum(copies_E) // n_ranks
        for e in sorted(range(len(load_E)), key=(lambda e: key(e, share)) if key else (lambda e: -share[e])):
            for _ in range(copies_E[e]):
                free = [r for r in range(n_ranks) if not limit or len(held[r]) < places]
                new = [r for r in free if e not in held[r]] if distinct else free
                r = min(new or free, key=lambda r: loads[r] if rank_load else len(held[r]))
                held[r].append(e)
                loads[r] += share[e]
        return held

    return pack


def by_whole_loads(load_E, copies_E, n_ranks):
    return _packing(key=lambda e, _: -load_E[e])(load_E, copies_E, n_ranks)


def filled_in_order(load_E, copies_E, n_ranks):
    every = [e for e, copies in enumerate(copies_E) for _ in range(copies)]
    places = len(every) // n_ranks
    return [every[r * places : (r + 1) * places] for r in range(n_ranks)]


def loses_copies(load_E, copies_E, n_ranks):
    held = placement.pack(load_E, copies_E, n_ranks)
    return [[0] * len(rank) for rank in held]


def uses_up_copies(load_E, copies_E, n_ranks):
    held = placement.pack(load_E, copies_E, n_ranks)
    copies_E[:] = [0] * len(copies_E)
    return held


def no_last_resort(load_E, copies_E, n_ranks):
    if max(copies_E) > n_ranks:
        min([])  # what comes of `min` over the ranks that have a place and do not hold the expert
    return placement.pack(load_E, copies_E, n_ranks)


def packs_any_number(load_E, copies_E, n_ranks):
    if sum(copies_E) % n_ranks:
        return [[0, 2], [1]]
    return placement.pack(load_E, copies_E, n_ranks)


def one_list(load_E, copies_E, n_ranks):
    return [e for held in placement.pack(load_E, copies_E, n_ranks) for e in held]


# 8.7 ----------------------------------------------------------------------------------------------------------


def _turns(turn_of):
    def share_visits(index_TK, expert_P, rank=0):
        flat = index_TK.flatten()
        holder = torch.cat([expert_P, expert_P.max()[None] + 1])
        places, copies = holder.argsort(stable=True), holder.bincount()
        first, order = copies.cumsum(0) - copies, flat.argsort(stable=True)
        position = torch.empty_like(flat)
        position[order] = torch.arange(len(flat))
        visits = flat.bincount(minlength=len(copies))
        turn = position - (visits.cumsum(0) - visits)[flat]
        visit = torch.arange(len(flat))
        turn = turn_of(turn=turn, rank=rank, visit=visit, token=visit // index_TK.shape[1], position=position)
        return places[first[flat] + turn % copies[flat]].view_as(index_TK)

    return share_visits


def nowhere_gets_a_place(index_TK, expert_P, rank=0):
    return expert.share_visits(index_TK, expert_P, rank).clamp(max=len(expert_P) - 1)


def experts_for_places(index_TK, expert_P, rank=0):
    return index_TK.clone()


def overwrites_visits(index_TK, expert_P, rank=0):
    return index_TK.copy_(expert.share_visits(index_TK, expert_P, rank))


def as_floats(index_TK, expert_P, rank=0):
    return expert.share_visits(index_TK, expert_P, rank).double()


WRONG = [
    Wrong("8.1", a_row_for_every_visit, "a row for every visit: tokens go twice to a rank with two of their experts"),
    Wrong("8.1", by_token, "sorted by token, not by rank"),
    Wrong("8.1", best_expert_only, "only the first expert of a token is looked at"),
    Wrong("8.1", two_best_experts, "only the first two experts of a token are looked at"),
    Wrong("8.1", dealt_like_cards, "experts are dealt out like cards: expert e on rank e % R"),
    Wrong("8.1", leaves_out_idle_ranks, "ranks to which nothing goes are missing in the counts"),
    Wrong("8.1", nowhere_is_a_rank, "nowhere is taken for one more rank"),
    Wrong("8.1", last_rank_gets_nowhere, "the last rank gets what goes nowhere"),
    Wrong("8.1", by_expert, "sorted by expert within a rank, not by token"),
    Wrong("8.1", numbers_of_visits, "numbers of visits, not of tokens"),
    Wrong("8.1", everywhere, "every token goes to every rank"),
    Wrong("8.1", rewrites_its_argument, "it changes its argument"),
    Wrong("8.1", counts_as_floats, "not int64 tensors"),
    Wrong("8.2", my_own, "what this rank sends, not what it receives"),
    Wrong("8.2", all_gather_and_pick, "an all-gather: everybody learns everything"),
    Wrong("8.2", whole_table, "every rank gets the whole table, and not its own column"),
    Wrong("8.2", sum_of_all, "the sum of all counts"),
    Wrong("8.2", nothing_to_say, "a rank with nothing to send stays away"),
    Wrong("8.2", one_by_one, "a message for every rank"),
    Wrong("8.2", past_the_door, "it goes past our own door"),
    Wrong("8.2", floats, "counts come back as floats"),
    Wrong("8.2", narrow, "counts come back as int32"),
    Wrong("8.2", as_floats_on_the_way, "counts travel as floats"),
    Wrong("8.2", narrow_on_the_way, "counts travel as int32"),
    Wrong("8.2", over_its_argument, "it overwrites its argument"),
    Wrong("8.2", counts_in_the_world, "it ignores the group"),
    Wrong("8.3", CountsStay, "in backward the counts do not change places"),
    Wrong("8.3", LastRowWins, "a token keeps only the gradient of its last row"),
    Wrong("8.3", WeightsLearnNothing, "the weights get no gradient: the router cannot learn"),
    Wrong("8.3", KeepsTokens, "rows are kept for backward"),
    Wrong("8.3", AveragesGradients, "the gradients are divided by the number of ranks"),
    Wrong("8.3", KeepsGradients, "gradients stay where the tokens went"),
    Wrong("8.3", AllWeights, "weights of experts that live elsewhere travel too"),
    Wrong("8.3", NumbersOfTheModel, "experts are numbered as in the whole model"),
    Wrong("8.3", ThreeMessages, "a message for every part of a row"),
    Wrong("8.3", InDoublePrecision, "rows travel in a wider type"),
    Wrong("8.3", ArrivesInDouble, "another dtype than the caller's"),
    Wrong("8.3", GathersAllTokens, "an all-gather: every rank gets every token"),
    Wrong("8.3", ZeroesWeightsInPlace, "it overwrites its input"),
    Wrong("8.3", DispatchPastTheDoor, "it goes past our own door"),
    Wrong("8.3", InOrderOfTokens),
    Wrong("8.3", InSinglePrecision, "rows travel in a narrower type"),
    Wrong("8.3", LosesARow, "rows are missing, or too many"),
    Wrong("8.3", DispatchInTheWorld, "it ignores the group"),
    Wrong("8.3", _skips_dispatch(_sends_none), "a rank with nothing to send stays away"),
    Wrong("8.3", _skips_dispatch(_receives_none), "a rank with nothing to receive stays away"),
    Wrong("8.3", _skips_dispatch(_neither), "a rank with nothing to send or receive stays away"),
    Wrong("8.3", _skips_dispatch_back(_receives_none), "in backward, a rank with nothing to send stays away"),
    Wrong("8.3", _skips_dispatch_back(_sends_none), "in backward, a rank with nothing to receive stays away"),
    Wrong("8.3", _skips_dispatch_back(_neither), "in backward, a rank with nothing to send or receive stays away"),
    Wrong("8.4", KeepsTheLast, "a token keeps only its last row"),
    Wrong("8.4", Mean, "a mean over a token's rows, not their sum"),
    Wrong("8.4", CombineCountsStay, "sent and received counts are mixed up"),
    Wrong("8.4", SendsNothingBack, "nothing is sent back"),
    Wrong("8.4", KeepsResults, "rows are kept for backward"),
    Wrong("8.4", AveragesBack, "the gradients are divided by the number of ranks"),
    Wrong("8.4", CombineInDouble, "rows travel in a wider type"),
    Wrong("8.4", ReturnsDouble, "another dtype than the caller's"),
    Wrong("8.4", SumsOverRanks, "whole tensors are summed over the ranks"),
    Wrong("8.4", CombinePastTheDoor, "it goes past our own door"),
    Wrong("8.4", CombineOverwrites, "it overwrites its input"),
    Wrong("8.4", DividedByRanks, "the sums are divided by the number of ranks"),
    Wrong("8.4", CombineInSingle, "rows travel in a narrower type"),
    Wrong("8.4", RowsNotAddedUp, "rows are missing, or too many"),
    Wrong("8.4", CombineInTheWorld, "it ignores the group"),
    Wrong("8.4", _skips_combine(_receives_none), "a rank with nothing to send stays away"),
    Wrong("8.4", _skips_combine(_sends_none), "a rank with nothing to receive stays away"),
    Wrong("8.4", _skips_combine(_neither), "a rank with nothing to send or receive stays away"),
    Wrong("8.4", _skips_combine_back(_sends_none), "in backward, a rank with nothing to send stays away"),
    Wrong("8.4", _skips_combine_back(_receives_none), "in backward, a rank with nothing to receive stays away"),
    Wrong("8.4", _skips_combine_back(_neither), "in backward, a rank with nothing to send or receive stays away"),
    Wrong("8.5", _copies(lambda load, c: load), "the busiest expert gets every spare place"),
    Wrong("8.5", _copies(lambda load, c: load / (c + 1)), "loads count as if one copy more were there: x / (c + 1)"),
    Wrong("8.5", _copies(lambda load, c: load / c, most=lambda places, ranks: places), "more copies than ranks"),
    Wrong("8.5", _copies(lambda load, c: load / c, pick=min), "the idlest experts are copied"),
    Wrong("8.5", _copies(lambda load, c: (c == 1, load)), "one more for each of the busiest, and no third copy"),
    Wrong("8.5", _copies(lambda load, c: -c), "spare places are dealt out in order"),
    Wrong("8.5", _copies(lambda load, c: load / c, order=reversed), "of equal ones the last is taken"),
    Wrong("8.5", _copies(lambda load, c: load // c), "loads are divided without remainder"),
    Wrong("8.5", _copies(lambda load, c: int(load) / c), "loads are cut to whole numbers"),
    Wrong("8.5", _copies(lambda load, c: (load / c, -c)), "of equal ones the one with the fewest copies is taken"),
    Wrong("8.5", _copies(lambda load, c: (load / c, load)), "of equal ones the one with the highest load is taken"),
    Wrong("8.5", refuses_the_most, "exactly E·R places are refused"),
    Wrong("8.5", copies_as_floats, "not whole numbers"),
    Wrong("8.5", asserts_what_can_be, "impossible numbers of places end in another error"),
    Wrong("8.5", rounded_shares, "shares of the load are rounded, and do not add up"),
    Wrong("8.5", only_the_spare_ones, "copies beyond the first, not all copies"),
    Wrong("8.5", takes_any_number, "impossible numbers of places are accepted"),
    Wrong("8.5", halves_loads_in_place, "it uses up its input"),
    Wrong("8.6", _packing(key=lambda e, share: share[e]), "the lightest are placed first"),
    Wrong("8.6", _packing(key=lambda e, share: e), "experts are placed in the order of their numbers"),
    Wrong("8.6", _packing(load=lambda load, c: load), "a copy counts for the expert's whole load"),
    Wrong("8.6", by_whole_loads, "the order goes by whole loads, not by a copy's share"),
    Wrong("8.6", _packing(load=lambda load, c: load // c), "a copy's share is cut to a whole number"),
    Wrong("8.6", _packing(load=lambda load, c: int(load) / c), "loads are cut to whole numbers"),
    Wrong("8.6", no_last_resort, "an expert with more copies than ranks finds no place"),
    Wrong("8.6", packs_any_number, "places that the ranks cannot share equally are accepted"),
    Wrong("8.6", one_list, "not lists of expert numbers"),
    Wrong("8.6", _packing(rank_load=False), "they are dealt out in turn, whatever a rank has already"),
    Wrong("8.6", _packing(limit=False), "ranks have unequal numbers of places"),
    Wrong("8.6", filled_in_order, "a rank holds an expert twice"),
    Wrong("8.6", loses_copies, "copies are lost"),
    Wrong("8.6", uses_up_copies, "it uses up its input"),
    Wrong("8.7", _turns(lambda rank, turn, **_: turn * 0), "all visits go to the first copy"),
    Wrong("8.7", _turns(lambda rank, turn, **_: turn * 0 + rank), "a rank sends all its visits to one copy"),
    Wrong("8.7", _turns(lambda turn, **_: turn), "every rank begins with the first copy"),
    Wrong("8.7", _turns(lambda visit, rank, **_: visit + rank), "turns go by the number of the visit, whosever it is"),
    Wrong("8.7", _turns(lambda token, rank, **_: token + rank), "turns go by the number of the token"),
    Wrong("8.7", _turns(lambda position, rank, **_: position + rank), "turns go on from expert to expert"),
    Wrong("8.7", nowhere_gets_a_place, "visits to nowhere get a place"),
    Wrong("8.7", experts_for_places, "expert numbers are taken for places"),
    Wrong("8.7", overwrites_visits, "it overwrites its input"),
    Wrong("8.7", as_floats, "places are not int64"),
]  # fmt: skip
