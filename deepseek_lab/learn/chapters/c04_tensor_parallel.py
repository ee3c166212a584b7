"""Chapter 04: layers split over ranks: what each rank holds, what it sends, and what autograd makes of it.

The graders run a candidate on four real ranks, in several settings: over the world, with the sequence split, in groups
of two, where a rank's number is another than in the world, and on our own ring, where autograd has messages to follow
instead of one operation.  What it should return is worked out in one process by autograd.  Values, gradients,
operations and their bytes are compared, those of forward and of backward apart.
"""

import copy
import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from deepseek_lab.learn.exercises import Exercise
from deepseek_lab.learn.ranks import RankError, run_ranks
from deepseek_lab.learn.verdict import Verdict, close, kept_for_backward, ok, wrong
from deepseek_lab.learn.wiretap import wiretap
from deepseek_lab.model import DeepSeekConfig, DeepSeekModel, loss
from deepseek_lab.parallel import collectives, data_parallel, tensor
from deepseek_lab.parallel.meter import record

R = 4
LIMIT_S = 8.0  # an answer needs a fraction of a second; a longer wait is a deadlock

TENSOR = "deepseek_lab.parallel.tensor"
SHARD, COLUMN, ROW = f"{TENSOR}.shard", f"{TENSOR}.column_parallel_linear", f"{TENSOR}.row_parallel_linear"
EMBEDDING, CROSS_ENTROPY = f"{TENSOR}.vocab_parallel_embedding", f"{TENSOR}.vocab_parallel_cross_entropy_sum"
GATHER = "deepseek_lab.parallel.collectives.GatherSequence"

# --- 4.1 shard ------------------------------------------------------------------------------------------------


def grade_shard(fn) -> Verdict:
    """A table in which element (i, j) is 10 i + j, cut along both dims; then three dims, a remainder, and memory."""
    w = 10.0 * torch.arange(8, dtype=torch.float64)[:, None] + torch.arange(8)
    for dim in (0, 1):
        wanted = list(w.chunk(R, dim))
        got = [fn(w, dim, rank, R) for rank in range(R)]
        if not all(isinstance(g, Tensor) for g in got):
            return wrong("A tensor was asked for: this rank's slice.")
        known = {
            "every R-th row, not a band": [w.index_select(dim, torch.arange(r, 8, R)) for r in range(R)],
            "dim is ignored: always rows": list(w.chunk(R, 0)),
            "ranks in reverse": wanted[::-1],
            "ranks are counted from 1": [*wanted[1:], None],
            "all slices, not one": [torch.stack(wanted)] * R,
        }
        if not all(map(close, got, wanted)):
            name = next((n for n, k in known.items() if all(x is None or close(g, x) for g, x in _both(got, k))), None)
            rows = [(f"dim {dim}, rank {r}", *_first_difference(e, g)) for r, (e, g) in enumerate(_both(wanted, got))]
            return wrong("This is not slice number `rank` of `size` contiguous ones.", name, rows)
    if (dtype := fn(w, 0, 1, R).dtype) != w.dtype:
        return wrong("The right numbers in another dtype.", "the dtype is lost", [("dtype", str(w.dtype), str(dtype))])
    cube = torch.arange(24.0).view(2, 3, 4)
    if not close(fn(cube, 2, 1, 2), cube[:, :, 2:]):
        return wrong("Right for a matrix, wrong for experts, which are stacked in three dims.", "only for matrices")
    mine = fn(w, 0, 1, R)
    held, needed = mine.untyped_storage().nbytes(), w.nbytes // R
    if held > needed or mine.data_ptr() == w[2:].data_ptr():
        rows = [("bytes that the slice keeps alive", needed, held)]
        return wrong("The right numbers, but the whole weight stays in memory behind them.", "a view, not a copy", rows)
    if not fn(w, 1, 1, R).is_contiguous():
        return wrong("The right numbers, but not next to each other in memory: a kernel wants them contiguous.")
    for size in (3, 16):
        try:
            part = fn(w, 0, 2, size)
        except ValueError as error:
            message = str(error)
            continue
        except Exception as error:
            name = f"{type(error).__name__}, not ValueError"
            return wrong(f"Refused, but by {type(error).__name__}: raise ValueError.", name)
        rows = [(f"8 rows for {size} ranks, rank 2", "ValueError", f"shape {tuple(part.shape)}")]
        return wrong("Ranks that do not divide the dimension have to be refused.", "a remainder is let pass", rows)
    if not {"8", "16"} <= set("".join(c if c.isdigit() else " " for c in message).split()):
        return wrong(
            f"Refused, but the message does not say which sizes met: {message!r}", "an error that says nothing"
        )
    return ok("Contiguous slices in rank order, each a copy of its own; what cannot be divided is refused.")


# --- what 4.2 to 4.4 share ------------------------------------------------------------------------------------


@dataclass
class Case:
    """What one rank is given, and what should come out: `y`, and the gradients of `arguments` for weights `c` of y."""

    arguments: list[Tensor]
    y: Tensor
    c: Tensor
    gradients: list[Tensor | None]
    forward: list[tuple[str, int]] = field(default_factory=list)  # (operation, bytes handed over)
    backward: list[tuple[str, int]] = field(default_factory=list)
    kept: float = math.inf  # bytes that an autograd function may keep for backward


Make = Callable[[int, int, bool], Case]  # of a rank's number in its group, the group's size, sequence_parallel


@dataclass(frozen=True)
class Setting:
    """How a candidate is called: by which ranks, and what is different this time."""

    words: str
    n_ranks: int = R  # fewer: in the groups {0, 2} and {1, 3}
    split: bool = False  # sequence_parallel
    ring: bool = False  # our own ring carries the sums
    outside: bool = False  # the first argument is used elsewhere, too
    dtype: torch.dtype = torch.float64

    def make(self, make: Make, rank: int) -> Case:
        """The case of one rank in this setting."""
        place = rank if self.n_ranks == R else rank // 2
        case = make(place, self.n_ranks, self.split)
        case.arguments = [t.to(self.dtype) if t.is_floating_point() else t for t in case.arguments]
        case.gradients = [None if t is None else t.to(self.dtype) for t in case.gradients]
        case.y, case.c = case.y.to(self.dtype), case.c.to(self.dtype)
        if self.outside and case.gradients[0] is not None:
            case.gradients[0] += case.arguments[0]
        return case


