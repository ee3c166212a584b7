"""Chapter 08: expert parallelism: tokens travel to their experts, and copies of the busy ones share the load.

All numbers that travel here are small integers, so that every sum is exact, whatever its order or type.
"""

import operator
import re
import tempfile
import time
from collections import Counter
from contextlib import contextmanager

import torch
import torch.distributed as dist

from deepseek_lab.learn.exercises import Exercise
from deepseek_lab.learn.ranks import RankError, RankTimeout, run_ranks
from deepseek_lab.learn.verdict import Verdict, close, kept_for_backward, ok, wrong
from deepseek_lab.learn.wiretap import wiretap
from deepseek_lab.model import DeepSeekConfig, DeepSeekModel, moe
from deepseek_lab.parallel import collectives, expert
from deepseek_lab.plan import placement

R, E, D, K = 4, 8, 5, 3
LIMIT_S = 8.0
EXPERT, PLAN = "deepseek_lab.parallel.expert", "deepseek_lab.plan.placement"
TOKENS, COUNTS = f"{EXPERT}.tokens_for_ranks", f"{EXPERT}.exchange_counts"
DISPATCH, COMBINE, SHARE = f"{EXPERT}.Dispatch", f"{EXPERT}.Combine", f"{EXPERT}.share_visits"
COPIES, PACK = f"{PLAN}.copies_for", f"{PLAN}.pack"
PAST_THE_DOOR = ("torch.distributed was called directly, where no meter sees it.", "it goes past our own door")
IN_A_PAIR = ("Over the whole world it is right, in a group of two it is not.", "it ignores the group")


class LeftOutError(RuntimeError):
    """A rank came through a step without any collective, while others wait in one."""


class WrongShapeError(ValueError):
    """A result of a wrong shape, for which backward cannot be tried."""


def _require_shape(setting, what, wanted, got):
    shape = tuple(got.shape) if isinstance(got, torch.Tensor) else type(got).__name__
    if shape != tuple(wanted.shape):
        raise WrongShapeError(f"{setting}: {what} should be of shape {tuple(wanted.shape)}, not {shape}")


class _RollCall:
    """Tells at once what a timeout would tell after seconds: that a rank left out the collective of a step.

    Ranks note in a file when they enter a collective, and when they came through a step without one.
    """

    def __init__(self, path):
        self.store = dist.FileStore(path, R)

    @contextmanager
    def step(self, name, ranks):
        """Listen to a step that `ranks` take together.  Raises LeftOutError."""
        entered, absent = (f"{name} {min(ranks)} {what}" for what in ("entered", "absent"))
        with wiretap(before=lambda: self.store.add(entered, 1)) as calls:
            yield calls
        if calls:
            return
        self.store.add(absent, 1)
        while self.store.add(absent, 0) < len(ranks):
            if self.store.add(entered, 0):
                raise LeftOutError(name)
            time.sleep(0.002)


