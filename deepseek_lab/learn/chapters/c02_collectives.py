"""Chapter 02: collectives from messages, what they cost, and what autograd makes of them.

The graders run a candidate on four real ranks.  The numbers that ranks hold are chosen so that a result can be read:
rank r contributes 10^r, so a sum over four ranks is 1111, and 1101 tells that rank 1 is missing.
"""

import math
import re

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from deepseek_lab.learn.exercises import Exercise
from deepseek_lab.learn.ranks import RankError, RankTimeout, run_ranks
from deepseek_lab.learn.verdict import Verdict, close, distance, ok, wrong
from deepseek_lab.learn.wiretap import wiretap
from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.meter import Event, Trace, record

R = 4
LIMIT_S = 4.0  # an answer needs some hundredths of a second; a longer wait is a deadlock

COLLECTIVES = "deepseek_lab.parallel.collectives"
MATRIX = "deepseek_lab.viz.traffic.traffic_matrix"
REDUCE_SCATTER, ALL_GATHER = f"{COLLECTIVES}.ring_reduce_scatter", f"{COLLECTIVES}.ring_all_gather"
ALL_REDUCE, ALL_TO_ALL = f"{COLLECTIVES}.ring_all_reduce", f"{COLLECTIVES}.pairwise_all_to_all"
RING_SECONDS, FIT = "deepseek_lab.plan.network.ring_all_reduce_seconds", "deepseek_lab.plan.network.fit_alpha_beta"
COPY = f"{COLLECTIVES}.CopyToGroup"

# --- 2.1 the traffic matrix -----------------------------------------------------------------------------------


def grade_traffic_matrix(fn) -> Verdict:
    """Events made by hand: two messages to one peer, both ends of a message, one to rank 0, a step of a collective."""
    everyone = (0, 1, 2, 3)

    def event(op, rank, peer, payload, wire, within=None):
        return Event(op, everyone, rank, peer, payload, wire, 0.0, 0.001, within)

    traces = [
        Trace([event("send", 0, 1, 100, 100), event("send", 0, 1, 20, 20), event("send", 0, 3, 7, 7)]),
        Trace([event("recv", 1, 0, 100, 0), event("recv", 1, 0, 20, 0)]),
        Trace([event("exchange", 2, 3, 8, 8, "all_reduce"), event("all_reduce", 2, None, 16, 8)]),
        Trace([event("recv", 3, 0, 7, 0), event("send", 3, 0, 50, 50), event("all_reduce", 3, None, 400, None)]),
    ]
    expected = _matrix({(0, 1): 120, (0, 3): 7, (2, 3): 8, (3, 0): 50})
    known = {
        "rows and columns are swapped": expected.T,
        "messages are counted, not bytes": _matrix({(0, 1): 2, (0, 3): 1, (2, 3): 1, (3, 0): 1}),
        "the last message overwrites those before": _matrix({(0, 1): 20, (0, 3): 7, (2, 3): 8, (3, 0): 50}),
        "a message is counted at both ends": expected + _matrix({(1, 0): 120, (3, 0): 7}),
        "steps of a collective are left out": expected - _matrix({(2, 3): 8}),
        "a trace's place in the list is taken for its rank": expected[::-1].copy(),
        "what goes to rank 0 is left out: the number 0 counts as false": expected - _matrix({(3, 0): 50}),
        "all rows are one and the same list": np.tile(expected.sum(0), (4, 1)),
    }
    for given in (traces, traces[::-1]):
        got = _as_array(fn(given, 4))
        if not close(got, expected):
            name = next((name for name, matrix in known.items() if close(got, matrix)), None)
            return wrong("This is not who sent how many bytes to whom.", name, _cells(expected, got))
    return ok("Each byte that was sent is counted once, in the row of its sender.", _cells(expected, got))


def _matrix(cells: dict[tuple[int, int], int]) -> np.ndarray:
    matrix = np.zeros((4, 4))
    for cell, value in cells.items():
        matrix[cell] = value
    return matrix


def _as_array(value) -> np.ndarray:
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return np.empty(0)


def _cells(expected, got):
    if got.shape != expected.shape:
        return [("shape", expected.shape, got.shape)]
    different = [i for i in np.ndindex(expected.shape) if expected[i] != got[i]] or [(0, 1), (0, 3), (2, 3), (3, 0)]
    return [(f"from rank {i} to rank {j}", int(expected[i, j]), float(got[i, j])) for i, j in different[:6]]


# --- what the ring exercises share ----------------------------------------------------------------------------


def _observe(path, make_input, group=None):
    """Run the function in slot `path` on this rank: what it returned, what it did to its input, what it sent."""
    arguments = make_input(collectives.rank_in(group), collectives.size_of(group))
    before = arguments[0].clone()
    function = getattr(collectives, path.rpartition(".")[2])
    with record() as trace, wiretap() as calls:
        result = function(*arguments, group)
    return {
        "result": result.detach().clone() if isinstance(result, torch.Tensor) else result,
        "overwritten": not torch.equal(arguments[0], before),
        "calls": calls,
        "peers": [event.peer for event in trace.events if event.wire_bytes],
        "order": [event.peer for event in trace.events if event.op in ("exchange", "send")],
        "sent_bytes": trace.wire_bytes(),
    }