SETTINGS = {
    "world": Setting(""),
    "sequence": Setting("With sequence_parallel=True: ", split=True),
    "pair": Setting("Right over the whole world, but in a group of two: ", n_ranks=2),
    "sequence in a pair": Setting("With sequence_parallel=True in a group of two: ", n_ranks=2, split=True),
    "ring": Setting('Right on gloo, but after set_algorithm("ring"): ', ring=True),
    "outside": Setting("Right alone, but where x is used elsewhere, too: ", outside=True),
    "bf16": Setting("In bf16: ", dtype=torch.bfloat16),
}
COMMON = ("world", "sequence", "pair", "sequence in a pair")


def _call(name, arguments, group, split):
    how = {"sequence_parallel": True} if split else {}
    return getattr(tensor, name)(*arguments, group, **how)


def _observe(call, make, settings):
    """Run a function on this rank in each setting: result, gradients, what was sent on either way, what was kept."""
    rank = dist.get_rank()
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    seen = {}
    for name in settings:
        setting = SETTINGS[name]
        case = setting.make(make, rank)
        leaves = [a.clone().requires_grad_(a.is_floating_point()) for a in case.arguments]
        collectives.set_algorithm("ring" if setting.ring else "gloo")
        with wiretap() as forward:
            y = call(leaves, None if setting.n_ranks == R else pair, setting.split)
        kept = sum(t.nbytes for t in kept_for_backward(y))
        with wiretap() as backward:
            if isinstance(y, Tensor) and y.shape == case.c.shape and y.requires_grad:
                elsewhere = (leaves[0] ** 2).sum() / 2 if setting.outside else 0
                ((y * case.c).sum() + elsewhere).backward()
        seen[name] = {
            "y": y.detach().clone() if isinstance(y, Tensor) else y,
            "gradients": [leaf.grad for leaf in leaves],
            "forward": forward,
            "backward": backward,
            "kept": kept,
            "changed": [not torch.equal(leaf.detach(), a) for leaf, a in _both(leaves, case.arguments)],
        }
    return seen


Errors = Sequence[tuple[str, str, str]]  # (pattern of a rank's error, what it means, misconception)


def _not_transposed(*shape):
    """torch's complaint names the shape of w on a rank as it is; after a transposition it would be the other way."""
    summary = "The shapes do not fit: y = x @ w.T, since weights are stored as (outputs, inputs)."
    return "shapes cannot be multiplied.* and {}x{}".format(*shape), summary, "w is not transposed"


def _run(fn, path, observe, *arguments, errors: Errors = ()):
    """What the ranks saw; or a Verdict, where one of them failed in a way that is known."""
    try:
        return run_ranks(observe, R, *arguments, timeout=LIMIT_S, overrides={path: fn})
    except RankError as error:
        for pattern, summary, name in errors:
            if re.search(pattern, error.cause):
                return Verdict(False, summary, name, detail=error.cause)
        raise


def _grade_split(
    fn, path, make: Make, recognise, names: Sequence[str], passed, call=None, settings=COMMON, errors: Errors = ()
):
    """Values, then gradients, then traffic, in each setting.

    `recognise(setting, what, got, cases)` names a misconception; `what` is "y" or the place of an argument.
    """
    call = call or functools.partial(_call, path.rpartition(".")[2])
    seen = _run(fn, path, _observe, call, make, settings, errors=errors)
    if isinstance(seen, Verdict):
        return seen
    for setting in settings:
        words = SETTINGS[setting].words
        cases = [SETTINGS[setting].make(make, rank) for rank in range(R)]
        here = [s[setting] for s in seen]
        compared: list[tuple] = [("y", "y", [s["y"] for s in here], [c.y for c in cases])]
        for i, name in enumerate(names):
            compared.append((i, name, [s["gradients"][i] for s in here], [c.gradients[i] for c in cases]))
        for what, name, got, wanted in compared:
            if wanted[0] is not None and not all(map(_is, got, wanted)):
                label = name if what == "y" else f"gradient of {name}"
                summary = f"{words}{label} is not what one process gets."
                misconception = _usual(setting, what, got, wanted, here) or recognise(setting, what, got, cases)
                rows = [(f"rank {r}: {label}", *_first_difference(w, g)) for r, (w, g) in enumerate(_both(wanted, got))]
                return wrong(summary, misconception, rows)
        for i, name in enumerate(names):
            if any(s["changed"][i] for s in here):
                return wrong(f"The numbers are right, but {name} is another one afterwards.", f"{name} is overwritten")
        if problem := _traffic_problem(setting, here, cases):
            return problem
    expected, got = SETTINGS["world"].make(make, 0).y, seen[0]["world"]["y"]
    return ok(passed, [("rank 0: y, its first row", _first_row(expected), _first_row(got))])


def _usual(setting, what, got, wanted, here):
    """Misconceptions that any of these functions may hold."""
    if setting == "pair":
        return "it ignores the group"
    if setting == "sequence in a pair" and what == "y":
        return "with sequence_parallel it ignores the group"
    if setting == "ring":
        return "autograd does not see the sum" if what != "y" else None
    if setting == "bf16":
        return (
            "bf16 is lost on the way" if all(isinstance(g, Tensor) and g.dtype != torch.bfloat16 for g in got) else None
        )
    if all(isinstance(g, Tensor) and close(g, w, 1e-6) for g, w in _both(got, wanted)):
        return "fp64 is lost on the way"
    if setting == "sequence" and what == "y" and _ops(here, "forward") <= {"all_reduce"}:
        alone = all(isinstance(g, Tensor) and g.shape != w.shape for g, w in _both(got, wanted))
        return "sequence_parallel is ignored" if alone else None
    if what == "y":
        return (
            "a mean, not a sum" if all(isinstance(g, Tensor) and _is(g * R, w) for g, w in _both(got, wanted)) else None
        )
    if all(g is None for g in got):
        other = what == 1 and any(s["gradients"][0] is not None for s in here)
        return "w is cut off from autograd" if other else "autograd does not see the communication"
    if all(isinstance(g, Tensor) and _is(g, w * R) for g, w in _both(got, wanted)):
        return "summed twice: the gradient is R times too large"
    if all(isinstance(g, Tensor) and _is(g * R, w) for g, w in _both(got, wanted)):
        return "a mean, not a sum"
    return None


def _ops(here, way):
    return {call.op for s in here for call in s[way]}


