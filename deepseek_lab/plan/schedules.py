"""Pipeline schedules as data: for every rank the list of actions that it carries out, in order.

The one idea: a schedule is nothing but an order.  A builder returns it, a validator proves that it cannot deadlock,
`simulate` says when everything happens, the executor carries it out, and a drawing shows it, all from the same lists.

A model of S = ranks · chunks stages is cut so that a rank holds `chunks` of them.  Per micro-batch and stage there are:

    F           forward                                B           the whole backward
    I, W        its input part, which the stage before waits for, and its weight part, for which nobody waits
    OVERLAP     a forward of one micro-batch with a backward of another, one computing while the other communicates
    U           an update of the weights after a micro-batch, where nobody waits for the end of the step
    SEND, RECV  of an activation (of "F") or a gradient (of "B")

Sources: GPipe (arXiv 1811.06965), 1F1B and interleaved 1F1B (arXiv 2104.04473), zero bubble (arXiv 2401.10241),
DualPipeV (DeepSeek-V3, arXiv 2412.19437, section 3.2.1, and the schedule's own repository), PipeDream (arXiv
1806.03377).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

# Those that a step ends with: every micro-batch meets the same weights.
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "dualpipe_v")


@dataclass(frozen=True)
class Action:
    """One thing that a rank does; `of`, `peer`: of a message, what it carries and to or from which rank."""

    kind: str
    micro_batch: int
    chunk: int = 0
    of: str = ""
    peer: int = -1
    parts: tuple[Action, ...] = ()  # of an OVERLAP: a forward and a backward

    def __str__(self) -> str:
        if self.parts:
            return "+".join(str(part) for part in self.parts)
        name = f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")
        return f"{self.kind} {self.of}{self.micro_batch}.{self.chunk} {self.peer}" if self.of else name

    def steps(self) -> tuple[Action, ...]:
        """Itself, or the parts of an overlap."""
        return self.parts or (self,)


@dataclass(frozen=True)
class Schedule:
    """`compute[rank]` holds that rank's F, B, I, W and OVERLAP in order; `actions` has the messages among them."""

    name: str
    ranks: int
    micro_batches: int
    chunks: int
    compute: tuple[tuple[Action, ...], ...]
    v_shape: bool = False  # chunk 1 runs from the last rank back to the first

    @property
    def stages(self) -> int:
        """Stages of the model, over all ranks."""
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Which stage of the model, counted from the input, is `chunk` of `rank`."""
        if self.v_shape and chunk == 1:
            return 2 * self.ranks - 1 - rank
        return chunk * self.ranks + rank

    def holder(self, stage: int) -> tuple[int, int]:
        """The rank and the chunk that hold a stage."""
        chunk, rank = divmod(stage, self.ranks)
        return (self.ranks - 1 - rank if self.v_shape and chunk == 1 else rank), chunk

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Every rank's list with its messages; see `_with_messages`."""
        return _with_messages(self)


# --- builders -------------------------------------------------------------------------------------------------


