"""run_ranks: real processes, every kind of failure explained, nothing left behind."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch

from deepseek_lab.learn import forkserver
from deepseek_lab.learn.ranks import RankError, RankTimeout, run_ranks
from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.collectives import Link

pytestmark = pytest.mark.ranks
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so ranks need not import pytest
R = 4


def rank_sum():
    return collectives.all_reduce(torch.tensor([float(collectives.rank_in())])).item()


def wait_for_the_others():
    collectives.all_reduce(torch.ones(1024))


def test_results_come_back_in_rank_order_and_ranks_can_talk():
    offset = 10.0
    results = run_ranks(
        lambda scale, *, shift: (collectives.rank_in() * scale + shift + offset, rank_sum()), R, 2.0, shift=1.0
    )
    assert results == [(11.0 + 2.0 * r, 6.0) for r in range(R)]
    assert run_ranks(rank_sum, 1) == [0.0]


def test_a_rank_starts_like_a_fresh_process():
    threads, seed, parent = run_ranks(
        lambda: (torch.get_num_threads(), torch.initial_seed(), os.getppid()), 2, timeout=30
    )[1]
    assert threads == 1
    assert seed == 0
    assert parent != os.getpid() or forkserver.METHOD == "spawn"


def test_first_failure_is_named_with_its_traceback_and_where_the_others_wait():
    def one_fails():
        if collectives.rank_in() == 2:
            raise ValueError("boom")
        wait_for_the_others()

    with pytest.raises(RankError) as caught:
        run_ranks(one_fails, R, timeout=60)
    error = caught.value
    assert not isinstance(error, RankTimeout)
    assert error.rank == 2
    assert "ValueError: boom" in error.cause
    assert 'raise ValueError("boom")' in error.remote_traceback  # the source line, although it was pickled
    assert error.waiting == dict.fromkeys([0, 1, 3], "waiting in all_reduce 4.0 KiB float32 over 4 ranks")
    assert "ranks 0, 1, 3: waiting in all_reduce" in str(error)


def test_waiting_in_torch_distributed_itself_is_found_on_the_stack():
    def bypass():
        if collectives.rank_in() == 0:
            raise KeyError("first")
        torch.distributed.all_reduce(torch.ones(2))

    with pytest.raises(RankError) as caught:
        run_ranks(bypass, 2)
    assert caught.value.rank == 0
    assert "torch.distributed's all_reduce" in caught.value.waiting[1]
    assert "of bypass" in caught.value.waiting[1]


def test_the_same_mistake_on_all_ranks_is_told_once():
    with pytest.raises(RankError) as caught:
        run_ranks(lambda: [][0], 3)
    assert caught.value.rank == 0
    assert str(caught.value).count("IndexError: list index out of range") == 2  # cause and traceback


@pytest.mark.parametrize(
    ("leave", "words"),
    [
        (lambda: os._exit(3), "exited with code 3"),
        (lambda: sys.exit("enough"), "called sys.exit('enough')"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV"),
    ],
)
def test_a_rank_that_goes_away_is_the_cause_not_its_peers(leave, words):
    def one_leaves():
        wait_for_the_others()
        if collectives.rank_in() == 1:
            leave()
        wait_for_the_others()

    with pytest.raises(RankError) as caught:
        run_ranks(one_leaves, R, timeout=60)
    assert caught.value.rank == 1
    assert words in caught.value.cause


def test_a_deadlock_ends_at_the_timeout_and_names_the_operations():
    def crossed():
        rank = collectives.rank_in()
        if rank == 0:
            collectives.recv(torch.empty(8), src=1)
        elif rank == 1:
            wait_for_the_others()
        elif rank == 2:
            time.sleep(60)

    with pytest.raises(RankTimeout) as caught:
        run_ranks(crossed, R, timeout=1)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.rank is None
    waiting = caught.value.waiting
    assert waiting[0] == "waiting in recv 32 B float32 from rank 1"
    assert waiting[1] == "waiting in all_reduce 4.0 KiB float32 over 4 ranks"
    assert "of crossed" in waiting[2]
    assert waiting[3] == "had already returned"
    assert "ranks 0, 1, 2 did not return within 1 s" in str(caught.value)


def test_unpicklable_arguments_are_named():
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"argument 2 .*lock.* cannot be copied to another process"):
        run_ranks(print, 2, 1, lock)
    with pytest.raises(TypeError, match=r"argument key= "):
        run_ranks(print, 2, key=lock)
    with pytest.raises(TypeError, match=r"variable `lock`"):
        run_ranks(lambda: lock, 2)
    with pytest.raises(RankError, match="cannot be copied back"):
        run_ranks(lambda: threading.Lock(), 2)


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((rank_sum, 0), {}, ValueError),
        ((rank_sum, True), {}, ValueError),
        ((rank_sum, 2.0), {}, ValueError),
        ((3, 2), {}, TypeError),
        ((rank_sum, 2), {"timeout": 0}, ValueError),
        ((rank_sum, 2), {"timeout": float("inf")}, ValueError),
        ((rank_sum, 2), {"link": 1e9}, TypeError),
    ],
)
def test_impossible_arguments_are_refused_before_anything_starts(arguments, options, error):
    with pytest.raises(error, match="run_ranks"):
        run_ranks(*arguments, **options)


def test_prints_are_labelled_and_in_order(capsys):
    def chatter():
        rank = collectives.rank_in()
        for i in range(3):
            print("line", i, "of", rank)
            collectives.barrier()
        print("no newline", end="", file=sys.stderr, flush=True)
        os.write(1, b"!")

    run_ranks(chatter, 3)
    expected = [
        f"[rank {r}] {text}" for r in range(3) for text in (*(f"line {i} of {r}" for i in range(3)), "no newline!")
    ]
    assert capsys.readouterr().out.splitlines() == expected


def test_much_output_does_not_block_and_comes_before_an_error(capsys):
    def flood():
        for i in range(5000):
            print(f"{i:0100d}")
        collectives.barrier()
        raise RuntimeError("after all that")

    with pytest.raises(RankError):
        run_ranks(flood, 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"[rank {r}] {i:0100d}" for r in range(2) for i in range(5000)]


def test_large_arguments_and_results():
    x = torch.arange(1_000_000, dtype=torch.float64)
    for rank, y in enumerate(run_ranks(lambda x: x + collectives.rank_in(), 2, x)):
        assert torch.equal(y, x + rank)


def test_nested_ranks():
    def outer():
        inner = run_ranks(rank_sum, 2)
        return inner, rank_sum()

    assert run_ranks(outer, 2) == [([1.0, 1.0], 1.0)] * 2


def test_overrides_fill_slots_inside_the_ranks_only():
    def fake(x, group=None):
        return x + 100

    def through_the_ring():
        collectives.set_algorithm("ring")
        return collectives.all_reduce(torch.zeros(1)).item()

    path = "deepseek_lab.parallel.collectives.ring_all_reduce"
    assert run_ranks(through_the_ring, 2, overrides={path: fake}) == [100.0, 100.0]
    assert run_ranks(through_the_ring, 2) == [0.0, 0.0]


def test_a_link_holds_operations_back():
    def timed():
        with collectives.record() as trace:
            rank_sum()
        return trace.events[0].seconds

    link = Link(latency_s=0.02, bytes_per_s=1e9)
    assert min(run_ranks(timed, R, link=link)) >= 2 * (R - 1) * link.latency_s


def leftovers():
    """Everything that a call could leave behind: processes, open files, sockets, folders."""
    gc.collect()
    me = psutil.Process()
    helpers = me.children(recursive=True)
    ports = [c for p in (me, *helpers) for c in p.net_connections("tcp")]
    folders = list(Path(tempfile.gettempdir()).glob(f"deepseek_lab-{os.getpid()}-*"))
    return (
        {p.pid for p in helpers},
        me.num_fds(),
        [p.num_fds() for p in helpers],
        ports,
        folders,
        threading.active_count(),
    )


def test_a_hundred_calls_leave_nothing():
    run_ranks(rank_sum, 2)
    before = leftovers()
    for i in range(100):
        if i % 10:
            run_ranks(rank_sum, 2)
        else:
            with pytest.raises(RankError):
                run_ranks(os._exit if i % 20 else divmod, 2, 1)
    deadline = time.monotonic() + 10  # killed ranks are reaped by the fork server, not by us
    while leftovers() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers() == before


def script(folder, text):
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


UNGUARDED = """
    from deepseek_lab.learn import run_ranks
    from deepseek_lab.parallel import collectives

    print("the script runs")

    class Box:
        pass

    def fn():
        box = Box()
        box.rank = collectives.rank_in()
        return box

    boxes = run_ranks(fn, 2)
    assert all(isinstance(box, Box) for box in boxes)
    print("ranks", [box.rank for box in boxes])