def _run_with_roll_call(observe, overrides):
    """`run_ranks`, with a `_RollCall` for each rank's `observe`."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(observe, R, f"{folder}/roll", timeout=LIMIT_S, overrides=overrides)


def _first_difference(wanted, got):
    """None for equal tensors; else where they differ first, and what is there in both."""
    if not isinstance(got, torch.Tensor):
        return "it", "a tensor", type(got).__name__
    for what in ("shape", "dtype"):
        if getattr(wanted, what) != getattr(got, what):
            return what, str(getattr(wanted, what)), str(getattr(got, what))
    pairs = enumerate(zip(wanted.tolist(), got.tolist(), strict=True))
    return next(((f"row {i}", w, g) for i, (w, g) in pairs if w != g), None)


def _difference_rows(label, differences):
    """Rows of a verdict from what `_first_difference` found on each rank."""
    return [(f"{label} on rank {r}, {d[0]}", d[1], d[2]) for r, d in enumerate(differences) if d]


# --- 8.1 which tokens go where --------------------------------------------------------------------------------


def _rows_to(index_TK, here, rank):
    """Tokens with an expert on `rank`, in order."""
    return [t for t, experts in enumerate(index_TK.tolist()) if any(e // here == rank for e in experts)]


def _true_tokens(index_TK, here, n_ranks):
    rows = [_rows_to(index_TK, here, r) for r in range(n_ranks)]
    return [t for row in rows for t in row], [len(row) for row in rows]


def _visits(index_TK, here, n_ranks, rank_of=None):
    """(rank, expert, token, visit) of every visit that takes place."""
    rank_of = rank_of or (lambda e: e // here)
    flat = [(e, t, t * index_TK.shape[1] + k) for t, row in enumerate(index_TK.tolist()) for k, e in enumerate(row)]
    return [(rank_of(e), e, t, v) for e, t, v in flat if e < here * n_ranks]


def _as_lists(pairs, n_ranks):
    """(rank, token) pairs in the order in which they are sent, as an answer."""
    counts = Counter(r for r, _ in pairs)
    return [t for _, t in pairs], [counts[r] for r in range(n_ranks)]


def grade_tokens_for_ranks(fn) -> Verdict:
    """Six tokens with two or three experts of eight, some of them nowhere, on four ranks and on two; and no tokens."""

    def by_visit(index, here, n):
        return _as_lists(sorted((r, t) for r, _, t, _ in _visits(index, here, n)), n)

    def by_token(index, here, n):
        pairs = sorted({(r, t) for r, _, t, _ in _visits(index, here, n)}, key=lambda pair: (pair[1], pair[0]))
        return _as_lists(pairs, n)

    def best_only(index, here, n):
        return _true_tokens(index[:, :1], here, n)

    def dealt(index, here, n):
        return _as_lists(sorted({(r, t) for r, _, t, _ in _visits(index, here, n, lambda e: e % n)}), n)

    def busy_only(index, here, n):
        tokens, counts = _true_tokens(index, here, n)
        return tokens, [c for c in counts if c]

    def nowhere_too(index, here, n):
        tokens, counts = _true_tokens(index, here, n + 1)
        return tokens, counts

    def last_takes_nowhere(index, here, n):
        return _true_tokens(index.clamp(max=here * n - 1), here, n)

    def by_expert(index, here, n):
        pairs = [(r, t) for r, _, t, _ in sorted(_visits(index, here, n))]
        return _as_lists(list(dict.fromkeys(pairs)), n)

    def visits(index, here, n):
        firsts = {}
        for r, _, t, v in _visits(index, here, n):
            firsts.setdefault((r, t), v)
        order = sorted(firsts)
        return [firsts[pair] for pair in order], _as_lists(order, n)[1]

    known = {
        "a row for every visit: tokens go twice to a rank with two of their experts": by_visit,
        "sorted by token, not by rank": by_token,
        "only the first expert of a token is looked at": best_only,
        "only the first two experts of a token are looked at": lambda index, here, n: _true_tokens(
            index[:, :2], here, n
        ),
        "experts are dealt out like cards: expert e on rank e % R": dealt,
        "ranks to which nothing goes are missing in the counts": busy_only,
        "nowhere is taken for one more rank": nowhere_too,
        "the last rank gets what goes nowhere": last_takes_nowhere,
        "sorted by expert within a rank, not by token": by_expert,
        "numbers of visits, not of tokens": visits,
        "every token goes to every rank": lambda index, here, n: (
            [t for _ in range(n) for t in range(len(index))],
            [len(index)] * n,
        ),
    }
    index = torch.tensor([[5, 4], [0, 7], [1, 5], [8, 2], [8, 8], [4, 0]])
    wide = torch.tensor([[7, 1, 6], [0, 5, 4], [8, 3, 2], [0, 1, 7], [7, 8, 6]])
    twice = torch.tensor([[1, 0], [1, 5], [0, 1]])
    cases = [(index, 2, 4), (wide, 2, 4), (wide, 4, 2), (twice, 2, 4), (index[:0], 2, 4)]
    asked = [_true_tokens(*case) for case in cases]
    given = [(index.clone(), here, n) for index, here, n in cases]
    returned = [fn(*case) for case in given]
    if not all(isinstance(r, tuple) and len(r) == 2 for r in returned):
        return wrong("It should return two things: tokens, and how many go to each rank.")
    if any(not torch.equal(a[0], b[0]) for a, b in zip(given, cases, strict=True)):
        return wrong("The caller's expert numbers have changed.", "it changes its argument")
    got = [tuple(x.tolist() if isinstance(x, torch.Tensor) else list(x) for x in pair) for pair in returned]
    if got != asked:
        name = next((name for name, f in known.items() if got == [f(*case) for case in cases]), None)
        rows = [
            row
            for (index, here, n), e, g in zip(cases, asked, got, strict=True)
            for row in (
                (f"experts {index.tolist()}, {here} a rank: tokens", e[0], g[0]),
                ("… to each rank", e[1], g[1]),
            )
            if row[1] != row[2]
        ]
        return wrong("These are not the tokens that each rank needs.", name, rows[:4])
    kinds = [(name, _kind(x)) for pair in returned for name, x in zip(("tokens", "counts"), pair, strict=True)]
    if odd := [(name, "torch.int64", kind) for name, kind in kinds if kind != "torch.int64"]:
        return wrong("Right, but they should be int64 tensors.", "not int64 tensors", odd[:1])
    return ok("A token goes once to every rank that it needs.", [("rows to each rank", asked[0][1], got[0][1])])


def _kind(x):
    return str(x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__


# --- 8.2 counts first -----------------------------------------------------------------------------------------


def grade_exchange_counts(fn) -> Verdict:
    """Rank r announces 100·r + destination; rank 2 has nothing to send, and must say so; then groups of two."""
    idle = "a rank with nothing to send stays away"
    try:
        seen = _run_with_roll_call(_observe_counts, {COUNTS: fn})
    except RankTimeout as timeout:
        return Verdict(False, "The ranks wait for each other.", "a deadlock", detail=str(timeout))
    except RankError as error:
        if "LeftOutError" not in error.cause:
            raise
        return wrong("Rank 2 has no rows to send and stays away; the others wait for it for ever.", idle)
    name: str | None = None
    asked = [[0 if src == 2 else 100 * src + r for src in range(R)] for r in range(R)]
    got = [s["got"].flatten().tolist() for s in seen]
    rows = [(f"rank {r} receives", e, g) for r, (e, g) in enumerate(zip(asked, got, strict=True))]
    if got != asked:
        sent = [[0] * R if r == 2 else [100 * r + d for d in range(R)] for r in range(R)]
        if got == sent:
            name = "what this rank sends, not what it receives"
        elif all(g == [sum(column) for column in zip(*sent, strict=True)] for g in got):
            name = "the sum of all counts"
        elif all(len(g) == R * R for g in got):
            name = "every rank gets the whole table, and not its own column"
        return wrong("These are not the rows that will come.", name, rows)
    if not all(call.our_door for s in seen for call in s["calls"]):
        return wrong(*PAST_THE_DOOR)
    ops = [call.op for call in seen[0]["calls"]]
    if ops != ["all_to_all"]:
        name = "an all-gather: everybody learns everything" if ops == ["all_gather"] else None
        name = "a message for every rank" if len(ops) > 2 else name
        return wrong("The counts are right, but one all-to-all is enough.", name, [("sent", ["all_to_all"], ops)])
    for what, kinds in (
        ("come back as", [s["got"].dtype for s in seen]),
        ("travel as", [s["calls"][0].dtype for s in seen]),
    ):
        if odd := next((kind for kind in kinds if kind != torch.int64), None):
            name = f"counts {what} {'floats' if odd.is_floating_point else str(odd).removeprefix('torch.')}"
            return wrong("Counts are int64, and travel as they are.", name, [(f"counts {what}", torch.int64, odd)])
    if any(s["got"].shape != (R,) for s in seen):
        return wrong("One count for each rank: shape (R,).", None, [("shape", (R,), tuple(seen[0]["got"].shape))])
    if any(s["changed"] for s in seen):
        return wrong("Right, but the counts that were handed over have changed.", "it overwrites its argument")
    if not all(s["pair_ok"] for s in seen):
        return wrong(*IN_A_PAIR)
    return ok(f"One all-to-all of {8 * R} bytes, also where nothing will be sent.", rows)


def _observe_counts(path):
    rank, roll = collectives.rank_in(), _RollCall(path)
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    sent_R = torch.tensor([0] * R if rank == 2 else [100 * rank + dst for dst in range(R)])
    before = sent_R.clone()
    with roll.step("counts", range(R)) as calls:
        got = expert.exchange_counts(sent_R)
    try:
        in_pair = expert.exchange_counts(torch.tensor([10 * rank, 10 * rank + 1]), pair).tolist()
    except ValueError:
        in_pair = None
    place = rank // 2
    return {
        "got": got.clone(),
        "calls": calls,
        "changed": not torch.equal(sent_R, before),
        "pair_ok": in_pair == [10 * (rank % 2) + place, 10 * (rank % 2 + 2) + place],
    }


# --- 8.3 and 8.4 dispatch and combine -------------------------------------------------------------------------


def _numbers(shape, seed, dtype):
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class _Trip:
    """What the ranks of a group hold, and what should come of it, worked out without any message.

    `x`, `weight`, `index`: of every rank's tokens; `arrives[r]`: (source, token) of the rows that come to rank r, which
    are none where r is `unwanted`; `y[r]` is what experts might make of them, and `dx[r]`, `dweight[r]` gradients of
    them.
    """

    def __init__(self, ranks, dtype, n_tokens=(4, 3, 0, 6), unwanted=None):
        n_tokens = [n_tokens[rank] for rank in ranks]
        self.here = E // len(ranks)
        self.x = [_numbers((n, D), rank, dtype) for rank, n in zip(ranks, n_tokens, strict=True)]
        self.weight = [_numbers((n, K), 10 + rank, dtype) for rank, n in zip(ranks, n_tokens, strict=True)]
        self.dy = [_numbers((n, D), 20 + rank, dtype) for rank, n in zip(ranks, n_tokens, strict=True)]
        # no expert twice for one token; E is nowhere
        scores = [
            torch.rand(n, E + 1, generator=torch.Generator().manual_seed(30 + rank))
            for rank, n in zip(ranks, n_tokens, strict=True)
        ]
        if unwanted is not None:
            for scores_TE in scores:
                scores_TE[:, unwanted * self.here : (unwanted + 1) * self.here] = -1
        self.index = [scores_TE.topk(K).indices for scores_TE in scores]
        places = range(len(ranks))
        self.arrives = [[(s, t) for s in places for t in _rows_to(self.index[s], self.here, r)] for r in places]
        self.y = [_numbers((len(a), D), 40 + r, dtype) for r, a in enumerate(self.arrives)]
        self.dx = [_numbers((len(a), D), 50 + r, dtype) for r, a in enumerate(self.arrives)]
        self.dweight = [
            _numbers((len(a), K), 60 + r, dtype).where(self.numbers_at(r) < self.here, 0)
            for r, a in enumerate(self.arrives)
        ]

    def route(self, s, group):
        """The route of the tokens of rank s: what `plan_route` would find by exchanging counts."""
        tokens = [[t for source, t in arrives if source == s] for arrives in self.arrives]
        received = Counter(source for source, _ in self.arrives[s])
        return expert.Route(
            n_tokens=len(self.x[s]),
            here=self.here,
            token_n=torch.tensor([t for row in tokens for t in row], dtype=torch.long),
            sent=[len(row) for row in tokens],
            received=[received[r] for r in range(len(self.x))],
            group=group,
        )

    def numbers_at(self, r):
        """The expert numbers (M, K) that should arrive at rank r."""
        first, rows = r * self.here, self.arrives[r]
        local = (
            torch.stack([self.index[s][t] - first for s, t in rows]) if rows else torch.zeros(0, K, dtype=torch.long)
        )
        return local.where((local >= 0) & (local < self.here), self.here)

    def at(self, r, held):
        """The rows of `held`, one tensor a source, that should arrive at rank r."""
        rows = [held[s][t] for s, t in self.arrives[r]]
        return torch.stack(rows) if rows else held[0].new_zeros(0, held[0].shape[1])

    def home(self, s, rows_by_rank, overwrite=False):
        """For the tokens of rank s the sum (or the last) of what ranks send back."""
        sums = rows_by_rank[0].new_zeros(len(self.x[s]), rows_by_rank[0].shape[1])
        for arrives, rows in zip(self.arrives, rows_by_rank, strict=True):
            for (source, t), row in zip(arrives, rows, strict=True):
                if source == s:
                    sums[t] = row if overwrite else sums[t] + row
        return sums


SETTINGS = {
    "world": "",
    "pair": "In a group of two: ",
    "bf16": "In bf16: ",
    "unwanted": "Where no token wants the experts of rank 1: ",
    "neither": "Where rank 2 has no tokens, and nobody wants its experts: ",
}


def _settings():
    """(name, trip, this rank's place in it, group, its ranks) of everything that is tried."""
    rank = collectives.rank_in()
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    yield "world", _Trip(range(R), torch.float64), rank, None, range(R)
    yield "pair", _Trip([rank % 2, rank % 2 + 2], torch.float64), rank // 2, pair, [rank % 2, rank % 2 + 2]
    yield "bf16", _Trip(range(R), torch.bfloat16), rank, None, range(R)
    yield "unwanted", _Trip(range(R), torch.float64, (4, 3, 2, 6), unwanted=1), rank, None, range(R)
    yield "neither", _Trip(range(R), torch.float64, unwanted=2), rank, None, range(R)


def _equal(a, b):
    return a is not None and a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))


