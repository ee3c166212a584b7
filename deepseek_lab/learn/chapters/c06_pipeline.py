"""Chapter 06: pipelines, their schedules, and the weights that micro-batches meet.

The graders of orders play them, without any rank; those of what runs inside a stage count what is kept and when.
"""

import time
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepseek_lab import slots
from deepseek_lab.learn.chapters.c03_data_parallel import text_bytes
from deepseek_lab.learn.exercises import Exercise
from deepseek_lab.learn.ranks import RankTimeout, run_ranks
from deepseek_lab.learn.verdict import Row, Verdict, close, distance, ok, tensors_in, wrong
from deepseek_lab.model import split_backward
from deepseek_lab.parallel import collectives, pipedream
from deepseek_lab.plan import schedules
from deepseek_lab.plan.schedules import Action, Schedule, build_schedule, simulate, validate

SCHEDULES = "deepseek_lab.plan.schedules"
GPIPE, PEAK, ONE_F_ONE_B = f"{SCHEDULES}.gpipe", f"{SCHEDULES}.peak_activations", f"{SCHEDULES}.one_f_one_b"
ZERO_BUBBLE, LINEAR = f"{SCHEDULES}.zero_bubble", "deepseek_lab.model.split_backward.DeferrableLinear"
STASHED = "deepseek_lab.parallel.pipedream.StashedWeights"
LIMIT_S = 8.0

Order = Callable[..., Iterable[Action]]

# --- 6.1, 6.3, 6.5: orders ------------------------------------------------------------------------------------


def _words(actions: Iterable[Action]) -> str:
    return " ".join(map(str, actions))


def _judge_order(fn: Order, asked: Order, known: dict[str, Order], cases: list[tuple], names: tuple[str, ...]):
    """Compare orders in all cases; returns a verdict on what is wrong, or None."""
    got = [fn(*case) for case in cases]
    if not all(isinstance(order, Iterable) for order in got):
        return wrong("It should return a list of actions, or yield them.", None, [("returned", "F0 …", got[0])])
    orders = [list(order) for order in got]
    if not all(isinstance(action, Action) for order in orders for action in order):
        shown = next(x for order in orders for x in order if not isinstance(x, Action))
        rows = [("one of them", 'Action("F", 0)', repr(shown))]
        return wrong('An action is made like this: `Action("F", 0)`.', "no actions", rows)

    def same(other: Order) -> bool:
        return all(_words(a) == _words(list(other(*case))) for a, case in zip(orders, cases, strict=True))

    if same(asked):
        return None
    rows = [
        _where_they_part(
            ", ".join(f"{name} {x}" for name, x in zip(names, case, strict=True)), list(asked(*case)), order
        )
        for case, order in zip(cases, orders, strict=True)
        if _words(order) != _words(list(asked(*case)))
    ]
    name = next((name for name, other in known.items() if same(other)), None)
    return wrong("This is not the order that was asked for.", name, rows[:4])


def _where_they_part(label: str, asked: list[Action], got: list[Action]) -> tuple[str, str, str]:
    """A row of two orders, whole where they are short, else from shortly before their first difference."""
    first = 0
    if max(len(asked), len(got)) > 24:
        alike = [str(a) == str(b) for a, b in zip(asked, got, strict=False)]
        first = max((alike.index(False) if False in alike else len(alike)) - 2, 0)
        label += f", from its action {first} on"
    shown = [_words(order[first : first + 24]) or "nothing" for order in (asked, got)]
    return label, shown[0], shown[1]


def _with_actions(kinds: str, micro_batches: Iterable[int]) -> list[Action]:
    """Every kind for each micro-batch in turn."""
    return [Action(kind, m) for m in micro_batches for kind in kinds]


ORDER_OF = ("rank", "of", "micro-batches")


def grade_gpipe(fn) -> Verdict:
    """First and last rank of four, and one rank alone."""
    asked = slots.original(GPIPE)
    known: dict[str, Order] = {
        "each micro-batch goes through before the next one starts: no pipeline": lambda r, p, m: _with_actions(
            "FB", range(m)
        ),
        "backwards from the last micro-batch to the first": lambda r, p, m: [
            *_with_actions("F", range(m)),
            *_with_actions("B", reversed(range(m))),
        ],
        "micro-batches are counted from 1": lambda r, p, m: [
            *_with_actions("F", range(1, m + 1)),
            *_with_actions("B", range(1, m + 1)),
        ],
        "as many micro-batches as ranks": lambda r, p, m: asked(r, p, p),
        "backward is missing": lambda r, p, m: _with_actions("F", range(m)),
        "this is 1F1B already": slots.original(ONE_F_ONE_B),
        "ranks from the fifth on do nothing": lambda r, p, m: asked(r, p, m) if r < 4 else [],
        "no more than 64 micro-batches": lambda r, p, m: asked(r, p, min(m, 64)),
    }
    cases = [(0, 4, 3), (3, 4, 3), (1, 4, 6), (0, 1, 2), (5, 8, 3), (1, 2, 130)]
    if (verdict := _judge_order(fn, asked, known, cases, ORDER_OF)) is not None:
        return verdict
    timeline = simulate(schedule_of(fn, 4, 8))
    return ok(
        f"Eight micro-batches on four ranks take {timeline.makespan:g} units of time, of which a rank works "
        f"{timeline.work:g}."
    )


