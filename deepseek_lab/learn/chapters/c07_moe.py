"""Chapter 07: mixture of experts: who is chosen, what the choice learns from, and what keeps the load even.

A router that learns nothing gives losses that look right, so the graders look at gradients as well as at numbers.
"""

import dataclasses
import math

import torch
import torch.distributed as dist

from deepseek_lab.data.batches import train_batch
from deepseek_lab.learn.exercises import Exercise
from deepseek_lab.learn.ranks import RankTimeout, run_ranks
from deepseek_lab.learn.verdict import Verdict, close, ok, wrong
from deepseek_lab.learn.wiretap import wiretap
from deepseek_lab.model import DeepSeekConfig, DeepSeekModel, moe
from deepseek_lab.model.moe import Router
from deepseek_lab.parallel import collectives
from deepseek_lab.train import optim

R = 4
LIMIT_S = 3.0
MOE = "deepseek_lab.model.moe"
COMBINE, CHOOSE, BIAS = f"{MOE}.combine_weights", f"{MOE}.choose_experts", f"{MOE}.router_bias_step"
BALANCE, AUX, DROP = (
    "deepseek_lab.train.optim.balance_experts",
    f"{MOE}.sequence_balance_loss",
    f"{MOE}.drop_beyond_capacity",
)


def _numbers(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _unlike(expected, got):
    """What is not right about the kind of `got`, or None."""
    if not isinstance(got, torch.Tensor):
        return f"a {type(got).__name__}"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{str(got.dtype).removeprefix('torch.')} {tuple(got.shape)}"
    return None


def _kind(expected):
    return f"{str(expected.dtype).removeprefix('torch.')} {tuple(expected.shape)}"


def _run(fn, case):
    """`fn` on copies of the case's tensors, whose floats ask for gradients: result, gradient, arguments it changed."""
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in case]
    floats = [x.requires_grad_() for x in copies if isinstance(x, torch.Tensor) and x.is_floating_point()]
    got = fn(*copies)
    pairs = enumerate(zip(case, copies, strict=True))
    changed = [n for n, (x, c) in pairs if isinstance(x, torch.Tensor) and not torch.equal(x, c)]
    gradient = None
    if isinstance(got, torch.Tensor) and got.requires_grad and floats:
        (gradient,) = torch.autograd.grad((got * _numbers(*got.shape, seed=7)).sum(), floats[0], allow_unused=True)
    return got.detach() if isinstance(got, torch.Tensor) else got, gradient, changed


def _widened(fn, scores, *rest):
    """A verdict on a `fn` that gives no fp32 for scores in fp32, or None."""
    kind = str(fn(scores.float(), *rest).dtype).removeprefix("torch.")
    if kind == "float32":
        return None
    return wrong("Right, but scores in fp32 do not stay so.", "the type of the scores is lost", [("", "float32", kind)])


def _known(known, cases, got):
    """The misconception whose function gives what came out in every case."""
    for name, f in known.items():
        if all(close(_run(f, case)[0], g) for case, g in zip(cases.values(), got, strict=True)):
            return name
    return None


# --- 7.1 weights ----------------------------------------------------------------------------------------------


def _true_weights(scores, index, normalise, scale):
    weight = scores.gather(1, index)
    return scale * (weight / weight.sum(dim=-1, keepdim=True) if normalise else weight)


def grade_combine_weights(fn) -> Verdict:
    """Scores of experts that are not the best ones, as after a bias; values first, then the gradient of the scores."""
    scores = _numbers(6, 8).sigmoid()
    index = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(t))[:3] for t in range(6)])
    cases = {
        "normalised": (scores, index, True, 1.0),
        "as they are": (scores, index, False, 1.0),
        "normalised, scale 2.5": (scores, index, True, 2.5),
        "as they are, scale 16": (scores[:2], index[:2, :1], False, 16.0),
    }

    def dense(s, i, normalise, scale):
        return torch.zeros_like(s).scatter(1, i, _true_weights(s, i, normalise, scale))

    known = {
        "the outputs are averaged": lambda s, i, n, c: torch.full(i.shape, c / i.shape[1], dtype=s.dtype),
        "divided by the sum over all experts, not over those visited": lambda s, i, n, c: (
            c * (s / s.sum(dim=-1, keepdim=True) if n else s).gather(1, i)
        ),
        "a softmax over scores that are scores already": lambda s, i, n, c: (
            c * (s.gather(1, i).softmax(dim=-1) if n else s.gather(1, i))
        ),
        "the scale is left out": lambda s, i, n, c: _true_weights(s, i, n, 1.0),
        "always normalised": lambda s, i, n, c: _true_weights(s, i, True, c),
        "never normalised": lambda s, i, n, c: _true_weights(s, i, False, c),
        "the scale comes before the division, and cancels": lambda s, i, n, c: _true_weights(s, i, n, 1.0 if n else c),
        "divided by K, not by the sum": lambda s, i, n, c: c * s.gather(1, i) / (i.shape[1] if n else 1),
        "the K largest scores, whoever was chosen": lambda s, i, n, c: _true_weights(
            s, s.topk(i.shape[1], dim=-1).indices, n, c
        ),
        "in the order of the experts, not of `index_TK`": lambda s, i, n, c: _true_weights(
            s, i.sort(dim=-1).values, n, c
        ),
        "divided by the length, so that squares add up to 1": lambda s, i, n, c: (
            c * (s.gather(1, i) / s.gather(1, i).norm(dim=-1, keepdim=True) if n else s.gather(1, i))
        ),
    }
    runs = [_run(fn, case) for case in cases.values()]
    asked = [_run(_true_weights, case) for case in cases.values()]
    kinds = [(name, _kind(a[0]), _unlike(a[0], r[0])) for name, a, r in zip(cases, asked, runs, strict=True)]
    if any(k for *_, k in kinds):
        narrow = all(isinstance(r[0], torch.Tensor) and r[0].dtype == torch.float32 for r in runs)
        every = all(close(r[0], dense(*case)) for r, case in zip(runs, cases.values(), strict=True))
        name = "a column for every expert, not for every visit" if every else "fp64 is lost on the way" * narrow or None
        return wrong("This is no table of one weight a visit, in the type of the scores.", name, kinds[:2])
    if any(changed for *_, changed in runs):
        return wrong("The caller's scores have changed.", "it works on its input")
    rows = [(f"{name}, token 0", a[0][0], r[0][0]) for name, a, r in zip(cases, asked, runs, strict=True)]
    if not all(close(r[0], a[0]) for r, a in zip(runs, asked, strict=True)):
        name = _known(known, cases, [r[0] for r in runs])
        return wrong("These are not the weights.", name, [row for row in rows if not close(row[1], row[2])])
    if any(gradient is None for _, gradient, _ in runs):
        return wrong("The weights are right, but no gradient gets through them.", "detached: the router learns nothing")
    rows = [(f"gradient, {name}", a[1][0], r[1][0]) for name, a, r in zip(cases, asked, runs, strict=True)]
    if not all(close(r[1], a[1]) for r, a in zip(runs, asked, strict=True)):
        parts = []
        for case in cases.values():
            s = case[0].clone().requires_grad_()
            weight = s.gather(1, case[1])
            weight = case[3] * (weight / weight.sum(dim=-1, keepdim=True).detach() if case[2] else weight)
            parts.append(torch.autograd.grad((weight * _numbers(*weight.shape, seed=7)).sum(), s)[0])
        half = all(close(r[1], p) for r, p in zip(runs, parts, strict=True))
        name = "the sum is detached: half of the gradient is lost" if half else None
        return wrong("The weights are right, their gradient is not.", name, rows)
    if widened := _widened(fn, *cases["normalised"]):
        return widened
    return ok("One weight a visit, and the scores get their gradient through it.", rows[:2])


