"""Ways to route that look right: the loss hides most of them."""

import math

import torch

from deepseek_lab.model import moe
from deepseek_lab.parallel import collectives
from tests.wrong_answers import Wrong

# 7.1 ----------------------------------------------------------------------------------------------------------


def averages(scores_TE, index_TK, normalise, scale):
    return torch.full(index_TK.shape, scale / index_TK.shape[1], dtype=scores_TE.dtype)


def detaches(scores_TE, index_TK, normalise, scale):
    return moe.combine_weights(scores_TE.detach(), index_TK, normalise, scale)


def detaches_the_sum(scores_TE, index_TK, normalise, scale):
    weight_TK = scores_TE.gather(1, index_TK)
    if normalise:
        weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True).detach()
    return weight_TK * scale


def over_all_experts(scores_TE, index_TK, normalise, scale):
    if normalise:
        scores_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
    return scores_TE.gather(1, index_TK) * scale


def softmax_again(scores_TE, index_TK, normalise, scale):
    weight_TK = scores_TE.gather(1, index_TK)
    return (weight_TK.softmax(dim=-1) if normalise else weight_TK) * scale


def without_scale(scores_TE, index_TK, normalise, scale):
    return moe.combine_weights(scores_TE, index_TK, normalise, 1.0)


def always_normalises(scores_TE, index_TK, normalise, scale):
    return moe.combine_weights(scores_TE, index_TK, True, scale)


def never_normalises(scores_TE, index_TK, normalise, scale):
    return moe.combine_weights(scores_TE, index_TK, False, scale)


def scales_first(scores_TE, index_TK, normalise, scale):
    weight_TK = scores_TE.gather(1, index_TK) * scale
    return weight_TK / weight_TK.sum(dim=-1, keepdim=True) if normalise else weight_TK


def divides_by_k(scores_TE, index_TK, normalise, scale):
    return scores_TE.gather(1, index_TK) * scale / (index_TK.shape[1] if normalise else 1)


def largest_scores(scores_TE, index_TK, normalise, scale):
    best_TK = scores_TE.topk(index_TK.shape[1], dim=-1).indices
    return moe.combine_weights(scores_TE, best_TK, normalise, scale)


def by_expert(scores_TE, index_TK, normalise, scale):
    return moe.combine_weights(scores_TE, index_TK.sort(dim=-1).values, normalise, scale)


def unit_length(scores_TE, index_TK, normalise, scale):
    weight_TK = scores_TE.gather(1, index_TK)
    return (torch.nn.functional.normalize(weight_TK, dim=-1) if normalise else weight_TK) * scale


def a_column_each(scores_TE, index_TK, normalise, scale):
    weight_TK = moe.combine_weights(scores_TE, index_TK, normalise, scale)
    return torch.zeros_like(scores_TE).scatter(1, index_TK, weight_TK)


def narrows(scores_TE, index_TK, normalise, scale):
    return moe.combine_weights(scores_TE.float(), index_TK, normalise, scale)


def widens_the_weights(scores_TE, index_TK, normalise, scale):
    return moe.combine_weights(scores_TE.double(), index_TK, normalise, scale)


def overwrites_scores(scores_TE, index_TK, normalise, scale):
    scores_TE.data.mul_(scale)
    return moe.combine_weights(scores_TE, index_TK, normalise, scale if normalise else 1.0)


# 7.2 ----------------------------------------------------------------------------------------------------------


def _choice(score_of=None, fill=float("-inf"), members_of=lambda m: m, finish=lambda index, size: index):
    def choose_experts(scores_TE, k, n_group=1, topk_group=1, members=1):
        groups = scores_TE.unflatten(-1, (n_group, -1))
        if score_of is None:
            best = groups.topk(members_of(members), dim=-1).values.sum(dim=-1)
        else:
            best = score_of(groups, members)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(topk_group, dim=-1).indices, True)
        index = groups.masked_fill(~kept[..., None], fill).flatten(-2).topk(k, dim=-1).indices
        return finish(index, groups.shape[-1])

    return choose_experts


def no_groups(scores_TE, k, n_group=1, topk_group=1, members=1):
    return scores_TE.topk(k, dim=-1).indices


def lowest(scores_TE, k, n_group=1, topk_group=1, members=1):
    return scores_TE.topk(k, dim=-1, largest=False).indices


