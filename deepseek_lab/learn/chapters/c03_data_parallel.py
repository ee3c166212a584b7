"""Chapter 03: gradients in buckets, on their way while backward works, and made smaller.

What decides (which gradients travel together, what a message holds, what stays behind) is graded on readable numbers;
what communicates, on four real ranks, of which rank r contributes 10^r: a sum over all is 1111.
"""

import functools

import torch
import torch.distributed as dist

from deepseek_lab import slots
from deepseek_lab.data.corpus import load_corpus
from deepseek_lab.learn.exercises import Exercise
from deepseek_lab.learn.ranks import RankError, RankTimeout, run_ranks
from deepseek_lab.learn.verdict import Verdict, close, ok, wrong
from deepseek_lab.learn.wiretap import wiretap
from deepseek_lab.model import DeepSeekModel
from deepseek_lab.parallel import collectives, compression, data_parallel
from deepseek_lab.parallel.meter import record

R = 4
LIMIT_S = 4.0
ONES = sum(10.0**r for r in range(R))

DATA_PARALLEL, COMPRESSION = "deepseek_lab.parallel.data_parallel", "deepseek_lab.parallel.compression"
BUCKETS, REDUCE, OVERLAP = (f"{DATA_PARALLEL}.{n}" for n in ("plan_buckets", "all_reduce_gradients", "Overlap"))
INT8, TOP_K, FEEDBACK = (f"{COMPRESSION}.{n}" for n in ("quantize_int8", "top_k", "with_error_feedback"))

# --- 3.1 buckets ----------------------------------------------------------------------------------------------


def grade_plan_buckets(fn) -> Verdict:
    """Small plans whose answers can be read, then one of a thousand gradients."""
    sizes, limit = [10, 20, 30, 5, 40], 45
    asked = [[4, 3], [2], [1, 0]]
    got = _plan(fn, sizes, limit)
    rows = [(f"gradients of {sizes} numbers, at most {limit} a bucket", asked, got)]
    if got != asked:
        known = {
            "the first parameters come first": [[0, 1], [2, 3], [4]],
            "a bucket is closed only once it is too full": [[4, 3], [2, 1], [0]],
            "a bucket that is just full counts as too full": [[4], [3, 2], [1, 0]],
            "sizes, not indices": [[40, 5], [30], [20, 10]],
            "the last bucket is forgotten": [[4, 3], [2]],
            "each gradient on its own": [[4], [3], [2], [1], [0]],
            "the limit is ignored": [[4, 3, 2, 1, 0]],
            "inside a bucket, the first parameter comes first": [[3, 4], [2], [0, 1]],
            "sorted by size, so that buckets wait for gradients from all over the model": [[4], [2], [1, 0, 3]],
            "gaps are filled with gradients that come much later": [[4, 3], [2, 0], [1]],
        }
        name = next((n for n, plan in known.items() if plan == got), None)
        turned = "planned from the front and turned round: the first bucket to travel is not full"
        if _plan(fn, [10, 20, 30, 5, 3], 36) in ([[4], [3, 2], [1, 0]], [[4], [2, 3], [0, 1]]):
            name = turned
        return wrong(
            "This is not the plan: gradients from last to first, each bucket as full as it may be.", name, rows
        )
    for sizes, limit, asked, name in [
        ([3, 100, 3], 10, [[2], [1], [0]], "a gradient larger than a bucket is lost"),
        ([3, 100], 10, [[1], [0]], "an empty bucket before a large gradient"),
        ([], 10, [], "an empty bucket where there is nothing to send"),
    ]:
        got = _plan(fn, sizes, limit)
        rows.append((f"gradients of {sizes}, at most {limit}", asked, got))
        if got != asked:
            return wrong("Right for ordinary gradients, but not at the edges.", name, rows[-1:])
    given = [10, 20, 30]
    fn(given, 45)
    if given != [10, 20, 30]:
        changed = [("the caller's list afterwards", [10, 20, 30], given)]
        return wrong("Right, but the caller's list of sizes changed.", "it empties the caller's list", changed)
    sizes = [(37 * i) % 101 + 1 for i in range(1000)]
    asked, got = slots.original(BUCKETS)(sizes, 300), _plan(fn, sizes, 300)
    if got != asked:
        return wrong("The small plans are right, one of a thousand gradients is not.", None, [("buckets", asked, got)])
    return ok(f"Last first, and as full as the limit allows: 1,000 gradients travel in {len(asked)} buckets.", rows)


def _plan(fn, sizes, limit):
    """The plan as lists of int, or whatever else came back."""
    got = fn(list(sizes), limit)
    try:
        return [[int(i) for i in bucket] for bucket in got]
    except (TypeError, ValueError):
        return got


# --- 3.2 an all-reduce in buckets -----------------------------------------------------------------------------

N_GRADIENTS, BUCKET_BYTES = 20, 160  # ten fp64 numbers each, two gradients to a bucket
UNEQUAL, UNEQUAL_BYTES = [3, 40, 8, 16, 5, 30, 2], 80  # bf16: 40 numbers to a bucket