"""


def test_a_script_without_a_main_guard_runs_once(tmp_path):
    done = subprocess.run(
        [sys.executable, script(tmp_path, UNGUARDED)], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the script runs", "ranks [0, 1]"]
    assert done.stderr == ""


BUSY = """
    import os, signal, time
    import torch
    from deepseek_lab.learn import run_ranks
    from deepseek_lab.parallel import collectives

    def fn(nested):
        print(os.getpid(), flush=True)
        if not nested and collectives.rank_in() == 0:
            run_ranks(fn, 2, True, timeout=100)
        elif not nested and collectives.rank_in() == 1:
            collectives.recv(torch.empty(1), src=0)
        time.sleep(100)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
    run_ranks(fn, 3, False, timeout=100)
"""


@pytest.fixture
def busy_script(tmp_path):
    """A script whose ranks sleep, wait in gloo, and have ranks of their own; and all its processes but itself."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    parent = subprocess.Popen([sys.executable, script(tmp_path, BUSY)], start_new_session=True, **pipes)
    lines = [parent.stdout.readline() for _ in range(5)]
    assert all(lines), parent.stderr.read()
    ranks_of_script = [psutil.Process(int(line.rsplit(" ", 1)[1])) for line in lines]
    yield parent, ranks_of_script + psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.communicate()