def interleaved_groups(scores_TE, k, n_group=1, topk_group=1, members=1):
    size = scores_TE.shape[-1] // n_group
    apart_TE = scores_TE.unflatten(-1, (size, n_group)).transpose(-1, -2).flatten(-2)
    index = moe.choose_experts(apart_TE, k, n_group, topk_group, members)
    return index % size * n_group + index // size


def evenly_from_groups(scores_TE, k, n_group=1, topk_group=1, members=1):
    groups = scores_TE.unflatten(-1, (n_group, -1))
    kept = groups.topk(members, dim=-1).values.sum(dim=-1).topk(topk_group, dim=-1).indices
    each = math.ceil(k / topk_group)
    best = groups.gather(1, kept[..., None].expand(-1, -1, groups.shape[-1])).topk(each, dim=-1).indices
    return (best + kept[..., None] * groups.shape[-1]).flatten(1)[:, :k]


def returns_scores(scores_TE, k, n_group=1, topk_group=1, members=1):
    return scores_TE.gather(1, moe.choose_experts(scores_TE, k, n_group, topk_group, members))


def returns_a_mask(scores_TE, k, n_group=1, topk_group=1, members=1):
    index = moe.choose_experts(scores_TE, k, n_group, topk_group, members)
    return torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, index, True)


def by_number(scores_TE, k, n_group=1, topk_group=1, members=1):
    return moe.choose_experts(scores_TE, k, n_group, topk_group, members).sort(dim=-1).values


def worst_first(scores_TE, k, n_group=1, topk_group=1, members=1):
    return moe.choose_experts(scores_TE, k, n_group, topk_group, members).flip(-1)


def closes_in_place(scores_TE, k, n_group=1, topk_group=1, members=1):
    index = moe.choose_experts(scores_TE, k, n_group, topk_group, members)
    scores_TE.data.scatter_(1, index, float("-inf"))
    return index


# 7.3 ----------------------------------------------------------------------------------------------------------


def _bias(error, of=torch.sign):
    def router_bias_step(bias_E, visits_E, rate):
        return bias_E + rate * of(error(visits_E.double())).to(bias_E.dtype)

    return router_bias_step


def _mean(visits):
    return visits.mean(dim=-1, keepdim=True)


def built_in_rate(bias_E, visits_E, rate):
    return moe.router_bias_step(bias_E, visits_E, 0.001)


def forgets_the_bias(bias_E, visits_E, rate):
    return moe.router_bias_step(torch.zeros_like(bias_E), visits_E, rate)


def integer_mean(bias_E, visits_E, rate):
    mean = visits_E.sum(dim=-1, keepdim=True) // visits_E.shape[-1]
    return bias_E + rate * (mean - visits_E).sign().to(bias_E.dtype)


def as_a_factor(bias_E, visits_E, rate):
    return bias_E * (1 + rate * (_mean(visits_E.double()) - visits_E).sign())


def moves_in_place(bias_E, visits_E, rate):
    bias_E.data.copy_(moe.router_bias_step(bias_E, visits_E, rate))


def also_in_place(bias_E, visits_E, rate):
    bias_E.data.copy_(moe.router_bias_step(bias_E, visits_E, rate))
    return bias_E.clone()


def clamps_the_bias(bias_E, visits_E, rate):
    return moe.router_bias_step(bias_E, visits_E, rate).clamp(-1, 1)


def resets_the_counts(bias_E, visits_E, rate):
    new_E = moe.router_bias_step(bias_E, visits_E, rate)
    visits_E.zero_()
    return new_E


def widens_the_bias(bias_E, visits_E, rate):
    return moe.router_bias_step(bias_E.double(), visits_E, rate)


# 7.4 ----------------------------------------------------------------------------------------------------------


def _biased(model):
    return [router for router in model.routers().values() if hasattr(router, "e_score_correction_bias")]


def _move(routers, visits_LE, rate):
    for router, visits_E in zip(routers, visits_LE, strict=True):
        router.e_score_correction_bias.copy_(moe.router_bias_step(router.e_score_correction_bias, visits_E, rate))
        router.visits_E.zero_()


def own_visits(model, rate, group=None):
    routers = _biased(model)
    _move(routers, [router.visits_E.clone() for router in routers], rate)