def _row_bytes_kept(y):
    """Bytes of rows, which are real numbers, kept for backward; where rows went is told in integers."""
    return sum(t.nbytes for t in kept_for_backward(y) if t.is_floating_point())


def _observe_dispatch(path):
    found, roll = {}, _RollCall(path)
    for name, trip, me, group, ranks in _settings():
        route = trip.route(me, group)
        x_TD, weight_TK, index_TK = trip.x[me].clone(), trip.weight[me].clone(), trip.index[me].clone()
        leaves = x_TD.requires_grad_(), weight_TK.requires_grad_()
        with roll.step(f"{name}: forward", ranks) as forward:
            x_MD, weight_MK, local_MK = expert.Dispatch.apply(*leaves, index_TK, route)
        numbers, unmasked = trip.numbers_at(me), trip.at(me, trip.weight)
        _require_shape(name, "tokens that arrive", trip.at(me, trip.x), x_MD)
        _require_shape(name, "weights that arrive", unmasked, weight_MK)
        found[name] = seen = {
            "tokens": _first_difference(trip.at(me, trip.x), x_MD.detach()),
            "weights": _first_difference(unmasked.where(numbers < trip.here, 0), weight_MK.detach()),
            "expert numbers": _first_difference(numbers, local_MK),
            "dtype": x_MD.dtype == weight_MK.dtype == trip.x[me].dtype and local_MK.dtype == torch.int64,
            "as: weights of experts that live elsewhere travel too": _equal(weight_MK.detach(), unmasked),
            "as: experts are numbered as in the whole model": _equal(local_MK, trip.at(me, trip.index)),
            "kept": _row_bytes_kept(x_MD),
            "forward": forward,
            "sent": sum(route.sent),
            "received": sum(route.received),
        }
        dx_MD, dweight_MK = trip.dx[me].clone(), trip.dweight[me].clone()
        pairs = [(t, g) for t, g in ((x_MD, dx_MD), (weight_MK, dweight_MK)) if t.requires_grad]
        with roll.step(f"{name}: backward", ranks) as backward:
            torch.autograd.backward(*zip(*pairs, strict=True)) if pairs else None
        dx, dweight = trip.home(me, trip.dx), trip.home(me, trip.dweight)
        held = ((x_TD, trip.x), (weight_TK, trip.weight), (index_TK, trip.index))
        given = ((dx_MD, trip.dx), (dweight_MK, trip.dweight))
        seen |= {
            "backward": backward,
            "dx": _first_difference(dx, x_TD.grad),
            "dweight": _first_difference(dweight, weight_TK.grad),
            "as: a token keeps only the gradient of its last row": _equal(x_TD.grad, trip.home(me, trip.dx, True)),
            "as: the gradients are divided by the number of ranks": x_TD.grad is not None
            and close(x_TD.grad * len(ranks), dx, 1e-2),
            "as: gradients stay where the tokens went": x_TD.grad is None or not bool(x_TD.grad.any()),
            "no dweight": weight_TK.grad is None or not bool(weight_TK.grad.any()),
            "changed": not all(_equal(now.detach(), before[me]) for now, before in held + given),
        }
    return found


