"""The process that ranks are forked from: torch and this package loaded, and nothing else ever run in it.

It loads in the background, from the import of `learn.ranks` on, and serves all ranks of a session.  It is that of
`multiprocessing`; where the platform has none, ranks are spawned, which takes seconds.
"""

import multiprocessing
import sys
import threading
import types
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import deepseek_lab

METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",  # every optimizer wants it
    "deepseek_lab.learn.ranks",
    "deepseek_lab.parallel.engine",
]

busy_teams: set[object] = set()  # the calls whose ranks are alive
_starting = threading.RLock()
_loaded_sources: object = None


def start_server() -> None:
    """See that the fork server runs, with today's sources loaded.  Returns at once; loading takes about two seconds."""
    global _loaded_sources
    if METHOD != "forkserver":
        return
    from multiprocessing import forkserver

    with _starting:
        server: Any = forkserver._forkserver
        forked_us = getattr(server, "_forkserver_address", None) and server._forkserver_pid is None
        if forked_us and sys.version_info < (3, 14):
            server.ensure_running = lambda: None  # we are a rank: use our own server, where CPython starts a second
            return
        sources = _sources()
        if _loaded_sources not in (None, sources) and not busy_teams and hasattr(server, "_stop"):
            server._stop()  # it holds old code; this waits for all ranks that it forked
        forkserver.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()
        _loaded_sources = sources


def _sources() -> object:
    root = Path(deepseek_lab.__file__).parent
    return sorted((str(path), path.stat().st_mtime_ns) for path in root.rglob("*.py"))


def start(process: BaseProcess) -> None:
    """Start a process that does not re-import the script which started it: cloudpickle sends what is needed of it."""
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main


def is_helper() -> bool:
    """Are we the fork server, the resource tracker or a rank, rather than somebody's notebook or script?"""
    return multiprocessing.parent_process() is not None or any("from multiprocessing." in arg for arg in sys.orig_argv)