def build_schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The schedule `name`: one of SCHEDULES, or pipedream.

    Args:
        ranks: pipeline-parallel ranks.
        chunks: stages that each rank holds; two or more for "interleaved", two for "dualpipe_v", else one.

    Raises:
        ValueError: for a name or a number of micro-batches or chunks that cannot be, saying which can.
    """
    orders = _orders(chunks)
    if name not in orders:
        raise ValueError(f"schedule {name!r} is not known; use one of {', '.join(orders)}")
    if ranks < 1 or micro_batches < 1:
        raise ValueError(f"ranks={ranks} and micro_batches={micro_batches} must both be at least 1")
    if name == "interleaved" and chunks < 2:
        raise ValueError(f"interleaved with chunks={chunks} interleaves nothing; use 2 or more, or the schedule 1f1b")
    if name == "interleaved" and micro_batches % ranks:
        raise ValueError(f"interleaved needs a multiple of ranks={ranks} micro-batches, not {micro_batches}")
    if name == "dualpipe_v" and (chunks != 2 or micro_batches < 2 * ranks):
        raise ValueError(
            f"dualpipe_v needs chunks=2, not {chunks}, and at least {2 * ranks} micro-batches, not {micro_batches}"
        )
    if name not in ("interleaved", "dualpipe_v") and chunks != 1:
        raise ValueError(f"{name} has one chunk a rank, not {chunks}; use interleaved for more")
    compute = tuple(tuple(orders[name](rank, ranks, micro_batches)) for rank in range(ranks))
    return Schedule(name, ranks, micro_batches, chunks, compute, v_shape=name == "dualpipe_v")


def _orders(chunks: int) -> dict[str, Callable[[int, int, int], Iterable[Action]]]:
    """By name, what gives (rank, ranks, micro_batches) its order.  Asked anew each time: a slot may be filled."""
    return {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": partial(interleaved, chunks=chunks),
        "zb_h1": zb_h1,
        "zb_h2": zb_h2,
        "dualpipe_v": dualpipe_v,
        "pipedream": pipedream,
    }


def gpipe(rank: int, ranks: int, micro_batches: int) -> Iterable[Action]:
    """The order of `rank`: all forwards, then all backwards, both from micro-batch 0 on.

    Simple, but every rank keeps the activations of every micro-batch (GPipe, arXiv 1811.06965, section 2.3).
    """
    for kind in ("F", "B"):
        for m in range(micro_batches):
            yield Action(kind, m)


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> Iterable[Action]:
    """The order of `rank`: forwards until its first backward can come, then one forward, one backward, in turn.

    The last rank can begin backward at once, the one before it one micro-batch later, and so on.  So what a rank keeps
    does not grow with the number of micro-batches.  In turn means: a forward, as long as any is left, then a backward.
    All ranks do both in the order of the micro-batches (PipeDream-flush, arXiv 2104.04473, section 2.2.1).
    """
    ahead = min(ranks - rank - 1, micro_batches)
    for m in range(ahead):
        yield Action("F", m)
    for m in range(micro_batches):
        if m + ahead < micro_batches:
            yield Action("F", m + ahead)
        yield Action("B", m)


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """1F1B over `chunks` stages a rank: a bubble `chunks` times smaller for as many times the messages.

    Micro-batches go through in groups of `ranks`: a group through chunk 0, then through chunk 1, and so on.
    """
    total = micro_batches * chunks

    def nth(n: int, backward: bool) -> Action:
        group, place = divmod(n, ranks * chunks)
        chunk, m = divmod(place, ranks)
        return Action("B" if backward else "F", group * ranks + m, chunks - 1 - chunk if backward else chunk)

    ahead = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, total)
    for n in range(ahead):
        yield nth(n, backward=False)
    for n in range(total):
        if n + ahead < total:
            yield nth(n + ahead, backward=False)
        yield nth(n, backward=True)


def zb_h1(rank: int, ranks: int, micro_batches: int) -> Iterable[Action]:
    """1F1B whose weight parts fill the bubble; the later a rank starts, the longer it puts them off."""
    return zero_bubble(micro_batches, ahead=ranks - rank, behind=rank)


def zb_h2(rank: int, ranks: int, micro_batches: int) -> Iterable[Action]:
    """Nearly twice the micro-batches in flight, and no bubble left where all parts take equally long."""
    return zero_bubble(micro_batches, ahead=2 * (ranks - rank) - 1, behind=2 * rank)


def zero_bubble(micro_batches: int, ahead: int, behind: int) -> Iterable[Action]:
    """An order in which backward is split: I, for which the rank before waits, and W, for which nobody does.

    First come `ahead` forwards.  Then, in turn: the I of the next micro-batch; the next W, provided that it belongs
    to a micro-batch at least `behind` before that of the I; the next forward.  What has run out is left out, and the
    weight parts that remain come last.  Micro-batches keep their order (arXiv 2401.10241, section 2).
    """
    forward, weight = min(ahead, micro_batches), 0
    for m in range(forward):
        yield Action("F", m)
    for m in range(micro_batches):
        yield Action("I", m)
        if m - weight >= behind:
            yield Action("W", weight)
            weight += 1
        if forward < micro_batches:
            yield Action("F", forward)
            forward += 1
    for m in range(weight, micro_batches):
        yield Action("W", m)


def pipedream(rank: int, ranks: int, micro_batches: int) -> Iterable[Action]:
    """1F1B that updates the weights after every backward and never drains: see `staleness` and `parallel/pipedream`."""
    for action in one_f_one_b(rank, ranks, micro_batches):
        yield action
        if action.kind == "B":
            yield Action("U", action.micro_batch)


def staleness(rank: int, ranks: int, micro_batch: int) -> int:
    """How many updates PipeDream's `rank` makes between a micro-batch's forward and the use of its gradient.

    Forward runs ahead of backward by ranks - rank - 1 micro-batches, and each of those updates the weights (PipeDream,
    arXiv 1806.03377, "Effective learning").  A rank keeps one more version of its weights than this.
    """
    return min(ranks - rank - 1, micro_batch)


def dualpipe_v(rank: int, ranks: int, micro_batches: int) -> Iterable[Action]:
    """DeepSeek's bidirectional pipeline folded into a V: chunk 1 runs back from the last rank to the first.

    A forward of one chunk overlaps with a backward of the other.  Eight phases, as in its authors' own code.
    """
    after, counts = ranks - rank - 1, {"F": [0, 0], "B": [0, 0]}
    put_off: deque[tuple[int, int]] = deque()

    def step(kind: str, chunk: int, split: bool = False) -> Action:
        m = counts[kind][chunk]
        counts[kind][chunk] += 1
        if split:
            put_off.append((m, chunk))
        return Action("I" if split else kind, m, chunk)

    def weight() -> Iterator[Action]:
        if put_off:
            yield Action("W", *put_off.popleft())

    def both(forward: int, backward: int) -> Action:
        f, b = step("F", forward), step("B", backward)
        return Action("OVERLAP", f.micro_batch, forward, parts=(f, b))

    for _ in range(2 * after):  # 1: fill the first leg
        yield step("F", 0)
    for _ in range(rank + 1):  # 2: fill the second
        yield step("F", 0)
        yield step("F", 1)
    for _ in range(after):  # 3: the first backwards come; weights fill the wait
        yield step("B", 1, split=True)
        yield from weight()
        yield step("F", 1)
    for n in range(micro_batches - 2 * ranks + rank + 1):  # 4: the steady state, all overlapped
        if n == 0 and after == 0:  # the last rank turns its own micro-batch round: nothing to overlap with yet
            yield step("F", 0)
            yield step("B", 1)
        else:
            yield both(0, 1)
        yield both(1, 0)
    for _ in range(after):  # 5: chunk 0 has no more forwards
        yield step("B", 1)
        yield both(1, 0)
    split = False
    for n in range(rank + 1):  # 6: backwards only; from the middle on weights are put off
        split = split or (n == (rank + 1) // 2 and rank % 2 == 1)
        yield step("B", 1, split)
        split = split or (n == (rank + 1) // 2 and rank % 2 == 0)
        yield step("B", 0, split)
    for _ in range(after):  # 7: weights in between the last backwards
        yield from weight()
        yield step("B", 0, split=True)
    while put_off:  # 8: what is left of them
        yield from weight()


# --- when everything happens ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """One action of one rank, from `start` to `end`, in the unit of the durations given."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass
class Timeline:
    """What `simulate` found: spans by rank in order of time, and what follows from them."""

    schedule: Schedule
    spans: list[list[Span]]
    work: float  # what one rank computes
    peak_activations: list[int]  # the most micro-batches of single chunks whose activations each rank holds at once

    @property
    def makespan(self) -> float:
        """From the first start to the last end of the rank that takes longest."""
        return max(spans[-1].end - spans[0].start for spans in self.spans)

    @property
    def bubble_rate(self) -> float:
        """The share of the makespan in which a rank computes nothing (arXiv 2401.10241, section 5.3)."""
        return 1 - self.work / self.makespan