def test_no_orphans_when_the_parent_is_killed(busy_script):
    parent, processes = busy_script
    parent.kill()
    assert not psutil.wait_procs(processes, timeout=20)[1]


def test_an_interrupt_ends_the_ranks(busy_script):
    parent, processes = busy_script
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal and Jupyter do: to the whole group
    _, stderr = parent.communicate(timeout=60)
    assert "KeyboardInterrupt" in stderr
    assert not psutil.wait_procs(processes, timeout=20)[1]
    assert not list(Path(tempfile.gettempdir()).glob(f"deepseek_lab-{parent.pid}-*"))


@pytest.mark.skipif(forkserver.METHOD != "forkserver", reason="spawned ranks load everything anew")
def test_an_edited_source_is_loaded_anew(monkeypatch):
    def server():
        return run_ranks(os.getppid, 1)[0]

    before = server()
    assert server() == before
    monkeypatch.setattr(forkserver, "_sources", lambda: "edited")
    after = server()
    assert after != before
    assert server() == after


def test_folders_of_dead_processes_are_swept():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = Path(tempfile.gettempdir(), f"deepseek_lab-{gone.pid}-left")
    folder.mkdir()
    run_ranks(rank_sum, 1)
    assert not folder.exists()


def test_in_a_notebook_whose_kernel_has_run_threaded_autograd(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    cells = [
        """
        import torch
        x = torch.randn(800, 800, requires_grad=True)
        (x @ x).relu().sum().backward()      # starts the kernel's thread pools
        """,
        """
        from dataclasses import dataclass
        from deepseek_lab.learn import RankError, run_ranks
        from deepseek_lab.parallel import collectives
        """,
        """
        SCALE = 3.0

        @dataclass
        class Found:
            rank: int
            total: float

        def scaled(value):
            return value * SCALE

        def make(offset):
            def found():
                rank = collectives.rank_in()
                y = (x @ x).sum() * 0 + scaled(rank) + offset   # a tensor of the notebook, with autograd
                print("rank", rank)
                return Found(rank, collectives.all_reduce(y.detach()).item())
            return found

        found = run_ranks(make(1.0), 4)
        assert all(isinstance(f, Found) for f in found)
        [(f.rank, f.total) for f in found]
        """,
        """
        def careless():
            values = {"a": 1}
            return values["b"]   # not there

        try:
            run_ranks(careless, 2)
        except RankError as error:
            print(error)
        """,
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(c).strip()) for c in cells])
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    printed, value = notebook.cells[2].outputs
    assert printed.text.splitlines() == [f"[rank {r}] rank {r}" for r in range(4)]
    assert value.data["text/plain"] == "[(0, 22.0), (1, 22.0), (2, 22.0), (3, 22.0)]"
    assert 'return values["b"]   # not there' in notebook.cells[3].outputs[0].text