def grade_one_f_one_b(fn) -> Verdict:
    """All ranks of four with many micro-batches and with few, and of two and one."""
    asked = slots.original(ONE_F_ONE_B)

    def ahead_by(ahead: Callable[[int, int], int], backward_of=lambda m, ahead: m, drain=True, clamp=True) -> Order:
        """1F1B for somebody who takes other numbers of forwards before the first backward."""

        def order(rank, ranks, m):
            first = min(ahead(rank, ranks), m) if clamp else ahead(rank, ranks)
            actions = _with_actions("F", range(first))
            for n in range(m):
                actions += _with_actions("F", [n + first]) if n + first < m else []
                actions += _with_actions("B", [backward_of(n, first)]) if drain or n + first < m else []
            return actions

        return order

    known: dict[str, Order] = {
        "all forwards come first: that is GPipe": slots.original(GPIPE),
        "no forwards run ahead: no pipeline": ahead_by(lambda r, p: 0),
        "one forward too many runs ahead": ahead_by(lambda r, p: p - r),
        "one forward too few runs ahead": ahead_by(lambda r, p: max(p - r - 2, 0)),
        "every rank runs as far ahead as the first": ahead_by(lambda r, p: p - 1),
        "ranks are counted from the wrong end": ahead_by(lambda r, p: r),
        "four ranks are built in": ahead_by(lambda r, p: max(3 - r, 0)),
        "more forwards run ahead than there are micro-batches": ahead_by(lambda r, p: p - r - 1, clamp=False),
        "the last backwards are missing": ahead_by(lambda r, p: p - r - 1, drain=False),
        "backward of the micro-batch that has just come": ahead_by(
            lambda r, p: p - r - 1, backward_of=lambda n, first: n + first
        ),
        "in the steady state backward comes first": lambda r, p, m: [
            *_with_actions("F", range(min(p - r - 1, m))),
            *(
                action
                for n in range(m)
                for action in (Action("B", n), *_with_actions("F", range(n + p - r - 1, min(n + p - r, m))))
            ),
        ],
    }
    cases = [(r, p, m) for p, m in ((4, 6), (4, 2), (2, 3), (1, 2), (8, 9)) for r in range(p)]
    if (verdict := _judge_order(fn, asked, known, cases, ORDER_OF)) is not None:
        verdict.detail = _what_follows(fn)
        return verdict
    rows = []
    for m in (8, 32):
        mine, gpipe = simulate(schedule_of(fn, 4, m)), simulate(build_schedule("gpipe", 4, m))
        rows += [
            (f"time of {m} micro-batches, against GPipe's", gpipe.makespan, mine.makespan),
            (f"kept at most with {m}, against GPipe's {m}", 4, max(mine.peak_activations)),
        ]
    return ok("The time of GPipe, and never more than four micro-batches' activations.", rows)


def schedule_of(fn: Order, ranks: int, micro_batches: int) -> Schedule:
    """What `fn(rank, ranks, micro_batches)` gives for every rank, as a schedule to simulate or to carry out."""
    compute = tuple(tuple(fn(rank, ranks, micro_batches)) for rank in range(ranks))
    return Schedule("yours", ranks, micro_batches, 1, compute)


def _what_follows(fn: Order) -> str:
    """What a wrong order would lead to on four ranks: a deadlock, more memory, more time."""
    try:
        mine = schedule_of(fn, 4, 8)
        validate(mine)
    except (ValueError, IndexError, KeyError) as problem:
        return f"On four ranks with eight micro-batches: {problem}"
    timeline, asked = simulate(mine), simulate(build_schedule("1f1b", 4, 8))
    return (
        f"On four ranks with eight micro-batches it takes {timeline.makespan:g} units of time (1F1B {asked.makespan:g})"
        f" and keeps at most {timeline.peak_activations} (1F1B {asked.peak_activations})."
    )


def grade_zero_bubble(fn) -> Verdict:
    """The numbers of ZB-H1 and ZB-H2 on four ranks, and fewer micro-batches than run ahead."""
    asked = slots.original(ZERO_BUBBLE)

    def play(turn="IWF", late=0, behind_of=lambda behind: behind, clamp=True, rest=True, weights_after_forwards=True):
        """The same with another turn, or another rule for W."""

        def order(micro_batches, ahead, behind):
            behind = behind_of(behind)
            forward, weight = min(ahead, micro_batches) if clamp else ahead, 0
            actions = _with_actions("F", range(forward))
            for m in range(micro_batches):
                for kind in turn:
                    if kind == "I":
                        actions.append(Action("I", m))
                    elif kind == "F" and forward < micro_batches:
                        actions.append(Action("F", forward))
                        forward += 1
                    elif (
                        kind == "W"
                        and m - weight >= behind + late
                        and (weights_after_forwards or forward < micro_batches)
                    ):
                        actions.append(Action("W", weight))
                        weight += 1
            return actions + (_with_actions("W", range(weight, micro_batches)) if rest else [])

        return order

    known: dict[str, Order] = {
        "all weight parts wait for the end": play("IF"),
        "`behind` is ignored: W right after its I": play(behind_of=lambda behind: 0),
        "W comes one micro-batch too late": play(late=1),
        "W comes one micro-batch too early": play(late=-1),
        "the forward comes first: one more micro-batch is kept": play("FIW"),
        "the weight part comes after the forward": play("IFW"),
        "the weight part comes before the input part": play("WIF"),
        "weight parts that remain are lost": play(rest=False),
        "more forwards run ahead than there are micro-batches": play(clamp=False),
        "weight parts stop when the forwards have run out": play(weights_after_forwards=False),
        "backward is not split": lambda m, ahead, behind: [
            *_with_actions("F", range(min(ahead, m))),
            *(
                action
                for n in range(m)
                for action in (Action("B", n), *_with_actions("F", range(n + ahead, min(n + ahead + 1, m))))
            ),
        ],
    }
    cases = [(8, 4, 0), (8, 3, 1), (8, 1, 3), (8, 7, 0), (8, 1, 6), (2, 4, 1), (3, 2, 5)]
    names = ("micro-batches", "ahead", "behind")
    if (verdict := _judge_order(fn, asked, known, cases, names)) is not None:
        return verdict
    verdict = ok("ZB-H1 and ZB-H2 are this order with other numbers. On four ranks with eight micro-batches:")
    for name in ("1f1b", "zb_h1", "zb_h2"):
        timeline = simulate(build_schedule(name, 4, 8))
        verdict.detail += f"{name:6} bubble {timeline.bubble_rate:5.1%}, keeps {max(timeline.peak_activations)}\n"
    return verdict