# --- 7.2 choice -----------------------------------------------------------------------------------------------


def _true_choice(scores, k, n_group=1, topk_group=1, members=1, kept_by=None, fill=float("-inf")):
    groups = scores.unflatten(-1, (n_group, -1))
    best = (kept_by or (lambda g: g.topk(members, dim=-1).values.sum(dim=-1)))(groups)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(topk_group, dim=-1).indices, True)
    return groups.masked_fill(~kept[..., None], fill).flatten(-2).topk(k, dim=-1).indices


def grade_choose_experts(fn) -> Verdict:
    """Scores of both signs, as a bias makes them; without groups, with groups scored by one and by two experts."""
    scores = _numbers(40, 12) - 1.0
    cases = {
        "no groups": (scores, 3, 1, 1, 1),
        "4 groups, 2 kept, scored by 2": (scores, 4, 4, 2, 2),
        "4 groups, 2 kept, scored by 1": (scores, 4, 4, 2, 1),
        "3 groups, 1 kept, scored by 2": (scores, 3, 3, 1, 2),
        "2 groups, both kept": (scores, 2, 2, 2, 1),
    }

    def strided(s, k, n, g, m):
        apart = s.unflatten(-1, (-1, n)).transpose(-1, -2).flatten(-2)
        chosen = _true_choice(apart, k, n, g, m)
        return chosen % (s.shape[-1] // n) * n + chosen // (s.shape[-1] // n)

    def equally(s, k, n, g, m):
        groups = s.unflatten(-1, (n, -1))
        kept = groups.topk(m, dim=-1).values.sum(dim=-1).topk(g, dim=-1).indices
        best = groups.gather(1, kept[..., None].expand(-1, -1, groups.shape[-1])).topk(-(-k // g), dim=-1).indices
        return (best + kept[..., None] * groups.shape[-1]).flatten(1)[:, :k]

    known = {
        "groups are passed over": lambda s, k, n, g, m: s.topk(k, dim=-1).indices,
        "a group is scored by all of its experts": lambda s, k, n, g, m: _true_choice(
            s, k, n, g, kept_by=lambda groups: groups.sum(dim=-1)
        ),
        "a group is scored by its best expert alone": lambda s, k, n, g, m: _true_choice(s, k, n, g, 1),
        "a group is always scored by two experts": lambda s, k, n, g, m: _true_choice(s, k, n, g, 2),
        "closed experts score 0, which beats a negative score": lambda s, k, n, g, m: _true_choice(
            s, k, n, g, m, fill=0.0
        ),
        "numbers within the group, not among all experts": lambda s, k, n, g, m: (
            _true_choice(s, k, n, g, m) % (s.shape[-1] // n)
        ),
        "experts of a group lie apart, not side by side": strided,
        "every kept group gives equally many experts": equally,
        "the weakest groups are kept": lambda s, k, n, g, m: _true_choice(
            s, k, n, g, kept_by=lambda groups: -groups.topk(m, dim=-1).values.sum(dim=-1)
        ),
        "the lowest scores are chosen": lambda s, k, n, g, m: s.topk(k, dim=-1, largest=False).indices,
    }

    def in_any_order(f):
        return lambda *case: f(*case).sort(dim=-1).values

    runs = [_run(fn, case) for case in cases.values()]
    asked = [_true_choice(*case) for case in cases.values()]
    kinds = [(name, _kind(a), _unlike(a, r[0])) for name, a, r in zip(cases, asked, runs, strict=True)]
    if any(k for *_, k in kinds):
        first = runs[0][0]
        name = None
        if isinstance(first, torch.Tensor) and first.dtype == torch.bool:
            name = "a mask, not numbers"
        elif isinstance(first, torch.Tensor) and first.is_floating_point():
            name = "the scores of the chosen, not their numbers"
        return wrong("This is no table of K expert numbers a token.", name, kinds[:2])
    if any(changed for *_, changed in runs):
        return wrong("The caller's scores have changed.", "it works on its input")
    in_order = [(n, a, r[0]) for n, a, r in zip(cases, asked, runs, strict=True)]
    got = [r[0].sort(dim=-1).values for r in runs]
    asked = [a.sort(dim=-1).values for a in asked]
    rows = [(f"{n}, token 0", a[0], g[0]) for n, a, g in zip(cases, asked, got, strict=True)]
    for n, (a, g) in enumerate(zip(asked, got, strict=True)):
        if not torch.equal(a, g):
            t = int((a != g).any(dim=-1).nonzero()[0])
            rows[n] = (f"{list(cases)[n]}, token {t}", a[t], g[t])
    bad = [row for row, a, g in zip(rows, asked, got, strict=True) if not torch.equal(a, g)]
    if bad:
        name = _known({n: in_any_order(f) for n, f in known.items()}, cases, got)
        return wrong("These are not the experts to visit.", name, bad)
    if moved := [(n, a, g, int((a != g).any(dim=-1).int().argmax())) for n, a, g in in_order if not torch.equal(a, g)]:
        order = None
        if all(torch.equal(g, a.flip(-1)) for _, a, g in in_order):
            order = "the worst of the chosen comes first"
        elif all(torch.equal(g, a) for (*_, g), a in zip(in_order, asked, strict=True)):
            order = "in the order of their numbers, not the best first"
        rows = [(f"{n}, token {t}", a[t], g[t]) for n, a, g, t in moved]
        return wrong("These are the experts to visit, but the best should come first.", order, rows)
    return ok("The best experts of the best groups.", rows[:3])


# --- 7.3 one step of the bias ---------------------------------------------------------------------------------


def _true_bias(bias, visits, rate, error=None):
    visits = visits.double()
    error = visits.mean(dim=-1, keepdim=True) - visits if error is None else error(visits)
    return bias + rate * error.sign().to(bias.dtype)


def grade_router_bias_step(fn) -> Verdict:
    """Two layers at once, one of which is busier; a mean that is no integer; a count exactly at it; a large bias."""
    bias = _numbers(2, 4) / 10
    cases = {
        "two layers": (bias, torch.tensor([[7, 1, 2, 0], [40, 40, 44, 36]]), 0.25),
        "one layer": (bias[0], torch.tensor([9, 0, 0, 0]), 2**-7),
        "a busy median": (bias[0], torch.tensor([6, 6, 6, 0]), 2**-7),
        "mean 2.5": (bias[0], torch.tensor([3, 2, 4, 1]), 0.5),
        "a large bias": (40 * bias[0], torch.tensor([3, 2, 4, 1]), 0.5),
    }

    def with_error(error, of=torch.sign):
        return lambda b, v, r: b + r * of(error(v.double()))

    def mean(v):
        return v.mean(dim=-1, keepdim=True)

    known = {
        "busy experts are raised": with_error(lambda v: v - mean(v)),
        "the step grows with the error": with_error(lambda v: mean(v) - v, of=lambda e: e),
        "the step is the error as a share of the mean": with_error(lambda v: (mean(v) - v) / mean(v), of=lambda e: e),
        "compared with the median": with_error(lambda v: v.median(dim=-1, keepdim=True).values - v),
        "compared with the mean over all layers": with_error(lambda v: v.mean() - v),
        "compared with the largest": with_error(lambda v: v.amax(dim=-1, keepdim=True) - v),
        "an expert at the mean moves, too": with_error(lambda v: mean(v) - v, of=lambda e: 2 * (e > 0).double() - 1),
        "only busy experts move": with_error(lambda v: mean(v) - v, of=lambda e: e.sign().clamp(max=0)),
        "only idle experts move": with_error(lambda v: mean(v) - v, of=lambda e: e.sign().clamp(min=0)),
        "the rate is built in": lambda b, v, r: _true_bias(b, v, 0.001),
        "the old bias is forgotten": lambda b, v, r: _true_bias(torch.zeros_like(b), v, r),
        "the mean is rounded to an integer": with_error(lambda v: mean(v).floor() - v),
        "the bias is kept between -1 and 1": lambda b, v, r: _true_bias(b, v, r).clamp(-1, 1),
        "the step is a factor": lambda b, v, r: b * (1 + r * (mean(v.double()) - v).sign()),
    }
    runs = [_run(fn, case) for case in cases.values()]
    asked = [_true_bias(*case) for case in cases.values()]
    kinds = [(name, _kind(a), _unlike(a, r[0])) for name, a, r in zip(cases, asked, runs, strict=True)]
    if any(k for *_, k in kinds):
        moved = all(0 in changed for *_, changed in runs)
        name = "the bias is moved in place, and nothing is returned" if moved else None
        return wrong("It should return a bias of the same type and shape.", name, kinds)
    if any(0 in changed for *_, changed in runs):
        return wrong("The old bias has changed; return a new one.", "it works on its input")
    if any(changed for *_, changed in runs):
        return wrong("`visits_E` has changed: counts are the caller's, to read only.", "it works on the counts")
    rows = [(name, a, r[0]) for name, a, r in zip(cases, asked, runs, strict=True)]
    if not all(close(g, e) for _, e, g in rows):
        name = _known(known, cases, [r[0] for r in runs])
        return wrong("This is not the new bias.", name, [row for row in rows if not close(row[1], row[2])])
    narrow = fn(bias.float(), cases["two layers"][1], 0.25)
    if narrow.dtype != torch.float32:
        kind = str(narrow.dtype).removeprefix("torch.")
        return wrong(
            "Right, but a bias in fp32 does not stay so.", "the type of the bias is lost", [("", "float32", kind)]
        )
    return ok("One step towards the mean, whatever the distance.", rows[:2])


# --- 7.4 global counts ----------------------------------------------------------------------------------------


class _Layers:
    """Stands in for a model: a router for each row of `visits`; all have a bias, but for the one named "plain"."""

    def __init__(self, names, visits):
        config = DeepSeekConfig(n_routed_experts=4, num_experts_per_tok=1, n_group=1, topk_group=1)
        plain = dataclasses.replace(config, topk_method="greedy")
        self.all = {name: Router(plain if name == "plain" else config) for name in names}
        for router, visits_E in zip(self.all.values(), visits, strict=True):
            router.visits_E += torch.tensor(visits_E)

    def routers(self):
        return self.all

    def biased(self):
        return [router for name, router in self.all.items() if name != "plain"]

    def biases(self):
        return torch.stack([router.e_score_correction_bias.clone() for router in self.biased()])

    def left(self):
        return sum(int(router.visits_E.sum()) for router in self.biased())


# Per rank, for each router: ranks 0 and 2 are one group, 1 and 3 the other; rank 3 has seen nothing.
VISITS = [
    ([9, 1, 1, 1], [5, 5, 1, 1], [3, 3, 6, 0]),
    ([1, 9, 1, 1], [2, 4, 4, 2], [0, 6, 3, 3]),
    ([1, 2, 2, 7], [5, 1, 1, 5], [3, 4, 0, 5]),
    ([0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
]
MANY = 2**24  # from here on fp32 does not hold every integer
LARGE = [
    ([MANY + 1, MANY, MANY, MANY - 1], *VISITS[0][1:]),
    ([MANY - 1, MANY, MANY + 1, MANY], *VISITS[1][1:]),
    ([2, 2, 2, 2], *VISITS[2][1:]),
    VISITS[3],
]
RATE = 0.125


def grade_balance_experts(fn) -> Verdict:
    """Four ranks in two groups, each with visits of its own; then without a visit; three routers; without a bias."""
    try:
        seen = run_ranks(_observe_balance, R, timeout=LIMIT_S, overrides={BALANCE: fn})
    except RankTimeout as timeout:
        return Verdict(False, "The ranks wait for each other.", "a rank without visits stays away", detail=str(timeout))
    visits = torch.tensor(VISITS)[:, [0, 2]].double()
    zero = torch.zeros(2, 4, dtype=torch.float64)
    asked = [_true_bias(zero, visits[r] + visits[(r + 2) % R], RATE) for r in range(R)]
    known = {
        "each rank goes by its own visits": [_true_bias(zero, visits[r], RATE) for r in range(R)],
        "it ignores the group": [_true_bias(zero, visits.sum(dim=0), RATE) for r in range(R)],
        "ranks average their steps, not their counts": [
            (_true_bias(zero, visits[r], RATE) + _true_bias(zero, visits[(r + 2) % R], RATE)) / 2 for r in range(R)
        ],
        "only the first layer is balanced": [
            _true_bias(zero, visits[r] + visits[(r + 2) % R], RATE) * torch.tensor([[1.0], [0.0]]) for r in range(R)
        ],
        "nothing moves": [zero] * R,
    }
    got = [s["biases"] for s in seen]
    rows = [(f"bias of the first layer, rank {r}", e[0], g[0]) for r, (e, g) in enumerate(zip(asked, got, strict=True))]
    rows += [("bias of the last layer, rank 0", asked[0][1], got[0][1])]
    if not all(close(g, e) for e, g in zip(asked, got, strict=True)):
        same = (n for n, w in known.items() if all(close(g, e) for g, e in zip(got, w, strict=True)))
        return wrong("These are not the biases after a step.", next(same, None), rows)
    if verdict := _three_layers([s["three"] for s in seen]):
        return verdict
    if any(s["left"] for s in seen):
        left = [(f"visits after the step, rank {r}", 0, s["left"]) for r, s in enumerate(seen)]
        return wrong("The bias is right, but the next step starts with these visits.", "counts are never reset", left)
    if not all(torch.equal(s["biases"], s["again"]) for s in seen):
        return wrong("Without a visit the second step should move nothing.", None, rows)
    if not all(call.our_door for s in seen for call in s["calls"]):
        return wrong("torch.distributed was called directly, where no meter sees it.", "it goes past our own door")
    sent = [(call.op, call.payload_bytes) for call in seen[0]["calls"]]
    if len(sent) > 1:
        name = "a message for every layer" if {op for op, _ in sent} == {"all_reduce"} else None
        return wrong("The biases are right, but one message is enough.", name, [("sent", [("all_reduce", 64)], sent)])
    if sent[0] in (("all_reduce", 96), ("all_reduce", 48)):  # three rows of int64 or int32
        return wrong(
            "The biases are right, but the message has a row for the router without a bias, too.",
            "a router without a bias is counted, too",
            [("sent", ("all_reduce", 64), sent[0])],
        )
    if sent[0][0] != "all_reduce" or sent[0][1] > 64:
        return wrong(
            "The biases are right, but this is more than one sum.", None, [("sent", ("all_reduce", 64), sent[0])]
        )
    if failed := seen[0]["empty error"]:
        name = "it fails where no router has a bias"
        return Verdict(False, "A model without a bias has nothing to agree on: return.", name, detail=failed)
    if any(s["empty calls"] for s in seen):
        return wrong("A model without a bias has nothing to agree on.", "it talks when there is nothing to say")
    return ok("The same bias on all ranks of a group, by one all-reduce of 64 bytes, and a fresh count.", rows[:2])


def _three_layers(got):
    """A verdict on the biases of three routers, of which the first has large counts, or None if they are right."""
    visits, zero = torch.tensor(LARGE).double(), torch.zeros(3, 4, dtype=torch.float64)
    asked = [_true_bias(zero, visits[r] + visits[(r + 2) % R], RATE) for r in range(R)]
    if all(close(g, e) for g, e in zip(got, asked, strict=True)):
        return None
    name = None
    if all(close(g[1:], e[1:]) for g, e in zip(got, asked, strict=True)):
        name = "large counts are rounded"
    elif all(close(g[:2], e[:2]) and not g[2].any() for g, e in zip(got, asked, strict=True)):
        name = "made for two routers"
    rows = [(f"bias of layer {n}, rank 0", e, g) for n, (e, g) in enumerate(zip(asked[0], got[0], strict=True))]
    return wrong(f"Right for two routers, not for three of which one has about {MANY:,} visits an expert.", name, rows)


def _observe_balance():
    rank = collectives.rank_in()
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model, three = _Layers(("a", "plain", "b"), VISITS[rank]), _Layers(("a", "b", "c"), LARGE[rank])
    with wiretap() as calls:
        optim.balance_experts(model, RATE, group)
    biases, left = model.biases(), model.left()
    optim.balance_experts(model, RATE, group)
    again = model.biases()
    optim.balance_experts(three, RATE, group)
    model.all, empty_error = {"plain": model.all["plain"]}, None
    with wiretap() as empty_calls:
        try:
            optim.balance_experts(model, RATE, group)
        except Exception as error:
            empty_error = f"{type(error).__name__}: {error}"
    return {
        "biases": biases,
        "left": left,
        "again": again,
        "three": three.biases(),
        "calls": calls,
        "empty calls": len(empty_calls),
        "empty error": empty_error,
    }


# --- 7.5 the auxiliary loss -----------------------------------------------------------------------------------


def _at_the_end(real):
    """As many real tokens a sequence, as if all padding stood behind them."""
    return torch.arange(real.shape[1]) < real.sum(dim=1, keepdim=True)


def _true_aux(scores, index, real, *, shares=None, f=None, each=lambda loss: loss, at_least=1):
    E, K = scores.shape[-1], index.shape[-1]
    n = real.sum(dim=1, keepdim=True).clamp(min=at_least)
    visits = torch.zeros_like(scores).scatter(2, index, 1.0) * real[..., None]
    f = (f or (lambda v, n: v.sum(dim=1) * E / (K * n)))(visits, n)
    share = scores / scores.sum(dim=-1, keepdim=True) if shares is None else shares(scores, visits)
    return each(f * (share * real[..., None]).sum(dim=1) / n).sum(dim=-1)


def grade_sequence_balance_loss(fn) -> Verdict:
    """Sequences padded behind, in front and inside, or nothing but padding; experts not the best; then gradients."""
    scores = 2 * _numbers(3, 6, 5).sigmoid()
    index = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:2] for i in range(18)])
    index, real = index.view(3, 6, 2), torch.arange(6) < torch.tensor([6, 4, 0])[:, None]
    anywhere = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 0, 0, 1, 1, 0], [0, 1, 1, 0, 1, 0]]) > 0
    cases = {
        "padded": (scores, index, real),
        "whole": (scores, index, torch.ones_like(real)),
        "one expert": (scores[:, :, :2], index[..., :1] * 0, real),
        "padding anywhere": (scores, index, anywhere),
        "one token": (scores, index, torch.arange(6) < torch.tensor([6, 4, 1])[:, None]),
    }

    def no_mask(s, i, real):
        return _true_aux(s, i, torch.ones_like(real))

    def over_the_batch(s, i, real):
        whole = _true_aux(s.flatten(0, 1)[None], i.flatten(0, 1)[None], real.view(1, -1))
        return whole.expand(len(s))

    def by_length(s, i, real):
        n = real.double().sum(dim=1).clamp(min=1)
        return _true_aux(s, i, real) * (n / s.shape[1]) ** 2

    known = {
        "padding counts, too": no_mask,
        "padding is taken to stand at the end": lambda s, i, r: _true_aux(s, i, _at_the_end(r)),
        "a sequence of one token counts as two": lambda s, i, r: _true_aux(s, i, r, at_least=2),
        "balanced over the batch, not in each sequence": over_the_batch,
        "divided by the padded length": by_length,
        "the factor E is missing: f is a share, not a multiple of the mean": lambda s, i, r: (
            _true_aux(s, i, r) / s.shape[-1]
        ),
        "visits are divided by T, not by K · T": lambda s, i, r: _true_aux(s, i, r) * i.shape[-1],
        "scores are not divided by their sum": lambda s, i, r: _true_aux(s, i, r, shares=lambda s, _: s),
        "a softmax over the scores": lambda s, i, r: _true_aux(s, i, r, shares=lambda s, _: s.softmax(dim=-1)),
        "P looks at the visited experts only": lambda s, i, r: _true_aux(
            s, i, r, shares=lambda s, visits: s / s.sum(dim=-1, keepdim=True) * visits
        ),
        "f is made of scores, not of visits": lambda s, i, r: _true_aux(
            s,
            i,
            r,
            f=lambda _, n: s.shape[-1] * (s / s.sum(-1, keepdim=True) * r[..., None]).sum(dim=1) / n,
        ),
        "a mean over the experts, not a sum": lambda s, i, r: _true_aux(s, i, r) / s.shape[-1],
        "only the first choice counts": lambda s, i, r: _true_aux(s, i[..., :1], r),
        "f · f: P is left out": lambda s, i, r: _true_aux(
            s, i, r, shares=lambda s, visits: visits * s.shape[-1] / i.shape[-1]
        ),
    }
    runs = [_run(fn, case) for case in cases.values()]
    asked = [_run(_true_aux, case) for case in cases.values()]
    kinds = [(name, _kind(a[0]), _unlike(a[0], r[0])) for name, a, r in zip(cases, asked, runs, strict=True)]
    if any(k for *_, k in kinds):
        sums = all(close(r[0], a[0].sum()) for r, a in zip(runs, asked, strict=True))
        means = all(close(r[0], a[0].mean()) for r, a in zip(runs, asked, strict=True))
        name = "one number for all sequences" if sums or means else None
        return wrong("It should return one number for each sequence.", name, kinds)
    if any(changed for *_, changed in runs):
        return wrong("The caller's tensors have changed.", "it works on its input")
    if any(not r[0].isfinite().all() for r in runs):
        return wrong(
            "A sequence of padding should cost nothing.",
            "no token: 0 divided by 0",
            [(name, a[0], r[0]) for name, a, r in zip(cases, asked, runs, strict=True)],
        )
    rows = [(name, a[0], r[0]) for name, a, r in zip(cases, asked, runs, strict=True)]
    if not all(close(g, e) for _, e, g in rows):
        name = _known(known, cases, [r[0] for r in runs])
        return wrong("These are not the losses.", name, [row for row in rows if not close(row[1], row[2])])
    if any(gradient is None for _, gradient, _ in runs):
        return wrong("The losses are right, but no gradient reaches the scores.", "detached: it balances nothing")
    rows = [(f"gradient, {name}", a[1], r[1]) for name, a, r in zip(cases, asked, runs, strict=True)]
    if not all(close(r[1], a[1]) for r, a in zip(runs, asked, strict=True)):
        return wrong("The losses are right, their gradient is not.", None, rows)
    if widened := _widened(fn, *cases["padded"]):
        return widened
    return ok(
        "Right in every sequence, whatever the padding.",
        [(n, a[0], r[0]) for n, a, r in zip(cases, asked, runs, strict=True)][:3],
    )