def simulate(
    schedule: Schedule, *, t_f: float = 1.0, t_b: float = 1.0, t_w: float = 1.0, t_comm: float = 0.0
) -> Timeline:
    """When every action starts and ends, if each starts as soon as its rank is free and its input is there.

    Args:
        t_f, t_b, t_w: a stage's forward and the input and weight parts of its backward; a whole backward B takes both.
            An overlap takes as long as its parts together: communication is what it hides.  An update takes no time.
        t_comm: between the end of a stage on one rank and the start of its neighbour on another.

    Raises:
        ValueError: when the ranks wait for each other, naming what each waits for.
    """
    takes = {"F": t_f, "B": t_b + t_w, "I": t_b, "W": t_w, "U": 0.0}
    left = [deque(actions) for actions in schedule.compute]
    spans: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    ends: dict[tuple[str, int, int], float] = {}

    def input_at(rank: int) -> float | None:
        """When the input of the rank's next action is there; None when it has not been worked out yet."""
        latest = 0.0
        for need, other in needs(schedule, rank, left[rank][0]):
            if need not in ends:
                return None
            latest = max(latest, ends[need] + (t_comm if other != rank else 0.0))
        return latest

    while any(left):
        possible = [(at, rank) for rank in range(schedule.ranks) if left[rank] and (at := input_at(rank)) is not None]
        if not possible:
            waiting = [str(actions[0]) if actions else "done" for actions in left]
            raise ValueError(f"{schedule.name}: every rank waits for another: ranks 0, 1, … are at {waiting}")
        at, rank = min(possible)
        action = left[rank].popleft()
        start = max(at, spans[rank][-1].end if spans[rank] else 0.0)
        end = start + sum(takes[step.kind] for step in action.steps())
        spans[rank].append(Span(rank, action, start, end))
        ends.update({ended(schedule, rank, step): end for step in action.steps()})
    work = sum(takes[step.kind] for action in schedule.compute[0] for step in action.steps())
    return Timeline(schedule, spans, work, [peak_activations(actions) for actions in schedule.compute])


