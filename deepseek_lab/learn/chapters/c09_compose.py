"""Chapter 09: all axes at once.

The functions here are short, and nothing crashes when one is wrong.  So the graders try every kind of parameter on
every layout, and know what each mistake would give.
"""

import contextlib
import itertools
import math
from pathlib import Path
from typing import Any

import torch

from deepseek_lab import slots
from deepseek_lab.data.batches import train_batch
from deepseek_lab.learn.exercises import Exercise
from deepseek_lab.learn.ranks import run_ranks
from deepseek_lab.learn.verdict import Verdict, ok, wrong
from deepseek_lab.model import DeepSeekConfig
from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.parallel.engine import parallelize
from deepseek_lab.parallel.mesh import build_mesh
from deepseek_lab.parallel.tensor import Layout
from deepseek_lab.plan import memory
from deepseek_lab.train import recorded
from deepseek_lab.train.loop import Trainer

R = 4
LIMIT_S = 10.0
PLACE, STATE = "deepseek_lab.plan.grid.coordinates", "deepseek_lab.plan.memory.state_of_a_rank"
SUMS, COPIES = "deepseek_lab.parallel.engine.gradient_axes", "deepseek_lab.parallel.engine.copies_of"
AXIS = "deepseek_lab.train.recorded.axis_of"


def _recognised(known, cases, got):
    """The first known mistake that gives exactly these results."""
    return next((name for name, f in known.items() if [f(*case) for case in cases] == got), None)


def _rows(names, asked, got, limit=5):
    return [row for row in zip(names, asked, got, strict=True) if row[1] != row[2]][:limit]


@contextlib.contextmanager
def _asking(what):
    """An answer that raises is told for what."""
    try:
        yield
    except Exception as error:
        error.add_note(f"Asked for {what}.")
        raise


# --- 9.1 which rank is where ----------------------------------------------------------------------------------


def _true_place(rank, sizes):
    place = {}
    for axis in reversed(sizes):
        rank, place[axis] = divmod(rank, sizes[axis])
    return {axis: place[axis] for axis in sizes}


def _strides(sizes):
    """Ranks from one step along an axis to the next."""
    names = list(sizes)
    return {axis: math.prod(sizes[later] for later in names[n + 1 :]) for n, axis in enumerate(names)}


def grade_coordinates(fn) -> Verdict:
    """Every rank of four grids, with axes of other names and of size one."""
    known = {
        "the first axis is taken for the innermost": lambda rank, sizes: {
            axis: n for axis, n in _true_place(rank, dict(reversed(sizes.items()))).items()
        },
        "every axis counts by itself: steps along an outer axis are longer": lambda rank, sizes: {
            axis: rank % size for axis, size in sizes.items()
        },
        "what the outer axes took is not taken off": lambda rank, sizes: {
            axis: rank // stride for axis, stride in _strides(sizes).items()
        },
        "counted from 1": lambda rank, sizes: {axis: n + 1 for axis, n in _true_place(rank, sizes).items()},
        "a step is as long as the axis itself": lambda rank, sizes: {
            axis: rank // size % size for axis, size in sizes.items()
        },
        "axes of size 1 are left out": lambda rank, sizes: {
            axis: n for axis, n in _true_place(rank, sizes).items() if sizes[axis] > 1
        },
        "every rank is at the origin": lambda rank, sizes: dict.fromkeys(sizes, 0),
    }
    grids = [
        {"pp": 2, "edp": 3, "ep": 1, "tp": 4},
        {"dp": 5},
        {"plane": 3, "row": 2, "column": 5},
        {"pp": 1, "edp": 1, "ep": 1, "tp": 1},
    ]
    cases = [(rank, sizes) for sizes in grids for rank in range(math.prod(sizes.values()))]
    asked = [_true_place(*case) for case in cases]
    names = [f"rank {rank} of {sizes}" for rank, sizes in cases]
    got = []
    for name, (rank, sizes) in zip(names, cases, strict=True):
        given = dict(sizes)
        with _asking(name):
            got.append(fn(rank, given))
        if given != sizes:
            return wrong("The caller's dictionary of sizes has changed.", "it uses up its input")
    if not all(isinstance(place, dict) for place in got):
        return wrong(
            "It should return a dictionary, one number by axis.", "not a dictionary", [(names[7], asked[7], got[7])]
        )
    if got != asked:
        return wrong("These are not the places.", _recognised(known, cases, got), _rows(names, asked, got))
    if any(type(n) is not int for place in got for n in place.values()):
        return wrong("The numbers are right, but they are not plain integers.", "not plain integers")
    if any(list(place) != list(sizes) for place, (_, sizes) in zip(got, cases, strict=True)):
        return wrong("The axes should stand in the order of `sizes`.", "the order of the axes is lost")
    for rank in (-1, 24):
        try:
            with _asking(f"rank {rank} of {grids[0]}"):
                fn(rank, dict(grids[0]))
        except ValueError:
            continue
        return wrong(f"A grid of 24 has no rank {rank}: raise ValueError.", "a rank that does not exist gets a place")
    return ok("Right for every rank of four grids.", [(names[n], asked[n], got[n]) for n in (0, 1, 4, 23)])


