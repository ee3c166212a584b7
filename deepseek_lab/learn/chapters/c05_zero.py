"""Chapter 05: ZeRO, and what every rank holds.

The graders count bytes as well as numbers: code that shards nothing gives the right numbers, too.
"""

import gc
import math
import time

import torch
import torch.distributed as dist

from deepseek_lab.learn.exercises import Exercise
from deepseek_lab.learn.ranks import RankError, RankTimeout, run_ranks
from deepseek_lab.learn.verdict import Verdict, close, ok, wrong
from deepseek_lab.learn.wiretap import wiretap
from deepseek_lab.parallel import collectives, zero

R = 4
LIMIT_S = 8.0
ZERO = "deepseek_lab.parallel.zero"
BYTES, RANGE, CUT = "deepseek_lab.plan.memory.zero_state_bytes", f"{ZERO}.shard_range", f"{ZERO}.cut"
REDUCE, GATHERED, NORM = f"{ZERO}.start_reduction", f"{ZERO}.GatheredWeights", f"{ZERO}.global_grad_norm"

# --- 5.1 bytes of state ---------------------------------------------------------------------------------------


def _true_bytes(n, R, stage, p, g, o):
    share = math.ceil(n / R)
    return {
        "parameters": p * (share if stage >= 3 else n),
        "gradients": g * (share if stage >= 2 else n),
        "optimizer": o * (share if stage >= 1 else n),
    }