def _observe_in_pairs(path, make_input):
    """The same in the groups {0, 2} and {1, 3}, where a rank's number in the group is another than in the world."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return _observe(path, make_input, pairs[dist.get_rank() % 2])


def _grade_messages(fn, path, make_input, make_expected, recognise, *, n_messages, n_bytes, one_peer, on_three=None):
    """Grade a collective that is made of messages: numbers, then traffic, then groups.

    `make_input(rank, R)` gives the arguments of a rank, `make_expected(R)` the list of right results; `recognise`
    names a misconception from the list of results.  `n_messages` and `n_bytes` are allowed per rank.
    """
    try:
        seen = run_ranks(_observe, R, path, make_input, timeout=LIMIT_S, overrides={path: fn})
    except RankTimeout as timeout:
        return _deadlock(timeout)
    results, expected = [s["result"] for s in seen], make_expected(R)
    rows = [(f"rank {r}", e, got) for r, (e, got) in enumerate(zip(expected, results, strict=True))]
    if not all(isinstance(got, torch.Tensor) and close(got, e) for e, got in zip(expected, results, strict=True)):
        return wrong(*recognise(results, expected), rows)
    if any(got.dtype != e.dtype for e, got in zip(expected, results, strict=True)):
        return wrong("The numbers are right, but not their type.", "fp64 is lost on the way", rows)
    if any(s["overwritten"] for s in seen):
        return wrong("The numbers are right, but the caller's tensor changed.", "it overwrites its input")
    if problem := _traffic_problem(seen, n_messages, n_bytes, one_peer):
        return problem
    for world_size, observe, name, words in [
        (3, _observe, on_three, "On four ranks it is right, on three it is not."),
        (
            R,
            _observe_in_pairs,
            "it ignores the group",
            "Over the whole world it is right, in a group of two it is not.",
        ),
    ]:
        size = 2 if observe is _observe_in_pairs else world_size
        wanted = [make_expected(size)[r // 2 if size == 2 else r] for r in range(world_size)]
        try:
            got = [
                s["result"]
                for s in run_ranks(observe, world_size, path, make_input, timeout=LIMIT_S, overrides={path: fn})
            ]
        except RankError as error:
            return Verdict(False, words, name, detail=error.cause if name else str(error))
        if not all(isinstance(g, torch.Tensor) and close(g, w) for g, w in zip(got, wanted, strict=True)):
            return wrong(words, name, [(f"rank {r}", w, g) for r, (w, g) in enumerate(zip(wanted, got, strict=True))])
    sent = " or ".join(str(n) for n in sorted({s["sent_bytes"] for s in seen}))
    words = f"Each rank sent {sent} bytes in at most {max(len(s['peers']) for s in seen)} messages"
    if one_peer:
        words += f", all to its {'right' if seen[0]['peers'] == [1] * len(seen[0]['peers']) else 'left'} neighbour"
    alike = all(torch.equal(e, expected[0]) for e in expected)
    return ok(f"{words}.", [("every rank", expected[0], results[0])] if alike else rows)


def _traffic_problem(seen, n_messages, n_bytes, one_peer):
    """The numbers are right; were they come by as asked?"""
    others = sorted({call.op for s in seen for call in s["calls"]} - {"send", "recv"})
    if others:
        summary = (
            f"The numbers are right, but {', '.join(others)} did the work: use only messages (exchange, send, recv)."
        )
        return wrong(summary, "a collective is built from a collective")
    if not all(call.our_door for s in seen for call in s["calls"]):
        summary = "The numbers are right, but torch.distributed was called directly, where no meter sees it."
        return wrong(summary, "it goes past our own door")
    sent = [s["sent_bytes"] for s in seen]
    rows = [(f"bytes sent by rank {r}", n_bytes, got) for r, got in enumerate(sent)]
    hubs = [h for h in range(R) if all(set(s["peers"]) == {h} for r, s in enumerate(seen) if r != h)]
    if hubs and one_peer:
        peers = [(f"rank {r} sent to", [(r + 1) % R], sorted(set(s["peers"]))) for r, s in enumerate(seen)]
        return wrong("The numbers are right, but one rank does the work of all.", "a star, not a ring", peers)
    if max(sent) > n_bytes:
        return wrong("The numbers are right, but more was sent than needed.", "more bytes than needed", rows)
    if one_peer and any(len(set(s["peers"])) > 1 for s in seen):
        peers = [(f"rank {r} sent to", [(r + 1) % R], sorted(set(s["peers"]))) for r, s in enumerate(seen)]
        return wrong(
            "The numbers are right, but the messages do not go round a ring.", "everyone sends to everyone", peers
        )
    counts = [len(s["peers"]) for s in seen]
    if max(counts) > n_messages:
        return wrong(
            f"Right, but in {max(counts)} messages per rank; {n_messages} are enough.", "too many small messages"
        )
    return None if one_peer else _queue(seen)


def _queue(seen):
    """Do several ranks send to the same one in the same step?"""
    for step, targets in enumerate(zip(*(s["order"] for s in seen), strict=False), 1):
        if len(set(targets)) < R and all(len(s["order"]) == R - 1 for s in seen):
            rows = [(f"rank {r}, step {step}, sends to", "a rank of its own", to) for r, to in enumerate(targets)]
            return wrong("Right, but several ranks send to one in the same step.", "a queue at one rank", rows)
    return None


def _deadlock(timeout):
    sends = [r for r, text in timeout.waiting.items() if text.startswith("waiting in send")]
    name = "everybody sends first: nobody is there to receive" if len(sends) > 1 else "sends and receives do not match"
    return Verdict(False, "The ranks wait for each other.", name, detail=str(timeout))


def _numbers(values):
    """A row of readable numbers as a tensor with two columns, the second one negative."""
    return torch.tensor([[v, -v] for v in values], dtype=torch.float64).reshape(-1, 2)


# --- 2.2 ring reduce-scatter ----------------------------------------------------------------------------------


def grade_ring_reduce_scatter(fn) -> Verdict:
    """Row i of rank r is (i+1) · 10^r, so digits of the sum show which ranks' terms are in it."""

    def my_rows(rank, n_ranks):
        return (_numbers([(i + 1) * 10**rank for i in range(n_ranks)]),)

    def sums(n_ranks):
        ones = sum(10**r for r in range(n_ranks))
        return list(_numbers([(i + 1) * ones for i in range(n_ranks)]))

    def recognise(results, expected):
        if all(_is(g, torch.stack(expected)) for g in results):
            return "Every rank holds all rows of the sum; its own was asked for.", "it returns all rows"
        if all(_is(g, e / R) for g, e in zip(results, expected, strict=True)):
            return "This is the mean over the ranks.", "a mean, not a sum"
        for shift in range(1, R):
            if all(_is(g, expected[(r + shift) % R]) for r, g in enumerate(results)):
                summary = f"Complete rows, but rank r holds row r + {shift}: shift where each row starts."
                return summary, "the right rows on the wrong ranks"
        if all(_row_of(g, r, R, expected[r]) for r, g in enumerate(results)):
            return "Row r is right on rank r, but all the others came with it.", "it returns its whole working tensor"
        if all(_row_of(g, 0, 1, expected[r]) for r, g in enumerate(results)):
            return (
                "The right rows, each in a tensor of shape (1, C); (C,) was asked for.",
                "a table of one row, not a row",
            )
        terms = [_terms(got, r) for r, got in enumerate(results)]
        if all(t == {r} for r, t in enumerate(terms)):
            summary = "Each rank holds its own term alone: the sum of the others never came to the row it returned."
            return summary, "nothing arrives in the row that is returned"
        if all(t is not None and len(t) == 1 for t in terms):
            return "Each rank holds one rank's row, not a sum.", "what arrives replaces the partial sum"
        if all(t == {r, (r - 1) % R} for r, t in enumerate(terms)):
            return (
                "Each sum has two terms: a rank's own, and its neighbour's.",
                "it sends its own rows, not partial sums",
            )
        if all(t is not None and len(t) == R - 1 for t in terms):
            return "One term is missing in every sum: the digits say whose.", "one step too few"
        return "These are not the sums over the ranks: the digits say whose terms are in them.", None

    return _grade_messages(
        fn, REDUCE_SCATTER, my_rows, sums, recognise, n_messages=R - 1, n_bytes=(R - 1) * 16, one_peer=True
    )