# --- 6.2 what is kept -----------------------------------------------------------------------------------------


def grade_peak_activations(fn) -> Verdict:
    """Whole and split backwards, overlaps, several chunks, lists with messages, and an empty one."""

    def count(step_of=lambda action: action.steps(), change=None, at_the_end=False, first_chunk=False):
        change = change or {"F": 1, "B": -1, "W": -1}

        def peak(actions):
            kept = most = 0
            for action in actions:
                for step in step_of(action):
                    if not (first_chunk and step.chunk):
                        kept += change.get(step.kind, 0)
                    most = max(most, kept)
            return kept if at_the_end else most

        return peak

    asked = count()
    orders = {
        "GPipe, 5 micro-batches": build_schedule("gpipe", 2, 5).actions[0],
        "1F1B, rank 1 of 4": build_schedule("1f1b", 4, 6).actions[1],
        "ZB-H1, rank 0 of 3": build_schedule("zb_h1", 3, 6).actions[0],
        "ZB-H1, rank 2 of 3": build_schedule("zb_h1", 3, 6).compute[2],
        "interleaved, rank 0 of 2": build_schedule("interleaved", 2, 4, 2).compute[0],
        "DualPipeV, rank 0 of 2": build_schedule("dualpipe_v", 2, 6, 2).actions[0],
        "an overlap": (Action("F", 0), Action("OVERLAP", 1, parts=(Action("F", 1), Action("B", 0))), Action("B", 1)),
        "nothing": (),
    }
    known = {
        "the overlaps are not taken apart": count(lambda action: (action,)),
        "activations are let go of in I, before W has used them": count(change={"F": 1, "B": -1, "I": -1}),
        "a split backward lets go twice": count(change={"F": 1, "B": -1, "I": -1, "W": -1}),
        "a split backward never lets go": count(change={"F": 1, "B": -1}),
        "what is kept at the end, not at the most": count(at_the_end=True),
        "all forwards are counted": count(change={"F": 1}),
        "only the first chunk is counted": count(first_chunk=True),
        "a message counts as the work that it carries": lambda actions: count(
            lambda action: (Action(action.of or action.kind, 0),) if action.kind in ("RECV",) else action.steps()
        )(actions),
        "the micro-batch with the highest number": lambda actions: max(
            (a.micro_batch + 1 for a in actions if a.kind == "F"), default=0
        ),
    }
    given = {name: list(order) for name, order in orders.items()}
    got = {name: fn(order) for name, order in given.items()}
    rows = [(name, asked(orders[name]), got[name]) for name in orders]
    if any(row[1] != row[2] for row in rows):
        name = next((n for n, f in known.items() if all(f(orders[o]) == got[o] for o in orders)), None)
        summary = "This is not the most that is kept at once."
        return wrong(summary, name, [row for row in rows if row[1] != row[2]][:5])
    if any(given[name] != list(order) for name, order in orders.items()):
        return wrong("The numbers are right, but the caller's list has changed.", "it uses up its input")
    return _judge_yielded(fn, asked, orders) or ok(
        "Right for whole and split backwards and for overlaps, listed or yielded.", rows[:6]
    )


def _judge_yielded(fn, asked, orders) -> Verdict | None:
    """An order may be yielded, see 6.1: then it can be gone through once, and has no length."""
    try:
        rows: list[Row] = [(f"{n}, yielded", asked(order), fn(a for a in order)) for n, order in orders.items()]
    except (TypeError, AttributeError) as problem:
        rows = [("with an order that is yielded", "a number", f"{type(problem).__name__}: {problem}")]
    if all(row[1] == row[2] for row in rows):
        return None
    summary = "Right for lists. But an order may also be yielded: go through it once, from front to back."
    return wrong(summary, "only a list will do", [row for row in rows if row[1] != row[2]][:3])


# --- 6.4 a backward in two parts --------------------------------------------------------------------------------