def grade_zero_state_bytes(fn) -> Verdict:
    """All stages at 1,000,003 parameters on 8 ranks, then stage 3 on one rank, then a stage that does not exist."""

    def as_if(stage):
        """The same formula, for somebody who takes `stage` for another."""
        return lambda n, R, s, p, g, o: _true_bytes(n, R, stage(s), p, g, o)

    known = {
        "each stage shards one kind only": lambda n, R, s, p, g, o: {
            k: v if {"optimizer": 1, "gradients": 2, "parameters": 3}[k] == s else full
            for (k, v), full in zip(_true_bytes(n, R, s, p, g, o).items(), (p * n, g * n, o * n), strict=True)
        },
        "2 + 2 + 12 bytes are built in": lambda n, R, s, p, g, o: _true_bytes(n, R, s, 2, 2, 12),
        "stage 1 shards what stage 2 does": as_if(lambda s: 2 if s == 1 else s),
        "gradients wait for stage 3": as_if(lambda s: 1 if s == 2 else s),
        "parameters are sharded from stage 2 on": as_if(lambda s: 3 if s == 2 else s),
        "stages are counted from zero: stage 1 shards nothing": as_if(lambda s: max(s - 1, 0)),
        "every stage divides everything": as_if(lambda s: 3 if s else 0),
        "the padding is forgotten: shares are rounded down": lambda n, R, s, p, g, o: {
            k: v if v == full else b * (n // R)
            for (k, v), full, b in zip(
                _true_bytes(n, R, s, p, g, o).items(), (p * n, g * n, o * n), (p, g, o), strict=True
            )
        },
        "shares are not rounded to whole numbers": lambda n, R, s, p, g, o: {
            k: v if v == full else full / R
            for (k, v), full in zip(_true_bytes(n, R, s, p, g, o).items(), (p * n, g * n, o * n), strict=True)
        },
        "bytes are rounded up, not numbers": lambda n, R, s, p, g, o: {
            k: v if v == full else math.ceil(full / R)
            for (k, v), full in zip(_true_bytes(n, R, s, p, g, o).items(), (p * n, g * n, o * n), strict=True)
        },
    }
    cases = [(1_000_003, 8, stage, 2, 2, 12) for stage in range(4)] + [(1_000_003, 8, 3, 4, 4, 8), (77, 1, 3, 2, 2, 12)]
    asked = [_true_bytes(*case) for case in cases]
    got = [fn(*case) for case in cases]
    rows = [
        (f"stage {case[2]}, {case[1]} rank{'s' * (case[1] > 1)}: {kind}", e[kind], g[kind])
        for case, e, g in zip(cases, asked, got, strict=True)
        for kind in e
        if isinstance(g, dict) and g.get(kind) != e[kind] and kind in g
    ]
    if not all(isinstance(g, dict) and g.keys() == asked[0].keys() for g in got):
        return wrong("It should return a dictionary like this one.", None, [("stage 0", asked[0], got[0])])
    if got != asked:
        name = next((name for name, f in known.items() if got == [f(*case) for case in cases]), None)
        return wrong("These are not the bytes of one rank.", name, rows[:6])
    for stage in (4, -1):
        try:
            fn(10, 2, stage, 2, 2, 12)
        except ValueError:
            continue
        return wrong(f"Stage {stage} does not exist: raise ValueError.", "a stage that does not exist is accepted")
    per = {stage: sum(_true_bytes(10**6, 8, stage, 2, 2, 12).values()) / 10**6 for stage in range(4)}
    return ok(
        "Right at every stage, padding included.",
        [(f"stage {s}, bytes per parameter on 8 ranks", v, v) for s, v in per.items()],
    )


# --- 5.2 equal shares -----------------------------------------------------------------------------------------


def grade_shard_range(fn) -> Verdict:
    """Sizes that four ranks divide, and sizes that they do not, down to fewer numbers than ranks."""
    known = {
        "rounded down: the last numbers belong to nobody": lambda n, r, k: (r * (n // k), (r + 1) * (n // k)),
        "the last share is shorter: collectives need equal ones": lambda n, r, k: (
            min(r * math.ceil(n / k), n),
            min((r + 1) * math.ceil(n / k), n),
        ),
        "shares differ by one: collectives need equal ones": lambda n, r, k: (n * r // k, n * (r + 1) // k),
        "the last rank takes the rest: collectives need equal shares": lambda n, r, k: (
            r * (n // k),
            n if r == k - 1 else (r + 1) * (n // k),
        ),
        "the first ranks take one more: collectives need equal shares": lambda n, r, k: (
            r * (n // k) + min(r, n % k),
            (r + 1) * (n // k) + min(r + 1, n % k),
        ),
        "every rank gets everything": lambda n, r, k: (0, n),
        "it returns start and length": lambda n, r, k: (r * math.ceil(n / k), math.ceil(n / k)),
        "the end is one too early: ranges stop before `stop`": lambda n, r, k: (
            r * math.ceil(n / k),
            (r + 1) * math.ceil(n / k) - 1,
        ),
        "one number of padding too many where the ranks divide the size": lambda n, r, k: (
            r * (n // k + 1),
            (r + 1) * (n // k + 1),
        ),
    }
    cases = [(numel, rank, 4) for numel in (1, 8, 10, 4097) for rank in range(4)] + [(7, 0, 1)]
    asked = [(r * math.ceil(n / k), (r + 1) * math.ceil(n / k)) for n, r, k in cases]
    got = [fn(*case) for case in cases]
    pairs = [tuple(g) if isinstance(g, (tuple, list)) and len(g) == 2 else g for g in got]
    rows = [(f"{n} numbers, rank {r} of {k}", e, g) for (n, r, k), e, g in zip(cases, asked, pairs, strict=True)]
    if pairs != asked:
        name = next((name for name, f in known.items() if pairs == [f(*case) for case in cases]), None)
        return wrong(
            "These are not equal shares that cover everything.", name, [row for row in rows if row[1] != row[2]][:6]
        )
    if not all(isinstance(x, int) for pair in pairs for x in pair):
        return wrong("The numbers are right, but places in a tensor are integers.", "floats, not integers", rows[:2])
    return ok("All shares are equal, and padding comes only at the end.", rows[8:12])


# --- 5.3 cutting through parameters ---------------------------------------------------------------------------


def _true_cut(numels, start, stop):
    offsets = [sum(numels[:i]) for i in range(len(numels))]
    parts = [(i, max(start - o, 0), min(stop - o, n)) for i, (o, n) in enumerate(zip(offsets, numels, strict=True))]
    return [part for part in parts if part[1] < part[2]]


def grade_cut(fn) -> Verdict:
    """Five parameters, one of them longer than two shares, in all shares of three and four ranks, padding included."""

    def whole(numels, start, stop):
        offsets = [sum(numels[:i]) for i in range(len(numels))]
        return [(i, 0, n) for i, (o, n) in enumerate(zip(offsets, numels, strict=True)) if start <= o < stop]

    def in_bucket(numels, start, stop):
        offsets = [sum(numels[:i]) for i in range(len(numels))]
        return [(i, a + offsets[i], b + offsets[i]) for i, a, b in _true_cut(numels, start, stop)]

    def in_share(numels, start, stop):
        return [(i, a - start, b - start) for i, a, b in in_bucket(numels, start, stop)]

    known = {
        "parameters are kept whole, with the rank that has their first number": whole,
        "places are counted from the start of the bucket, not of the parameter": in_bucket,
        "places are counted from the start of the share, not of the parameter": in_share,
        "the last number is named, not the one after it": lambda *a: [(i, x, y - 1) for i, x, y in _true_cut(*a)],
        "start and length, not start and end": lambda *a: [(i, x, y - x) for i, x, y in _true_cut(*a)],
        "parameters outside the share come as empty parts": lambda numels, start, stop: [
            next((p for p in _true_cut(numels, start, stop) if p[0] == i), (i, 0, 0)) for i in range(len(numels))
        ],
        "a parameter that lies across the whole share is missed": lambda numels, start, stop: [
            (i, x, y) for i, x, y in _true_cut(numels, start, stop) if x == 0 or y == numels[i]
        ],
        "parameters that only touch the share come as empty parts": lambda numels, start, stop: [
            (i, max(start - o, 0), min(stop - o, n))
            for i, (o, n) in enumerate(zip([sum(numels[:i]) for i in range(len(numels))], numels, strict=True))
            if max(start - o, 0) <= min(stop - o, n)
        ],
        "only parameters that begin in the share are seen": lambda numels, start, stop: [
            (i, x, y) for i, x, y in _true_cut(numels, start, stop) if x == 0
        ],
    }
    numels = [3, 1, 20, 6, 4]
    total = sum(numels)
    cases = [
        (numels, r * s, (r + 1) * s) for s in (math.ceil(total / k) for k in (3, 4, 8)) for r in range(total // s + 1)
    ]
    asked = [_true_cut(*case) for case in cases]
    given = [(list(n), a, b) for n, a, b in cases]
    returned = [fn(*case) for case in given]
    if not all(isinstance(parts, list) for parts in returned):
        return wrong("It should return a list of (i, first, last).", None, [("returned", [(0, 0, 3)], returned[0])])
    if any(case[0] != numels for case in given):
        return wrong("The caller's list of sizes has changed.", "it uses up its input")
    got = [[tuple(part) for part in parts] for parts in returned]
    rows = [(f"{a} to {b} of {numels}", e, g) for (_, a, b), e, g in zip(cases, asked, got, strict=True)]
    wrong_rows = [row for row in rows if row[1] != row[2]]
    if wrong_rows:

        def same(f):
            padded = [[tuple(p) for p in f(list(n), a, b)] for n, a, b in cases]
            return padded == got

        name = next((name for name, f in known.items() if same(f)), None)
        return wrong("These are not the parts of the parameters in that share.", name, wrong_rows[:4])
    return ok("Every number of every parameter is in one share, and padding in none.", rows[:3])


# --- 5.4 which collective -------------------------------------------------------------------------------------


def grade_start_reduction(fn) -> Verdict:
    """Rank r's gradient is 10^r times (1, 2, …, 8): a sum of four ranks is 1111 times that."""
    try:
        seen = run_ranks(_observe_reduction, R, timeout=LIMIT_S, overrides={REDUCE: fn})
    except RankTimeout as timeout:
        return Verdict(False, "The ranks wait for each other.", "a deadlock", detail=str(timeout))
    except RankError as error:
        if "'Tensor' object has no attribute 'wait'" in str(error) or "has no attribute 'wait'" in str(error):
            return wrong("It should return what can be waited for, a `Pending`.", "it does not return a Pending")
        raise
    whole = torch.arange(1.0, 9.0) * 1111
    for stage in range(4):
        asked = [whole if stage == 0 else whole.view(R, -1)[r] for r in range(R)]
        got = [s[stage]["result"] for s in seen]
        rows = [(f"stage {stage}, rank {r}", e, g) for r, (e, g) in enumerate(zip(asked, got, strict=True))]
        ops = [call.op for call in seen[0][stage]["calls"]]
        if not all(close(g, e) for e, g in zip(asked, got, strict=True)):
            name = None
            if all(close(g, whole / R) if stage == 0 else close(g, e / R) for e, g in zip(asked, got, strict=True)):
                name = "a mean, not a sum: the loss was divided by the tokens of all ranks already"
            elif stage and all(close(g, whole) for g in got):
                name = f"stage {stage} gets the whole sum on every rank: nothing is shared out"
            elif stage == 0 and all(close(g, e) for e, g in zip(whole.view(R, -1), got, strict=True)):
                name = "a share in stage 0, where every rank needs the whole sum"
            elif all(
                close(g.flatten(), s[stage]["mine"].flatten()[: g.numel()]) for g, s in zip(got, seen, strict=True)
            ):
                name = "nothing was added up"
            return wrong(f"In stage {stage} these are not the sums that a rank needs.", name, rows)
        wanted = ["reduce_scatter" if stage else "all_reduce"]
        if not all(call.our_door for s in seen for call in s[stage]["calls"]):
            return wrong("torch.distributed was called directly, where no meter sees it.", "it goes past our own door")
        if not ops:
            sent = [(f"started in stage {stage}", wanted, ops)]
            return wrong("Until somebody waits, nothing is sent.", "nothing is started", sent)
        if ops != wanted:
            name = "an all-reduce and a slice: right numbers, twice the traffic" if ops == ["all_reduce"] else None
            sent = [(f"stage {stage}", wanted, ops)]
            return wrong("The numbers are right, but this is not the one collective.", name, sent)
        sizes = [call.payload_bytes for call in seen[0][stage]["calls"]]
        if sizes != [32]:
            handed = [("bytes handed over, for a gradient of 32", [32], sizes)]
            return wrong("The numbers are right, but they travel in a wider type.", "more bytes than needed", handed)
        if stage and any(s[stage]["held"] > 8 for s in seen):
            kept = [(f"bytes behind the share, rank {r}", 8, s[stage]["held"]) for r, s in enumerate(seen)]
            summary = "The share is right, but the whole gradient stays alive behind it."
            return wrong(summary, "a view of the whole gradient", kept)
        if any(s[stage]["waited"] for s in seen):
            return wrong("Right, but it returns only when all is done.", "it waits: nothing can overlap with backward")
        if not all(s[stage]["pair_ok"] for s in seen):
            return wrong("Over the whole world it is right, in a group of two it is not.", "it ignores the group")
    return ok("An all-reduce in stage 0, a reduce-scatter of half its bytes in the others, and it returns at once.")


def _observe_reduction():
    rank = collectives.rank_in()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    found = []
    for stage in range(4):
        mine = torch.arange(1.0, 9.0) * 10.0**rank
        before = mine.clone()
        with wiretap() as calls, collectives.record() as completed:
            pending = zero.start_reduction(mine, stage, None)
        waited = bool(completed.events)  # an operation that was only started has not been recorded yet
        result = pending.wait()
        held = result.untyped_storage().nbytes()
        pair = zero.start_reduction(before.clone(), stage, pairs[rank % 2]).wait()
        pair_sum = torch.arange(1.0, 9.0) * (10.0 ** (rank % 2) + 10.0 ** (rank % 2 + 2))
        wanted = pair_sum if stage == 0 else pair_sum.view(2, -1)[rank // 2]
        found.append(
            {
                "result": result.clone(),
                "held": held,
                "mine": before,
                "calls": calls,
                "waited": waited,
                "pair_ok": close(pair, wanted),
            }
        )
    return found


# --- 5.5 weights that come and go -----------------------------------------------------------------------------


def grade_gathered_weights(fn) -> Verdict:
    """Four ranks in two groups, a bucket of 4,096 numbers each; a parameter is a view of it from the start."""
    try:
        seen = run_ranks(_observe_gathering, R, timeout=LIMIT_S, overrides={GATHERED: fn})
    except RankTimeout as timeout:
        return Verdict(False, "The ranks wait for each other.", "a deadlock", detail=str(timeout))
    except RankError as error:
        known = {
            "no attribute 'weights_P'": (
                "The bucket's memory should stay readable as `weights_P`.",
                "`weights_P` was renamed",
            ),
            "out of bounds for storage": (
                "`weights_P` and its memory do not agree in size.",
                "memory is counted in numbers, not in bytes",
            ),
        }
        for words, verdict in known.items():
            if words in str(error):
                return wrong(*verdict)
        raise
    for key, summary, name in GATHERING:
        if not all(s[key] for s in seen):
            return wrong(summary, name)
    if seen[0]["ops"] != ["all_gather"]:
        sent = [("sent", ["all_gather"], seen[0]["ops"])]
        return wrong("One all-gather is enough.", "more traffic than one all-gather", sent)
    return ok(
        "Weights come by one all-gather, are used where they are needed, and leave no memory behind.",
        [("bytes held while gathered, and after free()", (32768, 0), seen[0]["bytes"])],
    )


GATHERING = [  # in the order in which they are looked at
    (
        "there_at_first",
        "Right after it is made, the memory is gone: parameters cannot be made views of it.",
        "memory is freed before anybody asks",
    ),
    ("freed", "After the first free() the memory is still held.", "free() keeps the memory"),
    ("whole_after_gather", "After gather() `weights_P` is not what the shares of the group make.", None),
    (
        "view_after_gather",
        "`weights_P` is right, but a parameter, which was a view of it, does not see it.",
        "new memory each time: parameters still look at the old",
    ),
    ("freed_again", "After gather() and free() the memory is still held.", "free() keeps the memory"),
    ("share_kept", "free() has changed my share of the weights.", "free() writes old weights back over the share"),
    ("fresh", "After the share changed, gather() still gives the old weights.", "an old copy is kept"),
    ("no_copy", "After free(), `weights_P` is gone, but a tensor as large is still alive.", "a hidden copy is kept"),
    (
        "once",
        "gather() twice sends twice: the second time the weights were there already.",
        "it gathers again what is here",
    ),
    ("start_once", "start() twice sends twice: the first was still on its way.", "it starts again what is on its way"),
    ("start_is_quick", "start() returns only when the weights are here.", "start() waits: nothing can overlap"),
    ("uses_started", "After start(), gather() sends once more.", "gather() does not use what start() began"),
    (
        "waits_before_freeing",
        "free() takes the memory away while an all-gather still writes into it.",
        "memory is taken away under a running collective",
    ),
    (
        "freed_while_started",
        "After start() and free() the memory is still held.",
        "what was only started is never freed",
    ),
    ("survives_free", "After start(), free() and gather() the weights are wrong.", None),
    ("waited_once", "A `Pending` was waited for more than once, or never.", "a Pending is waited for once"),
    ("our_door", "torch.distributed was called directly, where no meter sees it.", "it goes past our own door"),
]


class _Counted:
    """An all-gather that counts its waits and lands in memory of its own, so that `out` may be taken away under it."""

    def __init__(self, start, x, group, out):
        self.out, self.waits, self.memory_was_there = out, 0, True
        self.landing = torch.empty_like(out) if self._out_is_there() else out
        self.pending = start(x, group, self.landing)

    def _out_is_there(self):
        return self.out is not None and self.out.untyped_storage().nbytes() >= self.out.nbytes

    def wait(self):
        self.waits += 1
        if self.waits > 1:
            return self.out
        whole, lands_apart = self.pending.wait(), self.landing is not self.out
        self.pending = self.landing = None  # no copy of ours is left to be counted
        if not lands_apart:
            return whole
        self.memory_was_there = self._out_is_there()
        return self.out.copy_(whole) if self.memory_was_there else self.out


def _observe_gathering():
    rank = collectives.rank_in()
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    n = 4096
    whole = torch.zeros(n, dtype=torch.float64)
    share = torch.arange(n // 2, dtype=torch.float64) + 10000 * rank
    expected = torch.cat([torch.arange(n // 2) + 10000.0 * r for r in (rank % 2, rank % 2 + 2)]).double()
    started = []
    own = collectives.start_all_gather

    def counted(x, group=None, out=None):
        started.append(_Counted(own, x, group, out))
        return started[-1]

    def alive():
        tensors = (t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter))
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
        return sum(size >= whole.nbytes for size in storages.values())

    collectives.start_all_gather = counted
    try:
        return _gathering_steps(zero.GatheredWeights(whole, share, pair), whole, share, expected, started, alive)
    finally:
        collectives.start_all_gather = own


def _gathering_steps(weights, whole, share, expected, started, alive):
    found = {}

    def held():
        return weights.weights_P.untyped_storage().nbytes()

    def right(factor=1.0):
        return held() >= whole.nbytes and bool(torch.equal(weights.weights_P, expected * factor))

    found["there_at_first"] = held() >= 32768
    if not found["there_at_first"]:
        return {key: True for key, *_ in GATHERING} | found | {"ops": [], "bytes": (0, 0)}
    parameter = whole[3:7].view(2, 2)
    weights.free()
    found["freed"] = held() == 0
    with wiretap() as calls:
        weights.gather()
    found["ops"] = [call.op for call in calls]
    found["our_door"] = all(call.our_door for call in calls)
    found["whole_after_gather"] = right()
    found["view_after_gather"] = parameter.untyped_storage().nbytes() >= 32768 and bool(
        torch.equal(parameter.flatten(), expected[3:7])
    )
    gathered_bytes = held()
    found["once"] = _sends(weights.gather) == 0
    share *= 3  # an optimizer's step, while the old weights are still whole
    mine = share.clone()
    weights.free()
    found["freed_again"] = held() == 0 and parameter.untyped_storage().nbytes() == 0
    found["no_copy"] = alive() == 1  # what it is compared with
    found["share_kept"] = bool(torch.equal(share, mine))
    found["bytes"] = (gathered_bytes, held())
    weights.gather()
    found["fresh"] = right(3.0)
    weights.free()
    with collectives.record() as completed:
        weights.start()
    found["start_is_quick"] = not completed.events
    found["start_once"] = _sends(weights.start) == 0
    found["uses_started"] = _sends(weights.gather) == 0 and right(3.0)
    weights.free()
    weights.start()
    n_started = len(started)
    weights.free()
    found["waits_before_freeing"] = all(s.waits and s.memory_was_there for s in started[:n_started])
    found["freed_while_started"] = held() == 0
    weights.gather()
    found["survives_free"] = right(3.0)
    weights.free()
    found["waited_once"] = all(s.waits == 1 for s in started)
    return found


def _sends(action):
    with wiretap() as calls:
        action()
    return len(calls)


# --- 5.6 one norm ---------------------------------------------------------------------------------------------


def grade_global_grad_norm(fn) -> Verdict:
    """A 2 x 2 grid: one gradient differs on all four ranks, one is the same along tp, one is whole on every rank."""
    try:
        seen = run_ranks(_observe_norm, R, timeout=LIMIT_S, overrides={NORM: fn})
    except RankTimeout as timeout:
        return Verdict(False, "The ranks wait for each other.", "a deadlock", detail=str(timeout))
    expected = seen[0]["expected"]
    got = [s["norm"] for s in seen]
    rows = [(f"norm on rank {r}", expected, g) for r, g in enumerate(got)]
    if not all(close(g, expected) for g in got):
        known = {key.removeprefix("as: "): [s[key] for s in seen] for key in seen[0] if key.startswith("as: ")}
        name = next((n for n, w in known.items() if all(close(a, b) for a, b in zip(got, w, strict=True))), None)
        if name is None and all(close(g, expected, 1e-6) for g in got):
            rows = [(label, f"{e:.12f}", f"{g:.12f}") for label, e, g in rows]
            return wrong("The gradients are fp64, and so should be their norm.", "fp64 is lost on the way", rows)
        return wrong("This is not the norm of the whole gradient.", name, rows)
    if any(s["kind"] != "tensor ()" for s in seen):
        return wrong(
            "The number is right, but it should be a scalar tensor.", None, [("returned", "tensor ()", seen[0]["kind"])]
        )
    if any(s["changed"] for s in seen):
        return wrong("The norm is right, but the gradients changed.", "it overwrites the gradients")
    if not all(call.our_door for s in seen for call in s["calls"]):
        return wrong("torch.distributed was called directly, where no meter sees it.", "it goes past our own door")
    n_bytes = max(sum(call.payload_bytes for call in s["calls"]) for s in seen)
    if n_bytes > 16 and all(call.payload_bytes == 8 for s in seen for call in s["calls"]):
        sent = [("messages", 2, max(len(s["calls"]) for s in seen))]
        return wrong("Right, but every gradient has a message of its own.", "one message for every gradient", sent)
    if n_bytes > 32:
        sent = [("bytes handed to collectives", 16, n_bytes)]
        return wrong("The norm is right, but whole gradients travelled for it.", "gradients are gathered first", sent)
    if not all(close(s["alone"], s["alone_expected"]) and not s["alone_calls"] for s in seen):
        return wrong(
            "Where no group is given, the norm is this rank's own, and nothing is sent.", "it ignores `groups`"
        )
    return ok(f"The same on every rank, at the price of {n_bytes} bytes.", rows)


def _observe_norm():
    rank = collectives.rank_in()
    tp, dp = [dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = [tp[rank // 2], dp[rank % 2]]

    def numbers(n, seed):
        return torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    gradients = [numbers(5, rank), numbers(7, 10 + rank // 2).view(7, 1), numbers(3, 20)]
    copies = [1, 2, 4]
    parts = [numbers(5, r) for r in range(R)] + [numbers(7, 10), numbers(7, 11), numbers(3, 20)]
    expected = torch.cat(parts).norm().item()
    local = [g.norm().item() ** 2 for g in gradients]
    every = collectives.all_gather_object(local)
    sum_ = sum(sum(squares) for squares in every)
    before = [g.clone() for g in gradients]
    with wiretap() as calls:
        norm = zero.global_grad_norm(gradients, copies, groups)
    with wiretap() as alone_calls:
        alone = zero.global_grad_norm(gradients, [1, 1, 1], [])
    one_group = sum(sum(s / c for s, c in zip(every[r], copies, strict=True)) for r in collectives.ranks_of(groups[1]))
    return {
        "norm": float(norm),
        "kind": f"tensor {tuple(norm.shape)}" if isinstance(norm, torch.Tensor) else type(norm).__name__,
        "alone": float(alone),
        "alone_expected": sum(local) ** 0.5,
        "alone_calls": len(alone_calls),
        "expected": expected,
        "changed": any(not torch.equal(a, b) for a, b in zip(before, gradients, strict=True)),
        "calls": calls,
        "as: copies are counted once per rank": sum_**0.5,
        "as: every rank has a norm of its own": sum(local) ** 0.5,
        "as: every rank has a norm of its own, copies divided": sum(s / c for s, c in zip(local, copies, strict=True))
        ** 0.5,
        "as: norms of single gradients are added, not squares": sum(
            sum(s**0.5 / c for s, c in zip(squares, copies, strict=True)) for squares in every
        ),
        "as: the largest of the ranks, not their sum": max(
            sum(s / c for s, c in zip(squares, copies, strict=True)) for squares in every
        )
        ** 0.5,
        "as: norms are added, not squares": sum(
            sum(s / c for s, c in zip(squares, copies, strict=True)) ** 0.5 for squares in every
        ),
        "as: the root is missing": expected**2,
        "as: the norm is divided by the copies, not the square": sum(
            sum(s / c**2 for s, c in zip(squares, copies, strict=True)) for squares in every
        )
        ** 0.5,
        "as: a mean over the ranks": (expected**2 / R) ** 0.5,
        "as: only the last group is summed over": one_group**0.5,
    }


# --- what the chapter shows besides ---------------------------------------------------------------------------


class SuspectOptimizer:
    """The puzzle 5-bug: an AdamW of ZeRO stage 1 with a silent mistake.  Look at its symptoms first."""

    def __init__(self, weights_P, lr=1e-2):
        rank, n_ranks = collectives.rank_in(), collectives.size_of()
        self.mine = slice(*zero.shard_range(len(weights_P), rank, n_ranks))
        self.weights_P = weights_P
        self.adam = torch.optim.AdamW([weights_P], lr=lr)

    def step(self, gradient_P):
        share_S = collectives.reduce_scatter(gradient_P)
        self.weights_P.grad = torch.zeros_like(self.weights_P)
        self.weights_P.grad[self.mine] = share_S
        self.adam.step()
        collectives.start_all_gather(self.weights_P[self.mine].clone(), out=self.weights_P).wait()


class ShardedOptimizer:
    """AdamW of ZeRO stage 1 on one flat tensor."""

    def __init__(self, weights_P, lr=1e-2):
        rank, n_ranks = collectives.rank_in(), collectives.size_of()
        self.mine = slice(*zero.shard_range(len(weights_P), rank, n_ranks))
        self.weights_P = weights_P
        self.adam = torch.optim.AdamW([weights_P[self.mine]], lr=lr)

    def step(self, gradient_P):
        (share_S,) = self.adam.param_groups[0]["params"]
        share_S.grad = collectives.reduce_scatter(gradient_P)
        self.adam.step()
        collectives.start_all_gather(share_S.clone(), out=self.weights_P).wait()


def train_flat(optimizer_class, steps=20):
    """Fit a regression with one flat weight vector: losses, traffic, and this rank's bytes of optimizer state."""
    rank, n_ranks, n = collectives.rank_in(), collectives.size_of(), 4096
    generator = torch.Generator().manual_seed(0)
    answer = torch.randn(n, generator=generator)
    x = torch.randn(n_ranks, 64, n, generator=generator)[rank] / n**0.5
    weights_P, losses = torch.zeros(n), []
    optimizer = optimizer_class(weights_P)
    with collectives.record() as trace:
        for _ in range(steps):
            error = x @ (weights_P - answer)
            losses.append((error.square().sum() / (64 * n_ranks)).item())
            optimizer.step(2 * x.T @ error / (64 * n_ranks))
    losses = (collectives.all_reduce(torch.tensor(losses))).tolist()
    state = sum(t.nbytes for s in optimizer.adam.state.values() for t in s.values() if t.numel() > 1)
    sent = [(event.op, event.payload_bytes) for event in trace.events[:2]]
    return {"losses": losses, "a step sends": sent, "optimizer bytes": state}


def watch_weights(engine, one_pass):
    """Run one pass of a stage 3 engine and see when the weights of each unit are on their way, whole and freed.

    Returns spans (name, gather starts, is complete, freed) in seconds, when backward began, and bytes: the most that
    had memory at once, whole or on their way, and of all weights.
    """
    begun, spans, open_, whole = time.monotonic(), [], {}, {}
    names = ["embedding", *(f"block {i}" for i in range(len(engine.buckets) - 2)), "head"]
    most, forward_ends_s = 0, []

    def now():
        return time.monotonic() - begun

    def watch(name, weights):
        start, gather, free = weights.start, weights.gather, weights.free

        def started():
            nonlocal most
            open_.setdefault(name, [now(), None])
            start()
            whole[name] = weights.weights_P.nbytes
            most = max(most, sum(whole.values()))

        def gathered():
            gather()
            open_[name][1] = open_[name][1] or now()

        def freed():
            if name in open_:
                starts, complete = open_.pop(name)
                spans.append((name, starts, complete or now(), now()))
            whole.pop(name, None)
            free()

        weights.start, weights.gather, weights.free = started, gathered, freed

    for name, bucket in zip(names, reversed(engine.buckets), strict=True):
        watch(name, bucket.gathered)
    engine.model.lm_head.register_forward_hook(lambda *_: forward_ends_s.append(now()))
    one_pass(engine)
    return spans, forward_ends_s[0], most, sum(bucket.weights_P.nbytes for bucket in engine.buckets)


HINTS = {
    "5-bug": (
        "The losses are right and so is the traffic. ZeRO stage 1 promises something else. Look at "
        '`"optimizer bytes"` of both, and at `zero_state_bytes(4096, 4, 1, 4, 4, 8)`.',
        "Which tensor is AdamW given, and how large are the moments that it makes for it?",
        "AdamW gets the whole `weights_P`, so it makes moments for all of it, on every rank. The gradient is zero "
        "outside of the share, the all-gather overwrites what moved there, and nobody notices. Give it "
        "`weights_P[self.mine]`, a view: then only a share's moments exist.",
    ),
}

TITLE = "ZeRO"

EXERCISES = (
    Exercise(
        number="5.1",
        path=BYTES,
        title="What a rank holds",
        grade=grade_zero_state_bytes,
        level="warm-up",
        minutes=10,
        hints=(
            "A share of n numbers on R ranks is n / R, rounded up: the flat buffer is padded until the ranks divide "
            "it.",
            "Stage 1 divides the optimizer's state only, stage 2 gradients too, stage 3 parameters too. What is not "
            "divided is held whole by every rank.",
            "`share = math.ceil(n_params / n_ranks)`, then `param_bytes * (share if stage >= 3 else n_params)`, and "
            "so on.",
        ),
    ),
    Exercise(
        number="5.2",
        path=RANGE,
        title="Equal shares",
        grade=grade_shard_range,
        level="warm-up",
        minutes=5,
        hints=(
            "A reduce-scatter needs shares of the same size. If the ranks do not divide the size, which way do you "
            "round?",
            "Up: `math.ceil(numel / n_ranks)`. The last share may then reach beyond `numel`; that is the padding.",
        ),
    ),
    Exercise(
        number="5.3",
        path=CUT,
        title="Cut through parameters",
        grade=grade_cut,
        minutes=15,
        hints=(
            "Walk along the parameters, and keep count of where in the bucket each begins (its offset).",
            "Seen from the parameter, the share begins at `start - offset` and ends at `stop - offset`. Either may lie "
            "outside of the parameter.",
            "`first = max(start - offset, 0)`, `last = min(stop - offset, numel)`; it is a part if `first < last`.",
        ),
    ),
    Exercise(
        number="5.4",
        path=REDUCE,
        title="Which collective",
        grade=grade_start_reduction,
        minutes=5,
        hints=(
            "What will a rank do with the summed gradient? In stage 0 it updates all weights, in the other stages its "
            "share of them.",
            "`collectives.start_all_reduce` for stage 0, `collectives.start_reduce_scatter` for the others. Both "
            "return a `Pending`; return it, and leave the waiting to the caller.",
        ),
    ),
    Exercise(
        number="5.5",
        path=GATHERED,
        title="Weights that come and go",
        grade=grade_gathered_weights,
        level="stretch",
        minutes=25,
        hints=(
            "Three states: free, on its way (`pending`), here (`here`). Write down which call moves which state where.",
            "Memory: `x.untyped_storage().resize_(0)` gives it back, and `resize_(x.nbytes)` takes it again, while "
            "`x` and all views of `x` stay valid.",
            "`start`: only if neither here nor pending, take memory, then `self.pending = "
            "gather_weights(self.weights_P, self.my_weights_S, self.group)`. `gather`: start, wait for what is "
            "pending, note that it is here. `free`: wait for what is pending (it still writes there), then give the "
            "memory back.",
        ),
    ),
    Exercise(
        number="5.6",
        path=NORM,
        title="One norm for all",
        grade=grade_global_grad_norm,
        minutes=15,
        hints=(
            "Norms do not add up. What does?",
            "Squares do. Divide the square of each gradient by the number of ranks that hold a copy of it, add them "
            "up on this rank, and then over the ranks of every group in `groups`.",
            "`collectives.all_reduce(square, group)` for each group, one after the other: first along one axis of the"
            " grid, then along the other. The root comes last.",
        ),
    ),
)