def _traffic_problem(name, here, cases):
    """The numbers are right; were they come by with no more than what is needed?"""
    setting = SETTINGS[name]
    if not all(call.our_door for s in here for way in ("forward", "backward") for call in s[way]):
        summary = "The numbers are right, but torch.distributed was called directly, where no meter sees it."
        return wrong(summary, "it goes past our own door")
    if setting.ring:
        return None  # its messages were counted as operations before
    n_ranks, width = setting.n_ranks, setting.dtype.itemsize
    for way in ("forward", "backward"):
        for rank, (s, case) in enumerate(_both(here, cases)):
            needed = [(op, n_bytes * width // 8) for op, n_bytes in getattr(case, way)]
            got = [(call.op, call.payload_bytes) for call in s[way]]
            if _ring_bytes(got, n_ranks) > _ring_bytes(needed, n_ranks):
                rows = [
                    (f"sent in {way} by rank {rank}", _listed(needed), _listed(got)),
                    ("bytes on a ring", _ring_bytes(needed, n_ranks), _ring_bytes(got, n_ranks)),
                ]
                instead = "all_reduce" in {op for op, _ in got} and "all_reduce" not in {op for op, _ in needed}
                name = "an all-reduce and a slice: twice the bytes" if instead and needed else None
                if setting.dtype == torch.bfloat16:
                    name = "bf16 travels as fp32: twice the bytes"
                summary = f"{setting.words}the numbers are right, but more was sent than needed."
                return wrong(summary, name or "more traffic than needed", rows)
    if any(s["kept"] > case.kept for s, case in _both(here, cases)):
        rows = [("bytes kept for backward by rank 0", cases[0].kept, here[0]["kept"])]
        return wrong("The numbers are right, but backward needs none of what is kept.", "x is kept for backward", rows)
    return None


def _listed(operations):
    return ", ".join(f"{op} of {n_bytes} B" for op, n_bytes in operations) or "nothing"


def _ring_bytes(operations, n_ranks):
    """What a ring sends for these operations, per rank."""
    share = {"all_reduce": 2 / n_ranks, "reduce_scatter": 1 / n_ranks, "all_to_all": 1 / n_ranks}
    return sum((n_ranks - 1) * n_bytes * share.get(op, 1) for op, n_bytes in operations)


def _is(got, expected):
    tolerance = 0.02 if expected.dtype == torch.bfloat16 else 1e-9  # bf16 has 8 bits, and sums have a few terms
    return isinstance(got, Tensor) and close(got, expected, tolerance) and got.dtype == expected.dtype


def _both(a, b):
    return zip(a, b, strict=True)


def _first_row(x):
    return x.reshape(-1, x.shape[-1])[0]


def _first_difference(wanted, got):
    """The first row in which two tensors differ, from both; or their shapes."""
    if not isinstance(got, Tensor):
        return tuple(wanted.shape), "None" if got is None else type(got).__name__
    if got.shape != wanted.shape:
        return f"shape {tuple(wanted.shape)}", f"shape {tuple(got.shape)}"
    rows = [x.reshape(-1, x.shape[-1]) if x.dim() else x.view(1, 1) for x in (wanted, got)]
    return next(((w, g) for w, g in _both(*rows) if not close(g, w)), (rows[0][0], rows[1][0]))


def _piece(x, dim, place, n_ranks):
    return x.detach().chunk(n_ranks, dim)[place].clone()


B, T, D, F_ = 4, 4, 3, 8


def _random(seed, *shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- 4.2 column ------------------------------------------------------------------------------------------------


def _column_parts():
    """x, w and the weights c of y: the first token is (1, 0, 0), and row f of w begins with f + 1."""
    x, w, c = _random(1, B, T, D), _random(2, F_, D), _random(3, B, T, F_)
    x[0, 0] = torch.tensor([1.0, 0.0, 0.0])
    w[:, 0] = torch.arange(1.0, F_ + 1)
    return x, w, c


def _column_case(place, n_ranks, split) -> Case:
    x, w, c = _column_parts()
    y, (dx, dw) = _serial(F.linear, c, x, w)
    x_l, dx_l = (_piece(t, 1, place, n_ranks) if split else t for t in (x, dx))
    sums = ("reduce_scatter" if split else "all_reduce", x.nbytes)
    return Case(
        [x_l, _piece(w, 0, place, n_ranks)],
        _piece(y, -1, place, n_ranks),
        _piece(c, -1, place, n_ranks),
        [dx_l, _piece(dw, 0, place, n_ranks)],
        forward=[("all_gather", x_l.nbytes)] if split else [],
        backward=[sums],
    )


def _serial(function, c, *arguments):
    """y and the gradients of the floating-point arguments, by one process."""
    leaves = [a.clone().requires_grad_(a.is_floating_point()) for a in arguments]
    y = function(*leaves)
    return y.detach(), torch.autograd.grad((y * c).sum(), [leaf for leaf in leaves if leaf.requires_grad])


def grade_column_parallel_linear(fn) -> Verdict:
    """Outputs, gradients and collectives, on four ranks and on pairs, the sequence whole and split, x used twice."""
    _, w, c = _column_parts()
    bands, weights = w.chunk(R), c.chunk(R, -1)
    parts = [c_l @ w_l for c_l, w_l in _both(weights, bands)]

    def recognise(setting, what, got, cases):
        shapes = {tuple(g.shape) if isinstance(g, Tensor) else None for g in got}
        if what == "y" and setting == "sequence":
            return "the sequence is gathered along the batch" if shapes == {(R * B, T // R, F_ // R)} else None
        if what == "y":
            if shapes == {(B, T, F_)}:
                return "the whole y is gathered"
            if all(_is(g, case.y * R) for g, case in _both(got, cases)):
                return "g at the entrance, not f: x is summed in forward"
            summed = sum(case.y for case in cases)
            return "g, not f: it sums in forward" if all(_is(g, summed) for g in got) else None
        if setting == "outside":
            return "what x gets elsewhere is summed, too" if what == 0 else None
        if what == 0:
            if setting == "world" and all(_is(g, p) for g, p in _both(got, parts)):
                return "nothing is summed in backward"
            mixed = sum(weights)
            if setting == "world" and all(_is(g, mixed @ w_l) for g, w_l in _both(got, bands)):
                return "f at the exit, not at the entrance"
            sliced = [_piece(p, 1, r, R) for r, p in enumerate(parts)]
            if setting == "sequence" and all(_is(g, s) for g, s in _both(got, sliced)):
                return "nothing is summed in backward"
            return None
        summed = sum(case.gradients[1] for case in cases)
        return "the gradients of different rows of w are summed" if all(_is(g, summed) for g in got) else None

    passed = (
        "Nothing is sent in forward; in backward one all-reduce of the gradient of x. With the sequence split: an "
        "all-gather of x in forward, a reduce-scatter in backward."
    )
    errors = (
        _not_transposed(F_ // R, D),
        (
            "cannot share a sequence of 1 tokens",
            "With sequence_parallel, x is a piece already: the pieces have to be put together, not cut again.",
            "scatter_sequence where gather_sequence belongs",
        ),
    )
    settings = (*COMMON, "outside")
    return _grade_split(fn, COLUMN, _column_case, recognise, ("x", "w"), passed, settings=settings, errors=errors)


# --- 4.3 row --------------------------------------------------------------------------------------------------


def _row_parts():
    """The first token is all ones, and rank r of four holds columns of w whose first row adds up to 10^r."""
    x, w, c = _random(4, B, T, F_), _random(5, D, F_), _random(6, B, T, D)
    x[0, 0] = 1.0
    w[0] = torch.tensor([10.0 ** (f * R // F_) / (F_ / R) for f in range(F_)])
    return x, w, c


def _row_case(place, n_ranks, split) -> Case:
    x, w, c = _row_parts()
    y, (dx, dw) = _serial(F.linear, c, x, w)
    y_l, c_l = (_piece(t, 1, place, n_ranks) if split else t for t in (y, c))
    return Case(
        [_piece(x, -1, place, n_ranks), _piece(w, 1, place, n_ranks)],
        y_l,
        c_l,
        [_piece(dx, -1, place, n_ranks), _piece(dw, 1, place, n_ranks)],
        forward=[("reduce_scatter" if split else "all_reduce", y.nbytes)],
        backward=[("all_gather", y_l.nbytes)] if split else [],
    )


def grade_row_parallel_linear(fn) -> Verdict:
    """The same of the second matrix of a pair, on the ring as well, and in bf16 for its bytes."""
    x, w, _ = _row_parts()
    partial = [x_l @ w_l.T for x_l, w_l in _both(x.chunk(R, -1), w.chunk(R, 1))]

    def recognise(setting, what, got, cases):
        shapes = {tuple(g.shape) if isinstance(g, Tensor) else None for g in got}
        if setting == "sequence":
            if what == "y" and shapes == {(B // R, T, D)}:
                return "the batch is split, not the sequence"
            if what == "y" and shapes == {(B, R * T, D)}:
                return "gather_sequence where scatter_sequence belongs"
            return "the gradients of the other pieces never arrive" if what != "y" else None
        if setting == "sequence in a pair":
            return "in a group, the gradients of the other pieces never arrive"
        if what == 0 and all(_is(g, sum(case.gradients[0] for case in cases)) for g in got):
            return "f at the entrance, too: gradients of different slices are summed"
        if what == "y":
            if all(_is(g, p) for g, p in _both(got, partial)):
                return "no sum: every rank returns its partial product"
            if shapes == {(B, T, R * D)}:
                return "partial products side by side, not added"
            x_sum = sum(x.chunk(R, -1))
            if all(_is(g, x_sum @ w_l.T) for g, w_l in _both(got, w.chunk(R, 1))):
                return "the inputs are added, not the products"
        return None

    passed = (
        "One all-reduce in forward adds the partial products; nothing is sent in backward. With the sequence split: a "
        "reduce-scatter in forward, an all-gather in backward."
    )
    settings = (*COMMON, "ring", "bf16")
    return _grade_split(
        fn, ROW, _row_case, recognise, ("x", "w"), passed, settings=settings, errors=(_not_transposed(D, F_ // R),)
    )


# --- 4.4 embedding ----------------------------------------------------------------------------------------------

VOCABULARY = 64
# The first and the last token of every band, for four ranks and for two; one of them twice.
IDS = torch.tensor([[16, 0, 15, 63], [31, 16, 32, 48], [47, 1, 0, 62], [2, 63, 33, 4]])


def _embedding_parts():
    """Row v of the table begins with v + 1, and continues with its negative."""
    w, c = _random(7, VOCABULARY, D), _random(8, B, T, D)
    w[:, 0] = torch.arange(1.0, VOCABULARY + 1)
    w[:, 1] = -w[:, 0]
    return w, c


def _embedding_case(place, n_ranks, split) -> Case:
    w, c = _embedding_parts()
    y, (dw,) = _serial(lambda table: table[IDS], c, w)
    y_l, c_l = (_piece(t, 1, place, n_ranks) if split else t for t in (y, c))
    return Case(
        [IDS, _piece(w, 0, place, n_ranks)],
        y_l,
        c_l,
        [None, _piece(dw, 0, place, n_ranks)],
        forward=[("reduce_scatter" if split else "all_reduce", y.nbytes)],
        backward=[("all_gather", y_l.nbytes)] if split else [],
    )


def grade_vocab_parallel_embedding(fn) -> Verdict:
    """Tokens of every rank's band, its first and last included; ids must stay as they are."""
    w, _ = _embedding_parts()
    bands, V_l = w.chunk(R), VOCABULARY // R
    local = [IDS - r * V_l for r in range(R)]
    mine = [(x >= 0) & (x < V_l) for x in local]
    masked = [torch.where(m[..., None], w[IDS], 0.0) for m in mine]
    clamped = [b[x.clamp(0, V_l - 1)] for b, x in _both(bands, local)]
    left_in, greedy = "tokens of other ranks are not left out", "the next rank's first token is taken, too"
    known = [
        (left_in, clamped),
        (left_in, [b[x.where(m, 0)] for b, x, m in zip(bands, local, mine, strict=True)]),
        (left_in, [b[IDS % V_l] for b in bands]),
        (
            "rows dealt out in turn, not in bands",
            [b[IDS // R] * torch.eq(IDS % R, r)[..., None] for r, b in enumerate(bands)],
        ),
        ("the first token of every band is lost", [m * (x > 0)[..., None] for m, x in _both(masked, local)]),
        (greedy, [c * ((x >= 0) & (x <= V_l))[..., None] for c, x in _both(clamped, local)]),
    ]

    def recognise(setting, what, got, cases):
        if setting == "sequence":
            return "the gradients of the other pieces never arrive" if what != "y" else None
        if setting == "sequence in a pair":
            return "in a group, the gradients of the other pieces never arrive"
        if what == "y":
            if all(_is(g, m) for g, m in _both(got, masked)):
                return "no sum: every rank returns its own rows only"
            if all(_is(g, torch.stack(masked).amax(0)) for g in got):
                return "the largest, not the sum: negative numbers are lost"
            for name, parts in known:
                if all(_is(g, sum(parts)) for g in got) or all(_is(g, p) for g, p in _both(got, parts)):
                    return name
        return None

    passed = (
        "Every rank looked up its own tokens; one sum completed the rows. The gradient of a row stays where it is held."
    )
    errors = (
        (
            "out of (range|bounds)",
            "A token that another rank holds was used as an index of this rank's rows.",
            "a token of another rank is looked up here",
        ),
    )
    settings = (*COMMON, "ring")
    return _grade_split(
        fn, EMBEDDING, _embedding_case, recognise, ("ids", "w"), passed, settings=settings, errors=errors
    )


# --- 4.5 cross-entropy ------------------------------------------------------------------------------------------

# Four bands of eight: the first and the last number of some of them.
LABELS = torch.tensor([[0, 15, -100], [31, 16, 23]])
OTHER_LABELS = torch.tensor([[-100, 8, 7], [24, -100, 30]])
V = 32
LOSS_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "huge": {"scale": 1000.0, "apart": 1.0},
    "pair": {"n_ranks": 2, "labels": OTHER_LABELS},
    "ring": {"ring": True},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
}


def _logits(scale=1.0, apart=0.0, dtype=torch.float64, **_):
    """Each token's lie `apart` above those of the token before it."""
    tokens = torch.arange(LABELS.numel()).view(*LABELS.shape, 1)
    return (scale * (_random(9, *LABELS.shape, V) + apart * tokens)).to(dtype)


def _my_logits(how, rank):
    return _loss_piece(_logits(**how), how, rank)


def _loss_piece(x_V, how, rank):
    n_ranks = how.get("n_ranks", R)
    return _piece(x_V, -1, rank if n_ranks == R else rank // 2, n_ranks)


def _observe_loss():
    rank = dist.get_rank()
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    seen = {}
    for setting, how in LOSS_SETTINGS.items():
        group = pair if setting == "pair" else None
        logits, labels = _my_logits(how, rank).requires_grad_(), how.get("labels", LABELS).clone()
        smoothing = {k: v for k, v in how.items() if k == "label_smoothing"}
        collectives.set_algorithm("ring" if setting == "ring" else "gloo")
        with record() as trace, wiretap() as forward:
            loss_sum, n_valid = tensor.vocab_parallel_cross_entropy_sum(logits, labels, group, **smoothing)
        with wiretap() as backward:
            if loss_sum.requires_grad and loss_sum.dim() == 0:
                loss_sum.backward()
        seen[setting] = {
            "loss": loss_sum.detach(),
            "n_valid": n_valid,
            "gradient": logits.grad,
            "forward": forward,
            "backward": backward,
            "changed": not torch.equal(labels, how.get("labels", LABELS)),
            "largest_group": max((len(event.group_ranks) for event in trace.events), default=0),
        }
    return seen


def grade_vocab_parallel_cross_entropy_sum(fn) -> Verdict:
    """Five labels and one that does not count; smoothing; logits of thousands; in pairs; on the ring; in halves."""
    errors = (
        (
            "index.*out of",
            "Labels are numbers of the whole vocabulary; this rank's slice begins at rank * V_l.",
            "a label is used as an index of this rank's slice",
        ),
    )
    seen = _run(fn, CROSS_ENTROPY, _observe_loss, errors=errors)
    if isinstance(seen, Verdict):
        return seen
    for setting, how in LOSS_SETTINGS.items():
        full, labels = _logits(**how).requires_grad_(), how.get("labels", LABELS)
        expected, n_expected = loss.cross_entropy_sum(full, labels, how.get("label_smoothing", 0.0))
        (gradient,) = torch.autograd.grad(expected, full)
        here = [s[setting] for s in seen]
        losses, counts, gradients = ([s[key] for s in here] for key in ("loss", "n_valid", "gradient"))
        tolerance = 1e-2 if setting in HALVES else 1e-9
        rows = [(f"rank {r}: loss_sum", expected.detach(), got) for r, got in enumerate(losses)]
        if not all(close(got, expected, tolerance) for got in losses):
            summary = f"The loss is not that of one process ({LOSS_WORDS[setting]})."
            return wrong(summary, _loss_misconception(setting, here, expected.detach()), rows)
        if any(got.dtype != expected.dtype for got in losses):
            name = f"{setting} is not widened" if setting in HALVES else "fp64 is lost on the way"
            return wrong(f"The loss should be {expected.dtype}; it is {losses[0].dtype}.", name, rows)
        problem = (
            _count_problem(setting, labels, counts, n_expected)
            or _loss_gradient_problem(setting, how, gradient, gradients, tolerance)
            or _loss_traffic_problem(setting, how, here)
        )
        if problem:
            return problem
        if any(s["changed"] for s in here):
            return wrong("The numbers are right, but the labels are others afterwards.", "labels are overwritten")
    words = "For each token the largest logit, then {} numbers in one sum; 32 logits, or 129,280, would cost no more."
    return ok(words.format("two (three with smoothing)"), [("loss_sum", expected.detach(), losses[0])])


HALVES = ("bf16", "fp16")
LOSS_WORDS = {
    "plain": "five labels and one -100",
    "smoothing": "label_smoothing=0.1",
    "huge": "logits of some thousands",
    "pair": "in a group of two",
    "ring": 'after set_algorithm("ring")',
    "bf16": "logits in bf16",
    "fp16": "logits in fp16",
}


def _count_problem(setting, labels, counts, expected):
    rows = [(f"rank {r}: n_valid", int(expected), n) for r, n in enumerate(counts)]
    try:
        right = all(int(n) == int(expected) for n in counts)
    except (TypeError, ValueError, RuntimeError):
        return wrong("n_valid should be one number.", "n_valid is no number", rows)
    if not right:
        own = [((labels >= r * V // R) & (labels < (r + 1) * V // R)).sum() for r in range(R)]
        name = None
        if setting != "plain":
            name = "n_valid is a constant"
        elif all(int(n) == labels.numel() for n in counts):
            name = "n_valid counts -100, too"
        elif all(int(n) == int(m) for n, m in _both(counts, own)):
            name = "each rank counts its own labels only"
        return wrong("The loss is right, but not how many labels counted.", name, rows)
    if not all(isinstance(n, Tensor) and n.dtype == torch.int64 and n.dim() == 0 for n in counts):
        n = counts[0]
        kind = f"{n.dtype}, shape {tuple(n.shape)}" if isinstance(n, Tensor) else type(n).__name__
        name = "n_valid is not an int64 tensor"
        return wrong(
            "n_valid has the right value, but not the promised type.", name, [("n_valid", "torch.int64", kind)]
        )
    return None


def _loss_misconception(setting, here, expected):
    """The known wrong way that leads to these losses, one a rank."""
    losses = [s["loss"] for s in here]
    if setting == "pair":
        return "it ignores the group"
    if setting == "huge":
        return _shift_gone_wrong(here)
    if all(close(got, expected, 1e-6) for got in losses):
        return "fp64 is lost on the way"
    known = _smoothing_gone_wrong() if setting == "smoothing" else _loss_gone_wrong(expected)
    return next((name for name, values in known if all(map(close, losses, values))), None)


def _shift_gone_wrong(here):
    """What was taken off logits of thousands, when the loss is not finite."""
    losses = [s["loss"] for s in here]
    if all(map(torch.isfinite, losses)):
        return None
    if any(call.op == "all_reduce" and call.payload_bytes == 8 for call in here[0]["forward"]):
        return "one maximum for all tokens: small exponentials vanish"
    logits = _logits(**LOSS_SETTINGS["huge"])
    summed = torch.stack([part.amax(-1) for part in logits.chunk(R, -1)]).sum(0)
    shifted = logits - summed[..., None]
    unlike = (shifted.exp().sum(-1).log() - _at_labels(shifted))[LABELS >= 0].sum()
    if all(torch.equal(got, unlike) for got in losses):
        return "the maxima are summed"
    return "no maximum: the exponentials overflow" if all(got == math.inf or got.isnan() for got in losses) else None


def _smoothing_gone_wrong():
    logits, valid = _logits(), LABELS >= 0
    top, label = logits.amax(-1), _at_labels(logits)
    normaliser, mean = logits.logsumexp(-1) - 0.9 * label, logits.mean(-1)
    others = (V * mean - label) / (V - 1)  # the mean logit of all classes but the label's
    means = [part.mean(-1) for part in logits.chunk(R, -1)]
    alone = [("the mean logit is not summed", [(normaliser - 0.1 * m / n)[valid].sum() for m in means]) for n in (1, R)]
    alone += [
        ("the mean logit is not summed", [(normaliser - 0.1 * (top + (m - top) / n))[valid].sum() for m in means])
        for n in (1, R)
    ]
    return [
        *alone,
        ("ε is shared by the other V-1 classes", _same((normaliser - 0.1 * others)[valid])),
        ("ε is shared by the other V-1 classes", _same((normaliser - 0.1 * mean * V / (V - 1))[valid])),
        (
            "ε is shared by the other V-1 classes",
            _same((normaliser - 0.1 * (top + (mean - top) * V / (V - 1)))[valid]),
        ),
        ("smoothing is ignored", _same((logits.logsumexp(-1) - label)[valid])),
        ("smoothing over V/R classes: the mean is R times too large", _same((normaliser - 0.1 * R * mean)[valid])),
        (
            "smoothing over V/R classes: the mean is R times too large",
            _same((normaliser - 0.1 * (top + R * (mean - top)))[valid]),
        ),
    ]


def _loss_gone_wrong(expected):
    """(misconception, the loss on each rank); logits may have been shifted by the largest one before they are used."""
    logits, valid = _logits(), LABELS >= 0
    label, normaliser, top = _at_labels(logits), logits.logsumexp(-1), logits.amax(-1)
    parts = logits.chunk(R, -1)
    tops = [part.amax(-1) for part in parts]
    local = [LABELS - r * (V // R) for r in range(R)]
    mine = [(x >= 0) & (x < V // R) for x in local]
    clamped = sum(_at(p, x.clamp(0, V // R - 1)) for p, x in _both(parts, local))
    unmasked = sum(_at(p, x.where(m, 0)) for p, x, m in zip(parts, local, mine, strict=True))
    own_shift = sum((p - t[..., None]).exp().sum(-1) for p, t in _both(parts, tops)).log()
    here = sum((label - t) * m for t, m in _both(tops, mine))
    name = "each rank takes off its own largest logit"
    found = [
        ("a mean, not a sum", _same(expected / valid.sum())),
        ("a mean, not a sum", _same(expected / valid.numel())),
        ("-100 counts", _same(normaliser - label)),
        ("-100 counts", _same(normaliser - label * valid)),
        ("-100 counts", _same(normaliser - top - (label - top) * valid)),
        ("the largest logit is not taken off the label's", _same((normaliser - top - label)[valid])),
        (name, _same((own_shift - here)[valid])),
        (name, [(own_shift + t - label)[valid].sum() for t in tops]),
    ]
    alone = sum(((p.logsumexp(-1) - label) * m)[valid].sum() for p, m in _both(parts, mine))
    found.append(("each rank's own softmax: the normaliser is not summed", _same(alone)))
    for shift in (0, top):
        for x in (clamped, unmasked):
            found.append(("labels of other ranks are looked up here", _same((normaliser - x + (R - 1) * shift)[valid])))
        own = [((normaliser - shift) - (label - shift) * m)[valid].sum() for m in mine]
        found.append(("the label's logit stays on the rank that has it", own))
    return found


def _same(values):
    return [values.sum()] * R


def _at(logits, index):
    return logits.gather(-1, index[..., None])[..., 0]


def _at_labels(logits):
    return _at(logits, LABELS.clamp(min=0))


def _loss_gradient_problem(setting, how, gradient, gradients, tolerance):
    n_ranks, labels = how.get("n_ranks", R), how.get("labels", LABELS)
    wanted = [_loss_piece(gradient, how, r) for r in range(R)]
    whole = gradient.norm()

    def near(got, want):
        return isinstance(got, Tensor) and got.shape == want.shape and bool((got - want).norm() <= tolerance * whole)

    if all(map(near, gradients, wanted)):
        return None
    name = None
    if all(g is None for g in gradients):
        name = "autograd does not see the communication"
    elif all(isinstance(g, Tensor) for g in gradients):
        onehot = F.one_hot(labels.clamp(min=0), V) * (labels >= 0)[..., None]
        picks = [-_loss_piece(onehot.to(gradient.dtype), how, r) for r in range(R)]
        if setting == "ring":
            name = "autograd does not see the sum"
        elif all(near(g, w * n_ranks) for g, w in _both(gradients, wanted)):
            name = "summed twice: the gradient is R times too large"
        elif all(near(g, p) for g, p in _both(gradients, picks)):
            name = "autograd does not see the communication"
        elif any(g.isnan().any() for g in gradients):
            name = "the largest logit is not detached"
    rows = [
        (f"rank {r}: gradient of its logits", *_first_difference(w, g))
        for r, (w, g) in enumerate(_both(wanted, gradients))
    ]
    return wrong(f"The loss is right, but not its gradient ({LOSS_WORDS[setting]}).", name, rows)


def _loss_traffic_problem(setting, how, here):
    """One maximum a token, then one sum of two numbers, of three with smoothing; in backward nothing."""
    n_ranks, forward, backward = how.get("n_ranks", R), here[0]["forward"], here[0]["backward"]
    if not all(call.our_door for s in here for call in s["forward"] + s["backward"]):
        summary = "The numbers are right, but torch.distributed was called directly, where no meter sees it."
        return wrong(summary, "it goes past our own door")
    if setting == "ring":
        return None  # its messages were counted as operations before
    if max(s["largest_group"] for s in here) > n_ranks:
        return wrong("The numbers are right, but ranks outside the group were asked.", "the maximum is the world's")
    width = 4 if setting in HALVES else 8
    needed = [
        ("all_reduce", LABELS.numel() * width),
        ("all_reduce", (2 + ("label_smoothing" in how)) * LABELS.numel() * width),
    ]
    got = [(call.op, call.payload_bytes) for call in forward]
    rows = [("sent in forward by rank 0", _listed(needed), _listed(got))]
    if _ring_bytes(got, n_ranks) > _ring_bytes(needed, n_ranks):
        name = "the logits travel" if any(n >= LABELS.numel() * V // n_ranks * width for _, n in got) else None
        if name and setting == "smoothing":
            name = "with smoothing the logits travel"
        return wrong("The numbers are right, but more was sent than needed.", name or "more traffic than needed", rows)
    if len(got) > len(needed):
        return wrong("The numbers are right; two messages are enough.", "a message for each number", rows)
    if backward:
        sent = [("sent in backward by rank 0", "nothing", _listed([(c.op, c.payload_bytes) for c in backward]))]
        return wrong("The numbers are right, but something was sent in backward.", "more traffic than needed", sent)
    return None


# --- 4.6 the sequence ---------------------------------------------------------------------------------------------


def _sequence_case(place, n_ranks, _) -> Case:
    """Token t of sequence b begins with 10 b + t; rank r's part of the gradient is about 10^r."""
    x = 10.0 * torch.arange(B, dtype=torch.float64)[:, None, None] + torch.arange(T)[:, None] + torch.arange(D) / 7
    parts = [10.0**rank + x / 3 for rank in range(n_ranks)]
    piece, gradient = (_piece(t, 1, place, n_ranks) for t in (x, sum(parts)))
    return Case(
        [piece],
        x,
        parts[place],
        [gradient],
        forward=[("all_gather", piece.nbytes)],
        backward=[("reduce_scatter", x.nbytes)],
        kept=0,
    )


def _call_gather(arguments, group, _):
    return collectives.gather_sequence(*arguments, group)


def grade_gather_sequence(fn) -> Verdict:
    """Forward and backward, on four ranks and on pairs, and what is kept in between."""

    def recognise(setting, what, got, cases):
        if what == "y":
            shapes = {tuple(g.shape) for g in got}
            if shapes == {(R * B, T // R, D)}:
                return "the sequence is gathered along the batch"
            if shapes == {(B, T // R, D)}:
                return "the other ranks' pieces never arrive"
            ordered = [x.flatten().sort().values for x in (*got, cases[0].y)]
            alike = all(close(x, ordered[-1]) for x in ordered)
            return "tokens in another order than that of the ranks" if alike else None
        own = [_piece(case.c, 1, r, R) for r, case in enumerate(cases)]
        if all(_is(g, o) for g, o in _both(got, own)):
            return "each rank keeps its own part: nothing is summed"
        others = [case.gradients[0] for case in cases]
        return "another rank's piece" if all(any(_is(g, o) for o in others) for g in got) else None

    passed = "An all-gather in forward, a reduce-scatter in backward: together the bytes of one all-reduce."
    errors = (
        (
            "incorrect number of gradients",
            "backward returns one value per argument of forward: the gradient of x, and None for the group.",
            "the None for the group is missing",
        ),
        (
            r"got \[4, 1, 3\].*\[4, 2, 3\]",
            "In a group of two, backward scatters over the whole world: forward has to keep the group for it.",
            "backward forgets the group",
        ),
        (
            "invalid gradient",
            "backward must return a gradient of the shape of this rank's piece, (B, T/R, D).",
            "the gradient of the whole sequence comes back",
        ),
        (
            "cannot share a sequence of 1 tokens",
            "forward has a piece, and puts the pieces together; it is backward that scatters.",
            "forward and backward are swapped",
        ),
    )
    settings = ("world", "pair")
    return _grade_split(fn, GATHER, _sequence_case, recognise, ("x",), passed, _call_gather, settings, errors)


# --- what the chapter shows besides -----------------------------------------------------------------------------


def suspect_parallel_linear(x, w_FD, group=None):
    """The puzzle 4-bug: x @ w.T, each rank working out a part of the outputs.  Look at its symptoms first."""
    rank, n_ranks = collectives.rank_in(group), collectives.size_of(group)
    my_rows = w_FD[torch.arange(rank, len(w_FD), n_ranks)]
    parts = collectives.all_gather((x @ my_rows.T).detach()[None], group)
    return torch.cat(list(parts), dim=-1)


def loss_with(linear, model, text):
    """Loss a token of `model` on a row of token numbers, its SwiGLU's first two matmuls made by `linear(x, w)`."""
    model = copy.deepcopy(model)
    for block in model.layers:
        feed_forward = getattr(block.mlp, "shared_experts", block.mlp)
        for layer in (feed_forward.gate_proj, feed_forward.up_proj):
            layer.forward = functools.partial(lambda x, w: linear(x, w), w=layer.weight)
    ids = torch.tensor([text])
    with torch.no_grad():
        return model.loss(model(ids[:, :-1]), ids[:, 1:]).item()


# Four ranks on two nodes, {0, 1} and {2, 3}: who shares every layer (tp), who shares the batch (dp).
LAYOUTS = {
    "dp 4": (None, [[0, 1, 2, 3]]),
    "dp 2 × tp 2, heads split inside a node": ([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
    "dp 2 × tp 2, heads split across nodes": ([[0, 2], [1, 3]], [[0, 1], [2, 3]]),
}


def bytes_between_nodes(layout: str, n_tokens: int) -> int:
    """Bytes that cross between two nodes in one training step of `n_tokens`, measured on our own rings.

    (Not in it: four bytes a token for the largest logit, since a maximum does not go round our ring.)
    """
    from deepseek_lab.viz import traffic  # here, since ranks import this module and draw nothing

    traces = run_ranks(_one_step, R, *LAYOUTS[layout], n_tokens, timeout=60)
    sent_RR = traffic.traffic_matrix(traces, R)
    return sum(sent_RR[i][j] for i in range(R) for j in range(R) if i // 2 != j // 2)


def _one_step(tp_members, dp_members, n_tokens):
    """Forward, backward and the sum of gradients of a small model, on this rank's share of the tokens."""
    tp_group = _my_group(tp_members) if tp_members else None
    dp_group = _my_group(dp_members)
    model = DeepSeekModel(
        DeepSeekConfig.preset("tiny", num_hidden_layers=2, n_routed_experts=4, n_group=1, topk_group=1)
    )
    layouts = tensor.apply_tensor_parallel(model, tp_group) if tp_members else {}
    ids = torch.randint(4096, (n_tokens // 64 // collectives.size_of(dp_group), 64))
    collectives.set_algorithm("ring")
    with record() as trace:
        loss_sum, _ = model.loss_sum(ids, ids)
        (loss_sum / n_tokens).backward()
        partial = [w.grad for name, w in model.named_parameters() if name in layouts and layouts[name].partial]
        data_parallel.all_reduce_gradients(partial, tp_group)
        data_parallel.all_reduce_gradients([w.grad for w in model.parameters()], dp_group)
    return trace


def _my_group(members):
    groups = [dist.new_group(ranks) for ranks in members]
    return next(g for g, ranks in zip(groups, members, strict=True) if dist.get_rank() in ranks)


HINTS = {
    "4-bug": (
        "All figures above stay the same when the outputs change places. Give `suspect_parallel_linear` a weight that "
        "tells its rows apart: row f filled with the number f, and an x that adds up to one.",
        "`torch.arange(8.0)[:, None].expand(8, 4)` and `torch.full((1, 4), 0.25)` should give 0, 1, 2, ..., 7. On four "
        "ranks they give 0, 4, 1, 5, 2, 6, 3, 7. Which rows does rank 0 work with, and where do its results go?",
        "Each rank takes every fourth row, and the results are put together in the order of the ranks, as if they were "
        "bands. A fresh model cannot tell: its features carry no meaning yet. A trained one finds each of them in "
        "another's place. The second mistake: the gather is no autograd function, so no weight ever gets a gradient.",
    ),
}

EXERCISES = (
    Exercise(
        number="4.1",
        path=SHARD,
        title="Which slice is mine",
        grade=grade_shard,
        level="warm-up",
        minutes=5,
        hints=(
            "A slice has `w.shape[dim] // size` rows (or columns). Where does that of rank r begin? What if there is a "
            "remainder?",
            "`w.narrow(dim, start, length)` takes a band along any dim. It is a view: the whole weight stays in memory "
            "for as long as the view lives. `.clone(memory_format=torch.contiguous_format)` is a copy of its own.",
        ),
    ),
    Exercise(
        number="4.2",
        path=COLUMN,
        title="Columns: nothing to send in forward",
        grade=grade_column_parallel_linear,
        minutes=10,
        hints=(
            "Every rank uses the same x with other rows of w. Which of chapter 02's two functions stands where one "
            "tensor enters work that differs from rank to rank?",
            "f, `collectives.copy_to_group(x, group)`. With `sequence_parallel` a rank has only a piece of x: "
            "`collectives.gather_sequence(x, group)` puts the pieces together, and takes care of backward.",
            "Either of the two on x first, then `F.linear(x, w_FlD)`, which is x @ w.T. The result stays split.",
        ),
    ),
    Exercise(
        number="4.3",
        path=ROW,
        title="Rows: one sum",
        grade=grade_row_parallel_linear,
        minutes=10,
        hints=(
            "Write y = x @ w.T as a sum over f, and sort the terms by the rank that holds them. What is missing on "
            "each rank after its own matmul?",
            "The sum over the ranks, and in backward nothing: that is g, `collectives.reduce_from_group(y, group)`. "
            "With `sequence_parallel` each rank keeps its piece of the sum: `collectives.scatter_sequence(y, group)`.",
        ),
    ),
    Exercise(
        number="4.4",
        path=EMBEDDING,
        title="A table that is split",
        grade=grade_vocab_parallel_embedding,
        minutes=15,
        hints=(
            "Rank r holds the rows of tokens r V/R up to (r + 1) V/R. Subtract the first of them, and see which "
            "numbers fall into the band.",
            "Look up something harmless for the others, such as row 0 (`local_BT.where(mine_BT, 0)`), and put zeros in "
            "its place: `rows_BTD.masked_fill(~mine_BT[..., None], 0.0)`.",
            "Exactly one rank has each token, so the sum over the ranks is its row. That is the end of a row-parallel "
            "linear again: `reduce_from_group`, or `scatter_sequence` with `sequence_parallel`.",
        ),
    ),
    Exercise(
        number="4.5",
        path=CROSS_ENTROPY,
        title="A loss without the logits",
        grade=grade_vocab_parallel_cross_entropy_sum,
        level="stretch",
        minutes=30,
        hints=(
            "The loss of a token is log Σ exp(logit) minus the logit of its label. What does a rank know of either? "
            "Which single numbers per token would make them whole?",
            "First the largest logit over all ranks, without a gradient: `collectives.all_reduce(logits_Vl.detach()"
            ".amax(dim=-1), group, op='max')`. Take it off all logits. Then Σ exp is a sum over the ranks, and so is "
            "the label's logit, if the ranks that lack the label count zero.",
            "`torch.stack` both (with smoothing also each rank's share of the mean logit) and sum them with one "
            "`collectives.reduce_from_group`: its backward is the one needed here, since every rank goes on to work "
            "out the same loss. Smoothing: picked = (1 - ε) picked + ε mean.",
            "-100 is no rank's label, so it picks nothing by itself. But its Σ exp still counts: "
            "`(total.log() - picked).where(valid, 0).sum()`.",
        ),
    ),
    Exercise(
        number="4.6",
        path=GATHER,
        title="The sequence, gathered",
        grade=grade_gather_sequence,
        minutes=10,
        hints=(
            "After forward every rank works with the whole sequence, each in its own way. So in backward every rank "
            "holds a part of the gradient of *all* pieces. What does the owner of a piece need?",
            "The sum over the ranks of the gradient for its piece, and no more: a reduce-scatter. "
            "`all_gather_sequence` and `reduce_scatter_sequence` do the two along dim 1.",
            "forward keeps the group, `ctx.group = group`, as in chapter 02. backward returns one value for each "
            "argument of forward: the gradient of the piece, and None.",
        ),
    ),
)