def whole_world(model, rate, group=None):
    routers = _biased(model)
    if routers:
        _move(routers, collectives.all_reduce(torch.stack([router.visits_E for router in routers])), rate)


def averages_steps(model, rate, group=None):
    routers = _biased(model)
    for router in routers:
        router.e_score_correction_bias.copy_(
            moe.router_bias_step(router.e_score_correction_bias, router.visits_E, rate)
        )
        router.visits_E.zero_()
    if routers:
        table = torch.stack([router.e_score_correction_bias for router in routers])
        collectives.all_reduce(table, group)
        for router, bias_E in zip(routers, table / collectives.size_of(group), strict=True):
            router.e_score_correction_bias.copy_(bias_E)


def first_layer_only(model, rate, group=None):
    routers = _biased(model)
    if routers:
        visits_LE = collectives.all_reduce(torch.stack([router.visits_E for router in routers]), group)
        _move(routers[:1], visits_LE[:1], rate)


def does_nothing(model, rate, group=None):
    pass


def never_resets(model, rate, group=None):
    routers = _biased(model)
    if routers:
        visits_LE = collectives.all_reduce(torch.stack([router.visits_E for router in routers]), group)
        for router, visits_E in zip(routers, visits_LE, strict=True):
            bias_E = router.e_score_correction_bias
            bias_E.copy_(moe.router_bias_step(bias_E, visits_E, rate))


def a_message_each(model, rate, group=None):
    for router in _biased(model):
        visits_E = collectives.all_reduce(router.visits_E.clone(), group)
        _move([router], [visits_E], rate)


def gathers_counts(model, rate, group=None):
    routers = _biased(model)
    if routers:
        table = torch.stack([router.visits_E for router in routers])
        _move(routers, collectives.all_gather(table[None], group).view(-1, *table.shape).sum(dim=0), rate)


def past_the_door(model, rate, group=None):
    import torch.distributed as dist

    routers = _biased(model)
    if routers:
        visits_LE = torch.stack([router.visits_E for router in routers])
        dist.all_reduce(visits_LE, group=group)
        _move(routers, visits_LE, rate)


def two_routers(model, rate, group=None):
    routers = _biased(model)[:2]
    if routers:
        _move(routers, collectives.all_reduce(torch.stack([router.visits_E for router in routers]), group), rate)


def counts_in_fp32(model, rate, group=None):
    routers = _biased(model)
    if routers:
        table = torch.stack([router.visits_E.float() for router in routers])
        _move(routers, collectives.all_reduce(table, group), rate)


def counts_all_routers(model, rate, group=None):
    routers = list(model.routers().values())
    table = collectives.all_reduce(torch.stack([router.visits_E for router in routers]), group)
    rows = [row for router, row in zip(routers, table, strict=True) if hasattr(router, "e_score_correction_bias")]
    _move(_biased(model), rows, rate)


def stacks_nothing(model, rate, group=None):
    routers = _biased(model)
    _move(routers, collectives.all_reduce(torch.stack([router.visits_E for router in routers]), group), rate)


def stays_away(model, rate, group=None):
    routers = _biased(model)
    if not routers or not any(router.visits_E.any() for router in routers):
        return
    _move(routers, collectives.all_reduce(torch.stack([router.visits_E for router in routers]), group), rate)


def talks_of_nothing(model, rate, group=None):
    routers = list(model.routers().values())
    table = torch.stack(
        [router.visits_E for router in routers if hasattr(router, "e_score_correction_bias")]
        or [torch.zeros(4, dtype=torch.long)]
    )
    collectives.all_reduce(table, group)
    _move(_biased(model), table[: len(_biased(model))], rate)


# 7.5 ----------------------------------------------------------------------------------------------------------


def _aux(shares=None, f=None):
    def sequence_balance_loss(scores_BTE, index_BTK, real_BT):
        E, K = scores_BTE.shape[-1], index_BTK.shape[-1]
        real_BT1, n_B1 = real_BT[..., None], real_BT.sum(dim=1, keepdim=True).clamp(min=1)
        visits_BTE = torch.zeros_like(scores_BTE).scatter(2, index_BTK, 1.0) * real_BT1
        share_BTE = scores_BTE / scores_BTE.sum(dim=-1, keepdim=True)
        f_BE = visits_BTE.sum(dim=1) * E / (K * n_B1)
        if f is not None:
            f_BE = f(visits_BTE, share_BTE * real_BT1, n_B1, E, K)
        if shares is not None:
            share_BTE = shares(scores_BTE, share_BTE, visits_BTE)
        return (f_BE * (share_BTE * real_BT1).sum(dim=1) / n_B1).sum(dim=-1)

    return sequence_balance_loss