def _is(got, expected):
    return isinstance(got, torch.Tensor) and close(got, expected)


def _row_of(got, row, n_rows, expected):
    return isinstance(got, torch.Tensor) and got.shape == (n_rows, *expected.shape) and close(got[row], expected)


def _terms(got, row):
    """The ranks whose terms are in a sum of (row+1) · 10^r, or None if it is something else."""
    if not (isinstance(got, torch.Tensor) and got.shape == (2,)):
        return None
    value = got[0].item() / (row + 1)
    digits = f"{int(value):04d}"[::-1] if value.is_integer() and 0 <= value < 10**R else ""
    return {r for r, d in enumerate(digits) if d == "1"} if digits and set(digits) <= {"0", "1"} else None


# --- 2.3 ring all-gather --------------------------------------------------------------------------------------


def grade_ring_all_gather(fn) -> Verdict:
    """Rank r has the chunk (10^r, -10^r)."""

    def my_chunk(rank, n_ranks):
        return (_numbers([10**rank])[0],)

    def chunks(n_ranks):
        return [_numbers([10**r for r in range(n_ranks)])] * n_ranks

    def recognise(results, expected):
        whole, own = expected[0], [10.0**r for r in range(R)]
        if all(_is(g, whole.flatten()) for g in results):
            return (
                "All the numbers, but in one line: return one row per rank, shape (R, C).",
                "the rows are run together",
            )
        if not all(isinstance(g, torch.Tensor) and g.shape == whole.shape for g in results):
            return "A tensor of one row per rank was asked for, shape (R, C).", None
        columns = [g[:, 0].tolist() for g in results]
        if all(c == [own[(r - i) % R] for i in range(R)] for r, c in enumerate(columns)):
            return "All rows are there, but in the order in which they came.", "rows in order of arrival, not of rank"
        missing = [[i for i in range(R) if c[i] != own[i]] for c in columns]
        if all(m == [r] for r, m in enumerate(missing)):
            return "Only each rank's own row is wrong.", "its own row is missing"
        if all(m == [(r + 1) % R] for r, m in enumerate(missing)):
            return "The row that has the longest way is missing on every rank.", "one step too few"
        if all(set(c[:r] + c[r + 1 :]) == {own[(r + 1) % R]} for r, c in enumerate(columns)):
            summary = "Every row that arrived holds what arrived last: they share one buffer."
            return summary, "one buffer for all that arrives"
        if all(set(c) <= {own[r], own[(r - 1) % R]} for r, c in enumerate(columns)):
            return "Nobody ever sees more than its left neighbour's row.", "it sends its own row every time"
        return "These are not the ranks' chunks, in rank order.", None

    return _grade_messages(
        fn, ALL_GATHER, my_chunk, chunks, recognise, n_messages=R - 1, n_bytes=(R - 1) * 16, one_peer=True
    )


