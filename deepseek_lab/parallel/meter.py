"""What was sent, when, and over which link: the meter behind `collectives`.

Every operation of `collectives` runs inside `operation(...)`.  That does three things: it notes in shared
memory what this rank is waiting in (so that a hang can be explained from outside), it adds an `Event` to
each open `record()`, and, where a `Link` was chosen, it holds the operation back until that link could have
delivered.  Bytes on the wire are *measured*: they are set only for what we send ourselves, point to point.
For a collective that torch carries out, they are `None`; nobody here can see them.

One process is one rank, so the state is the module's.  All times are `time.monotonic()`, one clock for all
ranks of a machine.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

NOTE_BYTES = 256  # length of the shared-memory note


@dataclass(frozen=True)
class Link:
    """A link with the α–β cost model: a message of S bytes arrives `latency_s + S / bytes_per_s` after it left.

    With `run_ranks(..., link=Link(...))` no operation completes earlier than this link would allow: ranks
    wait, they do not compute.  A rank's messages leave one after the other.  The link is a lower bound: what
    the real transport costs shows where it is slower.  Raises ValueError unless both figures are positive.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self):
        if not (self.latency_s > 0 and self.bytes_per_s > 0):
            raise ValueError(
                f"Link(latency_s={self.latency_s}, bytes_per_s={self.bytes_per_s}): both must be positive; "
                "for a link that costs nothing leave link=None"
            )

    def seconds(self, n_bytes: float, n_messages: int = 1) -> float:
        """Seconds for `n_messages` in a row that carry `n_bytes` together."""
        return n_messages * self.latency_s + n_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Event:
    """One operation of one rank.

    `payload_bytes` is the tensor that was handed over.  `wire_bytes` is what this rank itself sent, measured;
    None if torch carried the operation out.  `peer` is the receiver of a send (the sender for a recv), in
    `group_ranks` and `rank` all ranks are global.  `within` names the collective that this send was a step
    of: such sends are also part of that event's `wire_bytes`, so a total counts only events with
    `within is None`.  `blocked_s` is how long this rank stood still for the operation: all of `seconds`, unless it was
    started first and waited for later.
    """

    op: str
    group_ranks: tuple[int, ...]
    rank: int
    peer: int | None
    payload_bytes: int
    wire_bytes: int | None
    start_s: float
    seconds: float
    within: str | None = None
    blocked_s: float = 0.0


@dataclass
class Trace:
    """The events of one rank, in the order in which they ended."""

    events: list[Event] = field(default_factory=list)

    def wire_bytes(self) -> int:
        """Bytes that this rank sent itself, measured."""
        return sum(event.wire_bytes or 0 for event in self.events if event.within is None)


@dataclass
class Operation:
    """An operation under way.  `not_before` is the time at which the chosen link could have delivered."""

    op: str
    start_s: float
    wire_bytes: int | None = None
    not_before: float = 0.0
    done_s: float | None = None  # when it was complete, if that was noticed before somebody waited for it


_traces: list[Trace] = []
_under_way: list[Operation] = []
_link: Link | None = None
_link_free_at = 0.0
_note = None


@contextmanager
def record() -> Iterator[Trace]:
    """Record every operation of `collectives` on this rank: `with record() as trace: ...; trace.events`.

    Blocks may be nested; each sees all that happens inside it.  A trace can be returned from a rank.
    """
    trace = Trace()
    _traces.append(trace)
    try:
        yield trace
    finally:
        _traces[:] = [t for t in _traces if t is not trace]


@contextmanager
def operation(
    op, what, group_ranks, rank, *, peer=None, payload_bytes=0, wire_bytes=None, start_s=None
) -> Iterator[Operation]:
    """Meter one operation.  `what` is its description for a person, e.g. "all_reduce 4.0 KiB float32 over 4 ranks".

    `start_s`: when it was started, if that was before anybody waited for it.
    """
    blocked_from_s = time.monotonic()
    current = Operation(op, blocked_from_s if start_s is None else start_s, wire_bytes)
    outer = _under_way[-1] if _under_way else None
    if outer is None:
        _write_note(what)
    _under_way.append(current)
    try:
        yield current
        _wait_until(current.not_before)
    finally:
        _under_way.pop()
    # Not in `finally`: after a failure the note still says where this rank was.
    if outer is None:
        _write_note("")
    elif current.wire_bytes is not None:
        outer.wire_bytes = (outer.wire_bytes or 0) + current.wire_bytes
    now_s = time.monotonic()
    done_s = now_s if current.done_s is None else min(now_s, max(current.done_s, current.not_before))
    event = Event(
        op=op,
        group_ranks=tuple(group_ranks),
        rank=rank,
        peer=peer,
        payload_bytes=payload_bytes,
        wire_bytes=current.wire_bytes,
        start_s=current.start_s,
        seconds=done_s - current.start_s,
        within=outer.op if outer else None,
        blocked_s=now_s - blocked_from_s,
    )
    for trace in _traces:
        trace.events.append(event)


@contextmanager
def posting(op) -> Iterator[None]:
    """While an operation is started that will be waited for later: what is sent inside is ours."""
    _under_way.append(Operation(op, time.monotonic()))
    try:
        yield
    finally:
        _under_way.pop()


def inside_operation() -> bool:
    """Is this rank inside one of our operations?  (So a grader can tell our traffic from other traffic.)"""
    return bool(_under_way)


def use_link(link: Link | None) -> None:
    """From now on no operation of this rank completes earlier than `link` would allow; None: as fast as it goes."""
    global _link, _link_free_at
    _link, _link_free_at = link, 0.0


def current_link() -> Link | None:
    """What `use_link` chose."""
    return _link


def departure(n_bytes: float) -> float:
    """When `n_bytes` can leave this rank: now, or once the link has taken what was sent before."""
    global _link_free_at
    leaves = max(time.monotonic(), _link_free_at)
    if _link:
        _link_free_at = leaves + n_bytes / _link.bytes_per_s
    return leaves


def use_note(buffer) -> None:
    """Keep what this rank waits in in `buffer`, a writable shared memory of NOTE_BYTES bytes."""
    global _note
    _note = buffer


def _write_note(text: str) -> None:
    if _note is not None:
        _note[:NOTE_BYTES] = text.encode()[: NOTE_BYTES - 1].ljust(NOTE_BYTES, b"\0")


def _wait_until(deadline_s: float) -> None:
    while (left_s := deadline_s - time.monotonic()) > 0:
        time.sleep(left_s)
