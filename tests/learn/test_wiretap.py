"""The wiretap sees all traffic of torch.distributed, by whatever name it is called, in forward and in backward."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_reduce as called_by_its_bare_name

from deepseek_lab.learn import forkserver, run_ranks
from deepseek_lab.learn.wiretap import wiretap
from deepseek_lab.parallel import collectives

pytestmark = pytest.mark.ranks


def everything():
    x = torch.ones(8)
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    with wiretap() as calls:
        collectives.all_reduce(x.clone())
        called_by_its_bare_name(x.clone())
        dist.broadcast(x.clone(), 0)
        collectives.all_gather(x)
        collectives.reduce_scatter(x)
        counts = [8 // n_ranks] * n_ranks
        collectives.all_to_all(x, counts, counts)
        collectives.exchange(x, (rank + 1) % n_ranks, torch.empty(8), (rank - 1) % n_ranks)
        leaf = x.clone().requires_grad_()
        collectives.copy_to_group(leaf).sum().backward()
    collectives.all_reduce(x.clone())
    return [(call.op, call.payload_bytes, call.our_door) for call in calls]


def test_every_call_is_seen_with_its_bytes_and_its_door():
    for calls in run_ranks(everything, 2):
        sent_and_received = sorted(calls[6:8])
        assert sent_and_received == [("recv", 32, True), ("send", 32, True)]
        assert [*calls[:6], *calls[8:]] == [
            ("all_reduce", 32, True),
            ("all_reduce", 32, False),
            ("broadcast", 32, False),
            ("all_gather", 32, True),
            ("reduce_scatter", 32, True),
            ("all_to_all", 32, True),
            ("all_reduce", 32, True),
        ]


def test_listening_changes_no_result():
    def sums():
        x = torch.arange(4.0) + dist.get_rank()
        with wiretap():
            heard = collectives.all_reduce(x.clone())
        return torch.equal(heard, collectives.all_reduce(x.clone()))

    assert all(run_ranks(sums, 2))


def test_the_compiler_stays_out_of_a_process_that_did_not_load_it():
    """torch would import it for a dispatch mode; where ranks are spawned, that would cost each of them seconds."""
    code = (
        "import sys, torch\n"
        "from deepseek_lab.learn.wiretap import wiretap\n"
        "with wiretap(): torch.ones(2).sum()\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(forkserver.METHOD != "forkserver", reason="ranks are spawned here")
def test_ranks_find_what_optimizers_import_loaded():
    def at_start():
        import sys

        return "torch._dynamo" in sys.modules

    assert run_ranks(at_start, 1) == [True]
