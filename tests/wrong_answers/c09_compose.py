"""Compositions that look right: shapes agree, losses agree, and some group or count is another."""

import math

from deepseek_lab.parallel import collectives
from deepseek_lab.plan import memory
from tests.wrong_answers import Wrong

# 9.1 ----------------------------------------------------------------------------------------------------------


def checked(rank, sizes):
    if not 0 <= rank < math.prod(sizes.values()):
        raise ValueError(rank)


def innermost_first(rank, sizes):
    checked(rank, sizes)
    place = {}
    for axis, size in sizes.items():
        rank, place[axis] = divmod(rank, size)
    return place


def each_by_itself(rank, sizes):
    checked(rank, sizes)
    return {axis: rank % size for axis, size in sizes.items()}


def nothing_taken_off(rank, sizes):
    checked(rank, sizes)
    place, inside = {}, math.prod(sizes.values())
    for axis, size in sizes.items():
        inside //= size
        place[axis] = rank // inside
    return place


def from_one(rank, sizes):
    return {axis: n + 1 for axis, n in right_place(rank, sizes).items()}


def right_place(rank, sizes):
    checked(rank, sizes)
    place = {}
    for axis in reversed(sizes):
        rank, place[axis] = divmod(rank, sizes[axis])
    return {axis: place[axis] for axis in sizes}


def without_size_one(rank, sizes):
    return {axis: n for axis, n in right_place(rank, sizes).items() if sizes[axis] > 1}


def always_the_origin(rank, sizes):
    checked(rank, sizes)
    return dict.fromkeys(sizes, 0)


def any_rank(rank, sizes):
    place = {}
    for axis in reversed(sizes):
        rank, place[axis] = divmod(rank, sizes[axis])
    return {axis: place[axis] for axis in sizes}


def as_a_tuple(rank, sizes):
    return tuple(right_place(rank, sizes).values())


def backwards(rank, sizes):
    return dict(reversed(right_place(rank, sizes).items()))


def as_floats(rank, sizes):
    return {axis: float(n) for axis, n in right_place(rank, sizes).items()}


def uses_up_sizes(rank, sizes):
    place = right_place(rank, sizes)
    sizes.clear()
    return place


# 9.2 ----------------------------------------------------------------------------------------------------------


def state(dense_over=None, experts_over=None, *, stage=None, first=False, keep=(True, True), each=None):
    """`state_of_a_rank`, sharing out over other ranks, or counting something else."""

    def state_of_a_rank(config, parallel, pp_rank, world_size, bytes_each):
        dp = world_size // parallel.tp // parallel.pp
        overs = [
            dense_over(parallel, world_size) if dense_over else dp,
            experts_over(parallel, world_size) if experts_over else dp // parallel.ep,
        ]
        units = memory.units_of_a_rank(config, parallel, 0 if first else pp_rank)
        zero_stage = parallel.zero_stage if stage is None else stage
        total = {"parameters": 0, "gradients": 0, "optimizer": 0}
        for n, over in enumerate(overs):
            if keep[n]:
                held = memory.zero_state_bytes(sum(u[n] for u in units), over, zero_stage, *(each or bytes_each))
                total = {kind: total[kind] + held[kind] for kind in total}
        return total

    return state_of_a_rank


def dp_of(parallel, world):
    return world // parallel.tp // parallel.pp


def its_sum(config, parallel, pp_rank, world_size, bytes_each):
    return sum(state()(config, parallel, pp_rank, world_size, bytes_each).values())


# 9.3 ----------------------------------------------------------------------------------------------------------


def axes(experts=("edp",), dense=("dp",), tp=lambda layout: layout.partial, ends=lambda twice: twice, last="ends"):
    """`gradient_axes` with one decision changed."""

    def gradient_axes(layout, twice):
        found = list(experts if layout.expert else dense)
        return found + ["tp"] * tp(layout) + [last] * ends(twice)

    return gradient_axes


def as_a_set(layout, twice):
    return set(axes()(layout, twice))