def _observe_combine(path):
    found, roll = {}, _RollCall(path)
    for name, trip, me, group, ranks in _settings():
        route = trip.route(me, group)
        y_MD = trip.y[me].clone().requires_grad_()
        with roll.step(f"{name}: forward", ranks) as forward:
            y_TD = expert.Combine.apply(y_MD, route)
        expected = trip.home(me, trip.y)
        _require_shape(name, "sums", expected, y_TD)
        got = y_TD.detach().clone()
        rows = expected.new_tensor([max(1, sum((me, t) in a for a in trip.arrives)) for t in range(len(expected))])
        found[name] = seen = {
            "y": _first_difference(expected, got),
            "dtype": y_TD.dtype == trip.y[me].dtype,
            "as: a token keeps only its last row": _equal(got, trip.home(me, trip.y, True)),
            "as: a mean over a token's rows, not their sum": got.shape == expected.shape
            and close(got * rows[:, None], expected, 2e-2),
            "as: the sums are divided by the number of ranks": close(got * len(ranks), expected, 2e-2),
            "kept": _row_bytes_kept(y_TD),
            "forward": forward,
            "sent": sum(route.received),
            "received": sum(route.sent),
        }
        dy_TD = trip.dy[me].clone()
        with roll.step(f"{name}: backward", ranks) as backward:
            y_TD.backward(dy_TD) if y_TD.requires_grad else None
        dy = trip.at(me, trip.dy)
        seen |= {
            "backward": backward,
            "dy": _first_difference(dy, y_MD.grad),
            "as: nothing is sent back": y_MD.grad is None or not bool(y_MD.grad.any()),
            "as: the gradients are divided by the number of ranks": y_MD.grad is not None
            and close(y_MD.grad * len(ranks), dy, 1e-2),
            "changed": not (_equal(y_MD.detach(), trip.y[me]) and _equal(dy_TD, trip.dy[me])),
        }
    return found


def _run_trip(observe, path, fn):
    """What the ranks saw, or a verdict on why they did not get that far."""
    try:
        return _run_with_roll_call(observe, {path: fn}), None
    except RankTimeout as timeout:
        return None, Verdict(False, "The ranks wait for each other.", "a deadlock", detail=str(timeout))
    except RankError as error:
        words = str(error)
        if "LeftOutError" in error.cause:
            return None, _left_out(error, outwards=path == DISPATCH)
        if shape := re.search(r"WrongShapeError: (\w+): (.*)", error.cause):
            if shape[1] == "pair":
                return None, wrong(*IN_A_PAIR)
            return None, wrong(
                f"{SETTINGS[shape[1]]}On rank {error.rank}, {shape[2]}.", "rows are missing, or too many"
            )
        counts = re.search(r"all_to_all over (\d+) ranks: send_counts=\[(.*?)\]", words)
        if (counts and len(counts[2].split(",")) != int(counts[1])) or "splits not equal to group size" in words:
            return None, wrong(*IN_A_PAIR)
        if "send_counts must add up" in words or "Split sizes" in words or "must match the size" in words:
            back = "backward" in error.remote_traceback.split("site-packages")[-1]
            where = "In backward" if back else "In forward"
            name = "in backward the counts do not change places" if back else "sent and received counts are mixed up"
            return None, wrong(f"{where}, the counts do not fit the rows.", name)
        raise


def _left_out(error, outwards):
    """The verdict on a rank that stayed away.  `outwards`: forward goes from tokens to experts, backward home."""
    setting, way = re.search(r"LeftOutError: (\w+): (\w+)", error.cause).groups()
    has = {
        "unwanted": "receive" if outwards == (way == "forward") else "send",
        "neither": "send or receive",
    }.get(setting, "send" if outwards == (way == "forward") else "receive")
    where = "in backward, " if way == "backward" else ""
    words = f"In {way}, rank {error.rank} makes no collective, and the others wait for it for ever."
    return wrong(words, f"{where}a rank with nothing to {has} stays away")


def _known(seen, setting, keys):
    """The misconception among `keys` that matches on every rank of a setting."""
    return next((key.removeprefix("as: ") for key in keys if all(s[setting][key] for s in seen)), None)


def _spoiled(every, lead):
    """A verdict on ranks that changed what they were handed, or that answer in another type; None if neither."""
    if any(s["changed"] for s in every):
        return wrong(f"{lead}What was handed over has changed.", "it overwrites its input")
    if not all(s["dtype"] for s in every):
        return wrong(f"{lead}The result has another dtype than the rows.", "another dtype than the caller's")
    return None


def _keeps_rows(seen):
    """A verdict on rows that are kept for backward; None if there are none."""
    kept = [(f"bytes of rows kept on rank {rank}", 0, s["world"]["kept"]) for rank, s in enumerate(seen)]
    if not any(n_bytes for _, _, n_bytes in kept):
        return None
    summary = "The numbers are right, but backward needs no row of forward, only where they went."
    return wrong(summary, "rows are kept for backward", kept)


def _traffic(seen, columns, back_columns):
    """A verdict on traffic that is not one all-to-all of the right bytes each way; None where it is."""
    for setting, itemsize in (("world", 8), ("bf16", 2)):
        for way, rows, width in (("forward", "sent", columns), ("backward", "received", back_columns)):
            for rank, s in enumerate(s[setting] for s in seen):
                calls = s[way]
                if not all(call.our_door for call in calls):
                    return wrong(*PAST_THE_DOOR)
                ops, n_bytes = [call.op for call in calls], sum(call.payload_bytes for call in calls)
                asked = s[rows] * width * itemsize
                if ops == ["all_to_all"] and n_bytes == asked:
                    continue
                name = None
                if ops == ["all_to_all"] and n_bytes in (2 * asked, 4 * asked):
                    name = "rows travel in a wider type"
                elif ops == ["all_to_all"] and n_bytes * 8 in (4 * asked, 2 * asked, asked):
                    name = "rows travel in a narrower type"
                elif ops == ["all_to_all"] * len(ops) and len(ops) > 1:
                    name = "a message for every part of a row"
                elif set(ops) & {"all_reduce", "reduce_scatter"}:
                    name = "whole tensors are summed over the ranks"
                elif "all_gather" in ops:
                    name = "an all-gather: every rank gets every token"
                rows_ = [(f"{way} on rank {rank}", (["all_to_all"], asked), (ops, n_bytes))]
                return wrong("The numbers are right, but not what travels (bytes).", name, rows_)
    return None


def grade_dispatch(fn) -> Verdict:
    """Four ranks with 4, 3, 0 and 6 tokens, three experts of eight each, some nowhere; and the other SETTINGS."""
    seen, verdict = _run_trip(_observe_dispatch, DISPATCH, fn)
    if seen is None:
        return verdict
    for setting, lead in SETTINGS.items():
        every = [s[setting] for s in seen]
        if verdict := _spoiled(every, lead):
            return verdict
        known = {
            "expert numbers": ["as: experts are numbered as in the whole model"],
            "weights": ["as: weights of experts that live elsewhere travel too"],
        }
        for what in ("tokens", "expert numbers", "weights"):
            if rows := _difference_rows(what, [s[what] for s in every]):
                if setting == "pair":
                    return wrong(*IN_A_PAIR, rows)
                name = _known(seen, setting, known.get(what, []))
                return wrong(f"{lead}These are not the {what} that should arrive.", name, rows)
        if rows := _difference_rows("gradients", [s["dx"] for s in every]):
            name = _known(seen, setting, [k for k in every[0] if k.startswith("as: ") and "gradient" in k])
            return wrong(f"{lead}The gradient of the tokens is not right.", name, rows)
        if rows := _difference_rows("gradients", [s["dweight"] for s in every]):
            none = all(s["no dweight"] for s in every)
            name = "the weights get no gradient: the router cannot learn" if none else None
            return wrong(f"{lead}The gradient of the weights is not right.", name, rows)
    if verdict := _keeps_rows(seen) or _traffic(seen, D + 2 * K, D + K):
        return verdict
    s = seen[0]["world"]
    return ok(
        "Tokens arrive and their gradients come home, each by one all-to-all.",
        [("rows from rank 0", s["sent"], s["sent"])],
    )


