"""At least two thirds of all exercises are functions that the trainer runs: each is counted while it trains."""

import functools

import pytest
import torch

from deepseek_lab import slots
from deepseek_lab.data.tokenizer import load_tokenizer
from deepseek_lab.data.tokens import prepare
from deepseek_lab.learn import chapters, run_ranks
from deepseek_lab.model import DeepSeekConfig
from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.parallel.mesh import build_mesh
from deepseek_lab.train.config import DataConfig, RunConfig, TrainConfig
from deepseek_lab.train.loop import Trainer
from deepseek_lab.train.run import samples

# What a run does not need yet: its turn comes with the layouts of later chapters, or it plans on paper.
NOT_YET = {
    "deepseek_lab.parallel.collectives.pairwise_all_to_all",
    "deepseek_lab.parallel.collectives.CopyToGroup",
    "deepseek_lab.plan.network.ring_all_reduce_seconds",
    "deepseek_lab.plan.network.fit_alpha_beta",
    "deepseek_lab.viz.traffic.traffic_matrix",
}


def every_path():
    return sorted(exercise.path for exercise in chapters.exercises())


def called_in_training(folder):
    """Run one step, an evaluation and a sample, and return the slots that were entered on this rank."""
    entered = set()

    def counting(path):
        own = slots.original(path)

        @functools.wraps(own)
        def wrapper(*args, **kwargs):
            entered.add(path)
            return own(*args, **kwargs)

        return wrapper

    config = RunConfig(
        model=DeepSeekConfig.preset("tiny", num_hidden_layers=2, hidden_size=32),
        data=DataConfig(source=str(folder / "text"), seq_len=16),
        train=TrainConfig(steps=1, global_batch_size=2, micro_batch_size=1),
        parallel=ParallelConfig(collectives="ring"),
    )
    functions = {path: counting(path) for path in every_path() if not isinstance(slots.original(path), type)}
    with slots.filled(functions):
        collectives.set_algorithm(config.parallel.collectives)
        tokenizer = load_tokenizer()
        tokens = prepare(config.data.source, tokenizer, folder / "cache")
        trainer = Trainer(config, tokens, build_mesh(config.parallel, "cpu"), torch.device("cpu"), folder)
        for _ in trainer.fit():
            pass
        samples(trainer, tokenizer)
    return entered


@pytest.mark.ranks
def test_two_thirds_of_the_exercises_run_in_the_trainer(tmp_path):
    (tmp_path / "text").mkdir()
    for index in range(6):
        (tmp_path / "text" / f"{index}.txt").write_text(f"Some text, number {index}. 一些文字。\n" * 12)
    ranks = run_ranks(called_in_training, 2, tmp_path)
    entered = set().union(*ranks)
    assert entered == set(every_path()) - NOT_YET
    assert 3 * len(entered) >= 2 * len(every_path())