# --- 9.2 what a rank holds ------------------------------------------------------------------------------------


def _data_ranks(parallel, world_size):
    return max(world_size // parallel.tp // parallel.pp, 1)


def _state(
    over=lambda p, w: (_data_ranks(p, w), _data_ranks(p, w) // p.ep),
    part=lambda numbers, p: numbers,
    stage=lambda p: p.zero_stage,
    first_shared=(3, 2, 1),
    stage_of_pipeline=lambda rank: rank,
    bytes_of=lambda each: each,
    heaps=lambda units: [tuple(map(sum, zip(*units, strict=True)))],
    share=lambda n, over: math.ceil(n / over),
):
    """`state_of_a_rank`, with one thing or other changed.

    `over`: the ranks that share out all but experts, and experts.  `heaps`: pairs of numbers that are shared out by
    themselves.  `first_shared`: from which stage of ZeRO on weights, gradients and optimizer state are.
    """

    def state_of_a_rank(config, parallel, pp_rank, world_size, bytes_each):
        total = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
        for heap in heaps(memory.units_of_a_rank(config, parallel, stage_of_pipeline(pp_rank))):
            for n, ranks in zip(part(heap, parallel), over(parallel, world_size), strict=True):
                for kind, each, first in zip(total, bytes_of(bytes_each), first_shared, strict=True):
                    total[kind] += each * (share(n, ranks) if stage(parallel) >= first else n)
        return total

    return state_of_a_rank


def _over(dense, experts=None):
    """Ranks that share out, from the data-parallel ones, the configuration and the number of all ranks."""
    return lambda p, w: (
        dense(_data_ranks(p, w), p, w),
        max((experts or (lambda n, p, w: n // p.ep))(_data_ranks(p, w), p, w), 1),
    )


STATE_MISTAKES = {
    "experts are shared out over all data-parallel ranks": _state(_over(lambda n, p, w: n, lambda n, p, w: n)),
    "experts and the rest are one heap over all data-parallel ranks": _state(
        part=lambda numbers, p: (sum(numbers), 0), over=_over(lambda n, p, w: n)
    ),
    "everything is shared out over the few ranks that share experts": _state(_over(lambda n, p, w: n // p.ep)),
    "experts are shared out over their ep group, whose ranks hold different ones": _state(
        _over(lambda n, p, w: n, lambda n, p, w: p.ep)
    ),
    "tensor and pipeline ranks are taken for data-parallel ones": _state(
        _over(lambda n, p, w: w, lambda n, p, w: w // p.ep)
    ),
    "for experts, tensor and pipeline ranks are taken for data-parallel ones": _state(
        _over(lambda n, p, w: n, lambda n, p, w: w // p.ep)
    ),
    "pipeline ranks are taken for data-parallel ones": _state(
        _over(lambda n, p, w: n * p.pp, lambda n, p, w: n * p.pp // p.ep)
    ),
    "tensor-parallel ranks are taken for data-parallel ones": _state(
        _over(lambda n, p, w: n * p.tp, lambda n, p, w: n * p.tp // p.ep)
    ),
    "experts are left out": _state(part=lambda numbers, p: (numbers[0], 0)),
    "nothing but experts is counted": _state(part=lambda numbers, p: (0, numbers[1])),
    "experts are divided by ep twice: `units_of_a_rank` has done it": _state(
        part=lambda numbers, p: (numbers[0], numbers[1] // p.ep)
    ),
    "all is divided by tp twice: `units_of_a_rank` has done it": _state(
        part=lambda numbers, p: (numbers[0] // p.tp, numbers[1] // p.tp)
    ),
    "shares are rounded up block by block: add the blocks up first": _state(heaps=lambda units: units),
    "shares are rounded down": _state(share=lambda n, over: n // over),
    "the last of the units, the ends of the model, is left out": _state(
        heaps=lambda units: [tuple(map(sum, zip(*units[:-1], strict=True)))]
    ),
    "one block only": _state(heaps=lambda units: [max(units)]),
    "every rank is taken for the first of its pipeline": _state(stage_of_pipeline=lambda rank: 0),
    "the bytes of a number are fixed": _state(bytes_of=lambda each: (2, 2, 12)),
    "bytes of gradients and of the optimizer are swapped": _state(bytes_of=lambda each: (each[0], each[2], each[1])),
    "stage 3 does no more than stage 2: parameters stay whole": _state(first_shared=(4, 2, 1)),
    "the stages of ZeRO are counted the other way round": _state(first_shared=(1, 2, 3)),
    **{f"the stage of ZeRO is ignored: it is always {n}": _state(stage=lambda p, n=n: n) for n in range(4)},
    **{
        f"the number of data-parallel ranks is fixed at {n}": _state(lambda p, w, n=n: (n, max(n // p.ep, 1)))
        for n in (1, 2, 4, 8, 10, 16)
    },
    "sizes are fixed": _state(lambda p, w: (4, 2)),
}


def grade_state_of_a_rank(fn) -> Verdict:
    """Both stages of a pipeline, all stages of ZeRO, with and without experts, tensor and expert parallelism."""
    config = DeepSeekConfig.preset("tiny", num_hidden_layers=5, vocab_size=1001, tie_word_embeddings=True)
    dense = DeepSeekConfig.preset("tiny", num_hidden_layers=2, first_k_dense_replace=2, vocab_size=1001)
    runs = [
        (config, ParallelConfig(pp=2, tp=4, ep=ep, zero_stage=stage), world)
        for ep, world in ((2, 80), (1, 8))
        for stage in range(4)
    ]
    runs += [(config, ParallelConfig(ep=4, zero_stage=3), 8), (dense, ParallelConfig(pp=2, zero_stage=1), 6)]
    cases = [
        (model, parallel, pp_rank, world, bytes_each)
        for (model, parallel, world), bytes_each in zip(runs, itertools.cycle(((2, 2, 12), (4, 8, 16))), strict=False)
        for pp_rank in range(parallel.pp)
    ]
    names = [
        f"{'no experts, ' * (c is dense)}pp {p.pp}, tp {p.tp}, ep {p.ep}, ZeRO-{p.zero_stage} on {w} ranks, stage {r}"
        for c, p, r, w, _ in cases
    ]
    asked, got = [_state()(*case) for case in cases], []
    for name, case in zip(names, cases, strict=True):
        with _asking(name):
            got.append(fn(*case))
    if not all(isinstance(state, dict) and state.keys() == asked[0].keys() for state in got):
        return wrong(
            "It should return a dictionary like this one.", "not a dictionary by kind", [(names[0], asked[0], got[0])]
        )
    if got != asked:
        named = _recognised(STATE_MISTAKES, cases, got)
        return wrong("These are not the bytes of that rank.", named, _rows(names, asked, got))
    if any(type(size) is not int for state in got for size in state.values()):
        return wrong("The numbers are right, but they are not plain integers.", "not plain integers")
    return ok(
        "Right for both stages of the pipeline and all stages of ZeRO.",
        [(names[n], sum(asked[n].values()), sum(got[n].values())) for n in (0, 1, 2, 6)],
    )


# --- 9.3 over which axes --------------------------------------------------------------------------------------

# The kinds of parameters that there are, and whether both ends of the pipeline hold them.  Over tp, experts and the
# table, which the ends may share, are always split; without tp nothing is.
SPLIT_UP = [
    *((Layout((8, 4, 4), dim=dim), False) for dim in (0, 1)),
    *((Layout((8, 4, 4), partial=partial), False) for partial in (False, True)),
    *((Layout((8, 4, 4), dim=dim, expert=True), False) for dim in (1, 2)),
    (Layout((8, 4, 4), dim=0), True),
]
ALL_WHOLE = [(Layout((8, 4, 4)), False), (Layout((8, 4, 4), expert=True), False), (Layout((8, 4, 4)), True)]


def _describe(layout, twice):
    held = f"dim={layout.dim}{', partial' * layout.partial}"
    return f"{'experts' if layout.expert else 'not experts'}, {held}{', on both ends' * twice}"


def _axes(expert="edp", dense="dp", partial=lambda layout: layout.partial, ends=lambda twice: twice, last="ends"):
    """`gradient_axes`, with one thing or other changed."""

    def axes(layout, twice):
        first = expert if layout.expert else dense
        return [*([first] if isinstance(first, str) else first), *(["tp"] * partial(layout)), *([last] * ends(twice))]

    return axes


def grade_gradient_axes(fn) -> Verdict:
    """Every kind of parameter there is."""
    known = {
        "experts are added up over dp, where ranks hold different ones": _axes(expert="dp"),
        "experts are added up over edp and once more over ep": _axes(expert=("edp", "ep")),
        "experts are added up over dp and once more over edp": _axes(expert=("edp", "dp")),
        "experts are added up over ep, whose ranks hold different ones": _axes(expert="ep"),
        "experts are not added up over data-parallel ranks at all": _axes(expert=()),
        "not only experts are added up over edp: the ranks of an ep group see different tokens": _axes(dense="edp"),
        "partial gradients are not added up over tp": _axes(partial=lambda layout: False),
        "all that tp ranks hold whole is added up over tp, also where every rank has all of it": _axes(
            partial=lambda layout: layout.dim is None
        ),
        "split matrices are added up over tp: these are different columns": _axes(
            partial=lambda layout: layout.partial or layout.dim is not None
        ),
        "everything is added up over tp": _axes(partial=lambda layout: True),
        "the two ends keep gradients of their own": _axes(ends=lambda twice: False),
        "the ends add up what only one stage holds": _axes(ends=lambda twice: True),
        "the whole pipeline is asked, not its two ends": _axes(last="pp"),
    }
    cases = [*SPLIT_UP, *ALL_WHOLE]
    names = [_describe(*case) for case in cases]
    asked, returned = [_axes()(*case) for case in cases], []
    for name, case in zip(names, cases, strict=True):
        with _asking(name):
            returned.append(fn(*case))
    if not all(isinstance(axes, list) for axes in returned):
        return wrong("It should return a list of axes.", "not a list", [(names[0], asked[0], returned[0])])
    if len({id(axes) for axes in returned}) < len(returned):
        return wrong("Return a new list each time: the first answer changed with the second.", "one list for all calls")
    if [sorted(axes) for axes in returned] != [sorted(axes) for axes in asked]:
        return wrong(
            "Over these axes the sum is another gradient.",
            _recognised(known, cases, returned) or _recognised(known, cases, [axes[::-1] for axes in returned]),
            _rows(names, asked, returned),
        )
    if [axes[0] for axes in returned] != [axes[0] for axes in asked]:
        rows = _rows(names, asked, returned)
        return wrong(
            "The data axis should come first: its sum starts during backward.", "the data axis is not first", rows
        )
    return ok("Right for every kind of parameter.", [(names[n], asked[n], returned[n]) for n in (0, 3, 4, 6)])


# --- 9.4 how often --------------------------------------------------------------------------------------------


def _copies(
    tp=lambda layout: layout.dim is None,
    data=lambda stage, expert: stage == 0,
    expert=lambda sizes: sizes["edp"],
    twice=lambda stage: 2,
    join=math.prod,
    size=lambda sizes: sizes,
):
    """`copies_of`, with one thing or other changed."""

    def copies_of(layout, both, sizes, zero_stage):
        sizes = size(sizes)
        factors = [twice(zero_stage) if both else 1, sizes["tp"] if tp(layout) else 1]
        if data(zero_stage, layout.expert):
            factors.append(expert(sizes) if layout.expert else sizes["dp"])
        return join(factors)

    return copies_of


COPIES_MISTAKES = {
    "both ends are forgotten: a tied table counts twice": _copies(twice=lambda stage: 1),
    "both ends are forgotten under ZeRO: each has a share of its own table": _copies(
        twice=lambda stage: 1 if stage else 2
    ),
    "copies on tp ranks are forgotten": _copies(tp=lambda layout: False),
    "split matrices are taken for copies": _copies(tp=lambda layout: True),
    "dimension 0 is taken for none: ask `layout.dim is None`": _copies(tp=lambda layout: not layout.dim),
    "only partial ones are taken for copies": _copies(tp=lambda layout: layout.partial),
    "partial gradients are no copies: they are, once added up": _copies(
        tp=lambda layout: layout.dim is None and not layout.partial
    ),
    "split matrices and whole ones are mixed up": _copies(tp=lambda layout: layout.dim is not None),
    "ZeRO is ignored: from stage 1 on ranks hold different shares": _copies(data=lambda stage, expert: True),
    "ZeRO is ignored for experts: it shares them out, too": _copies(data=lambda stage, expert: expert or stage == 0),
    "data-parallel copies are forgotten": _copies(data=lambda stage, expert: False),
    "copies of experts on edp ranks are forgotten": _copies(expert=lambda sizes: 1),
    "stage 1 shares nothing out": _copies(data=lambda stage, expert: stage <= 1),
    "only stage 3 shares out": _copies(data=lambda stage, expert: stage < 3),
    "stage 0 and the others are mixed up": _copies(data=lambda stage, expert: stage > 0),
    "experts are on every data-parallel rank": _copies(expert=lambda sizes: sizes["dp"]),
    "an expert's numbers are on every rank of its ep group": _copies(expert=lambda sizes: sizes["dp"] // sizes["edp"]),
    "numbers of copies are added, not multiplied": _copies(join=lambda factors: 1 + sum(n - 1 for n in factors)),
    "its inverse": _copies(join=lambda factors: 1 / math.prod(factors)),
    "sizes are fixed at 2": _copies(size=lambda sizes: dict.fromkeys(sizes, 2)),
}


def grade_copies_of(fn) -> Verdict:
    """Every kind of parameter and stage of ZeRO; 5 tensor-parallel ranks, 21 data-parallel, 7 of them for an expert."""
    sizes = ({"tp": 5, "dp": 21, "edp": 7}, {"tp": 1, "dp": 6, "edp": 6}, {"tp": 1, "dp": 6, "edp": 3})
    cases = [
        (layout, twice, given, stage)
        for given in sizes
        for layout, twice in (SPLIT_UP if given["tp"] > 1 else ALL_WHOLE)
        for stage in range(4)
    ]
    names = [f"{_describe(layout, both)}; {given}, ZeRO-{stage}" for layout, both, given, stage in cases]
    asked, got = [_copies()(*case) for case in cases], []
    for name, (layout, both, given, stage) in zip(names, cases, strict=True):
        mine = dict(given)
        with _asking(name):
            got.append(fn(layout, both, mine, stage))
        if mine != given:
            return wrong("The caller's dictionary of sizes has changed.", "it uses up its input")
    if got != asked:
        named = _recognised(COPIES_MISTAKES, cases, got)
        return wrong("They are not on that many ranks.", named, _rows(names, asked, got))
    if any(type(n) is not int for n in got):
        return wrong("The numbers are right, but they are not plain integers.", "not plain integers")
    return ok(
        "Right for every kind of parameter and stage of ZeRO.", [(names[n], asked[n], got[n]) for n in (0, 8, 9, 24)]
    )


# --- 9.5 along which axis -------------------------------------------------------------------------------------

MESHES = (
    ParallelConfig(tp=2, ep=2),
    ParallelConfig(ep=2),
    ParallelConfig(pp=2),
    ParallelConfig(pp=4),
)


USUAL = ("tp", "pp", "dp", "edp", "ep")
FIRST = {"all_to_all": ["ep"], "all_reduce": ["ends"]}


def _axis_by_order(*order, first=FIRST, otherwise="world", same=lambda a, b: a == b):
    """`axis_of`: the first axis whose group has the event's ranks, of those for its operation and those in `order`."""

    def axis_of(event, groups):
        axes = [*first.get(event.op, []), *(order or USUAL)]
        return next((axis for axis in axes if axis in groups and same(groups[axis], event.group_ranks)), otherwise)

    return axis_of


AXIS_MISTAKES = {
    "where dp and ep have the same ranks, an exchange of tokens is counted as dp": _axis_by_order(
        first={"all_reduce": ["ends"]}
    ),
    "where dp and ep have the same ranks, a sum of gradients is counted as ep": _axis_by_order(
        "ep", *USUAL, first={"all_reduce": ["ends"]}
    ),
    "where dp and ep have the same ranks, ZeRO's gathers and reduce-scatters are counted as ep": _axis_by_order(
        first={**FIRST, "all_gather": ["ep"], "reduce_scatter": ["ep"]}
    ),
    "where dp and ep have the same ranks, ZeRO's gathers are counted as ep": _axis_by_order(
        first={**FIRST, "all_gather": ["ep"]}
    ),
    "where dp and ep have the same ranks, ZeRO's reduce-scatters are counted as ep": _axis_by_order(
        first={**FIRST, "reduce_scatter": ["ep"]}
    ),
    "every all-to-all is ep, whoever made it": lambda event, groups: (
        "ep" if event.op == "all_to_all" else _axis_by_order()(event, groups)
    ),
    "a group that is None is taken for the ends; `ranks_of(None)` are all ranks": lambda event, groups: (
        _axis_by_order()(event, {"ends": groups["world"], **groups})
    ),
    "the ends are left out: what they add up falls to pp or to the world": _axis_by_order(first={"all_to_all": ["ep"]}),
    "with two stages the ends are counted as pp": _axis_by_order(
        "tp", "pp", "ends", "dp", "edp", "ep", first={"all_to_all": ["ep"]}
    ),
    "with two stages, what pp sends is counted for the ends": _axis_by_order("ends", *USUAL),
    "where dp and edp are one, it is called edp": _axis_by_order("tp", "pp", "edp", "dp", "ep"),
    "groups are told apart by their size only": _axis_by_order(same=lambda a, b: len(a) == len(b)),
    "a group that contains these ranks is taken for theirs": _axis_by_order(
        "world", *USUAL, same=lambda a, b: set(b) <= set(a)
    ),
    "an axis that has all ranks is called world": _axis_by_order("world", *USUAL, first={"all_to_all": ["ep"]}),
    "edp is left out: it falls to the world": _axis_by_order("tp", "pp", "dp", "ep"),
    "what goes to all ranks has no name": _axis_by_order(otherwise=None),
    "the data axes are one: edp and ep are called dp": lambda event, groups: {"edp": "dp", "ep": "dp"}.get(
        axis := _axis_by_order()(event, groups), axis
    ),
}

# What the trainer does along each axis.  Only int8 sums send all-to-all along dp and edp.
SUMS_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
OPERATIONS = {
    "tp": ("all_reduce", "all_gather", "reduce_scatter"),
    "pp": ("all_reduce", "send", "recv"),
    "dp": SUMS_OPS,
    "edp": SUMS_OPS,
    "ep": ("all_to_all",),
    "ends": ("all_reduce",),
    "world": ("all_reduce",),
}


def grade_axis_of(fn) -> Verdict:
    """Four meshes of four ranks, every operation there is along every axis, seen from every rank."""
    seen = [case for rank in run_ranks(_observe_axes, R, timeout=2 * LIMIT_S, overrides={AXIS: fn}) for case in rank]
    cases = [(event, groups) for event, groups, _ in seen]
    asked, got = [_axis_by_order()(*case) for case in cases], [answer for *_, answer in seen]
    if got != asked:
        names = [f"{event.op} among {event.group_ranks}, rank {event.rank}, of {groups}" for event, groups in cases]
        named = _recognised(AXIS_MISTAKES, cases, got)
        return wrong("It went along another axis.", named, _rows(names, asked, got, 3))
    return ok(f"Right for {len(seen)} operations, on four meshes.")


def _observe_axes() -> list[tuple[Any, dict[str, tuple[int, ...]], Any]]:
    found, rank = [], collectives.rank_in()
    for parallel in MESHES:
        mesh = build_mesh(parallel, "cpu")
        groups = {axis: collectives.ranks_of(mesh.group(axis)) for axis in OPERATIONS if mesh.size(axis) > 1}
        for ranks, op in [(groups[axis], op) for axis in groups for op in OPERATIONS[axis]]:
            peer = next(other for other in ranks if other != rank) if op in ("send", "recv") else None
            event = collectives.Event(op, ranks, rank, peer, 8, 8, 0.0, 1.0)
            with _asking(f"{op} among {ranks}, rank {rank}, of {groups}"):
                found.append((event, groups, recorded.axis_of(event, mesh)))
    return found


# --- what the chapter shows besides ---------------------------------------------------------------------------


def right_step(engine, micros, forward):
    """A pass in which every loss is divided by the tokens of *all* ranks, and gradients are added up."""
    everyone = engine.mesh.size("dp") * sum(micro.labels.numel() for micro in micros)
    loss_sum, _ = engine.run(micros, forward, everyone)
    engine.finish_backward()
    return loss_sum


def suspect_step(engine, micros, forward):
    """The puzzle 9-bug: a pass whose mistake no loss shows.  Look at its symptoms first."""
    mine = sum(micro.labels.numel() for micro in micros)
    with slots.filled({"deepseek_lab.parallel.zero.start_reduction": averaged}):
        loss_sum, _ = engine.run(micros, forward, mine)
    engine.finish_backward()
    return loss_sum


def averaged(gradient_P, stage, group):
    """Each rank's loss is the mean over its own tokens, so the gradient is the mean over the ranks."""
    return collectives.start_all_reduce(gradient_P.div_(collectives.size_of(group)), group)


def small_config(**changes: Any) -> DeepSeekConfig:
    """Two layers, the second with 8 experts; 0.4 million parameters."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.1}
    return DeepSeekConfig.preset("tiny", tie_word_embeddings=True, **{**sizes, **changes})


def train(step, parallel, tokens, *, steps=10, rows=8, seq_len=32):
    """On a rank: losses and global gradient norms of `steps` of AdamW, in which `step` makes the pass.

    Also, after the first pass, the norm of the experts' gradients on this rank, and of all others.
    """
    mesh = build_mesh(parallel, "cpu")
    engine = parallelize(small_config(), mesh, parallel)
    matrices, vectors = engine.optimizer_tensors()
    optimizer = torch.optim.AdamW([*matrices, *vectors], lr=3e-3, weight_decay=0.0)
    losses, norms, parts = [], [], {}
    for n in range(steps):
        batch = train_batch(
            tokens["train"], seed=0, step=n, global_batch_size=rows, seq_len=seq_len,
            rank=mesh.rank("dp"), size=mesh.size("dp"),
        )  # fmt: skip
        engine.zero_grad()
        loss_sum = step(
            engine, [batch], lambda chunk, x, micro: engine.run_stage(chunk, x, micro.input_ids, micro.labels)
        )
        losses.append(collectives.all_reduce(loss_sum, mesh.group("dp")).item() / rows / seq_len)
        norms.append(engine.grad_norm().item())
        if n == 0:
            whole = [(".experts." in name, gradient.norm().item()) for name, gradient in engine.full("grad")]
            parts = {
                "experts": math.hypot(*(g for e, g in whole if e)),
                "others": math.hypot(*(g for e, g in whole if not e)),
            }
        optimizer.step()
        engine.after_step()
    return losses, norms, parts


def record_step(config, tokens):
    """On a rank: the trainer of `config`, as `deepseek_lab.train` runs it, up to the step that it records."""
    trainer = Trainer(config, tokens, build_mesh(config.parallel, "cpu"), torch.device("cpu"), Path("unused"))
    losses = []
    for values in trainer.fit():
        losses.append(values["loss"])
        if trainer.recorded is not None:
            break
    return trainer.recorded, losses


def deviations(found, reference):
    """By parameter the relative distance of gradients from those of one process, on the rank where it is largest.

    Args:
        found: of each rank {name: gradient}; reference: the same of one process.
    """
    worst: dict[str, float] = {}
    for gradients in found:
        for name, gradient in gradients.items():
            off = (gradient - reference[name]).norm() / reference[name].norm()
            worst[name] = max(worst.get(name, 0.0), off.item())
    return worst


def kind_of(name):
    """What kind of parameter it is, as far as sums over ranks go."""
    if ".experts." in name:
        return "experts"
    if "embed_tokens" in name:
        return "tied table"
    if ".mlp.gate." in name:
        return "router"
    if "_a_" in name:
        return "latents"
    return "norms" if "norm" in name else "matrices"


def by_kind(worst):
    """The largest of the `deviations` of each kind of parameter."""
    kinds: dict[str, float] = {}
    for name, off in worst.items():
        kinds[kind_of(name)] = max(kinds.get(kind_of(name), 0.0), off)
    return dict(sorted(kinds.items()))


def dense_config(layers=128, width=8192, **changes: Any) -> DeepSeekConfig:
    """A dense DeepSeek of that depth and width: heads of 128, a feed-forward of 8/3 of the width, V3's vocabulary."""
    return DeepSeekConfig.preset(
        "deepseek_v3",
        **{
            "hidden_size": width,
            "num_hidden_layers": layers,
            "first_k_dense_replace": layers,
            "num_attention_heads": width // 128,
            "intermediate_size": width * 8 // 3 // 256 * 256,
            **changes,
        },
    )


HINTS = {
    "9-bug": (
        "The loss is right at every step, with and without the mistake, and so is the norm without expert "
        "parallelism. What has ep got to do with the size of a gradient? The last cell of this section prints two "
        "norms apart: of the experts' gradients, and of all others.",
        "The suspect divides a loss by its rank's own tokens, and then a gradient by the ranks that it is added up "
        "over. For most parameters these are all dp ranks. For experts?",
        "An expert is added up over edp, dp / ep ranks, and divided by as many. But it has worked on the tokens of its "
        "whole ep group: dividing by dp would be right, so its gradient is ep times too large. AdamW divides a "
        "gradient by its own size, so no loss shows it; clipping by the global norm does, and SGD would. Divide every "
        "loss by the tokens of the *global* batch, and only add: then no group's size matters.",
    ),
}

TITLE = "All of it composed"

EXERCISES = (
    Exercise(
        number="9.1",
        path=PLACE,
        title="Which rank is where",
        grade=grade_coordinates,
        level="warm-up",
        minutes=10,
        hints=(
            "A clock does the same with seconds: 3,725 seconds are 1 hour, 2 minutes and 5 seconds. The last axis "
            "counts seconds.",
            "How many ranks lie inside one step along the first axis? The product of all other sizes. `divmod(rank, "
            "that)` gives the step, and what is left for the inner axes.",
            "Start with `inside = math.prod(sizes.values())`, and divide it by the size of each axis in turn. Check "
            "first that 0 <= rank < inside.",
        ),
    ),
    Exercise(
        number="9.2",
        path=STATE,
        title="What a rank holds",
        grade=grade_state_of_a_rank,
        minutes=15,
        hints=(
            "`units_of_a_rank(config, parallel, pp_rank)` has done the pipeline's and tp's part, and ep's: pairs "
            "(numbers of all but experts, numbers of experts) that this rank holds before ZeRO. Add each column up.",
            "How many ranks hold the same? `world_size // tp // pp` for all but experts. Of experts, the ranks of an "
            "ep group hold different ones: divide by `ep` once more.",
            "Call `zero_state_bytes(numbers, ranks, parallel.zero_stage, *bytes_each)` twice, and add the two "
            "dictionaries up, kind by kind.",
        ),
    ),
    Exercise(
        number="9.3",
        path=SUMS,
        title="Over which axes",
        grade=grade_gradient_axes,
        minutes=15,
        hints=(
            "Ask for each axis: do its ranks hold the same parameter, and has each found only a part of the gradient? "
            "Only then must they add up.",
            "Along dp, ranks saw different tokens: add up. But along ep they hold different experts, to which all "
            "tokens of the group have come already: for experts the axis is edp.",
            "Along tp: `layout.partial` says it. Along pp, only a parameter that both ends hold (`twice`): the axis is "
            'called "ends". The data axis comes first in the list.',
        ),
    ),
    Exercise(
        number="9.4",
        path=COPIES,
        title="How often a number is there",
        grade=grade_copies_of,
        minutes=15,
        hints=(
            "Start from one, and multiply by the ranks of each axis along which all hold the same numbers.",
            "Along tp: if `layout.dim` is None, nothing is split, and all hold the same (partial ones too, now that "
            "they have been added up). Both ends: twice.",
            'Along dp: with `zero_stage` 0 all hold the same, `sizes["dp"]` ranks, or `sizes["edp"]` for experts. '
            "From stage 1 on each has a share of its own.",
        ),
    ),
    Exercise(
        number="9.5",
        path=AXIS,
        title="Read the trace",
        grade=grade_axis_of,
        minutes=15,
        hints=(
            "`collectives.ranks_of(mesh.group(axis))` are the ranks of this rank's group along an axis. Compare them "
            "with `event.group_ranks`.",
            "Several axes can have the same ranks. dp and ep, if edp is 1: only experts exchange tokens, by "
            "`all_to_all`. dp and edp, if ep is 1: call it dp. pp and the ends, with two stages: the ends use "
            "`all_reduce`.",
            'So: "ep" first if it is an all-to-all, "ends" first if it is an all-reduce; then tp, pp, dp, edp, ep, '
            'passing over axes with `mesh.size(axis)` 1; and "world" if none fits.',
        ),
    ),
)