# --- 7.6 capacity ---------------------------------------------------------------------------------------------


def _true_drop(scores, index, real, factor, *, order=None, capacity=None, nowhere=None, takes_room=None):
    """Visit by visit, so that it can be read: the best of those that want an expert come first."""
    B, T, E = scores.shape
    K, result = index.shape[-1], torch.full_like(index, E if nowhere is None else nowhere)
    for b in range(B):
        limit = math.ceil(factor * K * int(real[b].sum()) / E) if capacity is None else capacity(b)
        for e in range(E):
            wish = [(t, k) for t in range(T) for k in range(K) if index[b, t, k] == e]
            wish = [(t, k) for t, k in wish if real[b, t] or takes_room]
            wish.sort(key=lambda tk: (order or (lambda t, k, score: (-score, t)))(*tk, float(scores[b, tk[0], e])))
            for t, k in wish[:limit]:
                if real[b, t] or takes_room == "and visits":
                    result[b, t, k] = e
    return result


def grade_drop_beyond_capacity(fn) -> Verdict:
    """Four experts, one of them wanted by nearly all; sequences of 9, 5 and 0 tokens, padded behind or in front.

    Besides, equal scores, and a choice that a bias made.
    """
    scores = _numbers(3, 9, 4).sigmoid() + torch.tensor([0.3, 0.0, 0.0, 0.0])
    index, real = scores.topk(2, dim=-1).indices, torch.arange(9) < torch.tensor([9, 5, 0])[:, None]
    biased = torch.tensor([-0.3, 0.4, 0.0, 0.2])
    index[:, ::2] = index[:, ::2].flip(-1)  # the order of the choices says nothing about the scores
    cases = {
        "factor 1": (scores, index, real, 1.0),
        "factor 0.5": (scores, index, real, 0.5),
        "plenty of room": (scores, index, real, 4.0),
        "equal scores": (torch.ones(1, 6, 2).double(), torch.zeros(1, 6, 1, dtype=torch.long), real[:1, :6], 1.0),
        "chosen with a bias": (scores, (scores + biased).topk(2, dim=-1).indices, real, 1.0),
        "padding anywhere": (scores, index, real.roll(3, dims=1), 1.0),
    }

    def limit(formula):
        """The capacity of each sequence from (factor, K, tokens of the sequence, T, E)."""

        def drop(s, i, r, factor):
            n = r.sum(dim=1).tolist()
            sizes = [formula(factor, i.shape[-1], n[b], s.shape[1], s.shape[-1]) for b in range(len(s))]
            return _true_drop(s, i, r, factor, capacity=sizes.__getitem__)

        return drop

    def best_ones(s, i, r, factor):
        kept = _true_drop(s, s.topk(i.shape[-1], dim=-1).indices, r, factor)
        taken = torch.zeros(*s.shape[:2], s.shape[-1] + 1, dtype=torch.bool).scatter(2, kept, True)
        return i.where(taken.gather(2, i), s.shape[-1])

    def whole_batch(s, i, r, factor):
        flat = _true_drop(s.flatten(0, 1)[None], i.flatten(0, 1)[None], r.view(1, -1), factor)
        return flat.view_as(i)

    def whole_token(s, i, r, factor):
        kept = _true_drop(s, i, r, factor)
        return kept.where((kept < s.shape[-1]).all(dim=-1, keepdim=True), s.shape[-1])

    def first_expert(s, i, r, factor):
        return _true_drop(s, i, r, factor, nowhere=0)

    known = {
        "the first tokens stay, whatever their scores": lambda s, i, r, c: _true_drop(
            s, i, r, c, order=lambda t, k, score: t
        ),
        "first choices stay before second ones, whatever their scores": lambda s, i, r, c: _true_drop(
            s, i, r, c, order=lambda t, k, score: (k, -score, t)
        ),
        "the K largest scores stand in line, whoever was chosen": best_ones,
        "the lowest scores stay": lambda s, i, r, c: _true_drop(s, i, r, c, order=lambda t, k, score: (score, t)),
        "of equal scores the later tokens stay": lambda s, i, r, c: _true_drop(
            s, i, r, c, order=lambda t, k, score: (-score, -t)
        ),
        "capacity of the whole batch, not of each sequence": whole_batch,
        "padding is taken to stand at the end": lambda s, i, r, c: _true_drop(s, i, _at_the_end(r), c),
        "padding takes room": lambda s, i, r, c: _true_drop(s, i, r, c, takes_room="only"),
        "padding makes room: the capacity is that of T tokens": limit(lambda c, K, n, T, E: math.ceil(c * K * T / E)),
        "padding visits experts": lambda s, i, r, c: _true_drop(s, i, r, c, takes_room="and visits"),
        "rounded down": limit(lambda c, K, n, T, E: math.floor(c * K * n / E)),
        "K is left out: every token has K visits": limit(lambda c, K, n, T, E: math.ceil(c * n / E)),
        "one visit too many": limit(lambda c, K, n, T, E: math.ceil(c * K * n / E) + 1),
        "one visit too few": limit(lambda c, K, n, T, E: max(math.ceil(c * K * n / E) - 1, 0)),
        "dropped visits go to expert 0": first_expert,
        "dropped visits have number -1, not E": lambda s, i, r, c: _true_drop(s, i, r, c, nowhere=-1),
        "a token that loses one visit loses all": whole_token,
        "nothing but padding is dropped": lambda s, i, r, c: i.where(r[..., None], s.shape[-1]),
    }
    runs = [_run(fn, case) for case in cases.values()]
    asked = [_true_drop(*case) for case in cases.values()]
    kinds = [(name, _kind(a), _unlike(a, r[0])) for name, a, r in zip(cases, asked, runs, strict=True)]
    if any(k for *_, k in kinds):
        masks = all(isinstance(r[0], torch.Tensor) and r[0].dtype == torch.bool for r in runs)
        return wrong(
            "It should return expert numbers like `index_BTK`.", "a mask, not numbers" if masks else None, kinds
        )
    if any(changed for *_, changed in runs):
        return wrong("The caller's tensors have changed.", "it works on its input")
    got = [r[0] for r in runs]
    bad = [(n, a, g) for n, a, g in zip(cases, asked, got, strict=True) if not torch.equal(a, g)]
    if bad:
        same = (
            n for n, f in known.items() if all(torch.equal(f(*c), g) for c, g in zip(cases.values(), got, strict=True))
        )
        rows = []
        for name, a, g in bad:
            b, t = (int(x) for x in (a != g).any(dim=-1).nonzero()[0])
            rows.append((f"{name}, sequence {b}, token {t}", a[b, t], g[b, t]))
        return wrong("These are not the visits that take place.", next(same, None), rows)
    dropped = {n: (a == cases[n][0].shape[-1]).sum().item() for n, a in zip(cases, asked, strict=True)}
    return ok(
        "No expert has more visits than its capacity, and the best ones take place.",
        [(f"{n}: visits that do not take place, padding included", dropped[n], dropped[n]) for n in list(cases)[:4]],
    )