def needs(schedule: Schedule, rank: int, action: Action) -> Iterator[tuple[tuple[str, int, int], int]]:
    """What must have ended before `action`: (direction, micro-batch, stage), and the rank that does it."""
    own = {ended(schedule, rank, step) for step in action.steps()}
    for step in action.steps():
        stage, m = schedule.stage(rank, step.chunk), step.micro_batch
        if step.kind == "F":
            wanted = [("F", m, stage - 1)] if stage else []
        elif step.kind in "WU":
            wanted = [("B", m, stage)]
        else:
            wanted = [("F", m, stage)] + ([("B", m, stage + 1)] if stage + 1 < schedule.stages else [])
        for need in wanted:
            if need not in own:
                yield need, schedule.holder(need[2])[0]


def ended(schedule: Schedule, rank: int, step: Action) -> tuple[str, int, int]:
    """What is there once `step` has ended: (its kind, B and I being one, micro-batch, stage)."""
    what = step.kind if step.kind in "WU" else direction(step)
    return (what, step.micro_batch, schedule.stage(rank, step.chunk))


def direction(step: Action) -> str:
    """Whether what `step` makes travels forward ("F", an activation) or backward ("B", a gradient)."""
    return "F" if step.kind == "F" else "B"


def peak_activations(actions: Iterable[Action]) -> int:
    """The most forwards whose activations a rank holds at once, if it carries out `actions` in this order.

    A forward F leaves its activations behind.  A backward B lets go of them; where backward is split, its last part
    W does.  All else, messages too, changes nothing.  `actions` may be a list, or be yielded.  `action.steps()` gives
    the parts of an OVERLAP one by one, and any other action as itself.
    """
    kept = most = 0
    for action in actions:
        for step in action.steps():
            kept += {"F": 1, "B": -1, "W": -1}.get(step.kind, 0)
            most = max(most, kept)
    return most


# --- messages -------------------------------------------------------------------------------------------------