class _CountMatmuls(TorchDispatchMode):
    """How many matrix products run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.n += 1
        return func(*args, **(kwargs or {}))


def grade_deferrable_linear(cls) -> Verdict:
    """Square and oblong weights, x of two to four dimensions, fp64: backward whole, in parts, one part not needed."""
    for label, shape, n_out in LINEAR_SHAPES:
        try:
            seen = _try_linear(cls, shape, n_out)
        except (RuntimeError, AttributeError, TypeError, ValueError) as problem:
            if (verdict := _linear_raised(label, problem)) is None:
                raise
            return verdict
        if (verdict := _linear_values(label, seen)) is not None:
            return verdict
    counts: list[Row] = [("matrix products in I", 1, seen["matmuls I"]), ("in W", 1, seen["matmuls W"])]
    if seen["matmuls I"] > 1:
        name = "the weight part is worked out at once and only handed over late"
        return wrong("The gradients are right, but I has the work of both.", name, counts)
    if seen["matmuls W"] > 1:
        return wrong("The gradients are right, but W does more than its part.", "the weight part works twice", counts)
    if (verdict := _linear_memory(seen)) is not None:
        return verdict
    frozen = _try_linear(cls, (5, 4), 4, w_grad=False)
    if frozen["left"]:
        return wrong("A weight that needs no gradient has no weight part.", "a frozen weight gets a weight part")
    if frozen["matmuls I"] > 1:
        name = "it works out a gradient of w that nobody needs"
        return wrong("Where w needs no gradient, one product is enough.", name, [("products", 1, frozen["matmuls I"])])
    first = _try_linear(cls, (5, 4), 4, x_grad=False)
    if first["matmuls I"]:
        name = "it works out a gradient of x that nobody needs"
        return wrong("Where x needs no gradient, I has nothing to do.", name)
    return ok("Both gradients right, whole and in two parts, and each part does its own work only.", counts)


LINEAR_SHAPES = (
    ("two dimensions", (5, 4), 4),  # and a square weight: nothing is refused for its shape
    ("three dimensions", (2, 3, 4), 6),
    ("four dimensions", (2, 3, 2, 4), 6),
)


class _NoTuple(ValueError):
    """What was put off gave a tensor."""


class _WatchedParts(split_backward.WeightParts):
    def put(self, weights, work_out):
        def looked_at():
            gradients = work_out()
            if isinstance(gradients, torch.Tensor):
                raise _NoTuple
            return gradients

        super().put(weights, looked_at)


def _linear_raised(label: str, problem: Exception) -> Verdict | None:
    """A verdict on what a usual slip raises; None for all else."""
    rows: list[Row] = [("it raised", "nothing", f"{type(problem).__name__}: {problem}"[:110])]
    if isinstance(problem, _NoTuple):
        summary = "What is put off should give a tuple of one gradient: `(dw,)`."
        return wrong(summary, "a tensor instead of a tuple")
    if isinstance(problem, AttributeError) and "NoneType" in str(problem) and "put" in str(problem):
        summary = "In an ordinary backward `deferred(weight)` is None: then the layer works both parts out itself."
        return wrong(summary, "it does not ask whether anything is put off", rows)
    if label != LINEAR_SHAPES[0][0] and isinstance(problem, RuntimeError):
        summary = f"An x of {label} fails: all but its last dimension are rows, and dw is a sum over all rows."
        return wrong(summary, f"{label} are not made into rows", rows)
    return None


def _linear_memory(seen) -> Verdict | None:
    """What backward keeps: x and w themselves, and nothing beside them."""
    if seen["beside"]:
        rows = [("tensors kept as attributes of ctx, apart from w", "none", ", ".join(seen["beside"]))]
        summary = "What `ctx.save_for_backward` does not know of, a recomputation cannot let go of."
        return wrong(summary, "a tensor is kept beside the saved ones", rows)
    if seen["saved"] > seen["x bytes"] + seen["w bytes"]:
        kept = [("bytes kept for backward", seen["x bytes"] + seen["w bytes"], seen["saved"])]
        return wrong("Right, but it keeps more than backward needs.", "it keeps more than x and w", kept)
    if seen["copies"]:
        copied = [("of what is kept, bytes that are copies", 0, seen["copies"])]
        return wrong("Right, but x or w takes up memory a second time.", "it keeps a copy", copied)
    return None


def _numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _try_linear(cls, shape, n_out, x_grad=True, w_grad=True):
    """Forward, a whole backward, and one in two parts."""
    x, w = _numbers(*shape), _numbers(n_out, shape[-1], seed=1)
    dy, weight = _numbers(*shape[:-1], n_out, seed=2), w.clone()
    found = {"x": x.clone(), "w": w.clone(), "dy": dy.clone(), "x bytes": x.nbytes, "w bytes": w.nbytes}
    x.requires_grad_(x_grad)
    weight.requires_grad_(w_grad)
    saved, copies = [], []

    def pack(tensor):
        saved.append(tensor.nbytes)
        if tensor.data_ptr() not in (x.data_ptr(), weight.data_ptr()):
            copies.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.detach):  # as recomputation gives them back
        y = cls.apply(x, weight)
    found["y"], found["saved"], found["copies"] = y.detach(), sum(saved), sum(copies)
    kept = vars(y.grad_fn).items() if y.grad_fn is not None else ()
    found["beside"] = [name for name, v in kept if any(t is not weight for t in tensors_in(v))]
    y.backward(dy.clone())
    found["whole"] = (x.grad, weight.grad)
    x.grad = weight.grad = None
    parts = _WatchedParts()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, torch.detach):
        y = cls.apply(x, weight)
    with split_backward.deferring(parts), _CountMatmuls() as count:
        y.backward(dy)
    found["changed"] = not (torch.equal(dy, found["dy"]) and torch.equal(x, found["x"]))
    found["matmuls I"], found["after I"] = count.n, (x.grad, weight.grad)
    found["w itself"], found["left"] = parts.weights in (set(), {id(weight)}), bool(parts._parts)
    found["whose"] = [list(weights) for weights, _ in parts._parts]
    if w_grad and all(w is weight for weights in found["whose"] for w in weights):
        with _CountMatmuls() as count:
            parts.run()
    found["matmuls W"], found["after W"] = count.n, (x.grad, weight.grad)
    return found


def _gap(label: str, asked: torch.Tensor, got: torch.Tensor | None) -> tuple:
    """A row that shows how far two tensors are apart: their norms may be the same."""
    if got is None or got.shape != asked.shape:
        return (f"{label}: shape", tuple(asked.shape), None if got is None else tuple(got.shape))
    return (f"{label}: largest difference", 0.0, (got - asked).abs().max().item())


def _linear_values(label, seen):
    x, w, dy = seen["x"], seen["w"], seen["dy"]
    y, dx = x @ w.T, dy @ w
    dw = dy.flatten(0, -2).T @ x.flatten(0, -2)
    if not close(seen["y"], y):
        rows = [_gap(f"y, {label}", y, seen["y"])]
        return wrong("This is not x wᵀ.", "digits are lost" if close(seen["y"], y, 1e-5) else None, rows)
    whole_dx, whole_dw = seen["whole"]
    pairs = (("x", dx, whole_dx), ("w", dw, whole_dw))
    rows = [_gap(f"gradient of {which}, {label}", *pair) for which, *pair in pairs if not close(pair[1], pair[0])]
    if whole_dw is None:
        name = "the weight part is lost where nothing is put off"
        return wrong("In an ordinary backward, w has no gradient.", name, rows)
    if rows:
        return wrong("In an ordinary backward, this is not the gradient.", _wrong_gradient(label, seen, dx, dw), rows)
    dx_i, dw_i = seen["after I"]
    if dw_i is not None:
        name = "put off, and worked out at once as well" if seen["left"] else "nothing is put off"
        return wrong("After I, w should not have its gradient yet.", name, [("gradient of w after I", None, dw_i)])
    if dx_i is None or not close(dx_i, dx):
        name = "the gradient of x is put off too: nobody can go on" if dx_i is None or not dx_i.any() else None
        return wrong("After I, x should have its gradient.", name, [_gap("gradient of x after I", dx, dx_i)])
    if not seen["w itself"]:
        name = "the gradient goes to a twin of the weight, not to the weight itself"
        return wrong("After a recomputation, what was saved comes back as a twin, which is no parameter.", name)
    if seen["left"] and not any(seen["whose"]):
        return wrong("`put` needs the weights whose gradients will come.", "it does not say whose gradient it is")
    dw_w = seen["after W"][1]
    if not close(dw_w, dw):
        name = "the weight part is thrown away" if dw_w is None else None
        return wrong("After W, this is not the gradient of w.", name, [_gap("gradient of w after W", dw, dw_w)])
    if seen["changed"]:
        return wrong("The gradients are right, but an argument changed.", "it overwrites what it was given")
    return None


def _wrong_gradient(label: str, seen, dx, dw) -> str | None:
    """The name of what went wrong in an ordinary backward."""
    (whole_dx, whole_dw), x, w, dy = seen["whole"], seen["x"], seen["w"], seen["dy"]
    if close(whole_dw, dw.T):
        return "the gradient of w is transposed"
    if w.shape[0] == w.shape[1] and close(whole_dx, dy @ w.T):
        return "the gradient of x takes the transposed weight"
    if distance(whole_dw, dw) < 1e-5 and distance(whole_dx, dx) < 1e-5:
        return "digits are lost"
    if dy.dim() > 2 and close(whole_dw, dy[0].flatten(0, -2).T @ x[0].flatten(0, -2)):
        return "only the first sequence of the batch is counted"
    return None


# --- 6.6 stale weights ------------------------------------------------------------------------------------------


def grade_stashed_weights(cls) -> Verdict:
    """Three micro-batches that share a version, two more that do not, and out of turn; then three real ranks."""
    start = {"a": _numbers(3, seed=3), "b": _numbers(2, 2, seed=4)}
    given = {name: w.clone() for name, w in start.items()}
    weights = cls(given)
    if (verdict := _first_version(weights, given)) is not None:
        return verdict
    gradients = [{name: _numbers(*w.shape, seed=10 + 2 * m + i) for i, (name, w) in enumerate(start.items())}
                 for m in range(5)]  # fmt: skip
    versions = [start]
    for g in gradients:
        versions.append({name: w - 0.5 * g[name] for name, w in versions[-1].items()})

    def backward(m):
        sum((weights.met[m][name] * g).sum() for name, g in gradients[m].items()).backward()

    def values(version):
        return torch.cat([version[name].detach().flatten() for name in start])

    met, steps, made = {}, [], [weakref.ref(weights.newest["a"])]
    for event in ("F0", "F1", "F2", "U0", "F3", "U1", "F4", "U2", "U3", "U4"):
        m = int(event[1])
        if event[0] == "F":
            met[m] = weights.forward(m)
            if weights.met.get(m) is not met[m]:
                return wrong("`met` should say which version a micro-batch met.", "it does not remember what was met")
        else:
            backward(m)
            weights.update(m, 0.5)
            made.append(weakref.ref(weights.newest["a"]))
        steps.append((event, values(weights.newest), {k: values(v) for k, v in met.items()}))
        if (verdict := _stash_state(weights, event, met)) is not None:
            return verdict
    n_updates = 0
    for event, newest, seen in steps:
        n_updates += event[0] == "U"
        if not close(newest, values(versions[n_updates])):
            return _wrong_update(event, n_updates, newest, versions, gradients, values)
        stale = {m: values(versions[max(0, m - 2)]) for m in seen}
        changed = [m for m in seen if not close(seen[m], stale[m])]
        if changed:
            rows = [(f"what micro-batch {m} met, after {event}", stale[m], seen[m]) for m in changed]
            name = "a version changes under micro-batches on their way" if event[0] == "U" else None
            return wrong("A version must stay what it was.", name, rows)
    if any(not torch.equal(given[name], w) for name, w in start.items()):
        return wrong("The weights that were given have changed.", "it trains the caller's own tensors")
    met.clear()
    n_alive = sum(version() is not None for version in made)
    n_copies = len({t.data_ptr() for t in tensors_in(getattr(weights, "__dict__", {}))}) / len(start)
    for n, name in ((n_alive, "old versions are kept aside"), (n_copies, "copies of old versions are kept aside")):
        if n > 1:
            rows = [("versions in memory when nothing is on its way any more", 1, n)]
            return wrong("Somebody still holds on to old versions.", name, rows)
    return _out_of_turn(cls, start) or _stash_on_ranks(cls)


def _first_version(weights, given) -> Verdict | None:
    """What must hold before the first micro-batch."""
    first = weights.newest
    if not isinstance(weights.met, dict):
        rows = [("met", "{}", repr(weights.met))]
        return wrong(
            "`met` takes a micro-batch to its version: a dictionary, empty at first.", "`met` is no dictionary", rows
        )
    if any(w.requires_grad for w in given.values()):
        return wrong("The tensors that were given have changed.", "the caller's tensors are made to take gradients")
    if any(first[name] is w for name, w in given.items()):
        return wrong("The first version should be a copy.", "the first version is the caller's own tensors")
    if any(first[name].data_ptr() == w.data_ptr() for name, w in given.items()):
        summary = "The first version should be a copy: if the caller changes its tensors, a version must stay."
        return wrong(summary, "the first version shares its memory with the caller")
    if any(w.dtype != torch.float64 for w in first.values()):
        return wrong("The weights were fp64.", "digits are lost", [("dtype", "float64", str(first["a"].dtype))])
    if not all(w.requires_grad for w in first.values()):
        summary = "Backward leaves no gradient on the first version: its tensors do not require one."
        return wrong(summary, "the first version takes no gradient")
    return None


def _out_of_turn(cls, start) -> Verdict | None:
    """Micro-batch 1 comes back before micro-batch 0."""
    weights = cls({name: w.clone() for name, w in start.items()})
    for m in (0, 1):
        weights.forward(m)
    sum(w.sum() for w in weights.met[1].values()).backward()
    weights.update(1, 0.5)
    if list(weights.met) != [0]:
        rows = [("on their way, when 1 of 0 and 1 has come back", [0], list(weights.met))]
        return wrong("`update(m)` is about m, whichever m that is.", "it lets go of the oldest, not of m", rows)
    return None


def _stash_state(weights, event: str, met: dict) -> Verdict | None:
    """What must hold after every event, apart from values."""
    m = int(event[1])
    if not all(w.is_leaf for w in weights.newest.values()):
        return wrong("The new weights drag the whole past along.", "the update is a part of the graph")
    if not all(w.requires_grad for w in weights.newest.values()):
        return wrong("Nobody can find a gradient of the new weights.", "the new version takes no gradient")
    if event == "F2" and not met[0]["a"] is met[1]["a"] is met[2]["a"]:
        return wrong("No update lies between these micro-batches.", "a copy for every micro-batch, not every version")
    if event[0] == "U" and m in weights.met:
        return wrong("A version that nobody needs any more takes up memory.", "what was met is never forgotten")
    left = [w.grad for w in met[m].values() if w.grad is not None] if event[0] == "U" else []
    if left and not any(g.any() for g in left):
        return wrong("Set `.grad` to None: zeros take up memory.", "gradients are zeroed, but not gone")
    if left:
        return wrong(
            "The next micro-batch leaves its gradients on the same tensors, where they would be added.",
            "gradients of micro-batches that share a version add up",
        )
    return None


def _wrong_update(event, n_updates, newest, versions, gradients, values) -> Verdict:
    m = int(event[1])
    before, old, step = versions[n_updates - 1], versions[max(0, m - 2)], gradients[m]
    known = {
        "it steps from the version that was met: the updates since are lost": (old, -0.5),
        "uphill": (before, 0.5),
        "the learning rate is forgotten": (before, -1.0),
    }
    name = next((n for n, (v, lr) in known.items() if close(newest, values({k: v[k] + lr * step[k] for k in v}))), None)
    asked = values(versions[n_updates])
    if close(newest, values(before)):
        name = "nothing is updated"
    elif close(newest, asked, 1e-5):
        name = "digits are lost in the update"
    rows = [(f"newest, after {event}", asked, newest), _gap(f"newest, after {event}", asked, newest)]
    return wrong("This is not one step from the newest weights.", name, rows[name == "digits are lost in the update" :])


def _stash_on_ranks(cls) -> Verdict:
    try:
        seen = run_ranks(_train_on_rank, 3, timeout=LIMIT_S, overrides={STASHED: cls})
    except RankTimeout as timeout:
        return Verdict(False, "The ranks wait for each other.", "a deadlock", detail=str(timeout))
    losses, asked = seen[-1]["losses"], seen[-1]["asked"]
    if not close(losses, asked):
        return wrong("On three ranks the losses are not those of the formula.", None, [("losses", asked, losses)])
    rows = [(f"versions that rank {r} kept", 3 - r, s["versions"]) for r, s in enumerate(seen)]
    if any(row[1] != row[2] for row in rows):
        return wrong("On three ranks, not as many versions are kept as needed.", None, rows)
    return ok("On three ranks, every stage makes the steps of the formula.", rows)


def _train_on_rank() -> dict:
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(3)]
    inputs, targets = [_numbers(6, 4, seed=m) for m in range(7)], [_numbers(6, 4, seed=50 + m) for m in range(7)]
    stage = pipedream.train_pipedream(stages, inputs, targets, nn.functional.mse_loss, lr=0.2)
    return {"losses": stage.losses, "asked": stale_losses(stages, inputs, targets), "versions": stage.most_versions}


def stale_losses(stages, inputs, targets, lr: float = 0.2) -> list[float]:
    """PipeDream's formula in one process."""
    history = [[dict(stage.named_parameters())] for stage in stages]
    losses = []
    for t, (x, target) in enumerate(zip(inputs, targets, strict=True)):
        met = [past[t - schedules.staleness(s, len(stages), t)] for s, past in enumerate(history)]
        for stage, version in zip(stages, met, strict=True):
            x = torch.func.functional_call(stage, version, (x,))
        loss = nn.functional.mse_loss(x, target)
        losses.append(loss.item())
        gradients = iter(torch.autograd.grad(loss, [w for version in met for w in version.values()]))
        for past in history:
            past.append({n: (w - lr * next(gradients)).detach().requires_grad_() for n, w in past[-1].items()})
    return losses