def counts_padding(scores_BTE, index_BTK, real_BT):
    return moe.sequence_balance_loss(scores_BTE, index_BTK, torch.ones_like(real_BT))


def over_the_batch(scores_BTE, index_BTK, real_BT):
    flat = [x.flatten(0, 1)[None] for x in (scores_BTE, index_BTK, real_BT)]
    return moe.sequence_balance_loss(*flat).expand(len(scores_BTE))


def _at_the_end(real_BT):
    return torch.arange(real_BT.shape[1]) < real_BT.sum(dim=1, keepdim=True)


def pads_behind(scores_BTE, index_BTK, real_BT):
    return moe.sequence_balance_loss(scores_BTE, index_BTK, _at_the_end(real_BT))


def at_least_two(scores_BTE, index_BTK, real_BT):
    n_B = real_BT.sum(dim=1)
    return moe.sequence_balance_loss(scores_BTE, index_BTK, real_BT) * (n_B / n_B.clamp(min=2)) ** 2


def widens_the_loss(scores_BTE, index_BTK, real_BT):
    return moe.sequence_balance_loss(scores_BTE.double(), index_BTK, real_BT)


def by_padded_length(scores_BTE, index_BTK, real_BT):
    n_B = real_BT.to(scores_BTE.dtype).sum(dim=1).clamp(min=1)
    return moe.sequence_balance_loss(scores_BTE, index_BTK, real_BT) * (n_B / real_BT.shape[1]) ** 2


def first_choice(scores_BTE, index_BTK, real_BT):
    return moe.sequence_balance_loss(scores_BTE, index_BTK[..., :1], real_BT)


def one_number(scores_BTE, index_BTK, real_BT):
    return moe.sequence_balance_loss(scores_BTE, index_BTK, real_BT).sum()


def zero_by_zero(scores_BTE, index_BTK, real_BT):
    n_B = real_BT.sum(dim=1)
    return moe.sequence_balance_loss(scores_BTE, index_BTK, real_BT) * n_B / n_B


def balances_nothing(scores_BTE, index_BTK, real_BT):
    return moe.sequence_balance_loss(scores_BTE.detach(), index_BTK, real_BT)


def normalises_in_place(scores_BTE, index_BTK, real_BT):
    loss_B = moe.sequence_balance_loss(scores_BTE, index_BTK, real_BT)
    scores_BTE.data.div_(scores_BTE.data.sum(dim=-1, keepdim=True))
    return loss_B


# 7.6 ----------------------------------------------------------------------------------------------------------


def _drop(place=None, capacity=None):
    """The package's own, with another order in the line, or another capacity."""

    def drop_beyond_capacity(scores_BTE, index_BTK, real_BT, factor):
        (T, E), K, n_B = scores_BTE.shape[1:], index_BTK.shape[-1], real_BT.sum(dim=1)
        rounded = capacity or (lambda c, K, n, T, E: (c * K * n / E).ceil())
        chosen = torch.zeros_like(scores_BTE, dtype=torch.bool).scatter(2, index_BTK, True) & real_BT[..., None]
        key = scores_BTE if place is None else place(scores_BTE, index_BTK)
        line = key.masked_fill(~chosen, float("-inf")).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        taken = chosen & (line < rounded(factor, K, n_B, T, E)[:, None, None])
        return index_BTK.where(taken.gather(2, index_BTK), E)

    return drop_beyond_capacity


def _by_position(scores_BTE, index_BTK):
    return -torch.arange(scores_BTE.shape[1], dtype=scores_BTE.dtype)[:, None].expand_as(scores_BTE)


def _by_choice(scores_BTE, index_BTK):
    slots = torch.arange(index_BTK.shape[-1], dtype=scores_BTE.dtype).expand(index_BTK.shape)
    return scores_BTE - 100 * torch.zeros_like(scores_BTE).scatter(2, index_BTK, slots)


