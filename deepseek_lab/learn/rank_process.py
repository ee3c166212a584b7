"""A rank's own side of `run_ranks`: join the others, run the function, report, and die with the parent."""

import faulthandler
import io
import marshal
import mmap
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import traceback
import types
from collections import ChainMap
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import cloudpickle
import torch
import torch.distributed as dist

from deepseek_lab import slots
from deepseek_lab.parallel import meter

START_LIMIT_S = 120.0  # for all ranks to start and find each other; the caller's timeout runs from there


def rank_main(world, folder, channel, prints):
    """Life of a rank: join the others, run the function, send what came out, and stay until told to go.

    It stays, because closing its sockets would make its peers fail and hide the true cause.
    """
    rank, world_size, backend, timeout_s, link = world
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt goes to the parent, which ends us
    _die_with_parent()
    _print_into(prints)
    stack = open(f"{folder}/stack-{rank}", "w")  # noqa: SIM115 (open as long as the process lives)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    with open(f"{folder}/note-{rank}", "r+b") as note:
        meter.use_note(mmap.mmap(note.fileno(), meter.NOTE_BYTES))
    try:
        _join(rank, world_size, backend, timeout_s, folder)
        channel.send_bytes(dumps(("running",)))
        meter.use_link(link)
        fn, args, kwargs, overrides = cloudpickle.loads(Path(folder, "call").read_bytes())
        with slots.filled(overrides) if overrides else nullcontext():
            result = fn(*args, **kwargs)
        message = ("returned", _dump_result(result))
    except BaseException as error:  # SystemExit too: the parent decides what it means
        message = _failed(error)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        channel.send_bytes(dumps(message))
        channel.recv_bytes()
    finally:
        os._exit(0)


def _join(rank, world_size, backend, timeout_s, folder):
    torch.set_num_threads(1)
    torch.manual_seed(0)  # a cell prints the same when it is run again
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s + START_LIMIT_S),  # the parent's clock comes first
    )


def _dump_result(result):
    try:
        return dumps(result)
    except Exception as error:
        raise TypeError(f"what it returned ({type(result).__name__}) cannot be copied back: {error}") from None


def _failed(error):
    at_s = time.monotonic()
    if isinstance(error, SystemExit):
        cause = f"called sys.exit({error.code!r})"
    else:
        cause = f"raised {type(error).__name__}: {error}".rstrip(": ")
    told = traceback.TracebackException.from_exception(error, lookup_lines=False)  # lines are looked up in the notebook
    told.stack[:] = [frame for frame in told.stack if frame.filename != __file__]
    try:
        dumps(told)
    except Exception:  # an exception may hold anything; its cause is told in any case
        told = None
    return "failed", at_s, cause, told if told and told.stack else None


def _print_into(pipe):
    os.dup2(pipe.fileno(), 1)
    os.dup2(pipe.fileno(), 2)
    sys.stdout, sys.stderr = (
        open(fd, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        for fd in (1, 2)
    )


def _die_with_parent():
    """End this process as soon as its parent is gone, even if that was killed."""
    parent = multiprocessing.parent_process()
    if not sys.platform.startswith("linux"):
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
        return
    import fcntl

    # The parent holds the other end of this pipe.  When it closes, the kernel sends SIGIO, which ends us also
    # inside a wait of gloo; a death signal would not do, since the fork server, not the kernel, is our parent process.
    fd = os.dup(parent.sentinel)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([fd], [], [], 0)[0]:
        os._exit(1)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle forgets which file or cell code came from; tracebacks need it."""

    dispatch_table: ClassVar = ChainMap(
        {types.CodeType: lambda code: (marshal.loads, (marshal.dumps(code),))}, cloudpickle.Pickler.dispatch_table
    )


def dumps(value):
    """Pickle anything, functions of a notebook included."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()