# --- what the chapter shows besides -----------------------------------------------------------------------------


class TakesTime(torch.autograd.Function):
    """The identity, which takes its time: in forward, in the input part of backward, and in the weight part."""

    @staticmethod
    def forward(ctx, x, w, seconds):
        ctx.w, ctx.seconds = w, seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        def weight_part():
            time.sleep(ctx.seconds)
            return (torch.zeros_like(ctx.w),)

        time.sleep(ctx.seconds)
        if parts := split_backward.deferred(ctx.w):
            parts.put([ctx.w], weight_part)
            return dy, None, None
        return dy, *weight_part(), None


def takes_time(x: torch.Tensor, w: torch.Tensor, seconds: float) -> torch.Tensor:
    """`x`, later: stands for a stage of weights `w` that computes `seconds` long in forward and twice that in backward.

    Ranks that share two cores cannot compute at the same time, but they can wait at the same time.
    """
    return TakesTime.apply(x, w, seconds)


def messages_beside_work(schedule: Schedule) -> list[list[Action]]:
    """The puzzle 6-bug: every message right before or behind the work that it is for."""
    lists: list[list[Action]] = []
    for rank, actions in enumerate(schedule.compute):
        lists.append([])
        for action in actions:
            before, behind = (rank - 1, rank + 1) if action.kind == "F" else (rank + 1, rank - 1)
            if 0 <= before < schedule.ranks:
                lists[rank].append(Action("RECV", action.micro_batch, of=action.kind, peer=before))
            lists[rank].append(action)
            if 0 <= behind < schedule.ranks:
                lists[rank].append(Action("SEND", action.micro_batch, of=action.kind, peer=behind))
    return lists