# --- what the chapter shows besides ---------------------------------------------------------------------------


class SuspectRouter(Router):
    """The puzzle 7-bug: a router whose auxiliary loss has a silent mistake.  Look at its symptoms first."""

    def _balance(self, weight_TK, scores_TE, index_TK, real_BT):
        scores_BTE, index_BTK = (x.unflatten(0, real_BT.shape) for x in (scores_TE, index_TK))
        loss = moe.sequence_balance_loss(scores_BTE, index_BTK, real_BT).mean()
        return moe.AddGradient.apply(weight_TK, loss, self.config.aux_loss_alpha)


def auxiliary_gradient(router_class, passes, sequences=8):
    """Norm of the router's gradient from the auxiliary loss of one global batch, taken in `passes` equal passes."""
    layer = moe.MoE(small_config(aux_loss_alpha=0.01)).double()
    layer.gate = router_class(layer.gate.config).double()
    for n, parameter in enumerate(layer.parameters()):
        parameter.data = 0.1 * _numbers(*parameter.shape, seed=n)
    layer.gate.n_sequences = sequences
    for x_BTD in _numbers(sequences, 32, 64, seed=99).split(sequences // passes):
        (0.0 * layer(x_BTD).sum()).backward()  # no loss but the auxiliary one
    return layer.gate.weight.grad.norm().item()


def small_config(**changes):
    """Two layers, the second with 32 experts of which a token visits 4; 0.4 million parameters."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    experts = {"n_routed_experts": 32, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
    rest = {"q_lora_rank": None, "tie_word_embeddings": True, "initializer_range": 0.06}
    return DeepSeekConfig.preset("tiny", **{**sizes, **experts, **rest, **changes})


def train(config, tokens, *, steps, rate=0.0, seed=0, n_rows=8, seq_len=64):
    """Train a `small_config` on the text, and watch its router at every step.

    Returns the model and lists by step: "loss", nats; "load" (E,), visits of each expert as a multiple of the mean;
    "dropped", the share of visits that capacity forbade; "moved", how far the router's weights are from where they
    began, as a share of their size.
    """
    model = DeepSeekModel(config, seed=seed)
    (router,) = model.routers().values()
    began = router.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    seen = {"model": model, "loss": [], "load": [], "dropped": [], "moved": []}
    for step in range(steps):
        batch = train_batch(tokens["train"], seed=seed, step=step, global_batch_size=n_rows, seq_len=seq_len)
        router.n_sequences = n_rows
        loss_sum, n_tokens = model.loss_sum(batch.input_ids, batch.labels)
        optimizer.zero_grad()
        (loss_sum / n_tokens).backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        optim.set_learning_rate(optimizer, 6e-3 * min(1.0, (step + 1) / 10) * (1 - 0.9 * step / steps))
        optimizer.step()
        visits_E = router.visits_E.double()
        seen["loss"].append(loss_sum.item() / n_tokens.item())
        seen["load"].append(visits_E / visits_E.mean())
        seen["dropped"].append((router.dropped_E.sum() / visits_E.sum()).item())
        seen["moved"].append(((router.weight - began).norm() / began.norm()).item())
        optim.balance_experts(model, rate)
        router.reset_counts()
    return seen


def rows_in(language, corpus, tokenizer, n_rows=8, seq_len=64):
    """(n_rows, seq_len) tokens of documents in one language, "en" or "zh"."""
    ids: list[int] = []
    for _, document in corpus.documents():
        if document.lang == language:
            ids += tokenizer.encode(document.text[:2000])
        if len(ids) >= n_rows * seq_len:
            break
    return torch.tensor(ids[: n_rows * seq_len]).view(n_rows, seq_len)


HINTS = {
    "7-bug": (
        "One global batch of 8 sequences, always the same. In how many passes it is taken should change nothing. By "
        "what factor does the suspect's gradient change?",
        "What does the suspect divide by: the sequences of the whole batch, or those of the pass?",
        "It takes the mean over the sequences of its own pass, and gradients of passes add up: with 8 passes the "
        "auxiliary loss weighs 8 times as much, with 8 ranks as well. It is the mean of means of chapter 00. Take the "
        "sum over the pass, and divide by the sequences of the *global* batch: `router.n_sequences`.",
    ),
}

TITLE = "MoE"

EXERCISES = (
    Exercise(
        number="7.1",
        path=COMBINE,
        title="What the router learns from",
        grade=grade_combine_weights,
        level="warm-up",
        minutes=10,
        hints=(
            "`scores_TE` has a column for every expert. You want, for each token, those that `index_TK` names.",
            "`scores_TE.gather(1, index_TK)`. With `normalise`, divide by its sum over the last dimension "
            "(`keepdim=True`), then multiply by `scale`.",
            "No `detach`, no `no_grad`, and no in-place operation: the gradient must reach the scores.",
        ),
    ),
    Exercise(
        number="7.2",
        path=CHOOSE,
        title="Choose within groups",
        grade=grade_choose_experts,
        minutes=20,
        hints=(
            "`scores_TE.unflatten(-1, (n_group, -1))` puts the experts of a group side by side. What is a group's "
            "score?",
            "The sum of its `members` best: `.topk(members, dim=-1).values.sum(dim=-1)`. Another `topk` over these "
            "gives the groups to keep.",
            "Give every expert of the other groups the score `float('-inf')` (not 0: scores can be negative), flatten "
            "again, and take the `k` best.",
        ),
    ),
    Exercise(
        number="7.3",
        path=BIAS,
        title="One step of the bias",
        grade=grade_router_bias_step,
        level="warm-up",
        minutes=5,
        hints=(
            "Only the direction counts: who is above the mean goes down by `rate`, who is below goes up.",
            "`visits_E.double().mean(dim=-1, keepdim=True) - visits_E` is positive for idle experts. `.sign()` makes "
            "steps of one of it. Return a new tensor, of the bias's type.",
        ),
    ),
    Exercise(
        number="7.4",
        path=BALANCE,
        title="Counts of all ranks",
        grade=grade_balance_experts,
        minutes=15,
        hints=(
            "`model.routers().values()` are the routers; those with a bias have `e_score_correction_bias`. If there "
            "is none, return.",
            "`torch.stack` the `visits_E` of all of them, and add the table up with `collectives.all_reduce(table, "
            "group)`: one message. Every rank must send, whatever it has seen.",
            "Then for each router: `bias_E.copy_(moe.router_bias_step(bias_E, visits_E, rate))` with its row of the "
            "table, and `router.visits_E.zero_()`.",
        ),
    ),
    Exercise(
        number="7.5",
        path=AUX,
        title="The auxiliary loss",
        grade=grade_sequence_balance_loss,
        minutes=25,
        hints=(
            "Make a table of visits first: `torch.zeros_like(scores_BTE).scatter(2, index_BTK, 1.0)`, times "
            "`real_BT[..., None]`, so that padding has none.",
            "f: the sum of the visits over the tokens, times E / (K · real tokens). P: the mean over the real tokens "
            "of scores divided by their sum over the experts.",
            "`real_BT.sum(dim=1, keepdim=True).clamp(min=1)` counts real tokens and never divides by 0. At the end "
            "`(f_BE * P_BE).sum(dim=-1)`.",
        ),
    ),
    Exercise(
        number="7.6",
        path=DROP,
        title="Beyond capacity",
        grade=grade_drop_beyond_capacity,
        level="stretch",
        minutes=25,
        hints=(
            "For each expert, line up the tokens of a sequence by score, those that chose it first. Who stands at "
            "place C or beyond is dropped.",
            "`scores_BTE.masked_fill(~chosen_BTE, float('-inf')).argsort(dim=1, descending=True, stable=True)` is that "
            "line: which token stands at each place. `argsort` once more turns it round: at which place each token "
            "stands.",
            "Compare the place with C of its sequence, require `chosen_BTE`, `gather` the answer for each visit of "
            "`index_BTK`, and put E where it is no. Padding is not chosen by anybody, and does not count in C.",
        ),
    ),
)