def grade_combine(fn) -> Verdict:
    """The way back of the same rows: sums at home, exact, in all SETTINGS; and what travels."""
    seen, verdict = _run_trip(_observe_combine, COMBINE, fn)
    if seen is None:
        return verdict
    for setting, lead in SETTINGS.items():
        every = [s[setting] for s in seen]
        if verdict := _spoiled(every, lead):
            return verdict
        if rows := _difference_rows("sums", [s["y"] for s in every]):
            if setting == "pair":
                return wrong(*IN_A_PAIR, rows)
            keys = [k for k in every[0] if k.startswith("as: ") and "gradient" not in k and "back" not in k]
            return wrong(f"{lead}These are not the sums of what came home.", _known(seen, setting, keys), rows)
        if rows := _difference_rows("gradients", [s["dy"] for s in every]):
            keys = ["as: nothing is sent back", "as: the gradients are divided by the number of ranks"]
            return wrong(f"{lead}The gradient is not right.", _known(seen, setting, keys), rows)
    verdict = _keeps_rows(seen) or _traffic(seen, D, D)
    return verdict or ok("Sums at home, and gradients out again, each by one all-to-all.")


# --- 8.5 copies of busy experts -------------------------------------------------------------------------------


def _greedy(load_E, n_places, most, worth, pick=max):
    copies = [1] * len(load_E)
    for _ in range(n_places - len(load_E)):
        free = [e for e in range(len(load_E)) if copies[e] < most]
        copies[pick(free, key=lambda e: worth(load_E[e], copies[e]))] += 1
    return copies


def _true_copies(load_E, n_places, n_ranks):
    return _greedy(load_E, n_places, n_ranks, lambda load, c: load / c)


def _whole_numbers(numbers):
    """A list of ints; None if they are something else."""
    try:
        return [operator.index(x) for x in numbers]
    except TypeError:
        return None