# --- 2.4 ring all-reduce --------------------------------------------------------------------------------------

SHAPE = (3, 2)  # six numbers, which four ranks do not divide: chunks of two, two of padding


def grade_ring_all_reduce(fn) -> Verdict:
    """A tensor of 3 × 2 numbers, i · 10^r, and then 1,000 random numbers in a transposed tensor."""

    def my_tensor(rank, n_ranks):
        return ((torch.arange(1.0, 7.0, dtype=torch.float64) * 10**rank).view(SHAPE),)

    def sums(n_ranks):
        ones = sum(10**r for r in range(n_ranks))
        return [(torch.arange(1.0, 7.0, dtype=torch.float64) * ones).view(SHAPE)] * n_ranks

    def recognise(results, expected):
        whole = expected[0]
        flat = [g.flatten() for g in results if isinstance(g, torch.Tensor)]
        if len(flat) < R:
            return "Every rank should return a tensor.", None
        if all(len(g) == 8 and _is(g[:6], whole.flatten()) for g in flat):
            return "Right numbers, and behind them the padding.", "the padding is not cut off"
        if all(_is(g, whole.flatten()) for g in flat):
            return "Right numbers in the wrong shape.", "the shape is lost"
        if all(_is(g, whole.flatten() / R) for g in flat):
            return "This is the mean over the ranks.", "a mean, not a sum"
        if all(g.shape == (6,) and _is(g.sort().values, whole.flatten()) for g in flat):
            return "All the right numbers, in the wrong places.", "chunks in the wrong order"
        if _is(flat[0], whole.flatten()):
            return "Rank 0 has the sum; the others need it, too.", "only rank 0 has it"
        if all(0 < len(g) < 6 and _is(g, whole.flatten()[: len(g)]) for g in flat):
            return "The last numbers are missing: those that do not fill a chunk.", "the remainder is cut off"
        if all(len(g) < 6 for g in flat):
            return "Each rank has a part of the sum.", "the all-gather is missing"
        return "This is not the sum over the ranks.", None

    try:
        verdict = _grade_messages(
            fn, ALL_REDUCE, my_tensor, sums, recognise, n_messages=2 * (R - 1), n_bytes=2 * (R - 1) * 16, one_peer=True
        )
    except RankError as error:
        try:
            run_ranks(_sum_of, R, 8, timeout=LIMIT_S, overrides={ALL_REDUCE: fn})
        except RankError:
            raise error from None
        summary = "It works on 8 numbers, and not on 6: four ranks do not divide them."
        return Verdict(False, summary, "it needs sizes that the ranks divide", detail=error.cause)
    if not verdict.passed:
        return verdict
    if problem := _problem_with_many(fn):
        return problem
    verdict.summary += f" That is 2·({R}-1)/{R} of the {R * 16} bytes of the padded tensor."
    return verdict


def _problem_with_many(fn):
    """1,000 random numbers, which four ranks divide, in a transposed tensor: digits, bytes, and memory layout."""
    try:
        seen = run_ranks(_sum_of_transposed, R, timeout=LIMIT_S, overrides={ALL_REDUCE: fn})
    except RankError as error:
        if not re.search("contiguous|stride", error.cause):
            raise
        summary = "It works on a contiguous tensor, and not on a transposed one: `flatten` copies where `view` cannot."
        return Verdict(False, summary, "it needs a contiguous tensor", detail=error.cause)
    expected = sum(_transposed(rank) for rank in range(R))
    if not all(_is(total, expected) for total, _ in seen):
        loss = max(distance(total, expected) for total, _ in seen)
        summary = "With 1,000 random numbers per rank, digits are missing."
        return wrong(summary, "fp64 is lost on the way", [("relative error", "below 1e-9", loss)])
    needed = 2 * (R - 1) * 250 * 8
    rows = [(f"bytes sent by rank {r}, of 1,000 numbers", needed, sent) for r, (_, sent) in enumerate(seen)]
    if any(sent > needed for _, sent in seen):
        return wrong(f"{R} ranks divide 1,000, and yet it was padded.", "padding where none is needed", rows)
    return None


def _sum_of(n_numbers):
    return collectives.ring_all_reduce(_random(n_numbers, collectives.rank_in()))