def data_last(layout, twice):
    return axes()(layout, twice)[::-1]


# 9.4 ----------------------------------------------------------------------------------------------------------


def copies(twice=2, tp=lambda layout: layout.dim is None, shared=lambda stage: stage > 0, experts="edp"):
    """`copies_of` with one decision changed."""

    def copies_of(layout, both, sizes, zero_stage):
        n = twice if both else 1
        n *= sizes["tp"] if tp(layout) else 1
        return n * (1 if shared(zero_stage) else sizes[experts if layout.expert else "dp"])

    return copies_of


def added(layout, both, sizes, zero_stage):
    n = 1 + both + (sizes["tp"] - 1) * (layout.dim is None)
    return n + (sizes["edp" if layout.expert else "dp"] - 1) * (zero_stage == 0)


def one_over(layout, both, sizes, zero_stage):
    return 1 / copies()(layout, both, sizes, zero_stage)


def of_two(layout, both, sizes, zero_stage):
    return copies()(layout, both, {"tp": 2, "dp": 2, "edp": 2}, zero_stage)


def forgets_sizes(layout, both, sizes, zero_stage):
    n = copies()(layout, both, sizes, zero_stage)
    sizes["tp"] = 1
    return n


# 9.5 ----------------------------------------------------------------------------------------------------------


def ordered(*order, tokens=True, same=lambda a, b: a == b, otherwise="world", always=False):
    """`axis_of` that looks at other axes, or compares otherwise."""

    def axis_of(event, mesh):
        if always and event.op == "all_to_all":
            return "ep"
        for axis in (["ep"] if tokens and event.op == "all_to_all" else []) + list(order):
            if mesh.size(axis) > 1 and same(collectives.ranks_of(mesh.group(axis)), event.group_ranks):
                return axis
        return otherwise

    return axis_of


USUAL = ("tp", "pp", "dp", "edp", "ep")