def send_and_receive(lists: list[list[Action]]) -> int:
    """Carry out the messages of this rank's list, one after the other; returns how many there were."""
    messages = [action for action in lists[collectives.rank_in()] if action.peer >= 0]
    for action in messages:
        (collectives.send if action.kind == "SEND" else collectives.recv)(torch.zeros(4), action.peer)
    return len(messages)


def symptoms(lists: list[list[Action]], timeout: float = 1.5) -> str:
    """What becomes of these lists on real ranks."""
    try:
        counts = run_ranks(send_and_receive, len(lists), lists, timeout=timeout)
    except RankTimeout as problem:
        return str(problem)
    return f"done: {counts} messages"


def change_places(lists: list[list[Action]], rank: int, one: str, other: str) -> list[list[Action]]:
    """New lists, in which two actions of `rank`, named as they are printed, have changed places.

    Raises ValueError, with the names there are, for an action that the rank does not have.
    """
    names = [str(action) for action in lists[rank]]
    if missing := {one, other} - set(names):
        raise ValueError(f"rank {rank} has no {', '.join(sorted(missing))}; it has: {', '.join(names)}")
    i, j = names.index(one), names.index(other)
    changed = list(lists[rank])
    changed[i], changed[j] = changed[j], changed[i]
    return [changed if r == rank else list(actions) for r, actions in enumerate(lists)]


