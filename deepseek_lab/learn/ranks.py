"""Real ranks in a notebook cell: `run_ranks(fn, 4)` runs `fn` on four processes that can talk to each other.

The one idea: ranks are forked by a small server process that has torch loaded and has run nothing else.  That
is fast, and unlike forking the kernel itself it is safe whatever the kernel's threads have done before.
Functions travel by cloudpickle, so those defined in a cell work.

And a cell must never hang.  The parent watches four things of every rank: its result pipe, its prints, whether
it still lives, and a note in shared memory that says which operation it is waiting in.  The first failure ends
the run and is reported with what the other ranks were waiting for.  Ranks die with their parent, however it
dies.
"""

import inspect
import math
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path

import cloudpickle
import torch

from deepseek_lab.learn import forkserver, rank_process
from deepseek_lab.learn.rank_process import START_LIMIT_S, dumps
from deepseek_lab.parallel import meter
from deepseek_lab.parallel.meter import Link

SETTLE_S = 0.1  # after the first failure: time for an exit that caused it to be seen
LIVE_PRINT_S = 2.0  # a shorter run prints rank by rank; a longer one every so often


class RankError(RuntimeError):
    """A rank failed.

    `rank` is the first that did (None when the time was up), `cause` one line on why, `remote_traceback` its own
    traceback ("" if it has none), `waiting` what each other rank was in at that moment.
    """

    def __init__(self, rank: int | None, cause: str, remote_traceback: str = "", waiting: dict[int, str] | None = None):
        self.rank, self.cause, self.remote_traceback, self.waiting = rank, cause, remote_traceback, waiting or {}
        super().__init__(rank, cause, remote_traceback, self.waiting)

    def __str__(self) -> str:
        parts = [self.cause if self.rank is None else f"rank {self.rank} {self.cause}"]
        if self.remote_traceback:
            parts.append(f"On rank {self.rank}:\n{self.remote_traceback.rstrip()}")
        if self.waiting:
            by_text: dict[str, list[int]] = {}
            for rank, text in sorted(self.waiting.items()):
                by_text.setdefault(text, []).append(rank)
            lines = [f"  {_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
            parts.append("\n".join(["At that moment:", *lines]))
        return "\n\n".join(parts)

    def _render_traceback_(self) -> list[str]:
        """What Jupyter shows: the account above, without the frames of run_ranks itself."""
        return [f"{type(self).__name__}: {self}"]


class RankTimeout(RankError, TimeoutError):
    """Some ranks were not done in time.  `waiting` says what each was in."""


def run_ranks(fn, world_size, *args, timeout=30.0, link=None, overrides=None, **kwargs):
    """Run `fn(*args, **kwargs)` on `world_size` ranks and return the list of their results, in rank order.

    Each rank is a process of its own with torch.distributed initialised (gloo on the CPU; NCCL as well when there
    are that many GPUs: untested on GPUs), one thread for tensor operations, and `torch.manual_seed(0)` done.  `fn`
    may be defined in a cell; it and its arguments are copied to each rank, and what it returns is copied back.  Its
    prints appear here, each line labelled with its rank.

    `timeout`: seconds the ranks may take.  `link`: a Link that operations of `collectives` must not outrun.
    `overrides`: {dotted path: function}, put into the package's slots inside each rank before `fn` runs.

    Raises RankError as soon as one rank raises, exits or is killed, RankTimeout after `timeout` seconds,
    ValueError or TypeError for arguments that cannot work.  No process is left behind in any case.
    """
    if not callable(fn):
        raise TypeError(f"run_ranks(fn, world_size, ...): fn must be a function, not {type(fn).__name__}")
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"run_ranks: world_size={world_size!r} must be a whole number of ranks, at least 1")
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"run_ranks: timeout={timeout!r} must be a positive number of seconds")
    if not isinstance(link, Link | None):
        raise TypeError(f"run_ranks: link={link!r} must be a Link(latency_s, bytes_per_s) or None")
    call = _dump_call(fn, args, kwargs, overrides or {})
    team = _Team(world_size, timeout, link)
    try:
        team.start(call)
        return team.results()
    finally:
        team.end()


# --- the parent's side --------------------------------------------------------------------------------------


@dataclass
class _Rank:
    """What the parent knows of one rank."""

    process: multiprocessing.process.BaseProcess
    channel: connection.Connection
    prints: connection.Connection
    state: str = "starting"  # then running; then returned, failed or exited
    result: object = None
    failed_at_s: float = math.inf
    cause: str = ""
    error: traceback.TracebackException | None = None
    lines: list[str] = field(default_factory=list)
    half_line: bytes = b""

    @property
    def busy(self):
        return self.state in ("starting", "running")