def grade_all_reduce_gradients(fn) -> Verdict:
    """Twenty fp64 gradients of three shapes, multiples of (i + 1) · 10^r; then seven of bf16, of unequal sizes."""
    try:
        seen = run_ranks(_reduce_on_rank, R, timeout=LIMIT_S, overrides={REDUCE: fn})
    except RankTimeout as timeout:
        return Verdict(False, "The ranks wait for each other.", "not all ranks send", detail=str(timeout))
    except RankError as error:
        if "all_reduce works in place and needs a contiguous tensor" not in str(error):
            raise
        summary = "all_reduce was handed a strided gradient itself. A flat bucket, made by `torch.cat`, is contiguous."
        return wrong(summary, "gradients are handed over one by one, not in a flat bucket")
    whole, mine = _gradients(ONES), [_gradients(10.0**r) for r in range(R)]
    held = [s["held"] for s in seen]
    rows = [
        (f"first number of gradient {i}, rank 0", whole[i].flatten()[0].item(), held[0][i].flatten()[0].item())
        for i in (0, 1, 19)
    ]
    if not all(_alike(g, whole) for g in held):
        return wrong(*_why_not_sums(seen, whole, mine), _largest_gap(held, whole))
    if not all(call.our_door for s in seen for call in s["calls"]):
        summary = "The numbers are right, but torch.distributed was called directly, where no meter sees it."
        return wrong(summary, "it goes past our own door")
    calls = seen[0]["calls"]
    n_bytes, asked_bytes = sum(c.payload_bytes for c in calls), N_GRADIENTS * 80
    messages = [("messages", N_GRADIENTS // 2, len(calls)), ("bytes in all of them", asked_bytes, n_bytes)]
    if {c.op for c in calls} == {"send", "recv"}:
        summary = "The sums are right. Which algorithm adds up is chosen elsewhere: call `collectives.all_reduce`."
        return wrong(summary, "an algorithm is chosen here: ring_all_reduce instead of all_reduce", messages)
    if len(calls) != N_GRADIENTS // 2:
        known = {
            N_GRADIENTS: "a message for each gradient",
            1: "one message for all, however large",
            2: "the limit is taken for a number of elements",
            5: "a number is taken to have four bytes",
        }
        summary = f"The sums are right, but buckets of {BUCKET_BYTES} bytes hold two of these gradients each."
        return wrong(summary, known.get(len(calls)), messages)
    if {c.op for c in calls} != {"all_reduce"} or n_bytes != asked_bytes:
        return wrong("The sums are right, but it took more than an all-reduce for each bucket.", None, messages)
    pairs = [_gradients(10.0 ** (r % 2) + 10.0 ** (r % 2 + 2)) for r in range(R)]
    if not all(_alike(s["pair"], w) for s, w in zip(seen, pairs, strict=True)):
        return wrong("Over the whole world it is right, in a group of two it is not.", "it ignores the group")
    if seen[0]["nothing"]:
        return wrong(
            "It fails when a rank has no gradients to send.", "it needs at least one gradient", seen[0]["nothing"]
        )
    if problem := _unequal_problem(seen):
        return problem
    return ok(f"{N_GRADIENTS} gradients were added up in place, in {len(calls)} messages of 160 bytes.", rows)


def _unequal_problem(seen):
    """Seven gradients of bf16, of unequal sizes: are they summed, and is what travels the bytes of the plan?"""
    plan = slots.original(BUCKETS)
    asked = _bytes(plan(UNEQUAL, UNEQUAL_BYTES // 2))
    got = sorted((c.payload_bytes for c in seen[0]["unequal_calls"]), reverse=True)
    rows = [(f"bytes of the messages, gradients of {UNEQUAL} numbers in bf16, at most 80 bytes a bucket", asked, got)]
    if failure := seen[0]["unequal_error"]:
        return wrong(
            "It fails on gradients of bf16 and of unequal sizes.", None, [("what it says", "nothing", failure)]
        )
    if not all(_alike(s["unequal"], _unequal(15.0)) for s in seen):
        return wrong("Gradients of bf16 and of unequal sizes are not summed.", None, rows)
    if got == asked:
        return None
    known = {
        "fp64 on the way: four times the bytes of bf16": [4 * n for n in asked],
        "fp32 on the way: twice the bytes of bf16": [2 * n for n in asked],
        "a number is taken to have eight bytes": _bytes(plan(UNEQUAL, UNEQUAL_BYTES // 8)),
        "two gradients to a bucket, whatever their size": _bytes([[6, 5], [4, 3], [2, 1], [0]]),
        "the first gradient's size stands for all": _bytes(plan([UNEQUAL[0]] * len(UNEQUAL), UNEQUAL_BYTES // 2)),
    }
    name = next((n for n, sizes in known.items() if sizes == got), None)
    return wrong("Right for equal gradients of fp64. Here they are of bf16, and of unequal sizes.", name, rows)


def _bytes(plan):
    return sorted((2 * sum(UNEQUAL[i] for i in bucket) for bucket in plan), reverse=True)


def _unequal(factor):
    return [torch.full((n,), factor * (i + 1), dtype=torch.bfloat16) for i, n in enumerate(UNEQUAL)]


def _gradients(factor):
    """Twenty gradients, every third of them transposed in memory; the last number of each needs all digits of fp64."""
    numbers = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8, 9, 1 / 3], dtype=torch.float64)
    values = [numbers * (i + 1) * factor for i in range(N_GRADIENTS)]
    return [v.clone() if i % 3 == 0 else v.view(2, 5) if i % 3 == 1 else v.view(2, 5).T for i, v in enumerate(values)]


def _reduce_on_rank():
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    gradients, in_pairs = _gradients(10.0**rank), _gradients(10.0**rank)
    held, handed_over, nothing = list(gradients), gradients, []
    with wiretap() as calls:
        returned = data_parallel.all_reduce_gradients(handed_over, bucket_bytes=BUCKET_BYTES)
    held_in_pairs = list(in_pairs)
    data_parallel.all_reduce_gradients(in_pairs, pairs[rank % 2], BUCKET_BYTES)
    try:
        data_parallel.all_reduce_gradients([], bucket_bytes=BUCKET_BYTES)
    except Exception as error:
        nothing = [("no gradients", "nothing happens", f"{type(error).__name__}: {error}")]
    unequal, failure = _unequal(2.0**rank), ""
    with wiretap() as unequal_calls:
        try:
            data_parallel.all_reduce_gradients(unequal, bucket_bytes=UNEQUAL_BYTES)
        except Exception as raised:
            failure = f"{type(raised).__name__}: {raised}"
    seen = {"held": held, "listed": handed_over, "returned": returned, "pair": held_in_pairs}
    seen |= {"unequal": unequal, "unequal_calls": unequal_calls, "unequal_error": failure}
    return seen | {"calls": calls, "nothing": nothing}


def _largest_gap(held, whole):
    """The number that is furthest off, for its size, as a row with all its digits."""
    worst, row = -1.0, []
    for rank, gradients in enumerate(held):
        for i, (got, asked) in enumerate(zip(gradients, whole, strict=True)):
            if got.shape != asked.shape:
                return [(f"shape of gradient {i}, rank {rank}", tuple(asked.shape), tuple(got.shape))]
            gap = ((got - asked).abs() / asked.abs()).nan_to_num(torch.inf).flatten()
            if gap.max() > worst:
                j = int(gap.argmax())
                worst, pair = gap[j].item(), (f"{t.flatten()[j].item():.12g}" for t in (asked, got))
                row = [(f"number {j} of gradient {i}, rank {rank}", *pair)]
    return row


def _why_not_sums(seen, whole, mine) -> tuple[str, str | None]:
    held = [s["held"] for s in seen]
    if all(_alike(s["listed"], whole) or _alike(s["returned"], whole) for s in seen):
        summary = (
            "The sums exist, but not in the tensors that were handed over: the parameters still hold the old ones."
        )
        return summary, "new tensors instead of the old ones"
    if all(_alike(g, m) for g, m in zip(held, mine, strict=True)):
        return "The gradients are as they were before.", "the sums are not written back"
    if all(_alike(g, [w / R for w in whole]) for g in held):
        return (
            "These are means over the ranks. The loss was divided by the tokens of all ranks already.",
            "a mean, not a sum",
        )
    if all(_alike(g, whole, 1e-6) for g in held):
        return "Close, but digits are missing.", "fp64 is lost on the way"
    strided = [i for i, w in enumerate(whole) if not w.is_contiguous()]
    last = slots.original(BUCKETS)([10] * N_GRADIENTS, 20)[-1]
    for untouched, summary, name in [
        (
            strided,
            "Transposed gradients are as they were: `flatten()` and `reshape(-1)` make a copy of such a tensor.",
            "the sum is written into a copy of a strided gradient",
        ),
        (last, "The gradients of the last bucket are as they were.", "the last bucket is forgotten"),
    ]:
        mixed = [[m[i] if i in untouched else whole[i] for i in range(N_GRADIENTS)] for m in mine]
        if all(_alike(g, m) for g, m in zip(held, mixed, strict=True)):
            return summary, name
    if all(close(_sorted(g), _sorted(whole)) for g in held):
        return "All sums are there, but not where they belong.", "sums land in the wrong places"
    return "Not every rank holds the sums over all ranks.", None


def _sorted(tensors):
    return torch.cat([t.flatten() for t in tensors]).sort().values


def _alike(got, wanted, tolerance=1e-9):
    if not isinstance(got, list | tuple) or len(got) != len(wanted):
        return False
    return all(isinstance(g, torch.Tensor) and close(g, w, tolerance) for g, w in zip(got, wanted, strict=True))


# --- 3.3 overlap ----------------------------------------------------------------------------------------------

MEMBERS = [[4, 3], [2], [1, 0]]


def grade_overlap(cls) -> Verdict:
    """What is started when, on a stand-in for the network; then real sums, on ranks that finish in different orders."""
    straight = _play(cls, (4, 3, 2, 1, 0))
    asked = ["ready 4", "ready 3", "start 0", "ready 2", "start 1", "ready 1", "ready 0", "start 2", "finish"]
    if problem := _order_problem(straight, asked):
        return problem
    if _play(cls, (4, 3, 2, 1, 0)) != straight:
        return wrong("It works for one step, but not for the next, with a new object.", "steps share their state")
    backwards = _play(cls, (3, 4, 2, 0, 1))
    asked = ["ready 3", "ready 4", "start 0", "ready 2", "start 1", "ready 0", "ready 1", "start 2", "finish"]
    if _before_waits(backwards) != asked:
        summary = "Gradient 3 was the first here, and gradient 4, of the same bucket, was still missing. Count them."
        name = "the last-listed gradient stands for its whole bucket"
        early = backwards["log"][:2] == ["ready 3", "start 0"]
        return wrong(
            summary if early else "Buckets are not started when they should be.",
            name if early else None,
            _steps(asked, _before_waits(backwards)),
        )
    swapped = _play(cls, (2, 4, 3, 1, 0))
    asked = ["ready 2", "ready 4", "ready 3", "start 0", "start 1", "ready 1", "ready 0", "start 2", "finish"]
    if _before_waits(swapped) != asked:
        if swapped["log"][:2] == ["ready 2", "start 1"]:
            summary = (
                "Gradient 2 came first here, and bucket 1 was started before bucket 0. On another rank it may be the "
            )
            summary += "other way round, and collectives are matched by their order."
            name = "buckets start as they fill, in another order on every rank"
        else:
            summary = "Bucket 1 was full already when bucket 0 started: nothing was left to wait for."
            name = "a bucket that is full already is forgotten"
        return wrong(summary, name, _steps(asked, _before_waits(swapped)))
    unused = _play(cls, (4, 3, 0))
    asked = ["ready 4", "ready 3", "start 0", "ready 0", "finish", "start 1", "start 2"]
    summary = "Gradients 2 and 1 never came: this rank did not use those parameters. Others may have, and wait."
    if _before_waits(unused) != asked or list(unused["results"]) != [100, 101, 102]:
        return wrong(summary, "a bucket with an unused parameter is never sent", _steps(asked, _before_waits(unused)))
    early = _play(cls, (2, 1, 0))
    asked = ["ready 2", "ready 1", "ready 0", "finish", "start 0", "start 1", "start 2"]
    if _before_waits(early) != asked or list(early["results"]) != [100, 101, 102]:
        started = [entry for entry in early["log"] if entry.startswith("start")]
        if len(started) < len(MEMBERS):
            name = "a full bucket behind an incomplete one is never sent"
        else:
            name = "what is left starts in an order that depends on what is missing"
        summary = "Gradients 4 and 3 never came; buckets 1 and 2 were full and waited. All ranks start 0, 1, 2."
        return wrong(summary, name, _steps(asked, _before_waits(early)))
    at_finish = early["log"][early["log"].index("finish") + 1 :]
    if any(entry.startswith("wait") for entry in at_finish[: len(MEMBERS)]):
        asked = ["start 0", "start 1", "start 2", "wait 0", "wait 1", "wait 2"]
        summary = "The network does nothing while a bucket is waited for before the next one has started."
        return wrong(summary, "finish waits for each bucket before it starts the next", _steps(asked, at_finish))
    return _overlap_on_ranks(cls)


def _play(cls, order):
    """Let gradients become ready in this order: the log of what happened, and what finish returned."""
    log = []

    class Waiting:
        def __init__(self, bucket):
            self.bucket = bucket

        def wait(self):
            log.append(f"wait {self.bucket}")
            return 100 + self.bucket if isinstance(self.bucket, int) else None

    def start(bucket):
        log.append(f"start {bucket}")
        return Waiting(bucket)

    members = [list(bucket) for bucket in MEMBERS]
    overlap = cls(members, start)
    for i in order:
        log.append(f"ready {i}")
        overlap.ready(i)
    log.append("finish")
    return {"log": log, "results": overlap.finish(), "members": members}


def _before_waits(played):
    return [entry for entry in played["log"] if not entry.startswith("wait")]


def _order_problem(played, asked):
    log, results = played["log"], played["results"]
    at_finish = log.index("finish")
    starts = [entry for entry in log if entry.startswith("start")]
    rows = _steps(asked, _before_waits(played))
    if any(entry.startswith("wait") for entry in log[:at_finish]):
        rows = _steps([*asked, "wait 0", "wait 1", "wait 2"], log)
        return wrong("Backward stands still until the bucket has arrived.", "it waits as soon as it has started", rows)
    if not any(entry.startswith("start") for entry in log[:at_finish]):
        return wrong("Everything is sent after backward has ended.", "nothing starts before the end", rows)
    if len(starts) > len(set(starts)):
        return wrong("A bucket was started more than once.", "what was started is started again", rows)
    if len(starts) > len(MEMBERS):
        return wrong("Each gradient was sent by itself.", "gradients start, not buckets", rows)
    if log[:2] == ["ready 4", "start 0"]:
        return wrong(
            "Bucket 0 left while gradient 3 was still missing.", "a bucket starts with its first gradient", rows
        )
    if _before_waits(played) != asked:
        return wrong("Buckets are not started when they should be.", None, rows)
    waited = [entry for entry in log if entry.startswith("wait")]
    if results is None:
        return wrong("The sums never reach the caller.", "finish returns nothing")
    if len(waited) < len(MEMBERS):
        summary = "Not all buckets were waited for, so what finish returned may not have arrived yet."
        return wrong(summary, "it does not wait", [("waits", ["wait 0", "wait 1", "wait 2"], waited)])
    if len(waited) > len(MEMBERS):
        rows = [("waits", ["wait 0", "wait 1", "wait 2"], waited)]
        return wrong("What has arrived is waited for again.", "it waits twice", rows)
    if not isinstance(results, list | tuple) or list(results) != [100, 101, 102]:
        return wrong(
            "finish does not return the results, bucket by bucket.", None, [("results", [100, 101, 102], results)]
        )
    if played["members"] != MEMBERS:
        rows = [("members afterwards", MEMBERS, [list(bucket) for bucket in played["members"]])]
        return wrong("The plan serves every step: it must not change.", "it crosses off in the plan", rows)
    return None


def _steps(asked, got):
    return [("what happened", ", ".join(asked), ", ".join(got))]


def _overlap_on_ranks(cls):
    try:
        seen = run_ranks(_overlap_on_rank, R, timeout=LIMIT_S, overrides={OVERLAP: cls})
    except RankTimeout as timeout:
        return Verdict(
            False, "The ranks wait for each other.", "buckets start in different orders", detail=str(timeout)
        )
    asked = [torch.full((8,), (b + 1) * ONES, dtype=torch.float64) for b in range(3)]
    rows = [(f"bucket {b} on rank 0", asked[b], seen[0]["sums"][0][b]) for b in range(3)]
    if not all(_alike(sums, asked) for s in seen for sums in s["sums"]):
        return wrong("On real ranks the sums are not right.", None, rows)
    if not all(call.our_door for s in seen for call in s["calls"]):
        return wrong("torch.distributed was called directly, where no meter sees it.", "it goes past our own door")
    ops = [call.op for call in seen[0]["calls"]]
    n_bytes = sum(call.payload_bytes for call in seen[0]["calls"])
    if ops != ["all_reduce"] * 6 or n_bytes != 6 * 64:
        return wrong("More was sent than the buckets.", None, [("operations of two steps", ["all_reduce"] * 6, ops)])
    summary = "Each bucket left as soon as it and those before it were full, in the same order on ranks that finished "
    return ok(summary + f"in different ones: 3 all-reduces of 64 bytes a step ({n_bytes} in two steps).", rows)


def _overlap_on_rank():
    """Two steps; odd ranks get their gradients in another order than even ones."""
    rank, sums = dist.get_rank(), []
    with wiretap() as calls:
        for order in [(4, 3, 2, 1, 0), (2, 0, 1, 4, 3)]:
            flats = [torch.full((8,), (b + 1) * 10.0**rank, dtype=torch.float64) for b in range(3)]
            overlap = data_parallel.Overlap(MEMBERS, lambda b, flats=flats: collectives.start_all_reduce(flats[b]))
            for i in order if rank % 2 == 0 else order[::-1]:
                overlap.ready(i)
            sums.append(overlap.finish())
    return {"sums": sums, "calls": calls}


# --- 3.4 int8 -------------------------------------------------------------------------------------------------

NUMBERS = [1.27, -0.504, 0.016, 0.0, 0.0, 0.0, 0.0, 0.0, -254.0, 3.4]  # two blocks of four and one of two


def grade_quantize_int8(fn) -> Verdict:
    """Blocks of four with readable scales; edges; then a sum over four ranks with int8 on the wire."""
    x_N = torch.tensor(NUMBERS, dtype=torch.float64)
    before = x_N.clone()
    try:
        got = fn(x_N, 4)
    except RuntimeError as error:
        if "is invalid for input of size" not in str(error):
            raise
        summary = "Ten numbers do not make whole blocks of four: pad them, and cut the padding off again."
        return Verdict(False, summary, "the last, shorter block is not padded", detail=f"RuntimeError: {error}")
    if isinstance(got, tuple) and len(got) == 2 and isinstance(got[1], float):
        return wrong("One large number takes the precision from all others.", "one scale for the whole tensor")
    if not (isinstance(got, tuple) and len(got) == 2 and all(isinstance(t, torch.Tensor) for t in got)):
        return wrong("Return two tensors: q_N and scale_M.")
    q_N, scale_M = got
    asked_q = torch.tensor([127, -50, 2, 0, 0, 0, 0, 0, -127, 2])
    asked_scale = torch.tensor([0.01, 0.0, 2.0], dtype=torch.float64)
    rows = [("scales", asked_scale, scale_M), ("q", asked_q.tolist(), q_N.flatten().tolist())]
    if problem := _kind_problem(q_N, scale_M, rows) or _scale_problem(scale_M, asked_scale, rows):
        return problem
    if not torch.equal(q_N.long(), asked_q):
        cut = torch.tensor([127, -50, 1, 0, 0, 0, 0, 0, -127, 1])
        down = torch.tensor([127, -51, 1, 0, 0, 0, 0, 0, -127, 1])
        name = "numbers are cut off, not rounded" if torch.equal(q_N.long(), cut) else None
        name = "always rounded down: every block is pulled to one side" if torch.equal(q_N.long(), down) else name
        name = "numbers wrap around in int8" if q_N[0] < 0 else name
        return wrong("The scales are right, what is counted in them is not.", name, rows)
    if not torch.equal(x_N, before):
        return wrong("Right, but the caller's numbers changed.", "it overwrites its input")
    return _int8_edges(fn) or _int8_on_ranks(fn, rows)


def _kind_problem(q_N, scale_M, rows):
    if q_N.dtype != torch.int8:
        name = "rounded, but not in int8: nothing is saved" if q_N.is_floating_point() else "not int8"
        return wrong("q must be int8: that is what travels.", name, [("type of q", "int8", _dtype(q_N)), *rows])
    if scale_M.dtype == torch.float32:
        return wrong("The numbers are fp64, their scales only fp32.", "fp64 is lost on the way", rows)
    if q_N.numel() == 12:
        return wrong("Ten numbers went in, twelve came out.", "the padding comes along", rows)
    if scale_M.numel() == 1:
        return wrong("One large number takes the precision from all others.", "one scale for the whole tensor", rows)
    if scale_M.numel() == 2:
        return wrong("The last block, of two numbers, has no scale.", "the last, shorter block is lost", rows)
    if scale_M.numel() == 4:
        return wrong("A block is four neighbours, not every fourth number.", "blocks run across, not along", rows)
    if q_N.shape != (10,) or scale_M.shape != (3,):
        return wrong("The shapes are not (N,) and (M,).", None, rows)
    return None


def _scale_problem(scale_M, asked, rows):
    used = [0, 2]  # what a block of zeros may have for a scale is looked at later, by itself
    if close(scale_M[used], asked[used]) and scale_M[1].isfinite():
        return None
    known = {
        "the scale is upside down": 1 / asked,
        "128 steps: the largest number does not fit into int8": asked * 127 / 128,
        "the largest number, not the largest magnitude": torch.tensor([0.01, 0, 3.4 / 127], dtype=torch.float64),
        "from the smallest to the largest: zero is no longer zero": torch.tensor(
            [1.774 / 255, 0, 257.4 / 255], dtype=torch.float64
        ),
        "half the range of int8 is left unused": asked * 127 / 255,
        "one scale for the whole tensor": torch.full_like(asked, 2.0),
        "the scale of a norm, not of the largest": torch.tensor(NUMBERS, dtype=torch.float64)[[0, 8]],
    }
    name = next((n for n, scale in known.items() if len(scale) == 3 and close(scale_M[used], scale[used])), None)
    if close(scale_M[used], asked[used]):
        name = "a block of zeros divides zero by zero"
    return wrong("The largest magnitude of a block should come out as 127.", name, rows)


def _int8_edges(fn):
    bad_N = torch.tensor([1.0, float("nan"), 1.0, 1.0, float("inf"), 2.0, 2.0, 2.0, 3.0, 3.0])
    q_N, scale_M = fn(bad_N, 4)
    read_N = _read(q_N, scale_M, 4)
    if read_N[1].isfinite() or read_N[4].isfinite():
        rows = [("read back from nan and from inf", "nan or inf", f"{read_N[1]:g} and {read_N[4]:g}")]
        return wrong("A gradient that overflowed must not look healthy.", "inf and nan are hidden", rows)
    if not close(read_N[8:], bad_N[8:], 1e-6):
        return wrong("One nan spoils blocks that are not its own.", "a nan spreads to other blocks")
    narrow = torch.tensor(NUMBERS, dtype=torch.bfloat16)
    _, scale_M = fn(narrow, 4)
    if scale_M.dtype != torch.float32:
        rows = [("type of the scales for bf16", "float32", _dtype(scale_M))]
        return wrong(
            "Scales in bf16 are off by up to 0.4%, and with them the whole block.", "scales as coarse as bf16", rows
        )
    return _nearest_problem(fn) or _small_problem(fn)


def _nearest_problem(fn):
    """No number is off by more than half a scale, and every scale is exact, whatever the dtype."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x_N = _noise(9).to(dtype)
        q_N, scale_M = fn(x_N, 64)
        steps_N = x_N.double() / scale_M.double().repeat_interleave(64)
        off_N = q_N.double() - steps_N
        exact_M = x_N.double().view(-1, 64).abs().amax(1) / 127
        row = [(f"largest error on 4,096 random numbers in {_dtype(x_N)}, in scales", 0.5, off_N.abs().max().item())]
        if off_N.abs().max() <= 0.5 + 1e-4 and close(scale_M, exact_M, 1e-6):  # 127 · 2⁻²⁴ for the division in fp32
            continue
        name = None
        if dtype == torch.bfloat16:
            name = "worked out in bf16: steps are missed, and the largest number may overflow int8"
        elif not torch.equal(q_N, fn(x_N, 64)[0]):
            name = "rounded up or down by chance"
        elif off_N.min() > -1e-4:
            name = "always rounded up: every block is pulled to one side"
        elif off_N.abs().max() < 1:
            name = "not rounded to the nearest step"
        return wrong("Rounded to the nearest step, no number is off by more than half a scale.", name, row)
    return None


def _small_problem(fn):
    """Gradients may be tiny, and a block of zeros has scale 0."""
    for dtype in (torch.float64, torch.float32):
        x_N = _noise(9, 64).to(dtype)
        q_N, _ = fn(x_N, 64)
        small_q_N, small_scale_M = fn(x_N * 2.0**-100, 64)
        if not torch.equal(q_N, small_q_N) or not close(small_scale_M * 2.0**100, fn(x_N, 64)[1], 1e-6):
            rows = [(f"largest q of numbers near 1e-30, {_dtype(x_N)}", 127, small_q_N.long().abs().max().item())]
            rows += [("scale of their block", x_N.abs().amax() / 127 * 2.0**-100, small_scale_M)]
            summary = "Small gradients have small scales. Only a scale of exactly 0 needs care."
            return wrong(summary, "a floor under the scale, or something added to it", rows)
    _, scale_M = fn(torch.zeros(4), 4)
    if scale_M.item() != 0:
        rows = [("scale of a block of zeros", 0.0, scale_M.item())]
        return wrong("What zeros are divided by is not their scale.", "a block of zeros has another scale than 0", rows)
    return None


def _read(q_N, scale_M, block):
    return q_N.to(scale_M.dtype) * scale_M.repeat_interleave(block)[: len(q_N)]


def _dtype(x):
    return str(x.dtype).removeprefix("torch.")


def _int8_on_ranks(fn, rows):
    seen = run_ranks(_compressed_sum, R, "int8", timeout=LIMIT_S, overrides={INT8: fn})
    true_N = sum(_noise(r) for r in range(R))
    worst = max(((s["sum"] - true_N).abs().max() / true_N.abs().max()).item() for s in seen)
    if not worst < 0.05:  # four terms off by half a 127th of their largest, and a sum
        return wrong(
            "Alone it is right. A sum over four ranks is not.", None, [("worst error", "below 5%", f"{worst:.1%}")]
        )
    sent = seen[0]["sent_bytes"]
    asked = 2 * 3 * 1024 * (1 + 8 / 256)
    if sent != asked:
        return wrong("Another number of bytes travels than int8 and scales have.", None, [("bytes sent", asked, sent)])
    words = f"Over four ranks, 4,096 fp64 numbers were added up with {sent:,} bytes sent by each; fp64 takes 49,152."
    return ok(words, rows)


def _noise(rank, n=4096):
    return torch.randn(n, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _compressed_sum(name):
    collectives.set_algorithm("ring")
    with record() as trace:
        total_N = compression.get(name)(_noise(dist.get_rank()))
    return {"sum": total_N, "sent_bytes": trace.wire_bytes()}


# --- 3.5 top-k ------------------------------------------------------------------------------------------------


def grade_top_k(fn) -> Verdict:
    """Eight numbers, of which -8, 7 and -4 are the largest; ties; nan; then a sum over four ranks."""
    x_N = torch.tensor([0.5, -8.0, 3.0, 0.0, -4.0, 1.0, 7.0, -0.25], dtype=torch.float64)
    before = x_N.clone()
    got = fn(x_N, 3)
    if not (isinstance(got, tuple) and len(got) == 2 and all(isinstance(t, torch.Tensor) for t in got)):
        return wrong("Return two tensors: places and numbers.")
    index_K, value_K = got
    rows = [("places and numbers", "1: -8, 4: -4, 6: 7", _pairs(index_K, value_K))]
    if index_K.is_floating_point() and not value_K.is_floating_point():
        return wrong("The places come first, then the numbers.", "value and index are swapped", rows)
    if len(index_K) != 3 or len(value_K) != 3:
        return wrong("k = 3 numbers were asked for.", "not k numbers", rows)
    places, numbers = index_K.tolist(), value_K.tolist()
    if dict(zip(places, numbers, strict=True)) != {1: -8.0, 4: -4.0, 6: 7.0}:
        known = {
            "the largest, not the largest magnitudes": {6, 2, 5},
            "the smallest": {3, 7, 0},
            "the first, not the largest": {0, 1, 2},
        }
        name = next((n for n, some in known.items() if set(places) == some), None)
        if set(places) == {1, 4, 6}:
            signless = numbers == [abs(x_N[i].item()) for i in places]
            name = "signs are lost" if signless else "places and numbers do not belong together"
        return wrong("These are not the three numbers of largest magnitude.", name, rows)
    if not torch.equal(x_N, before):
        return wrong("Right, but the caller's numbers changed.", "it overwrites its input")
    if index_K.dtype != torch.int32 or value_K.dtype != torch.float64:
        name = "places in int64: as many bytes as the numbers" if index_K.dtype == torch.int64 else None
        types = [("types", "int32 and float64", f"{_dtype(index_K)} and {_dtype(value_K)}")]
        return wrong("Right, but in the wrong type.", name, types)
    tied = fn(torch.tensor([1.0, -1.0, 1.0, 1.0, 0.5]), 2)[0]
    if len(tied) != 2 or len(set(tied.tolist())) != 2:
        summary = "Where several numbers are equally large, still k of them: all ranks must send as many."
        return wrong(summary, "ties give more than k", [("of four equal numbers", 2, len(tied))])
    if 2 not in fn(torch.tensor([1.0, 5.0, float("nan"), 2.0]), 2)[0].tolist():
        return wrong("A nan must travel, or nobody learns of it.", "nan is passed over")
    if problem := _far_and_small_problem(fn):
        return problem
    return _top_k_on_ranks(fn, rows)


def _far_and_small_problem(fn):
    """Two numbers far out among 70,000, first ordinary ones, then tiny ones."""
    x_N, asked = torch.zeros(70_000), [40_000, 69_999]
    x_N[asked] = torch.tensor([1e-30, -2e-30])
    got = sorted(fn(x_N * 1e30, 2)[0].tolist())
    if got != asked:
        rows = [("places of the largest of 70,000 numbers", asked, got)]
        return wrong("Right among few numbers. Places go up to 2 billion.", "places do not fit into int16", rows)
    got = sorted(fn(x_N, 2)[0].tolist())
    if got != asked:
        rows = [("places of 1e-30 and -2e-30 among zeros", asked, got)]
        return wrong("Right among ordinary numbers. Squared, small ones are zero.", "squares underflow", rows)
    return None


def _pairs(index_K, value_K):
    return ", ".join(f"{i:g}: {v:g}" for i, v in sorted(zip(index_K.tolist(), value_K.tolist(), strict=False)))


def _top_k_on_ranks(fn, rows):
    seen = run_ranks(_compressed_sum, R, "topk", timeout=LIMIT_S, overrides={TOP_K: fn})
    asked_N = torch.zeros(4096, dtype=torch.float64)
    for rank in range(R):
        x_N = _noise(rank)
        index_K = x_N.abs().topk(41).indices
        asked_N[index_K] += x_N[index_K]
    if not all(close(s["sum"], asked_N) for s in seen):
        return wrong("Alone it is right. A sum over four ranks is not.", None, [("sum", asked_N, seen[0]["sum"])])
    sent = seen[0]["sent_bytes"]
    words = f"Over four ranks, each sent 1% of its 4,096 numbers to each other: {sent:,} bytes; fp64 takes 49,152."
    return ok(words, rows)


# --- 3.6 error feedback ---------------------------------------------------------------------------------------

STEP = [4.0, 17.0, -26.0]  # sent in tens


def grade_with_error_feedback(fn) -> Verdict:
    """Three steps with the same gradient; messages count tens."""
    counted: list[int] = []
    unstarred: list[int] = []

    def compress(x_N):
        counted.append(1)
        return (x_N / 10).round(), torch.tensor(10.0, dtype=torch.float64)

    def decompress(*message):
        if len(message) == 1:
            unstarred.append(1)
            (message,) = message
        q_N, scale = message
        return q_N * scale

    residual_N = torch.zeros(3, dtype=torch.float64)
    sent: list[list[float]] = []
    kept: list[list[float]] = []
    for _ in range(3):
        x_N = torch.tensor(STEP, dtype=torch.float64)
        message = fn(x_N, residual_N, compress, decompress)
        if unstarred:
            summary = "decompress takes the parts of a message one by one: `decompress(*message)`."
            return wrong(summary, "the message is handed to decompress in one piece")
        if x_N.tolist() != STEP:
            return wrong("The caller's gradient changed.", "it overwrites the gradient")
        if not (isinstance(message, tuple) and len(message) == 2):
            read = isinstance(message, torch.Tensor) and message.shape == (3,)
            name = "it returns what is read, not what is sent" if read else None
            return wrong("Return the message as compress gave it: that is what travels.", name)
        sent.append([10 * v for v in message[0].tolist()])
        kept.append(residual_N.tolist())
    asked_sent = [[0.0, 20, -30], [10, 10, -20], [0, 20, -30]]
    asked_kept = [[4.0, -3, 4], [-2, 4, -2], [2, 1, 2]]
    rows = [
        (f"step {i}: sent, kept", (s, k), (sent[i], kept[i]))
        for i, (s, k) in enumerate(zip(asked_sent, asked_kept, strict=True))
    ]
    if sent != asked_sent or kept != asked_kept:
        return wrong(*_why_not_fed_back(sent, kept), rows)
    if len(counted) > 3:
        return wrong("Right, but compress runs twice in each step.", "it compresses twice", rows)
    if problem := _digits_problem(fn) or _sharing_problem(fn):
        return problem
    total = [sum(column) for column in zip(*sent, strict=True)]
    words = f"After three steps {total} has been sent of [12, 51, -78], and the rest is kept: nothing is lost."
    return ok(words, rows)


def _digits_problem(fn):
    """All that was sent, and the rest, make up all the gradients to the last digits of fp64."""
    residual_N, given_N, sent_N = (torch.zeros(64, dtype=torch.float64) for _ in range(3))
    for step in range(4):
        x_N = _noise(step, 64)
        given_N += x_N
        sent_N += fn(x_N, residual_N, lambda x: ((x * 4).round() / 4,), lambda q: q)[0]
    if close(sent_N + residual_N, given_N, 1e-13):
        return None
    rows = [("number 0 of four gradients", *(f"{x[0].item():.12g}" for x in (given_N, sent_N + residual_N)))]
    return wrong("Sent and kept do not quite make up what there was.", "fp64 is lost on the way", rows)


def _sharing_problem(fn):
    """A message may be a part of what was compressed, such as `(x,)`; then it must not change any more."""
    x_N, residual_N = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    (got_N,) = fn(x_N, residual_N, lambda x: (x,), lambda x: x)
    if got_N.tolist() == [11.0, 22.0] and residual_N.tolist() == [0.0, 0.0]:
        return None
    rows = [("message, and kept", ([11.0, 22.0], [0.0, 0.0]), (got_N.tolist(), residual_N.tolist()))]
    summary = "This compress returns the tensor that it was given. If that is the residual, both change together."
    return wrong(summary, "the message shares its memory with the residual", rows)


def _why_not_fed_back(sent, kept) -> tuple[str, str | None]:
    first = [0.0, 20, -30]
    if all(k == [0, 0, 0] for k in kept):
        summary = "The caller's residual is still zero. A new tensor under the old name stays inside the function."
        return summary, "the residual that the caller keeps does not change"
    known: dict[str, list[list[float]]] = {
        "older remainders are dropped": [[4.0, -3, 4], [-6, 7, -6]],
        "remainders are counted twice": [[4.0, -3, 4], [2, 1, 2]],
        "the remainder has the wrong sign": [[-4.0, 3, -4]],
        "what was sent is kept, too, and sent again": [[4.0, 17, -26]],
        "what was sent is kept, not what was left out": [first],
    }
    name = next((n for n, steps in known.items() if kept[: len(steps)] == steps), None)
    if name is None and sent == [first] * 3:
        return "What is kept grows, and is never sent.", "the residual is never sent"
    return "Kept must be: what was kept before, plus the gradient, minus what the receivers read.", name


# --- what the chapter shows besides ---------------------------------------------------------------------------


@functools.cache
def text_bytes(n_bytes: int = 1_000_000) -> torch.Tensor:
    """The beginning of the shipped text as numbers from 0 to 255: a vocabulary small enough to learn in seconds."""
    text = "\n".join(document.text for document in load_corpus().train[:1200])
    return torch.frombuffer(bytearray(text.encode()[:n_bytes]), dtype=torch.uint8)


def windows(text_N, step, *, n_rows=8, length=64, rank=0, n_ranks=1):
    """This rank's rows of the global batch of a step: input ids and labels, (rows, length)."""
    starts = torch.randint(0, len(text_N) - length - 1, (n_rows,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([text_N[s : s + length + 1] for s in starts.tolist()]).long()
    mine = rows[rank * n_rows // n_ranks : (rank + 1) * n_rows // n_ranks]
    return mine[:, :-1], mine[:, 1:]


def train(text_N, config, *, compress="none", optimizer="sgd", steps=55, n_rows=8, length=64):
    """Train on the ranks' windows, all gradients in one bucket; returns the mean loss of each step, nats a byte."""
    rank, n_ranks = collectives.rank_in(), collectives.size_of()
    model = DeepSeekModel(config).train()
    parameters, all_reduce, losses = list(model.parameters()), compression.get(compress), []
    update = _optimizer(parameters, optimizer)
    for step in range(steps):
        ids_BT, labels_BT = windows(text_N, step, n_rows=n_rows, length=length, rank=rank, n_ranks=n_ranks)
        loss_sum, _ = model.loss_sum(ids_BT, labels_BT)
        update.zero_grad()
        (loss_sum / (n_rows * length)).backward()
        if all_reduce is None:
            data_parallel.all_reduce_gradients([p.grad for p in parameters])
        else:
            flat = all_reduce(torch.cat([p.grad.flatten() for p in parameters]))
            for p, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                p.grad.copy_(total.view_as(p))
        _take_step(parameters, update, step)
        losses.append(loss_sum.detach() / (n_rows * length))
    return collectives.all_reduce(torch.stack(losses)).tolist()


def _optimizer(parameters, name):
    if name == "sgd":
        return torch.optim.SGD([{"params": parameters, "peak": 1.0, "clip": 0.5}], lr=1.0)
    return torch.optim.AdamW([{"params": parameters, "peak": 2e-3, "clip": 1.0}], betas=(0.9, 0.95))


def _take_step(parameters, update, step):
    """Clip, warm up over ten steps, and update."""
    (group,) = update.param_groups
    torch.nn.utils.clip_grad_norm_(parameters, group["clip"])
    group["lr"] = group["peak"] * min(1, (step + 1) / 10)
    update.step()


def mixed_rows(text_N, step, n_rows=8, length=64):
    """Rows of very different lengths, sorted by length so that ranks pad little: ids and labels, -100 where padded."""
    ids_BT, labels_BT = windows(text_N, step, n_rows=n_rows, length=length)
    labels_BT = labels_BT.clone()
    for row in range(n_rows // 2):  # the short half: four bytes, six, eight, ...
        labels_BT[row, 4 + 2 * row :] = -100
    return ids_BT, labels_BT


def train_mixed(text_N, config, suspect, steps=60, n_rows=8):
    """Train on rows of mixed lengths; returns the loss per byte of each step.  `suspect` is the puzzle 3-bug."""
    rank, n_ranks = collectives.rank_in(), collectives.size_of()
    mine = slice(rank * n_rows // n_ranks, (rank + 1) * n_rows // n_ranks)
    model = DeepSeekModel(config).train()
    parameters, losses = list(model.parameters()), []
    update = _optimizer(parameters, "sgd")
    for step in range(steps):
        ids_BT, labels_BT = mixed_rows(text_N, step, n_rows)
        loss_sum, n_valid = model.loss_sum(ids_BT[mine], labels_BT[mine])
        update.zero_grad()
        if suspect:
            (loss_sum / n_valid / n_ranks).backward()
        else:
            (loss_sum / collectives.all_reduce(n_valid.clone())).backward()
        data_parallel.all_reduce_gradients([p.grad for p in parameters])
        _take_step(parameters, update, step)
        losses.append(data_parallel.global_token_mean(loss_sum.detach(), n_valid).item())
    return losses


HINTS = {
    "3-bug": (
        "On one rank the two trainers agree to the last digit, and on several each rank does just what one rank would "
        "do with its rows. So what depends on how many ranks share the rows?",
        "Rows are sorted by length. On four ranks, rank 0 holds 10 bytes that count and rank 3 holds 128. How much of "
        "the gradient comes from each? And on one rank?",
        "`suspect` divides each rank's loss by the rank's *own* number of bytes, and then by the number of ranks: a "
        "mean of means. Rank 0's 10 bytes get as much say as rank 3's 128. The cure: count what counts over all ranks "
        "before the first backward, and divide every rank's sum by that number. Micro-batches on one rank have the "
        "same trap.",
    ),
}

EXERCISES = (
    Exercise(
        number="3.1",
        path=BUCKETS,
        title="Which gradients travel together",
        grade=grade_plan_buckets,
        level="warm-up",
        minutes=10,
        hints=(
            "Backward finishes the last parameter first. Walk through the indices from the last to the first, and keep "
            "the bucket that is being filled, with the count of numbers in it.",
            "Before you add a gradient, ask whether it would make the bucket too full. If so, open a new one, unless "
            "the bucket is still empty: a gradient larger than the limit travels alone.",
            "`for i in reversed(range(len(numels)))`; start with `members, held = [[]], 0`; open a new bucket if "
            "`members[-1] and held + numels[i] > bucket_numel`. In the end, drop the empty bucket that is left when "
            "there were no gradients.",
        ),
    ),
    Exercise(
        number="3.2",
        path=REDUCE,
        title="All-reduce in buckets",
        grade=grade_all_reduce_gradients,
        minutes=15,
        hints=(
            "For every bucket: make one flat tensor, all-reduce it, and copy each part back to where it came from.",
            "plan_buckets counts numbers, `bucket_bytes` counts bytes: `gradients[0].element_size()` is between them. "
            "Return early where there is one rank only, or no gradient.",
            "`flat = torch.cat([gradients[i].flatten() for i in bucket])`, then `collectives.all_reduce(flat, group)`. "
            "`flat.split([gradients[i].numel() for i in bucket])` gives the parts in the order of the bucket, and "
            "`gradients[i].copy_(total.view_as(gradients[i]))` writes one back.",
        ),
    ),
    Exercise(
        number="3.3",
        path=OVERLAP,
        title="Send while backward works",
        grade=grade_overlap,
        minutes=20,
        hints=(
            "Keep two things: for each bucket how many of its gradients are missing, and the list of what was started. "
            "The length of that list is the number of the next bucket that may start.",
            "`ready(i)` takes one from the missing of i's bucket. Then, *while* the next bucket has none missing, "
            "start it: one gradient may set several buckets free.",
            "finish starts whatever has not started, in order (its gradients never came, but other ranks wait for it), "
            "and returns `[pending.wait() for pending in self.pending]`. Nothing waits before that.",
        ),
    ),
    Exercise(
        number="3.4",
        path=INT8,
        title="Eight bits a number",
        grade=grade_quantize_int8,
        minutes=15,
        hints=(
            "A table with one block in each row: pad with zeros at the end, `F.pad(x, (0, -len(x) % block))`, then "
            "`.view(-1, block)`. The largest magnitude of a row, over 127, is its scale.",
            "q is x over the scale, rounded to the nearest whole number. Cut the padding off again. Scales are in "
            "`torch.promote_types(x_N.dtype, torch.float32)`, so that bf16 does not spoil them.",
            "A block of zeros has scale 0: divide it by 1 instead, `scale_M.where(scale_M > 0, 1)[:, None]`. Leave inf "
            "and nan in x alone: they make the scale of their block inf or nan, and so everybody sees them.",
        ),
    ),
    Exercise(
        number="3.5",
        path=TOP_K,
        title="Only the largest",
        grade=grade_top_k,
        level="warm-up",
        minutes=5,
        hints=(
            "`torch.topk` finds the largest numbers and their places. The largest of what?",
            "Of the magnitudes: `x_N.abs().topk(k)`. Use its places to read the numbers from x itself, where the signs "
            "are. Places go out as int32.",
        ),
    ),
    Exercise(
        number="3.6",
        path=FEEDBACK,
        title="Error feedback",
        grade=grade_with_error_feedback,
        minutes=10,
        hints=(
            "What is to be sent is the gradient and all that was left out before. What is kept is what the receivers "
            "do not get of that.",
            "Compress the sum, a new tensor (a message may share memory with what was compressed). Then write what is "
            "left into the residual, in place, or the caller never sees it.",
            "`wanted_N = x_N + residual_N`; `message = compress(wanted_N)`; "
            "`residual_N.copy_(wanted_N - decompress(*message))`; return the message.",
        ),
    ),
)
