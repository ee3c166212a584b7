"""Chapter 09: all axes at once.

The functions here are short, and nothing crashes when one is wrong.  So the graders try every kind of parameter on
every layout, and know what each mistake would give.
"""

import functools
import itertools
import math
from collections.abc import Callable
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
    got = []
    for rank, sizes in cases:
        given = dict(sizes)
        got.append(fn(rank, given))
        if given != sizes:
            return wrong("The caller's dictionary of sizes has changed.", "it uses up its input")
    names = [f"rank {rank} of {' x '.join(map(str, sizes.values()))}" for rank, sizes in cases]
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
            fn(rank, grids[0])
        except ValueError:
            continue
        return wrong(f"A grid of 24 has no rank {rank}: raise ValueError.", "a rank that does not exist gets a place")
    return ok("Right for every rank of four grids.", [(names[n], asked[n], got[n]) for n in (0, 1, 4, 23)])


# --- 9.2 what a rank holds ------------------------------------------------------------------------------------


def _true_state(config, parallel, pp_rank, world_size, bytes_each, *, stage=None, dense_over=None, experts_over=None):
    dp = max(world_size // parallel.tp // parallel.pp, 1)
    units = memory.units_of_a_rank(config, parallel, pp_rank)
    stage = parallel.zero_stage if stage is None else stage
    total = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    for part, over in enumerate((dense_over or dp, experts_over or dp // parallel.ep)):
        n = sum(unit[part] for unit in units)
        for (kind, each), from_stage in zip(zip(total, bytes_each, strict=True), (3, 2, 1), strict=True):
            total[kind] += each * (math.ceil(n / over) if stage >= from_stage else n)
    return total


def grade_state_of_a_rank(fn) -> Verdict:
    """Both stages of a pipeline, all stages of ZeRO, with and without tensor and expert parallelism."""
    config = DeepSeekConfig.preset("tiny", num_hidden_layers=5, vocab_size=1001, tie_word_embeddings=True)
    layouts = [
        (ParallelConfig(pp=2, tp=4, ep=ep, zero_stage=stage), world)
        for ep, world in ((2, 80), (1, 8))
        for stage in range(4)
    ]
    layouts.append((ParallelConfig(ep=4, zero_stage=3), 8))
    cases = [
        (config, parallel, pp_rank, world, bytes_each)
        for (parallel, world), bytes_each in zip(layouts, itertools.cycle(((2, 2, 12), (4, 8, 16))), strict=False)
        for pp_rank in range(parallel.pp)
    ]

    def parts(c, p, r, kind):
        return sum(unit[kind] for unit in memory.units_of_a_rank(c, p, r))

    def whole(c, p, r, w, b, n, over):
        return memory.zero_state_bytes(n, over, p.zero_stage, *b)

    def dp(p, w):
        return w // p.tp // p.pp

    def first_unit(c, p, r, w, b):
        dense, experts = max(memory.units_of_a_rank(c, p, r))
        a, e = whole(c, p, r, w, b, dense, dp(p, w)), whole(c, p, r, w, b, experts, dp(p, w) // p.ep)
        return {kind: a[kind] + e[kind] for kind in a}

    known: dict[str, Callable[..., dict[str, int]]] = {
        "experts are shared out over all data-parallel ranks": lambda c, p, r, w, b: _true_state(
            c, p, r, w, b, experts_over=dp(p, w)
        ),
        "experts and the rest are one heap over all data-parallel ranks": lambda c, p, r, w, b: whole(
            c, p, r, w, b, parts(c, p, r, 0) + parts(c, p, r, 1), dp(p, w)
        ),
        "everything is shared out over the few ranks that share experts": lambda c, p, r, w, b: _true_state(
            c, p, r, w, b, dense_over=dp(p, w) // p.ep
        ),
        "experts are shared out over their ep group, whose ranks hold different ones": lambda c, p, r, w, b: (
            _true_state(c, p, r, w, b, experts_over=p.ep)
        ),
        "tensor and pipeline ranks are taken for data-parallel ones": lambda c, p, r, w, b: _true_state(
            c, p, r, w, b, dense_over=w, experts_over=w // p.ep
        ),
        "pipeline ranks are taken for data-parallel ones": lambda c, p, r, w, b: _true_state(
            c, p, r, w, b, dense_over=w // p.tp, experts_over=w // p.tp // p.ep
        ),
        "tensor-parallel ranks are taken for data-parallel ones": lambda c, p, r, w, b: _true_state(
            c, p, r, w, b, dense_over=w // p.pp, experts_over=w // p.pp // p.ep
        ),
        "experts are left out": lambda c, p, r, w, b: whole(c, p, r, w, b, parts(c, p, r, 0), dp(p, w)),
        "nothing but experts is counted": lambda c, p, r, w, b: whole(
            c, p, r, w, b, parts(c, p, r, 1), dp(p, w) // p.ep
        ),
        "every rank is taken for the first of its pipeline": lambda c, p, r, w, b: _true_state(c, p, 0, w, b),
        "the bytes of a number are fixed": lambda c, p, r, w, b: _true_state(c, p, r, w, (2, 2, 12)),
        "one block only": first_unit,
    }
    for fixed in range(4):
        known[f"the stage of ZeRO is ignored: it is always {fixed}"] = functools.partial(_true_state, stage=fixed)
    asked = [_true_state(*case) for case in cases]
    got = [fn(*case) for case in cases]
    names = [f"pp {p.pp}, tp {p.tp}, ep {p.ep}, ZeRO-{p.zero_stage} on {w} ranks, stage {r}" for _, p, r, w, _ in cases]
    if not all(isinstance(state, dict) and state.keys() == asked[0].keys() for state in got):
        return wrong(
            "It should return a dictionary like this one.", "not a dictionary by kind", [(names[0], asked[0], got[0])]
        )
    if got != asked:
        return wrong("These are not the bytes of that rank.", _recognised(known, cases, got), _rows(names, asked, got))
    return ok(
        "Right for both stages of the pipeline and all stages of ZeRO.",
        [(names[n], sum(asked[n].values()), sum(got[n].values())) for n in (0, 1, 2, 6)],
    )


# --- 9.3 over which axes --------------------------------------------------------------------------------------

LAYOUTS = [
    Layout((8, 4, 4), dim=dim, partial=partial, expert=expert)
    for dim, partial, expert in itertools.product((None, 0, 1), (False, True), (False, True))
    if not (partial and dim is not None)
]


def _describe(layout, twice):
    held = "split over tp" if layout.dim is not None else "whole" + (", each tp rank finds a part" * layout.partial)
    return f"{'experts' if layout.expert else 'not experts'}, {held}{', on both ends' * twice}"


def _axes(expert="edp", dense="dp", partial=lambda layout: layout.partial, ends=lambda twice: twice, last="ends"):
    """`gradient_axes`, with one thing or other changed."""

    def axes(layout, twice):
        first = expert if layout.expert else dense
        return [*([first] if isinstance(first, str) else first), *(["tp"] * partial(layout)), *([last] * ends(twice))]

    return axes


def grade_gradient_axes(fn) -> Verdict:
    """Every kind of parameter there is, held by one stage and by both ends."""
    known = {
        "experts are added up over dp, where ranks hold different ones": _axes(expert="dp"),
        "experts are added up over edp and once more over ep": _axes(expert=("edp", "ep")),
        "experts are added up over ep, whose ranks hold different ones": _axes(expert="ep"),
        "experts are not added up over data-parallel ranks at all": _axes(expert=()),
        "all else is added up over edp: the ranks of an ep group see different tokens": _axes(dense="edp"),
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
        "experts are never partial": _axes(partial=lambda layout: layout.partial and not layout.expert),
    }
    cases = list(itertools.product(LAYOUTS, (False, True)))
    asked = [_axes()(*case) for case in cases]
    returned = [fn(*case) for case in cases]
    names = [_describe(*case) for case in cases]
    if not all(isinstance(axes, list) for axes in returned):
        return wrong("It should return a list of axes.", "not a list", [(names[0], asked[0], returned[0])])
    if [sorted(axes) for axes in returned] != [sorted(axes) for axes in asked]:
        return wrong(
            "Over these axes the sum is another gradient.",
            _recognised(known, cases, returned),
            _rows(names, asked, returned),
        )
    if [axes[0] for axes in returned] != [axes[0] for axes in asked]:
        rows = _rows(names, asked, returned)
        return wrong(
            "The data axis should come first: its sum starts during backward.", "the data axis is not first", rows
        )
    return ok("Right for every kind of parameter.", [(names[n], asked[n], returned[n]) for n in (0, 3, 5, 10)])


# --- 9.4 how often --------------------------------------------------------------------------------------------


def _copies(tp=lambda layout: layout.dim is None, data=lambda s: s == 0, expert="edp", twice=2, join=math.prod):
    """`copies_of`, with one thing or other changed."""

    def copies(layout, both, sizes, zero_stage):
        factors = [twice if both else 1, sizes["tp"] if tp(layout) else 1]
        factors.append(sizes[expert if layout.expert else "dp"] if data(zero_stage) else 1)
        return join(factors)

    return copies


def grade_copies_of(fn) -> Verdict:
    """Every kind of parameter and stage of ZeRO; 5 tensor-parallel ranks, 21 data-parallel, 7 of them for an expert."""
    known = {
        "both ends are forgotten: a tied table counts twice": _copies(twice=1),
        "copies on tp ranks are forgotten": _copies(tp=lambda layout: False),
        "split matrices are taken for copies": _copies(tp=lambda layout: True),
        "only partial ones are taken for copies": _copies(tp=lambda layout: layout.partial),
        "partial gradients are no copies: they are, once added up": _copies(
            tp=lambda layout: layout.dim is None and not layout.partial
        ),
        "split matrices and whole ones are mixed up": _copies(tp=lambda layout: layout.dim is not None),
        "ZeRO is ignored: from stage 1 on ranks hold different shares": _copies(data=lambda stage: True),
        "data-parallel copies are forgotten": _copies(data=lambda stage: False),
        "stage 1 shares nothing out": _copies(data=lambda stage: stage <= 1),
        "only stage 3 shares out": _copies(data=lambda stage: stage < 3),
        "stage 0 and the others are mixed up": _copies(data=lambda stage: stage > 0),
        "experts are on every data-parallel rank": _copies(expert="dp"),
        "an expert's numbers are on every rank of its ep group": lambda layout, both, sizes, stage: _copies()(
            layout, both, sizes | {"edp": sizes["dp"] // sizes["edp"]}, stage
        ),
        "numbers of copies are added, not multiplied": _copies(join=lambda f: 1 + sum(x - 1 for x in f)),
        "its inverse": lambda *case: 1 / _copies()(*case),
        "sizes are fixed at 2": lambda layout, both, sizes, stage: _copies()(
            layout, both, dict.fromkeys(sizes, 2), stage
        ),
    }
    sizes = ({"tp": 5, "dp": 21, "edp": 7}, {"tp": 1, "dp": 6, "edp": 6})
    cases = list(itertools.product(LAYOUTS, (False, True), sizes, range(4)))
    asked = [_copies()(*case) for case in cases]
    got = []
    for layout, both, given, stage in cases:
        mine = dict(given)
        got.append(fn(layout, both, mine, stage))
        if mine != given:
            return wrong("The caller's dictionary of sizes has changed.", "it uses up its input")
    names = [f"{_describe(layout, both)}; {given}, ZeRO-{stage}" for layout, both, given, stage in cases]
    if got != asked:
        return wrong("So often these numbers are not there.", _recognised(known, cases, got), _rows(names, asked, got))
    return ok(
        "Right for every kind of parameter and stage of ZeRO.", [(names[n], asked[n], got[n]) for n in (0, 8, 1, 24)]
    )


# --- 9.5 along which axis -------------------------------------------------------------------------------------

MESHES = (
    ParallelConfig(tp=2, ep=2),
    ParallelConfig(ep=2),
    ParallelConfig(pp=2, tp=2),
    ParallelConfig(pp=2),
    ParallelConfig(pp=4),
    ParallelConfig(tp=4),
)


def _axis_by_order(*order, a2a="ep", otherwise="world", same=lambda a, b: a == b):
    """`axis_of`: the first axis in `order` whose group has the event's ranks."""

    def axis_of(event, groups):
        axes = [a2a] * (event.op == "all_to_all" and a2a is not None) + list(order)
        return next((axis for axis in axes if axis in groups and same(groups[axis], event.group_ranks)), otherwise)

    return axis_of


def grade_axis_of(fn) -> Verdict:
    """Six meshes of four ranks, every operation there is along every axis, seen from every rank."""
    seen = [case for rank in run_ranks(_observe_axes, R, timeout=LIMIT_S, overrides={AXIS: fn}) for case in rank]
    usual = ("tp", "pp", "dp", "edp", "ep")
    known = {
        "where dp and ep have the same ranks, an exchange of tokens is counted as dp": _axis_by_order(*usual, a2a=None),
        "where dp and ep have the same ranks, a sum of gradients is counted as ep": _axis_by_order("ep", *usual),
        "every all-to-all is ep, whoever made it": lambda event, groups: (
            "ep" if event.op == "all_to_all" else _axis_by_order(*usual)(event, groups)
        ),
        "where dp and edp are one, it is called edp": _axis_by_order("tp", "pp", "edp", "dp", "ep"),
        "groups are told apart by their size only": _axis_by_order(*usual, same=lambda a, b: len(a) == len(b)),
        "a group that contains these ranks is taken for theirs": _axis_by_order(
            "world", *usual, same=lambda a, b: set(b) <= set(a)
        ),
        "an axis that has all ranks is called world": _axis_by_order("world", *usual),
        "edp is left out: it falls to the world": _axis_by_order("tp", "pp", "dp", "ep"),
        "what goes to all ranks has no name": _axis_by_order(*usual, otherwise=None),
        "the data axes are one: edp and ep are called dp": lambda event, groups: {"edp": "dp", "ep": "dp"}.get(
            axis := _axis_by_order(*usual)(event, groups), axis
        ),
    }
    cases = [(event, groups) for event, groups, _ in seen]
    asked, got = [_axis_by_order(*usual)(*case) for case in cases], [answer for *_, answer in seen]
    if got != asked:
        names = [f"{event.op} among {event.group_ranks}, rank {event.rank}, of {groups}" for event, groups in cases]
        return wrong("It went along another axis.", _recognised(known, cases, got), _rows(names, asked, got, 3))
    return ok(f"Right for {len(seen)} operations, on six meshes.")


def _observe_axes() -> list[tuple[Any, dict[str, tuple[int, ...]], Any]]:
    found, rank = [], collectives.rank_in()
    for parallel in MESHES:
        mesh = build_mesh(parallel, "cpu")
        axes = ("tp", "pp", "dp", "edp", "ep", "world")
        groups = {axis: collectives.ranks_of(mesh.group(axis)) for axis in axes if mesh.size(axis) > 1}
        for axis, op in itertools.product(groups, ("all_to_all", "all_reduce", "send")):
            peer = groups[axis][0] if op == "send" else None
            event = collectives.Event(op, groups[axis], rank, peer, 8, 8, 0.0, 1.0)
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
        "parallelism. What has ep got to do with the size of a gradient? `train` returns two more norms: look at "
        '`"experts"` and at `"others"`.',
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
            "Two axes can have the same ranks: dp and ep, if edp is 1. Only experts exchange tokens, by "
            "`all_to_all`. And dp and edp, if ep is 1: then call it dp.",
            'So: "ep" first if it is an all-to-all; then tp, pp, dp, edp, ep, passing over axes with `mesh.size(axis)` '
            '1; and "world" if none fits.',
        ),
    ),
)