class _Team:
    """The ranks of one call, and the folder in which they meet."""

    def __init__(self, world_size, timeout_s, link):
        self.world_size, self.timeout_s, self.link = world_size, timeout_s, link
        self.ranks: list[_Rank] = []
        _sweep_folders_of_the_dead()
        self.folder = Path(tempfile.mkdtemp(prefix=f"deepseek_lab-{os.getpid()}-"))

    def start(self, call):
        (self.folder / "call").write_bytes(call)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= self.world_size else "gloo"
        forkserver.start_server()
        forkserver.busy_teams.add(self)
        for rank in range(self.world_size):
            (self.folder / f"note-{rank}").write_bytes(bytes(meter.NOTE_BYTES))
            channel, rank_channel = multiprocessing.Pipe()
            prints, rank_prints = multiprocessing.Pipe(duplex=False)
            world = (rank, self.world_size, backend, self.timeout_s, self.link)
            arguments = (world, str(self.folder), rank_channel, rank_prints)
            context = multiprocessing.get_context(forkserver.METHOD)
            process = context.Process(target=rank_process.rank_main, args=arguments, name=f"rank{rank}")
            self.ranks.append(_Rank(process, channel, prints))  # before it starts: an interrupt may come at any time
            try:
                forkserver.start(process)
            except (EOFError, ConnectionError) as error:
                raise RuntimeError("the process that starts ranks is gone; what it printed above says why") from error
            rank_channel.close()
            rank_prints.close()

    def results(self):
        """Wait for every rank's result; raise what went wrong first."""
        deadline_s, settle_s = time.monotonic() + START_LIMIT_S, math.inf
        next_print_s = time.monotonic() + LIVE_PRINT_S
        running = False
        while any(rank.busy for rank in self.ranks):
            self._listen(min(deadline_s, settle_s, next_print_s))
            now_s = time.monotonic()
            if not running and all(rank.state != "starting" for rank in self.ranks):
                running, deadline_s = True, now_s + self.timeout_s
            if any(rank.state in ("failed", "exited") for rank in self.ranks):
                settle_s = min(settle_s, now_s + SETTLE_S)
            if now_s >= settle_s:
                break
            if now_s >= deadline_s:
                raise self._timeout(running)
            if now_s >= next_print_s:
                self._print()
                next_print_s = now_s + LIVE_PRINT_S
        if any(rank.state != "returned" for rank in self.ranks):
            raise self._failure()
        return [cloudpickle.loads(rank.result) for rank in self.ranks]

    def _listen(self, until_s):
        """Take in whatever the ranks have to say, waiting for it until `until_s` at most."""
        sources = {}
        for number, rank in enumerate(self.ranks):
            sources[rank.prints] = number
            if rank.busy:
                sources[rank.channel] = sources[rank.process.sentinel] = number
        live = [s for s in sources if not (isinstance(s, connection.Connection) and s.closed)]
        ready = connection.wait(live, max(0.0, until_s - time.monotonic()))
        for source in ready:
            rank = self.ranks[sources[source]]
            if source is rank.prints:
                self._read_prints(rank)
            elif source is rank.channel and rank.busy:
                self._read_channel(rank)
        for source in ready:  # after the channels: a rank's last words count more than its end
            rank = self.ranks[sources[source]]
            if source == rank.process.sentinel and rank.busy and not self._read_channel(rank):
                rank.process.join()
                rank.state, rank.failed_at_s, rank.cause = "exited", 0.0, _ending(rank.process.exitcode)

    def _read_channel(self, rank):
        """Read one message of a rank, if there is one."""
        try:
            if not rank.channel.poll():
                return False
            kind, *content = cloudpickle.loads(rank.channel.recv_bytes())
        except (EOFError, OSError):
            return False  # it is ending: its sentinel says how
        if kind == "running":
            rank.state = "running"
        elif kind == "returned":
            rank.state, (rank.result,) = "returned", content
        else:
            rank.state, (rank.failed_at_s, rank.cause, rank.error) = "failed", content
        return True

    def _read_prints(self, rank):
        chunk = os.read(rank.prints.fileno(), 1 << 16)
        *lines, rank.half_line = (rank.half_line + chunk).split(b"\n")
        if not chunk:
            rank.prints.close()
            if rank.half_line:
                lines, rank.half_line = [rank.half_line], b""
        rank.lines += [line.decode(errors="replace") for line in lines]

    def _print(self):
        """Show the lines that have come in, rank by rank."""
        for number, rank in enumerate(self.ranks):
            for line in rank.lines:
                print(f"[rank {number}] {line}")
            rank.lines.clear()

    def _failure(self):
        """The true cause: a rank that went away, else the earliest error (of equal ones the lowest rank's)."""
        failed = [n for n, rank in enumerate(self.ranks) if rank.state in ("failed", "exited")]
        first = min(failed, key=lambda n: self.ranks[n].failed_at_s)
        rank = self.ranks[first]
        same = [n for n in failed if self.ranks[n].cause == rank.cause]
        first, rank = same[0], self.ranks[same[0]]
        cause = rank.cause + (f" (the same on {_ranks(same[1:])})" if len(same) > 1 else "")
        waiting = {n: self._whereabouts(n) for n in range(self.world_size) if n not in same}
        return RankError(first, cause, "".join(rank.error.format()) if rank.error else "", waiting)

    def _timeout(self, running):
        waiting = {n: self._whereabouts(n) for n in range(self.world_size)}
        late = [n for n, rank in enumerate(self.ranks) if rank.busy]
        limit, what = (self.timeout_s, "did not return") if running else (START_LIMIT_S, "could not start")
        return RankTimeout(None, f"{_ranks(late)} {what} within {limit:g} s", waiting=waiting)

    def _whereabouts(self, number):
        """What a rank is in: its note if it is in one of our operations, else the top of its stack."""
        rank = self.ranks[number]
        if rank.state == "returned":
            return "had already returned"
        if not rank.busy:
            return rank.cause
        note = (self.folder / f"note-{number}").read_bytes().split(b"\0")[0].decode(errors="replace")
        if note:
            return f"waiting in {note}"
        stack = self.folder / f"stack-{number}"
        if rank.state == "starting" or not stack.exists() or rank.process.pid is None:
            return "starting"
        with suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
        text, limit_s = "", time.monotonic() + 0.3
        while "rank_main" not in text and time.monotonic() < limit_s:
            time.sleep(0.01)
            text = stack.read_text()
        return _describe_stack(text)

    def end(self):
        """Let ranks that returned go, end all others, show the last prints, and leave nothing behind."""
        orderly = all(rank.state == "returned" for rank in self.ranks)
        started = [rank for rank in self.ranks if rank.process.pid is not None]
        for rank in started:
            with suppress(OSError):  # it is gone already
                rank.channel.send_bytes(b"go") if orderly else rank.process.kill()
        for rank in started:
            rank.process.join(5)
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
            while not rank.prints.closed and rank.prints.poll():
                self._read_prints(rank)
            if rank.half_line:
                rank.lines.append(rank.half_line.decode(errors="replace"))
            rank.channel.close()
            rank.prints.close()
            rank.process.close()
        forkserver.busy_teams.discard(self)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._print()