def _sum_of_transposed():
    with record() as trace:
        total = collectives.ring_all_reduce(_transposed(collectives.rank_in()))
    return total, trace.wire_bytes()


def _transposed(rank):
    return _random(1000, rank).view(40, 25).T


def _random(n_numbers, rank):
    return torch.randn(n_numbers, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


# --- 2.5 pairwise all-to-all ----------------------------------------------------------------------------------


def grade_pairwise_all_to_all(fn) -> Verdict:
    """Rank s sends (2s + d + 1) % 3 rows to rank d, each with the number 10·s + d; some send nothing."""

    def count(src, dst):
        return (2 * src + dst + 1) % 3

    def my_rows(rank, n_ranks):
        rows = [10 * rank + dst for dst in range(n_ranks) for _ in range(count(rank, dst))]
        out, back = zip(*((count(rank, r), count(r, rank)) for r in range(n_ranks)), strict=True)
        return _numbers(rows), list(out), list(back)

    def received(n_ranks):
        def rows(rank):
            return _numbers([10 * src + rank for src in range(n_ranks) for _ in range(count(src, rank))])

        return [rows(rank) for rank in range(n_ranks)]

    def recognise(results, expected):
        if not all(isinstance(g, torch.Tensor) and g.dim() == 2 for g in results):
            return "A tensor of rows was asked for.", None
        pairs = enumerate(zip(results, expected, strict=True))
        values = [sorted(g[:, 0].tolist()) for g in results]
        wanted = [e[:, 0].tolist() for e in expected]
        if values == [sorted(w) for w in wanted]:
            return (
                "All rows arrived, in another order than that of their senders.",
                "rows in order of arrival, not of rank",
            )
        others = [[v for v in w if v // 10 != r] for r, w in enumerate(wanted)]
        uncopied = [g.shape == e.shape and _is(g[e[:, 0] // 10 != r], e[e[:, 0] // 10 != r]) for r, (g, e) in pairs]
        if values == others or all(uncopied):
            return "Only the rows that a rank keeps for itself are missing.", "its own rows are missing"
        if [len(v) for v in values] == [sum(count(r, d) for d in range(R)) for r in range(R)]:
            return (
                "As many rows came back as were sent; others send other numbers.",
                "it expects as many rows as it sends",
            )
        return "These are not the rows that the others sent to each rank.", None

    most = max(sum(count(r, d) for d in range(R) if d != r) for r in range(R)) * 16
    with_slack = {"n_messages": R - 1, "n_bytes": most, "one_peer": False}
    name = "partners by XOR: only for a power of two"
    return _grade_messages(fn, ALL_TO_ALL, my_rows, received, recognise, **with_slack, on_three=name)


# --- 2.6 and 2.7 cost -----------------------------------------------------------------------------------------


def grade_ring_all_reduce_seconds(fn) -> Verdict:
    """Four networks and sizes that the ranks divide (padded or not is the same), and one rank, with nothing to send."""
    cases = [
        (4e6, 4, 1e-3, 1e8),
        (1e9, 8, 5e-6, 4e11),
        (1024, 64, 2e-5, 1e10),
        (2.8e10, 2048, 1e-5, 5e10),
        (1e6, 1, 1e-3, 1e8),
    ]
    known = {
        "half of it: the all-gather is missing": lambda s, n, a, b: (n - 1) * (a + s / n / b),
        "the whole tensor in every round": lambda s, n, a, b: 2 * (n - 1) * (a + s / b),
        "one latency for all rounds": lambda s, n, a, b: a + 2 * (n - 1) / n * s / b,
        "one latency for each half": lambda s, n, a, b: 2 * (a + (n - 1) / n * s / b),
        "2 R rounds: two too many": lambda s, n, a, b: 2 * n * (a + s / n / b),
        "bytes taken for bits": lambda s, n, a, b: 2 * (n - 1) * (a + 8 * s / n / b),
        "no latency": lambda s, n, a, b: 2 * (n - 1) / n * s / b,
        "a tree, not a ring": lambda s, n, a, b: 2 * math.ceil(math.log2(n)) * (a + s / b),
        "send and receive in turn": lambda s, n, a, b: 4 * (n - 1) * (a + s / n / b),
    }
    got, expected = [fn(*case) for case in cases], [_ring_round_by_round(*case) for case in cases]
    rows = [
        (f"{s:g} B, {n} ranks, α = {a:g} s, B = {b:g} B/s", e, g)
        for (s, n, a, b), e, g in zip(cases, expected, got, strict=True)
    ]
    missed = [row for row in rows if not close(row[2], row[1])]
    if not missed:
        return ok("2 (R-1) rounds, in each a latency and the R-th part of the tensor.", rows)
    name = next((name for name, f in known.items() if close(got[:4], [f(*case) for case in cases[:4]], 1e-9)), None)
    return wrong("This is not what the ring takes.", name, missed)


def _ring_round_by_round(n_bytes, n_ranks, latency_s, bytes_per_s):
    """Round by round, so that the grader does not lean on the formula that it grades."""
    return sum(latency_s + n_bytes / n_ranks / bytes_per_s for _ in range(2 * (n_ranks - 1)))


def grade_fit_alpha_beta(fn) -> Verdict:
    """Exact times first; then times with 5% noise, where an unweighted fit loses α; then what cannot be fitted."""
    sizes = [2.0**k for k in range(8, 27, 2)]
    alpha, bandwidth = 2e-4, 5e8
    exact = [alpha + s / bandwidth for s in sizes]
    got = _pair(fn(sizes, exact))
    if not close(got, [alpha, bandwidth], 1e-6) or not close(got[0], alpha, 1e-6):
        known = {
            "seconds per byte, not bytes per second": [alpha, 1 / bandwidth],
            "the two are swapped": [bandwidth, alpha],
            "no latency": [0.0, None],
            "the time of the smallest message is taken for α": [exact[0], None],
        }
        name = next((n for n, want in known.items() if _matches(got, want)), None)
        rows = [("α (s)", alpha, got[0]), ("B (bytes/s)", bandwidth, got[1])]
        return wrong("The times follow a straight line exactly, and these are not its constants.", name, rows)
    noisy = [t * (1 + 0.05 * math.sin(7 * i)) for i, t in enumerate(exact)]
    wanted, got = _fit_by_hand(sizes, noisy), _pair(fn(sizes, noisy))
    rows = [("α (s), times with 5% noise", wanted[0], got[0]), ("B (bytes/s)", wanted[1], got[1])]
    if not (close(got[0], wanted[0], 1e-6) and close(got[1], wanted[1], 1e-6)):
        slope, intercept = np.polyfit(sizes, noisy, 1)
        ends = (noisy[-1] - noisy[0]) / (sizes[-1] - sizes[0])
        known = {
            "absolute errors: the largest messages decide alone": [float(intercept), float(1 / slope)],
            "only the first and the last point are used": [noisy[0] - sizes[0] * ends, 1 / ends],
        }
        name = next((n for n, want in known.items() if _matches(got, want)), None)
        return wrong("Exact times are fitted, but noisy ones are not weighed by their relative errors.", name, rows)
    for bad in ([[1e3, 1e3], [1.0, 1.1]], [[1e3, 1e6], [2.0, 1.0]]):
        try:
            with np.errstate(all="ignore"):
                fn(*bad)
        except ValueError:
            continue
        return wrong(f"Sizes {bad[0]} and times {bad[1]} cannot be fitted: raise ValueError.", "it fits the impossible")
    return ok("Both constants are found, also where each time is off by 5%.", rows)


def _fit_by_hand(sizes, seconds):
    """The normal equations of the relative errors, solved by hand: independent of the function that is graded."""
    s, t = np.asarray(sizes), np.asarray(seconds)
    w = 1 / t**2
    a, b, c, d, e = w.sum(), (w * s).sum(), (w * s * s).sum(), (w * t).sum(), (w * s * t).sum()
    determinant = a * c - b * b
    return (d * c - b * e) / determinant, determinant / (a * e - b * d)


def _pair(value):
    try:
        first, second = (float(v) for v in value)
    except (TypeError, ValueError):
        return [math.nan, math.nan]
    return [first, second]


def _matches(got, wanted):
    return all(w is None or close(g, w, 1e-6) for g, w in zip(got, wanted, strict=True))


# --- 2.8 f ----------------------------------------------------------------------------------------------------


def grade_copy_to_group(fn) -> Verdict:
    """Rank r's gradient is 10^r times (1, 2, 1/3); a second branch holds the same gradient tensor."""
    try:
        seen = run_ranks(_observe_f, R, timeout=LIMIT_S, overrides={COPY: fn})
    except RankTimeout as timeout:
        return _deadlock(timeout)
    except RankError as error:
        if "incorrect number of gradients" not in error.cause:
            raise
        summary = "backward returns one value per argument of forward: the gradient of x, and None for the group."
        return wrong(summary, "the None for the group is missing")
    outputs, gradients = [s["output"] for s in seen], [s["gradient"] for s in seen]
    if not all(_is(y, X) for y in outputs):
        name = "g, not f: it sums in forward" if all(_is(y, X * R) for y in outputs) else None
        return wrong("In forward, x should pass unchanged.", name, [(f"rank {r}", X, y) for r, y in enumerate(outputs)])
    whole = G * sum(10.0**r for r in range(R))
    rows = [(f"gradient on rank {r}", whole, g) for r, g in enumerate(gradients)]
    if not all(_is(g, whole) for g in gradients):
        known = {
            "nothing is summed in backward": [G * 10.0**r for r in range(R)],
            "a mean, not a sum": [whole / R] * R,
        }
        name = next((n for n, w in known.items() if all(map(_is, gradients, w))), None)
        if all(g is not None and close(g, whole, 1e-6) for g in gradients):
            name = "fp64 is lost on the way"
        return wrong("The gradient of x is not the sum over the ranks.", name, rows)
    if any(not _is(s["other"], G * 10.0**r) for r, s in enumerate(seen)):
        summary = "x has its gradient. But autograd had lent the same gradient to another branch, and that one changed."
        others = [(f"other branch, rank {r}", G * 10.0**r, s["other"]) for r, s in enumerate(seen)]
        return wrong(summary, "it sums in place a gradient that others use", others)
    if not all(call.our_door for s in seen for call in s["forward"] + s["backward"]):
        return wrong("torch.distributed was called directly, where no meter sees it.", "it goes past our own door")
    ops = [[call.op for call in seen[0][way]] for way in ("forward", "backward")]
    if ops != [[], ["all_reduce"]]:
        sent = [("sent in forward", [], ops[0]), ("sent in backward", ["all_reduce"], ops[1])]
        return wrong("The numbers are right, but other things were sent.", "more traffic than one all-reduce", sent)
    in_pairs = [G * (10.0 ** (r % 2) + 10.0 ** (r % 2 + 2)) for r in range(R)]
    if not all(_is(s["pair"], w) for s, w in zip(seen, in_pairs, strict=True)):
        return wrong("Over the whole world it is right, in a group of two it is not.", "it ignores the group")
    return ok("Nothing is sent in forward; in backward, one all-reduce gives every rank the whole gradient.", rows)


X = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
G = torch.tensor([1.0, 2.0, 1 / 3], dtype=torch.float64)


def _observe_f():
    """Runs on each rank: x takes f and a second branch takes the same gradient, after f in the order of backward."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x, twin, x_in_pair = (X.clone().requires_grad_() for _ in range(3))
    other = twin * 1.0  # made before f, so its backward runs after that of f
    with wiretap() as forward:
        y = collectives.copy_to_group(x)
    output = y.detach().clone()
    with wiretap() as backward:
        ((y + other) * G * 10.0**rank).sum().backward()  # the inner sum lends one gradient to both branches
    (collectives.copy_to_group(x_in_pair, pairs[rank % 2]) * G * 10.0**rank).sum().backward()
    return {
        "output": output,
        "gradient": x.grad,
        "other": twin.grad,
        "pair": x_in_pair.grad,
        "forward": forward,
        "backward": backward,
    }


# --- what the chapter shows besides ---------------------------------------------------------------------------


def star_all_reduce(x, group=None):
    """The obvious all-reduce: everybody sends to rank 0, which adds up and sends the sum back."""
    rank, n_ranks = collectives.rank_in(group), collectives.size_of(group)
    if rank == 0:
        total, arrived = x.clone(), torch.empty_like(x)
        for src in range(1, n_ranks):
            total += collectives.recv(arrived, src, group)
        for dst in range(1, n_ranks):
            collectives.send(total, dst, group)
        return total
    collectives.send(x, 0, group)
    return collectives.recv(torch.empty_like(x), 0, group)


def suspect_all_reduce(x, group=None):
    """The puzzle 2-bug: a ring with a silent mistake.  Look at its symptoms first."""
    rank, n_ranks = collectives.rank_in(group), collectives.size_of(group)
    right, left = (rank + 1) % n_ranks, (rank - 1) % n_ranks
    sum_RC = F.pad(x.flatten(), (0, -x.numel() % n_ranks)).view(n_ranks, -1).clone()
    arrived_C = torch.empty_like(sum_RC[0])
    for step in range(n_ranks - 1):
        give, take = (rank - step) % n_ranks, (rank - step - 1) % n_ranks
        collectives.exchange(sum_RC[give], right, arrived_C, left, group)
        sum_RC[take] += arrived_C
    complete_C = sum_RC[(rank + 1) % n_ranks]
    return collectives.ring_all_gather(complete_C, group).flatten()[: x.numel()].view_as(x)


def train_together(all_reduce, lr, steps=25):
    """Fit 64 weights by gradient descent on four ranks' data: the loss of each step."""
    rank, n_ranks = collectives.rank_in(), collectives.size_of()
    generator = torch.Generator().manual_seed(0)
    answer = torch.randn(64, generator=generator, dtype=torch.float64)
    x = torch.randn(n_ranks, 256, 64, generator=generator, dtype=torch.float64)[rank]
    weights, losses = torch.zeros(64, dtype=torch.float64), []
    for _ in range(steps):
        error = x @ (weights - answer)
        losses.append(error.square().mean())
        gradient = all_reduce(2 * x.T @ error / len(error)) / n_ranks
        weights -= lr * gradient
    return (collectives.all_reduce(torch.stack(losses)) / n_ranks).tolist()


HINTS = {
    "2-bug": (
        "Every test above uses numbers that are equal within a tensor, or looks at a figure that does not care about "
        "order. Try a tensor in which element i is the number i.",
        "`run_ranks(lambda: suspect_all_reduce(torch.arange(8.0)), 4)[0]` gives 8, 12, 16, 20, 24, 28, 0, 4; "
        "right is 0, 4, 8, ..., 28. Which chunk stands where chunk 0 belongs?",
        "Its reduce-scatter starts one place further on, so that rank r ends up with the complete row r + 1, not r. "
        "That is a valid convention. But its all-gather files the row under r: all chunks move by one place. Gradients "
        "reach the wrong weights, while sums, norms and agreement between ranks are untouched.",
    ),
}

EXERCISES = (
    Exercise(
        number="2.1",
        path=MATRIX,
        title="Who sent how much to whom",
        grade=grade_traffic_matrix,
        level="warm-up",
        minutes=5,
        hints=(
            "Start from an R × R table of zeros: `[[0] * n_ranks for _ in range(n_ranks)]`. Go through the events of "
            "all traces, and add each to one cell.",
            "The row is `event.rank`, not the trace's place in the list. The column is `event.peer`. Skip events whose "
            "peer is None: collectives have none. What is added is `event.wire_bytes`, which is 0 for a receive.",
        ),
    ),
    Exercise(
        number="2.2",
        path=REDUCE_SCATTER,
        title="Ring reduce-scatter",
        grade=grade_ring_reduce_scatter,
        minutes=15,
        hints=(
            "Follow row 0 only. It must be complete at rank 0, so the last rank to add its term is rank 0, and the "
            "first to send it is rank 0's right neighbour, rank 1. In step 0, then, rank 1 sends row 0. Which row does "
            "rank r send in step 0?",
            "In step s rank r sends row (r - 1 - s) mod R. What arrives comes from rank r - 1, which sends row "
            "(r - 2 - s) mod R: that is the row of yours to add it to.",
            "Work on a clone, `sum_RC = x_RC.clone()`, and receive into a buffer of one row: "
            "`exchange(sum_RC[give], right, arrived_C, left, group)`, then `sum_RC[take] += arrived_C`. After R - 1 "
            "steps return `sum_RC[rank]`.",
        ),
    ),
    Exercise(
        number="2.3",
        path=ALL_GATHER,
        title="Ring all-gather",
        grade=grade_ring_all_gather,
        minutes=10,
        hints=(
            "The same ring, without any adding: pass on what you got last. In the first step that is your own chunk.",
            "Make room for all rows, `x_C.new_empty(n_ranks, *x_C.shape)`, and put yours into row `rank`. In step s "
            "you send row (rank - s) mod R. Which row does your left neighbour send at that moment?",
            "It sends row (rank - 1 - s) mod R, and that is where you receive it, without a buffer: "
            "`exchange(gathered_RC[give], right, gathered_RC[take], left, group)`.",
        ),
    ),
    Exercise(
        number="2.4",
        path=ALL_REDUCE,
        title="Ring all-reduce",
        grade=grade_ring_all_reduce,
        minutes=10,
        hints=(
            "A reduce-scatter leaves each rank one row of the sum. What brings all rows to all ranks?",
            "The rows must be equally long: flatten `x`, and append zeros until the R ranks divide it. "
            "`F.pad(flat, (0, n))` appends n zeros; a chunk has `math.ceil(x.numel() / n_ranks)` elements.",
            "`padded.view(n_ranks, chunk)` goes into ring_reduce_scatter, its result into ring_all_gather. Flatten "
            "what comes out, cut it to `x.numel()` elements, and give it the shape of `x` with `view_as(x)`.",
        ),
    ),
    Exercise(
        number="2.5",
        path=ALL_TO_ALL,
        title="Pairwise all-to-all",
        grade=grade_pairwise_all_to_all,
        level="stretch",
        minutes=15,
        hints=(
            "In step s every rank sends to the rank s places further on. Who sends to you in that step?",
            "The rank s places back: src = (rank - s) mod R. Steps go from 1 to R - 1. Your own rows are copied.",
            "`x.split(list(send_counts))` cuts x by receiver. Make one buffer per sender, "
            "`x.new_empty(count, *x.shape[1:])`, exchange into `incoming[src]`, and `torch.cat(incoming)` at the end: "
            "then the order is that of the senders, whatever came first.",
        ),
    ),
    Exercise(
        number="2.6",
        path=RING_SECONDS,
        title="What a ring costs",
        grade=grade_ring_all_reduce_seconds,
        minutes=5,
        hints=(
            "How many rounds are there in a reduce-scatter? In an all-gather? How many bytes does one message carry?",
            "2 (R - 1) rounds. Each takes one message of n_bytes / n_ranks: latency_s plus its bytes / bytes_per_s. "
            "All ranks send and receive at the same time, so a round takes as long as one message.",
        ),
    ),
    Exercise(
        number="2.7",
        path=FIT,
        title="Fit α and B to measurements",
        grade=grade_fit_alpha_beta,
        level="stretch",
        minutes=15,
        hints=(
            "Each measurement is an equation, α · 1 + β · size = time. Divide it by its time: α / time + β · size / "
            "time = 1. Now an error of 5% weighs the same in every equation.",
            "`np.linalg.lstsq(equations, np.ones(n), rcond=None)[0]` solves it; `equations` has the columns 1 / time "
            "and size / time. Return α and 1 / β.",
            "Raise ValueError before that if there are fewer than two different sizes or a time is not positive, and "
            "after it if β is not positive.",
        ),
    ),
    Exercise(
        number="2.8",
        path=COPY,
        title="f: copy in forward, sum in backward",
        grade=grade_copy_to_group,
        minutes=10,
        hints=(
            "What has to be sent in forward, where all ranks hold the same x? And in backward, where each has found "
            "its own part of the gradient of x? What must forward keep in `ctx` for that?",
            "forward keeps the group, `ctx.group = group`, and hands x on: `return x.view_as(x)`. backward sums its "
            "gradient over that group. It returns one value for each argument of forward: the sum, and None.",
            "all_reduce works in place, and autograd may have lent the same gradient to somebody else: sum a clone, "
            "`all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group)`.",
        ),
    ),
)
