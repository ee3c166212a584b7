"""`python -m deepseek_lab doctor`: whether this machine can run the course, and how to put right what it cannot.

Everything is tried, not guessed: the last lines come from a real all-reduce over 4 processes.
"""

import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata

FINE, NOTE, FAULT = "ok", "note", "FAULT"


@dataclass(frozen=True)
class Finding:
    """One line of the report.  `cure` says what to do; only a FAULT keeps the course from running."""

    level: str
    what: str
    cure: str = ""


def main(argv: list[str] | None = None) -> int:
    """Print the report; returns 1 when there is a fault, else 0."""
    if argv:
        print(f"usage: python -m deepseek_lab doctor   (it takes no arguments, and was given {' '.join(argv)})")
        return 2
    faults = 0
    for finding in examine():
        print(
            f"{finding.level:>5}  {finding.what}" + (f"\n       -> {finding.cure}" if finding.cure else ""), flush=True
        )
        faults += finding.level == FAULT
    print("Everything the course needs is here." if not faults else f"{faults} fault(s): see the arrows above.")
    return int(bool(faults))


def examine() -> Iterator[Finding]:
    """All findings, one at a time, cheapest first.  A check that itself fails becomes a fault."""
    checks: list[Callable[[], Iterator[Finding]]] = [python, versions, machine, torch_backends, port, all_reduce]
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Finding(FAULT, f"{check.__name__.replace('_', '-')}: {type(error).__name__}: {error}")


def python() -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info < (3, 11):  # noqa: UP036 (whoever has an older one is told here)
        yield Finding(FAULT, f"Python {version}", "install Python 3.11 or newer, then: make PYTHON=python3.12")
    else:
        yield Finding(FINE, f"Python {version} on {platform.system()} {platform.machine()}")
    if sys.prefix == sys.base_prefix and "CONDA_PREFIX" not in os.environ:
        yield Finding(NOTE, "no virtual environment is active", "make any target, then: source .venv/bin/activate")


def versions() -> Iterator[Finding]:
    """Each requirement of the package against what is installed; those of extras only where they are installed."""
    wrong = 0
    try:
        requirements = metadata.requires("deepseek_lab") or []
    except metadata.PackageNotFoundError:
        yield Finding(FAULT, "deepseek_lab is not installed", 'pip install -e ".[test,hf]"')
        return
    for requirement in requirements:
        name, ranges, extra = parse_requirement(requirement)
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            if not extra:
                yield Finding(FAULT, f"{name} is missing", f'pip install "{name}{ranges}"')
                wrong += 1
            continue
        if not within(installed, ranges):
            level = NOTE if extra else FAULT
            yield Finding(level, f"{name} {installed} is outside {ranges}", f'pip install "{name}{ranges}"')
            wrong += 1
    if not wrong:
        yield Finding(FINE, f"{len(requirements)} requirements, every installed version within its range")


def parse_requirement(text: str) -> tuple[str, str, bool]:
    """(name, ranges, is it of an extra) of a line such as 'ruff<1,>=0.11; extra == "test"'."""
    wanted, _, condition = text.partition(";")
    match = re.match(r"\s*([\w.-]+)(?:\[[^]]*\])?\s*\(?([^)]*)\)?", wanted)
    if not match:
        raise ValueError(f"cannot read the requirement {text!r}")
    return match[1], match[2].strip(), "extra" in condition


def within(version: str, ranges: str) -> bool:
    """Whether a version lies in ranges such as '>=2.11,<2.14'.  Knows >=, >, <=, <, ==, != on release numbers."""
    at = _numbers(version)
    tests = {
        ">=": at.__ge__, "<=": at.__le__, "==": at.__eq__, "!=": at.__ne__, ">": at.__gt__, "<": at.__lt__,
    }  # fmt: skip
    for part in filter(None, (p.strip() for p in ranges.split(","))):
        match = re.match(r"(>=|<=|==|!=|>|<)\s*([\w.]+)", part)
        if not match:
            raise ValueError(f"cannot read the range {part!r}")
        if not tests[match[1]](_numbers(match[2])):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(n) for n in release[0].split(".")] if release else [0]
    return tuple(numbers + [0] * (4 - len(numbers)))


def machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    few = "it will work, slowly: the course is made for two" if cores < 2 else ""
    yield Finding(NOTE if few else FINE, f"{cores} core(s)", few)
    if (free := free_memory_gib()) is not None:
        tight = "close other programs: four ranks take about 1 GiB, training and the tests up to 4" if free < 4 else ""
        yield Finding(NOTE if tight else FINE, f"{free:.1f} GiB of memory available", tight)
    disk = shutil.disk_usage(".").free / 2**30
    full = "free some: token files, runs and checkpoints are written here" if disk < 1 else ""
    yield Finding(NOTE if full else FINE, f"{disk:.0f} GiB of disk free here", full)


def free_memory_gib() -> float | None:
    """Memory that a program can still get, in GiB; None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    except (ValueError, OSError, AttributeError):
        return None


def torch_backends() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    yield Finding(FINE, f"torch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding(
            FAULT, "this torch has no gloo backend", 'reinstall it: pip install --force-reinstall "torch==2.13.*"'
        )
    else:
        yield Finding(FINE, "backends: gloo" + (", nccl" if dist.is_nccl_available() else ""))
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding(FINE, f"{len(names)} GPU(s): {', '.join(sorted(set(names)))}")
    elif shutil.which("nvidia-smi"):
        yield Finding(
            NOTE, "a GPU driver is here, but this torch cannot use it", "install a CUDA build of torch to use it"
        )
    else:
        yield Finding(FINE, "no GPU: everything runs on the CPU")


def port() -> Iterator[Finding]:
    """A free port on loopback, as launchers need one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield Finding(FINE, f"a free port on loopback ({probe.getsockname()[1]})")


def all_reduce() -> Iterator[Finding]:
    """Four real processes add up their rank numbers."""
    from deepseek_lab.learn.ranks import RankError, run_ranks

    started = time.monotonic()
    try:
        sums = run_ranks(_sum_of_ranks, 4, timeout=20)
    except (RankError, RuntimeError, OSError) as error:
        cure = "on a machine with a firewall, allow connections on loopback; in a container, give it some /dev/shm"
        yield Finding(FAULT, f"all-reduce on 4 ranks failed: {error}", cure)
        return
    seconds = time.monotonic() - started
    if sums != [6.0] * 4:
        yield Finding(FAULT, f"all-reduce on 4 ranks gave {sums}, not 6.0 four times", "please report this")
    else:
        yield Finding(FINE, f"all-reduce on 4 ranks, {seconds:.1f} s with their start")


def _sum_of_ranks() -> float:
    import torch

    from deepseek_lab.parallel import collectives

    return collectives.all_reduce(torch.tensor([float(collectives.rank_in())])).item()
