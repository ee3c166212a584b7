"""Layouts that nearly hold: most of them crash nowhere, and the loss does not show them."""

import itertools
import math

import numpy as np
import torch

from deepseek_lab.parallel import collectives, engine
from deepseek_lab.plan import grid, memory
from tests.wrong_answers import Wrong

# 9.1 ----------------------------------------------------------------------------------------------------------


def _refusing(place):
    def coordinates(rank, sizes):
        if not 0 <= rank < math.prod(sizes.values()):
            raise ValueError(f"no rank {rank}")
        return place(rank, sizes)

    return coordinates


@_refusing
def innermost_first(rank, sizes):
    place = {}
    for axis, size in sizes.items():
        rank, place[axis] = divmod(rank, size)
    return place


@_refusing
def each_axis_alone(rank, sizes):
    return {axis: rank % size for axis, size in sizes.items()}


@_refusing
def nothing_taken_off(rank, sizes):
    place, inside = {}, math.prod(sizes.values())
    for axis, size in sizes.items():
        inside //= size
        place[axis] = rank // inside
    return place


@_refusing
def from_one(rank, sizes):
    return {axis: n + 1 for axis, n in grid.coordinates(rank, sizes).items()}


@_refusing
def steps_of_their_own_size(rank, sizes):
    return {axis: rank // size % size for axis, size in sizes.items()}


@_refusing
def without_single_axes(rank, sizes):
    return grid.coordinates(rank, {axis: size for axis, size in sizes.items() if size > 1})


@_refusing
def at_the_origin(rank, sizes):
    return dict.fromkeys(sizes, 0)


@_refusing
def a_tuple(rank, sizes):
    return tuple(grid.coordinates(rank, sizes).values())


@_refusing
def numbers_of_numpy(rank, sizes):
    return dict(zip(sizes, np.unravel_index(rank, tuple(sizes.values())), strict=True))


@_refusing
def innermost_axis_stands_first(rank, sizes):
    return dict(reversed(grid.coordinates(rank, sizes).items()))


@_refusing
def uses_sizes_up(rank, sizes):
    place, inside = {}, math.prod(sizes.values())
    while sizes:
        axis = next(iter(sizes))
        inside //= sizes.pop(axis)
        place[axis], rank = divmod(rank, inside)
    return place


def any_rank(rank, sizes):
    return grid.coordinates(rank % math.prod(sizes.values()), sizes)


@_refusing
def knows_four_axes(rank, sizes):
    table = itertools.product(*(range(sizes.get(axis, 1)) for axis in ("pp", "edp", "ep", "tp")))
    return dict(zip(sizes, list(table)[rank], strict=True))


# 9.2 ----------------------------------------------------------------------------------------------------------


def _state(
    data=lambda p, w: w // p.tp // p.pp,
    experts_over=lambda n, p: n // p.ep,
    stage_of=lambda p: p.zero_stage,
    cut=lambda dense, experts, p: (dense, experts),
    units=lambda units: units,
    shared=memory.zero_state_bytes,
):
    def state_of_a_rank(config, parallel, pp_rank, world_size, bytes_each):
        n = data(parallel, world_size)
        held = units(memory.units_of_a_rank(config, parallel, pp_rank))
        dense, experts = cut(*(sum(numbers) for numbers in zip(*held, strict=True)), parallel)
        stage = stage_of(parallel)
        parts = [
            shared(dense, n, stage, *bytes_each),
            shared(experts, max(experts_over(n, parallel), 1), stage, *bytes_each),
        ]
        return {kind: sum(part[kind] for part in parts) for kind in parts[0]}

    return state_of_a_rank


def one_heap(config, parallel, pp_rank, world_size, bytes_each):
    n = world_size // parallel.tp // parallel.pp
    held = sum(dense + experts for dense, experts in memory.units_of_a_rank(config, parallel, pp_rank))
    return memory.zero_state_bytes(held, n, parallel.zero_stage, *bytes_each)


def dense_over_edp(config, parallel, pp_rank, world_size, bytes_each):
    smaller = world_size // parallel.ep
    return _state(experts_over=lambda n, p: n)(config, parallel, pp_rank, smaller, bytes_each)


def experts_over_all_ranks(config, parallel, pp_rank, world_size, bytes_each):
    over = world_size // parallel.ep
    return _state(experts_over=lambda n, p: over)(config, parallel, pp_rank, world_size, bytes_each)


def block_by_block(config, parallel, pp_rank, world_size, bytes_each):
    n, total = world_size // parallel.tp // parallel.pp, {"parameters": 0, "gradients": 0, "optimizer": 0}
    for numbers in memory.units_of_a_rank(config, parallel, pp_rank):
        for held, over in zip(numbers, (n, n // parallel.ep), strict=True):
            for kind, size in memory.zero_state_bytes(held, over, parallel.zero_stage, *bytes_each).items():
                total[kind] += size
    return total


def rounded_down(n_params, n_ranks, stage, *bytes_each):
    shares = [n_params // n_ranks if stage >= first else n_params for first in (3, 2, 1)]
    return {
        k: each * n for k, each, n in zip(("parameters", "gradients", "optimizer"), bytes_each, shares, strict=True)
    }


def swapped(n_params, n_ranks, stage, param, grad, optim):
    return memory.zero_state_bytes(n_params, n_ranks, stage, param, optim, grad)


def other_way_round(n_params, n_ranks, stage, *bytes_each):
    shares = [-(-n_params // n_ranks) if stage >= first else n_params for first in (1, 2, 3)]
    return {
        k: each * n for k, each, n in zip(("parameters", "gradients", "optimizer"), bytes_each, shares, strict=True)
    }


def needs_experts(config, parallel, pp_rank, world_size, bytes_each):
    _, experts = zip(*memory.units_of_a_rank(config, parallel, pp_rank), strict=True)
    if not sum(experts):
        raise RuntimeError("no experts")
    return memory.state_of_a_rank(config, parallel, pp_rank, world_size, bytes_each)


def first_rank(config, parallel, pp_rank, world_size, bytes_each):
    return memory.state_of_a_rank(config, parallel, 0, world_size, bytes_each)


def sixteen_bytes(config, parallel, pp_rank, world_size, bytes_each):
    return memory.state_of_a_rank(config, parallel, pp_rank, world_size, (2, 2, 12))


def in_all(config, parallel, pp_rank, world_size, bytes_each):
    return sum(memory.state_of_a_rank(config, parallel, pp_rank, world_size, bytes_each).values())


def in_floats(config, parallel, pp_rank, world_size, bytes_each):
    state = memory.state_of_a_rank(config, parallel, pp_rank, world_size, bytes_each)
    return {kind: float(size) for kind, size in state.items()}


# 9.3 ----------------------------------------------------------------------------------------------------------


def _axes(expert=("edp",), dense=("dp",), tp=lambda layout: layout.partial, ends=lambda twice: twice, last="ends"):
    def gradient_axes(layout, twice):
        axes = list(expert if layout.expert else dense)
        if tp(layout):
            axes.append("tp")
        if ends(twice):
            axes.append(last)
        return axes

    return gradient_axes


def data_axis_last(layout, twice):
    return engine.gradient_axes(layout, twice)[::-1]


def a_set(layout, twice):
    return set(engine.gradient_axes(layout, twice))


ONE = []


def one_list(layout, twice):
    ONE[:] = engine.gradient_axes(layout, twice)
    return ONE


# 9.4 ----------------------------------------------------------------------------------------------------------


def _copies(
    ends=lambda stage: 2,
    tp=lambda layout: layout.dim is None,
    data=lambda stage, expert: stage == 0,
    experts=lambda sizes: sizes["edp"],
):
    def copies_of(layout, twice, sizes, zero_stage):
        copies = ends(zero_stage) if twice else 1
        if tp(layout):
            copies *= sizes["tp"]
        if data(zero_stage, layout.expert):
            copies *= experts(sizes) if layout.expert else sizes["dp"]
        return copies

    return copies_of


def adds(layout, twice, sizes, zero_stage):
    copies = 1 + twice
    if layout.dim is None:
        copies += sizes["tp"] - 1
    if zero_stage == 0:
        copies += sizes["edp" if layout.expert else "dp"] - 1
    return copies


def inverse(layout, twice, sizes, zero_stage):
    return 1 / engine.copies_of(layout, twice, sizes, zero_stage)


def always_two(layout, twice, sizes, zero_stage):
    return engine.copies_of(layout, twice, {"tp": 2, "dp": 2, "edp": 2}, zero_stage)


def overwrites_sizes(layout, twice, sizes, zero_stage):
    if zero_stage:
        sizes["dp"] = sizes["edp"] = 1
    return engine.copies_of(layout, twice, sizes, 0)


def a_float(layout, twice, sizes, zero_stage):
    return float(engine.copies_of(layout, twice, sizes, zero_stage))


def a_tensor(layout, twice, sizes, zero_stage):
    return torch.tensor(engine.copies_of(layout, twice, sizes, zero_stage))


# 9.5 ----------------------------------------------------------------------------------------------------------


USUAL = ("tp", "pp", "dp", "edp", "ep")
FIRST = {"all_to_all": ["ep"], "all_reduce": ["ends"]}


def _axis(*order, first=FIRST, otherwise="world", same=lambda mine, theirs: mine == theirs):
    def axis_of(event, mesh):
        for axis in [*first.get(event.op, []), *(order or USUAL)]:
            if mesh.size(axis) > 1 and same(collectives.ranks_of(mesh.group(axis)), event.group_ranks):
                return axis
        return otherwise

    return axis_of


def by_operation(event, mesh):
    return "ep" if event.op == "all_to_all" else _axis()(event, mesh)


def two_names_fewer(event, mesh):
    axis = _axis()(event, mesh)
    return "dp" if axis in ("edp", "ep") else axis


def first_that_fits(event, mesh):
    axes = ["ep"] * (event.op == "all_to_all") + [*USUAL, "world"]
    return next(axis for axis in axes if collectives.ranks_of(mesh.group(axis)) == event.group_ranks)


def no_ends_are_all(event, mesh):
    if event.op == "all_reduce" and collectives.ranks_of(mesh.group("ends")) == event.group_ranks:
        return "ends"
    return _axis()(event, mesh)


WRONG = [
    Wrong("9.1", innermost_first, "the first axis is taken for the innermost"),
    Wrong("9.1", each_axis_alone, "every axis counts by itself: steps along an outer axis are longer"),
    Wrong("9.1", nothing_taken_off, "what the outer axes took is not taken off"),
    Wrong("9.1", from_one, "counted from 1"),
    Wrong("9.1", steps_of_their_own_size, "a step is as long as the axis itself"),
    Wrong("9.1", without_single_axes, "axes of size 1 are left out"),
    Wrong("9.1", at_the_origin, "every rank is at the origin"),
    Wrong("9.1", a_tuple, "not a dictionary"),
    Wrong("9.1", numbers_of_numpy, "not plain integers"),
    Wrong("9.1", innermost_axis_stands_first, "the order of the axes is lost"),
    Wrong("9.1", uses_sizes_up, "it uses up its input"),
    Wrong("9.1", any_rank, "a rank that does not exist gets a place"),
    Wrong("9.1", knows_four_axes),
    Wrong("9.2", _state(experts_over=lambda n, p: n), "experts are shared out over all data-parallel ranks"),
    Wrong("9.2", one_heap, "experts and the rest are one heap over all data-parallel ranks"),
    Wrong("9.2", dense_over_edp, "everything is shared out over the few ranks that share experts"),
    Wrong(
        "9.2",
        _state(experts_over=lambda n, p: p.ep),
        "experts are shared out over their ep group, whose ranks hold different ones",
    ),
    Wrong("9.2", _state(data=lambda p, w: w), "tensor and pipeline ranks are taken for data-parallel ones"),
    Wrong("9.2", _state(data=lambda p, w: w // p.tp), "pipeline ranks are taken for data-parallel ones"),
    Wrong("9.2", _state(data=lambda p, w: w // p.pp), "tensor-parallel ranks are taken for data-parallel ones"),
    Wrong("9.2", _state(cut=lambda dense, experts, p: (dense, 0)), "experts are left out"),
    Wrong("9.2", _state(cut=lambda dense, experts, p: (0, experts)), "nothing but experts is counted"),
    Wrong("9.2", first_rank, "every rank is taken for the first of its pipeline"),
    Wrong("9.2", sixteen_bytes, "the bytes of a number are fixed"),
    Wrong("9.2", _state(units=lambda units: [max(units)]), "one block only"),
    Wrong(
        "9.2",
        experts_over_all_ranks,
        "for experts, tensor and pipeline ranks are taken for data-parallel ones",
    ),
    Wrong("9.2", block_by_block, "shares are rounded up block by block: add the blocks up first"),
    Wrong("9.2", _state(shared=rounded_down), "shares are rounded down"),
    Wrong(
        "9.2",
        _state(cut=lambda dense, experts, p: (dense, experts // p.ep)),
        "experts are divided by ep twice: `units_of_a_rank` has done it",
    ),
    Wrong(
        "9.2",
        _state(cut=lambda dense, experts, p: (dense // p.tp, experts // p.tp)),
        "all is divided by tp twice: `units_of_a_rank` has done it",
    ),
    Wrong("9.2", _state(units=lambda units: units[:-1]), "the last of the units, the ends of the model, is left out"),
    Wrong("9.2", _state(shared=swapped), "bytes of gradients and of the optimizer are swapped"),
    Wrong(
        "9.2",
        _state(stage_of=lambda p: min(p.zero_stage, 2)),
        "stage 3 does no more than stage 2: parameters stay whole",
    ),
    Wrong("9.2", _state(shared=other_way_round), "the stages of ZeRO are counted the other way round"),
    Wrong("9.2", _state(data=lambda p, w: 10), "the number of data-parallel ranks is fixed at 10"),
    Wrong("9.2", _state(data=lambda p, w: 4, experts_over=lambda n, p: 2), "sizes are fixed"),
    Wrong("9.2", needs_experts),
    Wrong("9.2", in_floats, "not plain integers"),
    Wrong("9.2", _state(stage_of=lambda p: 0), "the stage of ZeRO is ignored: it is always 0"),
    Wrong("9.2", _state(stage_of=lambda p: 1), "the stage of ZeRO is ignored: it is always 1"),
    Wrong("9.2", _state(stage_of=lambda p: 3), "the stage of ZeRO is ignored: it is always 3"),
    Wrong("9.2", in_all, "not a dictionary by kind"),
    Wrong("9.3", _axes(expert=("dp",)), "experts are added up over dp, where ranks hold different ones"),
    Wrong("9.3", _axes(expert=("edp", "ep")), "experts are added up over edp and once more over ep"),
    Wrong("9.3", _axes(expert=("ep",)), "experts are added up over ep, whose ranks hold different ones"),
    Wrong("9.3", _axes(expert=()), "experts are not added up over data-parallel ranks at all"),
    Wrong("9.3", _axes(expert=("edp", "dp")), "experts are added up over dp and once more over edp"),
    Wrong(
        "9.3",
        _axes(dense=("edp",)),
        "not only experts are added up over edp: the ranks of an ep group see different tokens",
    ),
    Wrong("9.3", _axes(tp=lambda layout: False), "partial gradients are not added up over tp"),
    Wrong(
        "9.3",
        _axes(tp=lambda layout: layout.dim is None),
        "all that tp ranks hold whole is added up over tp, also where every rank has all of it",
    ),
    Wrong(
        "9.3",
        _axes(tp=lambda layout: layout.partial or layout.dim is not None),
        "split matrices are added up over tp: these are different columns",
    ),
    Wrong("9.3", _axes(tp=lambda layout: True), "everything is added up over tp"),
    Wrong("9.3", _axes(ends=lambda twice: False), "the two ends keep gradients of their own"),
    Wrong("9.3", _axes(ends=lambda twice: True), "the ends add up what only one stage holds"),
    Wrong("9.3", _axes(last="pp"), "the whole pipeline is asked, not its two ends"),
    Wrong("9.3", one_list, "one list for all calls"),
    Wrong("9.3", data_axis_last, "the data axis is not first"),
    Wrong("9.3", a_set, "not a list"),
    Wrong("9.4", _copies(ends=lambda stage: 1), "both ends are forgotten: a tied table counts twice"),
    Wrong(
        "9.4",
        _copies(ends=lambda stage: 1 if stage else 2),
        "both ends are forgotten under ZeRO: each has a share of its own table",
    ),
    Wrong("9.4", _copies(tp=lambda layout: False), "copies on tp ranks are forgotten"),
    Wrong("9.4", _copies(tp=lambda layout: True), "split matrices are taken for copies"),
    Wrong("9.4", _copies(tp=lambda layout: not layout.dim), "dimension 0 is taken for none: ask `layout.dim is None`"),
    Wrong("9.4", _copies(tp=lambda layout: layout.partial), "only partial ones are taken for copies"),
    Wrong(
        "9.4",
        _copies(tp=lambda layout: layout.dim is None and not layout.partial),
        "partial gradients are no copies: they are, once added up",
    ),
    Wrong("9.4", _copies(tp=lambda layout: layout.dim is not None), "split matrices and whole ones are mixed up"),
    Wrong("9.4", _copies(data=lambda s, expert: True), "ZeRO is ignored: from stage 1 on ranks hold different shares"),
    Wrong(
        "9.4",
        _copies(data=lambda stage, expert: expert or stage == 0),
        "ZeRO is ignored for experts: it shares them out, too",
    ),
    Wrong("9.4", _copies(data=lambda stage, expert: False), "data-parallel copies are forgotten"),
    Wrong("9.4", _copies(experts=lambda sizes: 1), "copies of experts on edp ranks are forgotten"),
    Wrong("9.4", _copies(data=lambda stage, expert: stage < 2), "stage 1 shares nothing out"),
    Wrong("9.4", _copies(data=lambda stage, expert: stage < 3), "only stage 3 shares out"),
    Wrong("9.4", _copies(data=lambda stage, expert: stage > 0), "stage 0 and the others are mixed up"),
    Wrong("9.4", _copies(experts=lambda sizes: sizes["dp"]), "experts are on every data-parallel rank"),
    Wrong(
        "9.4",
        _copies(experts=lambda sizes: sizes["dp"] // sizes["edp"]),
        "an expert's numbers are on every rank of its ep group",
    ),
    Wrong("9.4", adds, "numbers of copies are added, not multiplied"),
    Wrong("9.4", inverse, "its inverse"),
    Wrong("9.4", always_two, "sizes are fixed at 2"),
    Wrong("9.4", overwrites_sizes, "it uses up its input"),
    Wrong("9.4", a_float, "not plain integers"),
    Wrong("9.4", a_tensor),
    Wrong(
        "9.5",
        _axis(first={"all_reduce": ["ends"]}),
        "where dp and ep have the same ranks, an exchange of tokens is counted as dp",
    ),
    Wrong(
        "9.5",
        _axis("ep", *USUAL, first={"all_reduce": ["ends"]}),
        "where dp and ep have the same ranks, a sum of gradients is counted as ep",
    ),
    Wrong(
        "9.5",
        _axis(first={**FIRST, "all_gather": ["ep"], "reduce_scatter": ["ep"]}),
        "where dp and ep have the same ranks, ZeRO's gathers and reduce-scatters are counted as ep",
    ),
    Wrong(
        "9.5",
        _axis(first={**FIRST, "all_gather": ["ep"]}),
        "where dp and ep have the same ranks, ZeRO's gathers are counted as ep",
    ),
    Wrong(
        "9.5",
        _axis(first={**FIRST, "reduce_scatter": ["ep"]}),
        "where dp and ep have the same ranks, ZeRO's reduce-scatters are counted as ep",
    ),
    Wrong("9.5", by_operation, "every all-to-all is ep, whoever made it"),
    Wrong("9.5", first_that_fits),
    Wrong(
        "9.5",
        _axis(first={"all_to_all": ["ep"]}),
        "the ends are left out: what they add up falls to pp or to the world",
    ),
    Wrong(
        "9.5",
        _axis("tp", "pp", "ends", "dp", "edp", "ep", first={"all_to_all": ["ep"]}),
        "with two stages the ends are counted as pp",
    ),
    Wrong("9.5", _axis("ends", *USUAL), "with two stages, what pp sends is counted for the ends"),
    Wrong("9.5", no_ends_are_all, "a group that is None is taken for the ends; `ranks_of(None)` are all ranks"),
    Wrong("9.5", _axis("tp", "pp", "edp", "dp", "ep"), "where dp and edp are one, it is called edp"),
    Wrong(
        "9.5",
        _axis(same=lambda mine, theirs: len(mine) == len(theirs)),
        "groups are told apart by their size only",
    ),
    Wrong(
        "9.5",
        _axis("world", *USUAL, same=lambda mine, theirs: set(theirs) <= set(mine)),
        "a group that contains these ranks is taken for theirs",
    ),
    Wrong("9.5", _axis("world", *USUAL, first={"all_to_all": ["ep"]}), "an axis that has all ranks is called world"),
    Wrong("9.5", _axis("tp", "pp", "dp", "ep"), "edp is left out: it falls to the world"),
    Wrong("9.5", _axis(otherwise=None), "what goes to all ranks has no name"),
    Wrong("9.5", two_names_fewer, "the data axes are one: edp and ep are called dp"),
]