def what_rendezvous_says(schedule: Schedule, lists: list[list[Action]]) -> str:
    """Whether these lists run where a send waits for its receiver, and if not, where each rank stands."""
    try:
        schedules.rendezvous(schedule, lists)
    except ValueError as problem:
        return str(problem)
    return "no deadlock: every message meets its receiver, all work has its input"


class Embed(nn.Module):
    """The last bytes of a text to one vector."""

    def __init__(self, context: int, width: int):
        super().__init__()
        self.table, self.mix = nn.Embedding(256, 16), nn.Linear(16 * context, width)

    def forward(self, ids_NC):
        return torch.relu(self.mix(self.table(ids_NC).flatten(1)))


class Residual(nn.Module):
    """x and what two layers make of it."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x_ND):
        return x_ND + self.down(torch.relu(self.up(x_ND)))


def byte_stages(seed: int = 0, width: int = 96) -> list[nn.Module]:
    """Four stages of a small model that guesses the next byte from the last eight."""
    torch.manual_seed(seed)
    middle = [Residual(width) for _ in range(2)]
    return [Embed(8, width), *middle, nn.Sequential(Residual(width), nn.Linear(width, 256))]


def byte_batches(micro_batches: int, seed: int = 0, rows: int = 32) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Pieces of eight bytes of real text, and the byte that follows each."""
    text_N = text_bytes()
    starts_MN = torch.randint(0, len(text_N) - 9, (micro_batches, rows), generator=torch.Generator().manual_seed(seed))
    pieces_MNC = text_N[starts_MN[..., None] + torch.arange(9)].long()
    return list(pieces_MNC[..., :8]), list(pieces_MNC[..., 8])


def train_bytes(micro_batches: int = 100, lr: float = 0.3, seed: int = 0, stash: bool = True) -> list[float]:
    """The loss of each micro-batch, an update after each: by PipeDream on four ranks, by plain SGD on one."""
    stages, (inputs, targets) = byte_stages(seed), byte_batches(micro_batches, seed)
    whole = [nn.Sequential(*stages)] if collectives.size_of() == 1 else stages
    trained = pipedream.train_pipedream(whole, inputs, targets, nn.functional.cross_entropy, lr, stash=stash)
    return trained.losses


