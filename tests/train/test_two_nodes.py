"""One run on two "nodes": network namespaces with a cable between them where this machine allows it, else loopback."""

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from deepseek_lab.model import DeepSeekModel
from deepseek_lab.train import config
from deepseek_lab.train.metrics import read_metrics
from tests.train.test_run import SMALL

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu.yaml"]
TRAINER = ["-m", "deepseek_lab.train", *SMALL, "--train.steps=3", "--train.global_batch_size=6"]


@dataclass
class Node:
    """Where to run a command as on one node; the address of node 0 and its free port; `interface` to the other node."""

    inside: list[str]
    main_ip: str
    main_port: int
    interface: str
    namespace: str | None = None

    def start(self, *words):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.interface}
        return subprocess.Popen(
            [*self.inside, *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def bytes_sent(self):
        counter = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        return int(subprocess.run([*self.inside, "cat", counter], capture_output=True, text=True, check=True).stdout)


@pytest.fixture
def nodes():
    """Two nodes, taken apart again afterwards."""
    names = [f"lab{os.getpid()}-{n}" for n in range(2)]
    try:
        if not (shutil.which("ip") and lay_cable(names)):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            yield [Node([], "127.0.0.1", port, "lo0" if sys.platform == "darwin" else "lo")] * 2
        else:
            yield [Node(["ip", "netns", "exec", name], "10.0.0.1", 29500, "cable", name) for name in names]
    finally:
        for name in names if shutil.which("ip") else []:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)  # and the cable with it


def lay_cable(names):
    """Two network namespaces and a veth pair between them; False where that is not allowed."""
    setup = [f"netns add {name}" for name in names]
    setup += [f"link add cable netns {names[0]} type veth peer name cable netns {names[1]}"]
    for n, name in enumerate(names, start=1):
        setup += [f"-n {name} addr add 10.0.0.{n}/24 dev cable"]
        setup += [f"-n {name} link set {interface} up" for interface in ("lo", "cable")]
    return all(subprocess.run(["ip", *line.split()], capture_output=True).returncode == 0 for line in setup)


@pytest.mark.launch
def test_two_nodes_of_two_ranks_are_the_serial_run(nodes, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {n}: 你好，世界。 The same text for every rank.\n" for n in range(200)))
    train = [*TRAINER, f"--data.source={text}"]
    before = [node.bytes_sent() for node in nodes]
    started = []
    try:
        for rank, node in enumerate(nodes):
            where = ["--num_machines=2", "--num_processes=4", f"--machine_rank={rank}"]
            where += [f"--main_process_ip={node.main_ip}", f"--main_process_port={node.main_port}"]
            layout = ["--parallel.tp=2", "--parallel.zero_stage=1", f"--out={tmp_path / 'two'}"]
            started.append(node.start(*LAUNCHER, *where, *train, *layout))
        printed = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(printed)
    alone = subprocess.run(
        [sys.executable, *train, f"--out={tmp_path / 'one'}"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert alone.returncode == 0, alone.stderr
    ours, theirs = (list(read_metrics(tmp_path / out / "metrics.jsonl")) for out in ("two", "one"))
    assert len(ours) == 3
    for ours_line, their_line in zip(ours, theirs, strict=True):
        for key in ("loss", "grad_norm", "tokens"):
            assert ours_line[key] == pytest.approx(their_line[key], rel=1e-4)
    if nodes[0].namespace:  # a node has all weights once, and sent half of their gradients in each of the three steps
        settings = config.load(tmp_path / "two" / "config.yaml")
        with torch.device("meta"):
            n_parameters = DeepSeekModel(settings.model).num_parameters()
        for node, sent_before in zip(nodes, before, strict=True):
            assert node.bytes_sent() - sent_before > 3 * 4 * n_parameters / 2


def test_the_slurm_script_starts_one_launcher_on_each_node(tmp_path):
    """With stand-ins for Slurm's own commands, and for accelerate, which says how it was called."""
    stand_ins = {
        "scontrol": "printf 'node7\\nnode8\\n'",
        "srun": 'shift; for n in 0 1; do SLURM_NODEID=$n "$@"; done',
        "accelerate": 'printf "%s|" "$@"; echo',
    }
    for name, line in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "12345", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    done = subprocess.run(
        ["bash", "configs/slurm/train.sbatch", "--config", "configs/tiny.yaml", "--out", "runs/a run"],
        cwd=ROOT,
        env=os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    calls = [line.split("|") for line in done.stdout.splitlines()]
    for rank, call in enumerate(calls):
        for option, value in (
            ("--num_machines", "2"),
            ("--num_processes", "16"),
            ("--machine_rank", str(rank)),
            ("--main_process_ip", "node7"),
            ("--main_process_port", "22345"),
            ("-m", "deepseek_lab.train"),
            ("--out", "runs/a run"),
        ):
            assert call[call.index(option) + 1] == value
    assert len(calls) == 2
