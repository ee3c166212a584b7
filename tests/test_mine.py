"""Your code trains: kept functions fill their slots in a real launch, and most slots are really called there."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepseek_lab import slots
from deepseek_lab.learn.chapters import exercises

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    "--config=configs/tiny.yaml",
    "--model.num_hidden_layers=2",
    "--model.hidden_size=32",
    "--model.intermediate_size=32",
    "--model.moe_intermediate_size=16",
    "--data.seq_len=32",
    "--train.global_batch_size=4",
    "--train.steps=2",
    "--train.eval_every=0",
    "--optim.warmup_steps=1",
]

# No single layout calls every slot: with tp the loss is another function than without, and int8 sums are another
# collective than whole ones.  A pipeline has one order, and only some orders split backward.
RUNS = (
    ["--parallel.zero_stage=3", "--parallel.ep=2"],
    ["--parallel.tp=2", "--parallel.sequence_parallel=true"],
    ["--parallel.compression=int8", "--model.aux_loss_alpha=0.01", "--model.capacity_factor=1.0"],
    ["--parallel.pp=2"],
    ["--parallel.pp=2", "--parallel.schedule=zb_h1"],
)

# Slots that none of RUNS calls yet, and why.  At least two thirds of all must run.
NOT_IN_THE_TRAINER = {
    "2.1": "draws",
    "2.6": "plans",
    "2.7": "measures",
    "3.5": "compresses by another method than int8",
    "6.1": "is not the order of any of these",
    "6.6": "does not drain the pipe",
    "8.5": "plans",
    "8.6": "plans",
    "8.7": "serves",
}


def noting(path: str, folder: Path):
    """A learner's function for `path`: it leaves a mark, and does what the package's own does."""

    def stand_in(*args, **kwargs):
        from deepseek_lab import slots

        (folder / path).touch()
        return slots.original(path)(*args, **kwargs)

    return stand_in if not isinstance(slots.original(path), type) else noting_class(path, folder)


def noting_class(path: str, folder: Path):
    """The same for a class: a subclass that leaves a mark where its first method starts."""
    own = slots.original(path)
    function = issubclass(own, torch.autograd.Function)
    first = "forward" if function else "__init__"

    def noted(*args, **kwargs):
        (folder / path).touch()
        return getattr(own, first)(*args, **kwargs)

    return type(own)(own.__name__, (own,), {first: staticmethod(noted) if function else noted})


@pytest.mark.launch
def test_kept_functions_run_in_the_trainer(tmp_path):
    """Two ranks under `accelerate launch`, our own ring, every function of `.lab/` in its slot, in each of RUNS."""
    called = tmp_path / "called"
    called.mkdir()
    for task in exercises():
        slots.save_mine(task.path, noting(task.path, called), "")
    launch = ["accelerate.commands.launch", "--config_file=configs/accelerate/cpu.yaml", "--num_processes=2", "-m"]
    text = tmp_path / "text"
    text.mkdir()
    for n in range(8):
        (text / f"{n}.txt").write_text(f"Text number {n}, 你好。\n" * 20)
    for n, layout in enumerate(RUNS):
        options = [*layout, "--mine", "--parallel.collectives=ring", f"--out={tmp_path / f'{n}'}"]
        done = subprocess.run(
            [sys.executable, "-m", *launch, "deepseek_lab.train", *SMALL, *options, f"--data.source={text}"],
            cwd=ROOT, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        printed = done.stdout + done.stderr
        assert done.returncode == 0, printed
        for task in exercises():
            assert task.name in printed, f"the run does not list {task.path} as the learner's"

    seen = {task.number for task in exercises() if (called / task.path).exists()}
    numbers = {task.number for task in exercises()}
    assert seen == numbers - set(NOT_IN_THE_TRAINER)
    assert len(seen) >= 2 / 3 * len(numbers)