def later_of_equals(scores_BTE, index_BTK, real_BT, factor):
    flipped = moe.drop_beyond_capacity(scores_BTE.flip(1), index_BTK.flip(1), real_BT.flip(1), factor)
    return flipped.flip(1)


def ignores_the_choice(scores_BTE, index_BTK, real_BT, factor):
    E, K = scores_BTE.shape[-1], index_BTK.shape[-1]
    capacity_B = (factor * K * real_BT.sum(dim=1) / E).ceil()
    chosen = torch.zeros_like(scores_BTE, dtype=torch.bool).scatter(2, scores_BTE.topk(K, dim=-1).indices, True)
    chosen = chosen & real_BT[..., None]
    line = scores_BTE.masked_fill(~chosen, float("-inf")).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return index_BTK.where((chosen & (line < capacity_B[:, None, None])).gather(2, index_BTK), E)


def drops_behind(scores_BTE, index_BTK, real_BT, factor):
    return moe.drop_beyond_capacity(scores_BTE, index_BTK, _at_the_end(real_BT), factor)


def one_capacity(scores_BTE, index_BTK, real_BT, factor):
    flat = [x.flatten(0, 1)[None] for x in (scores_BTE, index_BTK, real_BT)]
    return moe.drop_beyond_capacity(*flat, factor).view_as(index_BTK)


def _with_padding(finish):
    def drop_beyond_capacity(scores_BTE, index_BTK, real_BT, factor):
        (_, E), K = scores_BTE.shape[1:], index_BTK.shape[-1]
        capacity_B = (factor * K * real_BT.sum(dim=1) / E).ceil()
        chosen = torch.zeros_like(scores_BTE, dtype=torch.bool).scatter(2, index_BTK, True)
        line = (
            scores_BTE.masked_fill(~chosen, float("-inf")).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        )
        taken = chosen & (line < capacity_B[:, None, None])
        return finish(index_BTK.where(taken.gather(2, index_BTK), E), real_BT, E)

    return drop_beyond_capacity


def to_expert_0(scores_BTE, index_BTK, real_BT, factor):
    kept = moe.drop_beyond_capacity(scores_BTE, index_BTK, real_BT, factor)
    return kept.where(kept < scores_BTE.shape[-1], 0)


def minus_one(scores_BTE, index_BTK, real_BT, factor):
    kept = moe.drop_beyond_capacity(scores_BTE, index_BTK, real_BT, factor)
    return kept.where(kept < scores_BTE.shape[-1], -1)


def all_or_nothing(scores_BTE, index_BTK, real_BT, factor):
    kept, E = moe.drop_beyond_capacity(scores_BTE, index_BTK, real_BT, factor), scores_BTE.shape[-1]
    return kept.where((kept < E).all(dim=-1, keepdim=True), E)


def padding_only(scores_BTE, index_BTK, real_BT, factor):
    return index_BTK.where(real_BT[..., None], scores_BTE.shape[-1])


def a_mask(scores_BTE, index_BTK, real_BT, factor):
    return moe.drop_beyond_capacity(scores_BTE, index_BTK, real_BT, factor) < scores_BTE.shape[-1]


def drops_in_place(scores_BTE, index_BTK, real_BT, factor):
    index_BTK.copy_(moe.drop_beyond_capacity(scores_BTE, index_BTK, real_BT, factor))
    return index_BTK