def most_stable_step(delay: int, momentum: float = 0.0) -> float:
    """The largest step, to three digits, with which descent on w²/2 by gradients `delay` updates old still arrives."""
    low, high = 0.0, 4.0
    while high - low > 1e-3:
        step = (low + high) / 2
        w, speed = [1.0] * (delay + 1), 0.0
        while len(w) < 4000 and abs(w[-1]) < 1e6:
            speed = momentum * speed - step * w[-1 - delay]
            w.append(w[-1] + speed)
        low, high = (step, high) if max(map(abs, w[-40:])) < 1 else (low, step)
    return low


HINTS = {
    "6-bug": (
        "In which operation does each rank stand, and whom does it wait for? `send` may wait until its receiver is "
        "there; no buffer is promised.",
        "Rank 0 sends the activation of micro-batch 1. Where in its list does rank 1 receive it, and what does it do "
        "just before?",
        "Rank 1 first hands the gradient of micro-batch 0 back, to a rank that is not there to receive it: it is "
        "sending. Both send, and nobody receives. One of the two must receive first. Change that, and look where the "
        "ranks stand then: the same happens once more, with the next micro-batch.",
        "There are two such places, and in each either rank may give way, so four answers are right. First place: "
        '`"SEND F1.0 1"` and `"RECV B0.0 1"` on rank 0, or `"SEND B0.0 0"` and `"RECV F1.0 0"` on rank 1. Second '
        'place: `"SEND F2.0 1"` and `"RECV B1.0 1"` on rank 0, or `"SEND B1.0 0"` and `"RECV F2.0 0"` on rank 1. '
        "`build_schedule(...).actions` lets rank 1 give way first, rank 0 then. Megatron-LM has operations that do "
        "both at once, such as `send_backward_recv_forward`.",
    ),
}

TITLE = "Pipelines"

EXERCISES = (
    Exercise(
        number="6.1",
        path=GPIPE,
        title="All forwards, then all backwards",
        grade=grade_gpipe,
        level="warm-up",
        minutes=5,
        hints=(
            'The forward of micro-batch 3 is `Action("F", 3)`, its backward `Action("B", 3)`. Does `rank` matter?',
            "In GPipe every rank does the same: first F of every micro-batch, then B of every micro-batch.",
        ),
    ),
    Exercise(
        number="6.2",
        path=PEAK,
        title="What is kept",
        grade=grade_peak_activations,
        level="warm-up",
        minutes=10,
        hints=(
            "Take F0 F1 B0 F2 B1 B2, and write below each action how many micro-batches are kept after it. Which of "
            "these numbers is asked for? And what changes if B0 becomes I0 W0?",
            "Keep a count: F is plus one, B and W are minus one, all else is nothing. I is nothing: W still needs what "
            "F left.",
            "`for action in actions: for step in action.steps(): ...`, and look at the count after each step.",
        ),
    ),
    Exercise(
        number="6.3",
        path=ONE_F_ONE_B,
        title="One forward, one backward",
        grade=grade_one_f_one_b,
        minutes=20,
        hints=(
            "Look at the last rank first: when can it do its first backward? Write its list for three micro-batches. "
            "Then that of the rank before it: what is it doing when B0 comes back?",
            "The last rank does F0 B0 F1 B1 …: no forward runs ahead. The rank before it has to wait one micro-batch"
            " longer, so one forward runs ahead: F0 | F1 B0 F2 B1 …. "
            "On `rank` it is `ranks - rank - 1` of them, but never more than there are micro-batches.",
            "After `ahead` forwards: for each m, the forward of micro-batch m + ahead, if there is one, then the "
            "backward of m.",
        ),
    ),
    Exercise(
        number="6.4",
        path=LINEAR,
        title="A backward in two parts",
        grade=grade_deferrable_linear,
        level="stretch",
        minutes=25,
        hints=(
            "Write an ordinary backward first, with both products, and let `check` see it. Which of the two does the "
            "stage before wait for? Only that one has to be done at once.",
            "Put the product dyᵀ x into a function without arguments, that returns a tuple with one gradient. "
            "`parts = deferred(weight)` is None in an ordinary backward; if not, `parts.put([weight], that_function)`, "
            "and return None for the gradient of w.",
            "`dy.flatten(0, -2)` makes rows of all but the last dimension. `ctx.needs_input_grad` tells which of x and "
            "w need a gradient: work out nothing for one that does not, and put nothing off for it either.",
            "`ctx.save_for_backward` gives back x and w as they were, but after a recomputation as twins, which are no "
            "parameters. So keep `ctx.weight = w_FD` besides, and put off the gradient of that one.",
        ),
    ),
    Exercise(
        number="6.5",
        path=ZERO_BUBBLE,
        title="Weight parts where the bubble was",
        grade=grade_zero_bubble,
        minutes=20,
        hints=(
            "Write the order for four micro-batches, ahead=2, behind=1, by hand. How many turns are there? Which of "
            "the "
            "three kinds can be missing in a turn, and when?",
            "There is a turn for each I: the I, perhaps a W, and a forward if one is left. Keep the numbers of the "
            "next forward and of the next weight part. In the turn of I number m, the next W "
            "is due when `m - weight >= behind`.",
            "After the last turn, yield all weight parts that are left, in order.",
        ),
    ),
    Exercise(
        number="6.6",
        path=STASHED,
        title="Stale weights",
        grade=grade_stashed_weights,
        minutes=20,
        hints=(
            "`forward` only notes which version is the newest now. No copy: an update makes a new version and leaves "
            "the old one alone.",
            "`update`: the gradients are on the tensors of `met[m]`, but the step starts from `newest`. In between "
            "other micro-batches have moved it.",
            "Inside `torch.no_grad()`: `{name: (w - lr * met[name].grad).requires_grad_() ...}`. Then set the `.grad` "
            "of the met tensors to None, since another micro-batch may have met the same version.",
        ),
    ),
)