def _with_messages(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Put a SEND behind what another rank waits for, and its RECV into that rank's list.

    A send may wait for its receiver, so both ends of all messages must come in one order, the same everywhere.  That
    order is the one in which a simulation ends the actions that they follow; a receiver takes a message when it comes,
    at the latest just before it is needed.
    """
    timeline = simulate(schedule, t_f=1.0, t_b=1.0, t_w=1.0, t_comm=1e-3)
    events: list[list[tuple[tuple, Action]]] = [[] for _ in range(schedule.ranks)]
    for spans in timeline.spans:
        for place, span in enumerate(spans):
            events[span.rank].append(((span.start, 1, "", place, 0), span.action))
            for step in span.action.steps():
                if (message := _message_after(schedule, span.rank, step)) is not None:
                    chunk, peer = message
                    send = Action("SEND", step.micro_batch, step.chunk, of=direction(step), peer=peer)
                    receive = Action("RECV", step.micro_batch, chunk, of=direction(step), peer=span.rank)
                    events[span.rank].append((_when(span.end, send), send))
                    events[peer].append((_when(span.end, receive), receive))
    return tuple(tuple(action for _, action in sorted(mine, key=lambda event: event[0])) for mine in events)


def _when(at: float, message: Action) -> tuple:
    """Messages that follow actions of the same end come in an order that does not depend on the rank."""
    return (at, 0, message.of, message.micro_batch, message.chunk)


def _message_after(schedule: Schedule, rank: int, step: Action) -> tuple[int, int] | None:
    """For which chunk of which other rank the result of `step` is, if for any."""
    if step.kind in "WU":
        return None
    stage = schedule.stage(rank, step.chunk)
    target = stage + 1 if step.kind == "F" else stage - 1
    if not 0 <= target < schedule.stages:
        return None
    peer, chunk = schedule.holder(target)
    return None if peer == rank else (chunk, peer)


def validate(schedule: Schedule, most_kept: int | None = None) -> None:
    """Prove that a schedule runs: everything once, every send received, no deadlock though sends wait for receivers.

    Args:
        most_kept: activations that a rank may hold at once, if that is bounded.

    Raises:
        ValueError: naming the first thing that is wrong.
    """
    for rank, actions in enumerate(schedule.compute):
        steps = [step for action in actions for step in action.steps()]
        for chunk in range(schedule.chunks):
            for m in range(schedule.micro_batches):
                kinds = sorted(s.kind for s in steps if (s.micro_batch, s.chunk) == (m, chunk))
                if kinds not in (["B", "F"], ["F", "I", "W"], ["B", "F", "U"]):
                    raise ValueError(
                        f"rank {rank} does {kinds} with micro-batch {m} of chunk {chunk}, not F and B, F, I and W, or "
                        "F, B and U"
                    )
        if len(steps) != sum(1 for s in steps if 0 <= s.micro_batch < schedule.micro_batches):
            raise ValueError(f"rank {rank} has a micro-batch that is not one of {schedule.micro_batches}")
        if most_kept is not None and (kept := peak_activations(actions)) > most_kept:
            raise ValueError(f"rank {rank} keeps the activations of {kept} micro-batches, more than {most_kept}")
    rendezvous(schedule, schedule.actions)


def rendezvous(schedule: Schedule, lists: Sequence[Sequence[Action]]) -> None:
    """Play lists with messages: one needs both its ends at once, work needs all that it builds on, on its own rank.

    Raises:
        ValueError: for a deadlock, naming what each rank stands before.
    """
    place = [0] * schedule.ranks
    there: list[set[tuple[str, int, int]]] = [set() for _ in lists]  # what each rank has worked out or received

    def head(rank: int) -> Action | None:
        return lists[rank][place[rank]] if place[rank] < len(lists[rank]) else None

    def meet(sender: Action, rank: int, receiver: Action | None) -> bool:
        return receiver is not None and (receiver.kind, receiver.peer, receiver.of, receiver.micro_batch) == (
            "RECV",
            rank,
            sender.of,
            sender.micro_batch,
        )

    def advance(rank: int) -> bool:
        action = head(rank)
        if action is None or action.kind == "RECV":  # a receiver moves with its sender
            return False
        if action.kind == "SEND":
            receiver = head(action.peer)
            if not meet(action, rank, receiver):
                return False
            there[action.peer].add((action.of, action.micro_batch, schedule.stage(rank, action.chunk)))
            place[action.peer] += 1
        else:
            if any(need not in there[rank] for need, _ in needs(schedule, rank, action)):
                return False
            there[rank] |= {ended(schedule, rank, step) for step in action.steps()}
        place[rank] += 1
        return True

    while any([advance(rank) for rank in range(schedule.ranks)]):
        pass
    stuck = {rank: str(head(rank)) for rank in range(schedule.ranks) if head(rank) is not None}
    if stuck:
        raise ValueError(f"{schedule.name}: a deadlock: {stuck}")