def grade_copies_for(fn) -> Verdict:
    """Loads with one, two and no busy experts, with ties, zeros and fractions; and places too few, full or too many."""
    known = {
        "the busiest expert gets every spare place": lambda load, n, r: _greedy(load, n, r, lambda x, c: x),
        "loads count as if one copy more were there: x / (c + 1)": lambda load, n, r: _greedy(
            load, n, r, lambda x, c: x / (c + 1)
        ),
        "more copies than ranks": lambda load, n, r: _greedy(load, n, n, lambda x, c: x / c),
        "the idlest experts are copied": lambda load, n, r: _greedy(load, n, r, lambda x, c: x / c, min),
        "one more for each of the busiest, and no third copy": lambda load, n, r: _greedy(
            load, n, r, lambda x, c: (c == 1, x)
        ),
        "spare places are dealt out in order": lambda load, n, r: _greedy(load, n, r, lambda x, c: -c),
        "loads are divided without remainder": lambda load, n, r: _greedy(load, n, r, lambda x, c: x // c),
        "loads are cut to whole numbers": lambda load, n, r: _greedy(load, n, r, lambda x, c: int(x) / c),
        "of equal ones the one with the fewest copies is taken": lambda load, n, r: _greedy(
            load, n, r, lambda x, c: (x / c, -c)
        ),
        "of equal ones the one with the highest load is taken": lambda load, n, r: _greedy(
            load, n, r, lambda x, c: (x / c, x)
        ),
        "of equal ones the last is taken": lambda load, n, r: _greedy_last(load, n, r),
        "shares of the load are rounded, and do not add up": lambda load, n, r: [
            max(1, round(n * x / sum(load))) for x in load
        ],
        "copies beyond the first, not all copies": lambda load, n, r: [c - 1 for c in _true_copies(load, n, r)],
    }
    cases: list[tuple[list[float], int, int]] = [
        ([10, 6, 5, 1], 8, 4),
        ([3, 3, 3, 3], 6, 2),
        ([40, 1, 1, 0], 8, 4),
        ([100, 55, 55, 9, 8, 1], 12, 4),
        ([0, 7, 0], 4, 2),
        ([2, 9], 2, 2),
        ([3, 7], 4, 3),
        ([4, 2], 4, 3),
        ([2, 4], 4, 3),
        ([0.6, 0.9], 3, 2),
    ]
    asked = [_true_copies(*case) for case in cases]
    given = [(list(load), n, r) for load, n, r in cases]
    returned = [fn(*case) for case in given]
    if [case[0] for case in given] != [case[0] for case in cases]:
        return wrong("The caller's loads have changed.", "it uses up its input")
    got = [_whole_numbers(g) for g in returned]
    if odd := [
        (f"loads {case[0]}", e, repr(r)) for case, e, g, r in zip(cases, asked, got, returned, strict=True) if g is None
    ]:
        return wrong("It should return a list of E whole numbers.", "not whole numbers", odd[:1])
    rows = [
        (f"loads {load}, {n} places on {r} ranks", e, g)
        for (load, n, r), e, g in zip(cases, asked, got, strict=True)
        if e != g
    ]
    if rows:
        name = next((name for name, f in known.items() if got == [f(*case) for case in cases]), None)
        return wrong("These are not the copies whose heaviest is the lightest.", name, rows[:4])
    try:
        full = _whole_numbers(fn([3, 5], 6, 3))
    except ValueError as error:
        words = f"2 experts on 3 ranks can fill 6 places, but it raised ValueError: {error}"
        return wrong(words, "exactly E·R places are refused")
    if full != [3, 3]:
        return wrong("These are not the copies that fill E·R places.", None, [("6 places, 3 ranks", [3, 3], full)])
    for n_places in (3, 9):
        try:
            fn([1, 1, 1, 1], n_places, 2)
        except ValueError:
            continue
        except Exception as error:
            words = f"4 experts on 2 ranks cannot fill {n_places} places: raise ValueError, not {type(error).__name__}."
            return wrong(words, "impossible numbers of places end in another error")
        words = f"4 experts on 2 ranks cannot fill {n_places} places: raise ValueError."
        return wrong(words, "impossible numbers of places are accepted")
    load, n_places, _ = cases[3]
    heaviest = max(x / c for x, c in zip(load, got[3], strict=True))
    best = max(x / c for x, c in zip(load, asked[3], strict=True))
    return ok("The heaviest copy is as light as can be.", [(f"loads {load}, {n_places} places", best, heaviest)])


def _greedy_last(load_E, n_places, most):
    copies = [1] * len(load_E)
    for _ in range(n_places - len(load_E)):
        free = [e for e in reversed(range(len(load_E))) if copies[e] < most]
        copies[max(free, key=lambda e: load_E[e] / copies[e])] += 1
    return copies


# --- 8.6 packing ----------------------------------------------------------------------------------------------


def grade_pack(fn) -> Verdict:
    """Any packing passes that fills equal places, holds no expert twice on a rank, and is as even as longest-first."""
    cases: list[tuple[list[float], list[int], int]] = [
        ([9, 8, 2, 1, 7, 6, 4, 3], [1] * 8, 4),
        ([1, 1, 9, 9, 1, 1, 1, 1], [1] * 8, 2),
        ([12, 1, 1, 1, 1], [4, 1, 1, 1, 1], 4),
        ([40, 22, 20, 9, 8, 7, 3, 2], [3, 2, 2, 1, 1, 1, 1, 1], 4),
        ([12, 10, 9, 5, 4], [2, 1, 1, 1, 1], 3),
        ([20, 1, 1, 1], [1] * 4, 2),
        ([2, 3, 3, 1], [1, 2, 2, 1], 3),
        ([1, 2, 3, 2], [1, 2, 2, 1], 3),
        ([0.4, 0.8, 0.6, 0.2], [1] * 4, 2),
    ]
    given = [(list(load), list(copies), n) for load, copies, n in cases]
    got = [fn(*case) for case in given]
    if [case[:2] for case in given] != [(load, copies) for load, copies, _ in cases]:
        return wrong("The caller's lists have changed.", "it uses up its input")
    for case, packed in zip(cases, got, strict=True):
        if verdict := _not_allowed(*case, packed):
            return verdict
    if verdict := _at_the_limits(fn):
        return verdict
    busiest = [max(placement.rank_loads(case[0], g)) for case, g in zip(cases, got, strict=True)]
    asked = [max(placement.rank_loads(case[0], _true_pack(*case))) for case in cases]
    busier = [
        (f"loads {case[0]}: the busiest rank", e, g)
        for case, e, g in zip(cases, asked, busiest, strict=True)
        if g > e * (1 + 1e-9)
    ]
    if busier:
        known = {
            "the lightest are placed first": lambda load, copies, n: _true_pack(
                load, copies, n, key=lambda e: load[e] / copies[e]
            ),
            "experts are placed in the order of their numbers": lambda load, copies, n: _true_pack(
                load, copies, n, key=lambda e: e
            ),
            "the order goes by whole loads, not by a copy's share": lambda load, copies, n: _true_pack(
                load, copies, n, key=lambda e: -load[e]
            ),
            "a copy counts for the expert's whole load": lambda load, copies, n: _true_pack(
                load, copies, n, share_of=lambda x, c: x
            ),
            "a copy's share is cut to a whole number": lambda load, copies, n: _true_pack(
                load, copies, n, share_of=lambda x, c: x // c
            ),
            "loads are cut to whole numbers": lambda load, copies, n: _true_pack(
                load, copies, n, share_of=lambda x, c: int(x) / c
            ),
            "they are dealt out in turn, whatever a rank has already": lambda load, copies, n: _true_pack(
                load, copies, n, blind=True
            ),
        }
        as_sets = [[sorted(held) for held in g] for g in got]

        def same(f):
            made = [[sorted(held) for held in f(*case)] for case in cases]
            return made == as_sets

        name = next((name for name, f in known.items() if same(f)), None)
        return wrong("Allowed, but the busiest rank has more to do than it must.", name, busier[:4])
    return ok("Equal places, no expert twice on a rank, and even loads.", [("busiest ranks", asked, busiest)])


def _not_allowed(load, copies, n, packed):
    """A verdict on a packing that breaks a rule; None for one that may be."""
    label = f"loads {load}, copies {copies}, {n} ranks"
    try:
        expert_RS = [_whole_numbers(held) for held in packed]
    except TypeError:
        expert_RS = [None]
    if None in expert_RS:
        words = "It should return R lists of expert numbers."
        return wrong(words, "not lists of expert numbers", [(label, f"{n} lists", packed)])
    places = [len(held) for held in expert_RS]
    if len(places) != n or sum(places) != sum(copies) or len(set(places)) > 1:
        name = "ranks have unequal numbers of places" if sum(places) == sum(copies) and len(places) == n else None
        return wrong("Every rank needs the same number of places.", name, [(label, [sum(copies) // n] * n, places)])
    counts = Counter(e for held in expert_RS for e in held)
    if [counts[e] for e in range(len(load))] != copies:
        held = [counts[e] for e in range(len(load))]
        return wrong("An expert has not as many copies as it should.", "copies are lost", [(label, copies, held)])
    for e in range(len(load)):
        on_each = [held.count(e) for held in expert_RS]
        if max(on_each) > 1 and min(on_each) == 0:
            rows = [(f"{label}: expert {e} on each rank", "once at most", on_each)]
            return wrong("Two copies on one rank share nothing.", "a rank holds an expert twice", rows)
    return None


def _at_the_limits(fn):
    """A verdict on what happens with more copies than ranks, or with places that the ranks cannot share."""
    load, copies, n = [6, 1], [3, 1], 2
    last_resort = "an expert with more copies than ranks finds no place"
    try:
        packed = fn(list(load), list(copies), n)
    except (ValueError, IndexError) as error:
        words = f"Expert 0 has 3 copies on 2 ranks, so one of them must hold two; it raised {type(error).__name__}."
        return wrong(words, last_resort, [(f"loads {load}, copies {copies}", [[0, 0], [0, 1]], str(error))])
    if verdict := _not_allowed(load, copies, n, packed):
        verdict.misconception = last_resort
        return verdict
    try:
        packed = fn([3, 2, 1], [1, 1, 1], 2)
    except ValueError:
        return None
    except Exception as error:
        packed = type(error).__name__
    words = "2 ranks cannot share 3 places equally: raise ValueError."
    rows = [("loads [3, 2, 1], copies [1, 1, 1], 2 ranks", "ValueError", packed)]
    return wrong(words, "places that the ranks cannot share equally are accepted", rows)


def _true_pack(load_E, copies_E, n_ranks, key=None, share_of=lambda load, copies: load / copies, blind=False):
    share = [share_of(x, c) for x, c in zip(load_E, copies_E, strict=True)]
    held, loads, places = [[] for _ in range(n_ranks)], [0.0] * n_ranks, sum(copies_E) // n_ranks
    for e in sorted(range(len(load_E)), key=key or (lambda e: -share[e])):
        for _ in range(copies_E[e]):
            free = [r for r in range(n_ranks) if len(held[r]) < places and e not in held[r]]
            free = free or [r for r in range(n_ranks) if len(held[r]) < places]
            r = min(free, key=lambda r: len(held[r]) if blind else loads[r])
            held[r].append(e)
            loads[r] += share[e]
    return held


# --- 8.7 turns ------------------------------------------------------------------------------------------------


def _true_share(index_TK, expert_P, rank, turn_of=lambda turn, rank, **_: turn + rank):
    """By the rules; `turn_of` may bend them: it sees a visit's number, its token's, and its place when sorted."""
    P, flat = len(expert_P), index_TK.flatten().tolist()
    where = {e: [p for p in range(P) if expert_P[p] == e] for e in set(expert_P.tolist())}
    position = {v: i for i, v in enumerate(sorted(range(len(flat)), key=flat.__getitem__))}
    seen, out = Counter(), []
    for v, e in enumerate(flat):
        turn = turn_of(turn=seen[e], rank=rank, visit=v, token=v // index_TK.shape[1], position=position[v])
        out.append(where[e][turn % len(where[e])] if e in where else P)
        seen[e] += 1
    return torch.tensor(out, dtype=torch.long).view_as(index_TK)


def grade_share_visits(fn) -> Verdict:
    """Three copies of one expert, two of another; visits to nowhere; four ranks with one visit each; no tokens."""

    def by(turn_of):
        return lambda index, places, rank: _true_share(index, places, rank, turn_of)

    known = {
        "all visits go to the first copy": by(lambda **_: 0),
        "a rank sends all its visits to one copy": by(lambda rank, **_: rank),
        "every rank begins with the first copy": by(lambda turn, **_: turn),
        "turns go by the number of the visit, whosever it is": by(lambda visit, rank, **_: visit + rank),
        "turns go by the number of the token": by(lambda token, rank, **_: token + rank),
        "turns go on from expert to expert": by(lambda position, rank, **_: position + rank),
        "visits to nowhere get a place": lambda index, places, rank: _true_share(index, places, rank).clamp(
            max=len(places) - 1
        ),
    }
    expert_P = torch.tensor([2, 0, 2, 1, 2, 0, 3, 1])
    index = torch.tensor([[2, 0], [2, 1], [0, 2], [2, 0], [0, 2], [3, 4], [2, 0], [1, 2]])
    cases = [(index, expert_P, 0), (index, expert_P, 3)]
    cases += [(torch.tensor([[2, 3]]), expert_P, rank) for rank in range(R)] + [(index[:0], expert_P, 1)]
    asked = [_true_share(*case) for case in cases]
    given = [(i.clone(), p.clone(), r) for i, p, r in cases]
    got = [fn(*case) for case in given]
    if any(not (torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])) for a, b in zip(given, cases, strict=True)):
        return wrong("The caller's tensors have changed.", "it overwrites its input")
    kinds = [
        (f"visits {case[0].tolist()}", f"torch.int64 {tuple(e.shape)}", f"{_kind(g)} {tuple(getattr(g, 'shape', ()))}")
        for case, e, g in zip(cases, asked, got, strict=True)
    ]
    if odd := [row for row in kinds if row[1] != row[2]]:
        name = "places are not int64" if "torch.int64" not in odd[0][2] else None
        return wrong("Places are int64, of the shape of the visits.", name, odd[:1])
    if all(torch.equal(g, e) for g, e in zip(got, asked, strict=True)):
        counts = got[0].flatten().bincount(minlength=len(expert_P) + 1)[: len(expert_P)].tolist()
        return ok("Copies take turns, and ranks begin at different ones.", [("visits of each place", counts, counts)])
    rows = []
    for (i, _, r), e, g in zip(cases, asked, got, strict=True):
        if bool((g != e).any()):
            first = int((g != e).flatten().nonzero()[0])
            label = f"rank {r}, visits {i.flatten()[: first + 1].tolist()}: place of the last"
            rows.append((label, int(e.flatten()[first]), int(g.flatten()[first])))
    held = torch.cat([expert_P, torch.tensor([4])])
    wrong_expert = any(
        bool(((g < 0) | (g > len(expert_P))).any()) or not torch.equal(held[g], case[0])
        for g, case in zip(got, cases, strict=True)
    )
    name = next(
        (
            name
            for name, f in known.items()
            if f and all(torch.equal(g, f(*case)) for g, case in zip(got, cases, strict=True))
        ),
        "expert numbers are taken for places"
        if all(torch.equal(g, c[0]) for g, c in zip(got, cases, strict=True))
        else None,
    )
    words = "Some visits end at another expert." if wrong_expert else "The right experts, but not by turns."
    return wrong(f"{words} The places hold experts {expert_P.tolist()}.", name, rows[:3])


# --- what the chapter shows besides ---------------------------------------------------------------------------

SMALL = DeepSeekConfig.preset(
    "tiny",
    vocab_size=256,
    hidden_size=64,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    first_k_dense_replace=0,
    n_shared_experts=0,
    initializer_range=0.15,
)
SEQUENCES = 8  # of the global batch, whatever the number of ranks


def _my_ids(step):
    """This rank's share of a step's sequences, and all of them: walks of random steps round the vocabulary."""
    generator = torch.Generator().manual_seed(step)
    ids_BT = torch.randint(16, (SEQUENCES, 33), generator=generator).cumsum(-1) % SMALL.vocab_size
    return ids_BT.chunk(collectives.size_of())[collectives.rank_in()], ids_BT


def spread_gradients(model, n_ranks):
    """After backward of the mean loss of this rank's tokens: gradients of the mean over all ranks' tokens."""
    for name, parameter in model.named_parameters():
        if ".mlp.experts." not in name:  # each of these lives on one rank only
            collectives.all_reduce(parameter.grad)
        parameter.grad /= n_ranks


def suspect_gradients(model, n_ranks):
    """The puzzle 8-bug: the same, by a colleague."""
    for name, parameter in model.named_parameters():
        if ".mlp.experts." not in name:  # each of these lives on one rank only: there is nothing to average
            collectives.all_reduce(parameter.grad)
            parameter.grad /= n_ranks


def train_spread(finish, steps=20):
    """Train a small model with its experts over all ranks: each step's loss and gradient norm.

    `finish(model, n_ranks)` turns gradients of this rank's mean loss into those of the mean over all ranks.
    """
    n_ranks = collectives.size_of()
    model = DeepSeekModel(SMALL, seed=0)
    expert.apply_expert_parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0)
    losses, norms = [], []
    for step in range(steps):
        ids, _ = _my_ids(step)
        loss_sum, n_tokens = model.loss_sum(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        (loss_sum / n_tokens).backward()
        finish(model, n_ranks)
        norms.append(gradient_norm(model).item())
        optimizer.step()
        losses.append(collectives.all_reduce((loss_sum / n_tokens).detach() / n_ranks).item())
    return losses, norms


def gradient_norm(model):
    """The norm of all gradients, each number once: experts' squares are added over the ranks."""
    mine = sum(p.grad.square().sum() for name, p in model.named_parameters() if ".mlp.experts." in name)
    shared = sum(p.grad.square().sum() for name, p in model.named_parameters() if ".mlp.experts." not in name)
    return (collectives.all_reduce(mine.clone()) + shared).sqrt()


def compare_with_serial(finish):
    """For one step, on this rank, by parameter: the norm of its gradient over that of one process with all tokens."""
    rank, n_ranks = collectives.rank_in(), collectives.size_of()
    my_ids, all_ids = _my_ids(0)
    serial, ours = (DeepSeekModel(SMALL, seed=0).double() for _ in range(2))
    expert.apply_expert_parallel(ours)
    for model, ids in ((serial, all_ids), (ours, my_ids)):
        loss_sum, n_tokens = model.loss_sum(ids[:, :-1], ids[:, 1:])
        (loss_sum / n_tokens).backward()
    finish(ours, n_ranks)
    ratios = {}
    for name, parameter in serial.named_parameters():
        grad = parameter.grad.chunk(n_ranks)[rank] if ".mlp.experts." in name else parameter.grad
        ratios[name] = (ours.get_parameter(name).grad.norm() / grad.norm()).item()
    return ratios


class CarefulExperts(expert.ExpertParallel):
    """The puzzle 8-hang: a rank without tokens saves itself the work."""

    def forward(self, x_TD, weight_TK, index_TK, counts_E):
        if counts_E.sum() == 0:
            return torch.zeros_like(x_TD)
        return super().forward(x_TD, weight_TK, index_TK, counts_E)


def read_spread(model, ids_RBT, placements=None):
    """Read text on all ranks with the experts of `model` spread, and placed if `placements` has one for each layer.

    Returns:
        loss: mean over the tokens of all ranks.
        visits_LE: visits of each expert in each layer, of the tokens of all ranks.
        worked_L: visits that this rank's experts had in each layer.
        trace: what was sent meanwhile, by our own messages.
    """
    rank = collectives.rank_in()
    collectives.set_algorithm("ring")
    expert.apply_expert_parallel(model)
    layers = [module for module in model.modules() if isinstance(module, expert.ExpertParallel)]
    for layer, expert_RS in zip(layers, placements or [], strict=bool(placements)):
        expert.place_experts(layer, expert_RS)
    worked_L, visits_LE, work = [], [], moe.Experts.forward

    def watched(self, x, weight, index, counts):
        worked_L.append(int(counts.sum()))
        return work(self, x, weight, index, counts)

    moe.Experts.forward = watched
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, arguments: visits_LE.append(arguments[3]))
    ids = ids_RBT[rank]
    with torch.no_grad(), collectives.record() as trace:
        loss_sum, n_tokens = model.loss_sum(ids[:, :-1], ids[:, 1:])
    loss = collectives.all_reduce(loss_sum / n_tokens) / collectives.size_of()
    return loss.item(), collectives.all_reduce(torch.stack(visits_LE)), worked_L, trace


def dispatched(trace, layer):
    """The part of a trace of `read_spread` in which `layer` sends tokens out: each sends counts, tokens, results."""
    groups, group = [], []
    for event in trace.events:
        group.append(event)
        if event.within is None:
            groups.append(group)
            group = []
    return collectives.Trace(groups[3 * layer + 1])


HINTS = {
    "8-hang": (
        "Who is waiting, and in what? Which rank is missing there, and what did it have to do?",
        "An all-to-all is complete when *all* ranks of the group have come. Rank 3 had no tokens to send. Might it "
        "have had some to receive?",
        "Rank 3 returns early, because it has no tokens; but it holds experts, and the others may have tokens for "
        "them. Whether any come it learns only from the counts, which are a collective themselves. And where it stays "
        "away from a later one, because nothing is to come or go, its peers still wait for it. So the mend would hang "
        "as well. Leave no collective out: send zero rows.",
    ),
    "8-bug": (
        "The batch is the same on 1, 2 and 4 ranks. Then so must be its gradient, and the norm of it. Of which "
        "parameters is the gradient wrong?",
        "Compare with one process: `run_ranks(compare_with_serial, 4, suspect_gradients)[0]` gives, for every "
        "parameter, the norm of its gradient divided by that of the serial run.",
        "Expert gradients are exactly 4 times too large, for 4 ranks. True, there is nothing to average. But each "
        "rank's loss is a mean over its *own* tokens, a quarter of all, and an expert adds up the gradients of four "
        "such means. Divide by the number of ranks; or better, divide each loss by the global number of tokens, and "
        "only add. AdamW divides every gradient by its own size, so it hides any factor that stays the same.",
    ),
}

TITLE = "Expert parallelism"

EXERCISES = (
    Exercise(
        number="8.1",
        path=TOKENS,
        title="Which tokens go where",
        grade=grade_tokens_for_ranks,
        minutes=15,
        hints=(
            "Make a table of booleans first: does token t go to rank r? Then read it off, rank after rank.",
            "Expert e lives on rank `e // here`; for nowhere that is `n_ranks`, which is nobody. Compare `index_TK // "
            "here` with every rank number, by broadcasting, and use `any` over a token's experts.",
            "With `goes_RT` of shape (R, T), `goes_RT.nonzero()` lists (rank, token) in just the right order, and "
            "`goes_RT.sum(dim=1)` counts.",
        ),
    ),
    Exercise(
        number="8.2",
        path=COUNTS,
        title="Counts first",
        grade=grade_exchange_counts,
        level="warm-up",
        minutes=5,
        hints=(
            "Number d of `sent_R` is for rank d. A collective that sends each rank its own row is an all-to-all.",
            "`collectives.all_to_all(x, send_counts, recv_counts, group)`: here one number goes to each rank, and one "
            "comes from each.",
        ),
    ),
    Exercise(
        number="8.3",
        path=DISPATCH,
        title="Dispatch",
        grade=grade_dispatch,
        minutes=25,
        hints=(
            "Forward: gather rows by `route.token_n`, put x, weights and expert numbers side by side with `torch.cat`, "
            "send, and split again. Keep `route` on `ctx`; nothing else is needed.",
            "`route.local_numbers(index_TK)` is (n, K), with number `route.here` for experts that live elsewhere. "
            "Their weights are set to zero.",
            "Backward is the way home: the same all-to-all with `route.received` and `route.sent` in each other's "
            "place, then `route.add_up`, since a token that went to three ranks has three rows of gradient. Return "
            "one gradient for each argument of forward, None for `index_TK` and `route`.",
        ),
    ),
    Exercise(
        number="8.4",
        path=COMBINE,
        title="Combine",
        grade=grade_combine,
        minutes=10,
        hints=(
            "It is the backward of Dispatch, with D columns and no weights: they were applied where the experts are.",
            "Backward: y of a token is the *sum* of its rows, so each row's gradient is dy of its token: "
            "`dy_TD[route.token_n]`, dispatched.",
        ),
    ),
    Exercise(
        number="8.5",
        path=COPIES,
        title="Copies of the busy ones",
        grade=grade_copies_for,
        minutes=15,
        hints=(
            "Everybody has one copy. Deal out the spare places one at a time: who needs the next one most?",
            "The expert with the highest `load / copies`, among those with fewer than `n_ranks` copies. `max` takes "
            "the first of equal ones.",
        ),
    ),
    Exercise(
        number="8.6",
        path=PACK,
        title="Even packing",
        grade=grade_pack,
        minutes=20,
        hints=(
            "Pack a van: large things first. What is the load of one copy?",
            "Keep the load of every rank so far. For each copy, among ranks that have a free place and do not hold "
            "this expert, take the one with the least.",
            "`sorted(range(E), key=lambda e: -share_E[e])`, and for each of its copies `min(..., key=lambda r: "
            "load_R[r])`. If no rank is left without that expert, any free place will do.",
        ),
    ),
    Exercise(
        number="8.7",
        path=SHARE,
        title="Turns",
        grade=grade_share_visits,
        level="stretch",
        minutes=20,
        hints=(
            "For every visit you need three things: how many visits of the same expert came before it, how many copies "
            "that expert has, and where its copies are.",
            "A stable sort of the visits by expert puts those of one expert next to each other: its place in the "
            "sorted list, minus where its expert begins, is its turn. A stable sort of `expert_P` lists the places of "
            "expert 0, then those of expert 1, and so on.",
            "place = places[first[e] + (turn + rank) % copies[e]], where `first` is a cumulative sum of `copies`. "
            "Nowhere needs no special case if you append it to `expert_P` as one more expert with one place.",
        ),
    ),
)