WRONG = [
    Wrong("9.1", innermost_first, "the first axis is taken for the innermost"),
    Wrong("9.1", each_by_itself, "every axis counts by itself: steps along an outer axis are longer"),
    Wrong("9.1", nothing_taken_off, "what the outer axes took is not taken off"),
    Wrong("9.1", from_one, "counted from 1"),
    Wrong("9.1", without_size_one, "axes of size 1 are left out"),
    Wrong("9.1", always_the_origin, "every rank is at the origin"),
    Wrong("9.1", any_rank, "a rank that does not exist gets a place"),
    Wrong("9.1", as_a_tuple, "not a dictionary"),
    Wrong("9.1", backwards, "the order of the axes is lost"),
    Wrong("9.1", as_floats, "not plain integers"),
    Wrong("9.1", uses_up_sizes, "it uses up its input"),
    Wrong("9.2", state(experts_over=dp_of), "experts are shared out over all data-parallel ranks"),
    Wrong(
        "9.2",
        state(lambda p, w: dp_of(p, w) // p.ep),
        "everything is shared out over the few ranks that share experts",
    ),
    Wrong(
        "9.2",
        state(experts_over=lambda p, w: p.ep),
        "experts are shared out over their ep group, whose ranks hold different ones",
    ),
    Wrong(
        "9.2",
        state(lambda p, w: w, lambda p, w: w // p.ep),
        "tensor and pipeline ranks are taken for data-parallel ones",
    ),
    Wrong(
        "9.2",
        state(lambda p, w: w // p.tp, lambda p, w: w // p.tp // p.ep),
        "pipeline ranks are taken for data-parallel ones",
    ),
    Wrong("9.2", state(keep=(True, False)), "experts are left out"),
    Wrong("9.2", state(keep=(False, True)), "nothing but experts is counted"),
    Wrong("9.2", state(first=True), "every rank is taken for the first of its pipeline"),
    Wrong("9.2", state(each=(2, 2, 12)), "the bytes of a number are fixed"),
    Wrong("9.2", state(stage=1), "the stage of ZeRO is ignored: it is always 1"),
    Wrong("9.2", its_sum, "not a dictionary by kind"),
    Wrong("9.3", axes(experts=["dp"]), "experts are added up over dp, where ranks hold different ones"),
    Wrong("9.3", axes(experts=["edp", "ep"]), "experts are added up over edp and once more over ep"),
    Wrong("9.3", axes(experts=["ep"]), "experts are added up over ep, whose ranks hold different ones"),
    Wrong("9.3", axes(experts=[]), "experts are not added up over data-parallel ranks at all"),
    Wrong("9.3", axes(dense=["edp"]), "all else is added up over edp: the ranks of an ep group see different tokens"),
    Wrong("9.3", axes(tp=lambda layout: False), "partial gradients are not added up over tp"),
    Wrong(
        "9.3",
        axes(tp=lambda layout: layout.dim is None),
        "all that tp ranks hold whole is added up over tp, also where every rank has all of it",
    ),
    Wrong(
        "9.3",
        axes(tp=lambda layout: layout.partial or layout.dim is not None),
        "split matrices are added up over tp: these are different columns",
    ),
    Wrong("9.3", axes(tp=lambda layout: True), "everything is added up over tp"),
    Wrong("9.3", axes(ends=lambda twice: False), "the two ends keep gradients of their own"),
    Wrong("9.3", axes(ends=lambda twice: True), "the ends add up what only one stage holds"),
    Wrong("9.3", axes(last="pp"), "the whole pipeline is asked, not its two ends"),
    Wrong("9.3", as_a_set, "not a list"),
    Wrong("9.3", data_last, "the data axis is not first"),
    Wrong("9.4", copies(twice=1), "both ends are forgotten: a tied table counts twice"),
    Wrong("9.4", copies(tp=lambda layout: False), "copies on tp ranks are forgotten"),
    Wrong("9.4", copies(tp=lambda layout: True), "split matrices are taken for copies"),
    Wrong("9.4", copies(tp=lambda layout: layout.partial), "only partial ones are taken for copies"),
    Wrong(
        "9.4",
        copies(tp=lambda layout: layout.dim is None and not layout.partial),
        "partial gradients are no copies: they are, once added up",
    ),
    Wrong("9.4", copies(shared=lambda s: False), "ZeRO is ignored: from stage 1 on ranks hold different shares"),
    Wrong("9.4", copies(shared=lambda s: True), "data-parallel copies are forgotten"),
    Wrong("9.4", copies(shared=lambda s: s > 1), "stage 1 shares nothing out"),
    Wrong("9.4", copies(shared=lambda s: s == 3), "only stage 3 shares out"),
    Wrong("9.4", copies(experts="dp"), "experts are on every data-parallel rank"),
    Wrong("9.4", added, "numbers of copies are added, not multiplied"),
    Wrong("9.4", one_over, "its inverse"),
    Wrong("9.4", of_two, "sizes are fixed at 2"),
    Wrong("9.4", forgets_sizes, "it uses up its input"),
    Wrong(
        "9.5",
        ordered(*USUAL, tokens=False),
        "where dp and ep have the same ranks, an exchange of tokens is counted as dp",
    ),
    Wrong("9.5", ordered("ep", *USUAL), "where dp and ep have the same ranks, a sum of gradients is counted as ep"),
    Wrong("9.5", ordered(*USUAL, always=True), "every all-to-all is ep, whoever made it"),
    Wrong("9.5", ordered("tp", "pp", "edp", "dp", "ep"), "where dp and edp are one, it is called edp"),
    Wrong("9.5", ordered(*USUAL, same=lambda a, b: len(a) == len(b)), "groups are told apart by their size only"),
    Wrong("9.5", ordered("world", *USUAL), "an axis that has all ranks is called world"),
    Wrong("9.5", ordered("tp", "pp", "dp", "ep"), "edp is left out: it falls to the world"),
    Wrong("9.5", ordered(*USUAL, otherwise=None), "what goes to all ranks has no name"),
]