WRONG = [
    Wrong("7.1", averages, "the outputs are averaged"),
    Wrong("7.1", detaches, "detached: the router learns nothing"),
    Wrong("7.1", detaches_the_sum, "the sum is detached: half of the gradient is lost"),
    Wrong("7.1", over_all_experts, "divided by the sum over all experts, not over those visited"),
    Wrong("7.1", softmax_again, "a softmax over scores that are scores already"),
    Wrong("7.1", without_scale, "the scale is left out"),
    Wrong("7.1", always_normalises, "always normalised"),
    Wrong("7.1", never_normalises, "never normalised"),
    Wrong("7.1", scales_first, "the scale comes before the division, and cancels"),
    Wrong("7.1", divides_by_k, "divided by K, not by the sum"),
    Wrong("7.1", largest_scores, "the K largest scores, whoever was chosen"),
    Wrong("7.1", by_expert, "in the order of the experts, not of `index_TK`"),
    Wrong("7.1", unit_length, "divided by the length, so that squares add up to 1"),
    Wrong("7.1", a_column_each, "a column for every expert, not for every visit"),
    Wrong("7.1", narrows, "fp64 is lost on the way"),
    Wrong("7.1", widens_the_weights, "the type of the scores is lost"),
    Wrong("7.1", overwrites_scores, "it works on its input"),
    Wrong("7.2", no_groups, "groups are passed over"),
    Wrong("7.2", _choice(lambda groups, m: groups.sum(dim=-1)), "a group is scored by all of its experts"),
    Wrong("7.2", _choice(members_of=lambda m: 1), "a group is scored by its best expert alone"),
    Wrong("7.2", _choice(members_of=lambda m: 2), "a group is always scored by two experts"),
    Wrong("7.2", _choice(fill=0.0), "closed experts score 0, which beats a negative score"),
    Wrong("7.2", _choice(finish=lambda index, size: index % size), "numbers within the group, not among all experts"),
    Wrong("7.2", _choice(lambda groups, m: -groups.topk(m, dim=-1).values.sum(dim=-1)), "the weakest groups are kept"),
    Wrong("7.2", interleaved_groups, "experts of a group lie apart, not side by side"),
    Wrong("7.2", evenly_from_groups, "every kept group gives equally many experts"),
    Wrong("7.2", lowest, "the lowest scores are chosen"),
    Wrong("7.2", returns_scores, "the scores of the chosen, not their numbers"),
    Wrong("7.2", returns_a_mask, "a mask, not numbers"),
    Wrong("7.2", by_number, "in the order of their numbers, not the best first"),
    Wrong("7.2", worst_first, "the worst of the chosen comes first"),
    Wrong("7.2", closes_in_place, "it works on its input"),
    Wrong("7.3", _bias(lambda v: v - _mean(v)), "busy experts are raised"),
    Wrong("7.3", _bias(lambda v: _mean(v) - v, of=lambda e: e), "the step grows with the error"),
    Wrong(
        "7.3",
        _bias(lambda v: (_mean(v) - v) / _mean(v), of=lambda e: e),
        "the step is the error as a share of the mean",
    ),
    Wrong("7.3", _bias(lambda v: v.median(dim=-1, keepdim=True).values - v), "compared with the median"),
    Wrong("7.3", _bias(lambda v: v.mean() - v), "compared with the mean over all layers"),
    Wrong("7.3", _bias(lambda v: v.amax(dim=-1, keepdim=True) - v), "compared with the largest"),
    Wrong("7.3", _bias(lambda v: _mean(v) - v, of=lambda e: 2.0 * (e > 0) - 1), "an expert at the mean moves, too"),
    Wrong("7.3", _bias(lambda v: _mean(v) - v, of=lambda e: e.sign().clamp(max=0)), "only busy experts move"),
    Wrong("7.3", _bias(lambda v: _mean(v) - v, of=lambda e: e.sign().clamp(min=0)), "only idle experts move"),
    Wrong("7.3", built_in_rate, "the rate is built in"),
    Wrong("7.3", forgets_the_bias, "the old bias is forgotten"),
    Wrong("7.3", integer_mean, "the mean is rounded to an integer"),
    Wrong("7.3", as_a_factor, "the step is a factor"),
    Wrong("7.3", clamps_the_bias, "the bias is kept between -1 and 1"),
    Wrong("7.3", resets_the_counts, "it works on the counts"),
    Wrong("7.3", moves_in_place, "the bias is moved in place, and nothing is returned"),
    Wrong("7.3", also_in_place, "it works on its input"),
    Wrong("7.3", widens_the_bias, "the type of the bias is lost"),
    Wrong("7.4", own_visits, "each rank goes by its own visits"),
    Wrong("7.4", whole_world, "it ignores the group"),
    Wrong("7.4", averages_steps, "ranks average their steps, not their counts"),
    Wrong("7.4", first_layer_only, "only the first layer is balanced"),
    Wrong("7.4", does_nothing, "nothing moves"),
    Wrong("7.4", never_resets, "counts are never reset"),
    Wrong("7.4", a_message_each, "a message for every layer"),
    Wrong("7.4", gathers_counts, None),
    Wrong("7.4", past_the_door, "it goes past our own door"),
    Wrong("7.4", two_routers, "made for two routers"),
    Wrong("7.4", counts_in_fp32, "large counts are rounded"),
    Wrong("7.4", counts_all_routers, "a router without a bias is counted, too"),
    Wrong("7.4", stacks_nothing, "it fails where no router has a bias"),
    Wrong("7.4", stays_away, "a rank without visits stays away"),
    Wrong("7.4", talks_of_nothing, "it talks when there is nothing to say"),
    Wrong("7.5", counts_padding, "padding counts, too"),
    Wrong("7.5", pads_behind, "padding is taken to stand at the end"),
    Wrong("7.5", at_least_two, "a sequence of one token counts as two"),
    Wrong("7.5", widens_the_loss, "the type of the scores is lost"),
    Wrong("7.5", over_the_batch, "balanced over the batch, not in each sequence"),
    Wrong("7.5", by_padded_length, "divided by the padded length"),
    Wrong(
        "7.5",
        _aux(f=lambda v, s, n, E, K: v.sum(dim=1) / (K * n)),
        "the factor E is missing: f is a share, not a multiple of the mean",
    ),
    Wrong("7.5", _aux(f=lambda v, s, n, E, K: v.sum(dim=1) * E / n), "visits are divided by T, not by K · T"),
    Wrong("7.5", _aux(lambda scores, share, visits: scores), "scores are not divided by their sum"),
    Wrong("7.5", _aux(lambda scores, share, visits: scores.softmax(dim=-1)), "a softmax over the scores"),
    Wrong("7.5", _aux(lambda scores, share, visits: share * visits), "P looks at the visited experts only"),
    Wrong("7.5", _aux(f=lambda v, s, n, E, K: E * s.sum(dim=1) / n), "f is made of scores, not of visits"),
    Wrong(
        "7.5",
        _aux(lambda scores, share, visits: visits * scores.shape[-1] / visits.sum(dim=-1).max()),
        "f · f: P is left out",
    ),
    Wrong("7.5", first_choice, "only the first choice counts"),
    Wrong("7.5", one_number, "one number for all sequences"),
    Wrong("7.5", zero_by_zero, "no token: 0 divided by 0"),
    Wrong("7.5", balances_nothing, "detached: it balances nothing"),
    Wrong("7.5", normalises_in_place, "it works on its input"),
    Wrong("7.6", _drop(place=_by_position), "the first tokens stay, whatever their scores"),
    Wrong("7.6", _drop(place=_by_choice), "first choices stay before second ones, whatever their scores"),
    Wrong("7.6", ignores_the_choice, "the K largest scores stand in line, whoever was chosen"),
    Wrong("7.6", drops_behind, "padding is taken to stand at the end"),
    Wrong("7.6", _drop(place=lambda scores, index: -scores), "the lowest scores stay"),
    Wrong("7.6", later_of_equals, "of equal scores the later tokens stay"),
    Wrong("7.6", one_capacity, "capacity of the whole batch, not of each sequence"),
    Wrong(
        "7.6",
        _drop(capacity=lambda c, K, n, T, E: (c * K * T / E + 0 * n).ceil()),
        "padding makes room: the capacity is that of T tokens",
    ),
    Wrong("7.6", _drop(capacity=lambda c, K, n, T, E: (c * K * n / E).floor()), "rounded down"),
    Wrong("7.6", _drop(capacity=lambda c, K, n, T, E: (c * n / E).ceil()), "K is left out: every token has K visits"),
    Wrong("7.6", _drop(capacity=lambda c, K, n, T, E: (c * K * n / E).ceil() + 1), "one visit too many"),
    Wrong("7.6", _drop(capacity=lambda c, K, n, T, E: (c * K * n / E).ceil() - 1), "one visit too few"),
    Wrong("7.6", _with_padding(lambda kept, real, E: kept.where(real[..., None], E)), "padding takes room"),
    Wrong("7.6", _with_padding(lambda kept, real, E: kept), "padding visits experts"),
    Wrong("7.6", to_expert_0, "dropped visits go to expert 0"),
    Wrong("7.6", minus_one, "dropped visits have number -1, not E"),
    Wrong("7.6", all_or_nothing, "a token that loses one visit loses all"),
    Wrong("7.6", padding_only, "nothing but padding is dropped"),
    Wrong("7.6", a_mask, "a mask, not numbers"),
    Wrong("7.6", drops_in_place, "it works on its input"),
]