def _dump_call(fn, args, kwargs, overrides):
    """Pickle the call; if that fails, say which part of it cannot travel."""
    try:
        return dumps((fn, args, kwargs, overrides))
    except Exception as error:  # picklers raise all sorts of types
        parts = {f"argument {n} of {fn!r}": value for n, value in enumerate(args, 1)}
        parts |= {f"argument {name}=": value for name, value in kwargs.items()}
        parts |= {f"override {path}": value for path, value in overrides.items()}
        target = inspect.unwrap(fn)
        if inspect.isfunction(target):
            used = inspect.getclosurevars(target)
            parts |= {f"the variable `{n}`, which fn uses,": v for n, v in {**used.globals, **used.nonlocals}.items()}
        bad = next((f"{name} ({type(value).__name__})" for name, value in parts.items() if not _travels(value)), "fn")
        raise TypeError(
            f"run_ranks: {bad} cannot be copied to another process: {error}. "
            "Create it inside the function, or pass what it is made from."
        ) from error


def _travels(value):
    try:
        dumps(value)
    except Exception:
        return False
    return True


def _ending(exit_code):
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        why = {
            "SIGKILL": " (out of memory?)",
            "SIGABRT": " (did a message meet a smaller buffer? Sender and receiver must agree in size and dtype)",
        }
        return f"was killed by {name}{why.get(name, '')}"
    return f"exited with code {exit_code} before it returned"


def _ranks(numbers):
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def _describe_stack(text):
    """One line from faulthandler's dump: the torch.distributed call, if any, and the line that made it."""
    frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', text)
    mine = [f for f in frames if f"{os.sep}torch{os.sep}" not in f[0] and f[0] != rank_process.__file__]
    calls = [name for file, _, name in frames if file.endswith("distributed_c10d.py")]
    where = f"line {mine[0][1]} of {mine[0][2]}" if mine else "an unknown place"
    return f"waiting in torch.distributed's {calls[-1]}, called from {where}" if calls else f"running {where}"


def _sweep_folders_of_the_dead():
    for folder in Path(tempfile.gettempdir()).glob("deepseek_lab-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it lives, and is somebody else's
    return True


if forkserver.is_helper():
    torch.set_num_threads(1)  # no thread pool may exist where ranks are forked
else:
    forkserver.start_server()
