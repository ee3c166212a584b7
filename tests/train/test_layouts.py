"""A checkpoint belongs to no layout: what one wrote, every other reads, optimizer state included, bit for bit."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from deepseek_lab.data.batches import IGNORE, Batch, rank_slice
from deepseek_lab.learn import run_ranks
from deepseek_lab.model import DeepSeekConfig, generate
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.parallel.mesh import build_mesh
from deepseek_lab.train.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from deepseek_lab.train.loop import Trainer

ROWS = 6
MODEL = DeepSeekConfig.preset(
    "tiny", num_hidden_layers=4, tie_word_embeddings=True, hidden_size=32, vocab_size=64, intermediate_size=48
)
TEXT = {"train": SimpleNamespace(n_tokens=1, n_bytes=1, tokenizer="none")}
CONFIG = RunConfig(
    model=MODEL,
    data=DataConfig(seq_len=16),
    optim=OptimConfig(lr=1e-2, min_lr=1e-3, warmup_steps=1, clip_norm=0.5),
    train=TrainConfig(steps=4, global_batch_size=ROWS, micro_batch_size=2),
    precision="fp64",
)
LAYOUTS = {
    "one process": (1, {}),
    "dp 4, ZeRO-1": (4, {"zero_stage": 1}),
    "dp 3, ZeRO-3": (3, {"zero_stage": 3}),
    "dp 2 x tp 2, ZeRO-2, sequence parallel": (4, {"tp": 2, "zero_stage": 2, "sequence_parallel": True}),
    "tp 4": (4, {"tp": 4}),
    "pp 3, uneven": (3, {"pp": 3, "stage_layers": [1, 2, 1]}),
    "dp 2 x pp 2, ep 2, interleaved": (4, {"pp": 2, "ep": 2, "schedule": "interleaved", "chunks": 2}),
    "dp 2 x tp 2 x pp 2, ep 2, ZeRO-1": (8, {"tp": 2, "pp": 2, "ep": 2, "zero_stage": 1}),
}


def train(out, parallel, resume, steps, engine="lab", precision="fp64"):
    """Steps from a checkpoint or from the start: losses, and all state, gathered; it saves when it started afresh."""
    config = dataclasses.replace(
        CONFIG, parallel=ParallelConfig(**parallel), engine=engine, precision=precision, model=MODEL
    )
    mesh = build_mesh(config.parallel, "cpu")
    trainer = Trainer(config, TEXT, mesh, torch.device("cpu"), out)
    if resume:
        trainer.resume()
    at_start = state(trainer)
    losses = []
    mine = rank_slice(ROWS, mesh.rank("dp"), mesh.size("dp"))
    for step in range(trainer.steps_done, trainer.steps_done + steps):
        ids = torch.randint(MODEL.vocab_size, (ROWS, 17), generator=torch.Generator().manual_seed(step))
        batch = Batch(ids[mine, :-1], ids[mine, 1:], torch.zeros_like(ids[mine, 1:]))
        n_tokens, _ = trainer.agree(int((batch.labels != IGNORE).sum()), stop=False)
        losses.append(trainer.step(batch, n_tokens)["loss"])
    if not resume:
        trainer.save()
    written = list(generate.stream(trainer.model, [1, 2, 3], max_new_tokens=8))
    return losses, at_start, state(trainer), written


def state(trainer):
    kinds = ["model"] + (["exp_avg", "exp_avg_sq"] if trainer.optimizer.state else [])
    tensors = {f"{k}.{n}": t.clone() for k in kinds for n, t in trainer.engine.full(k, trainer.optimizer)}
    routers = trainer.model.routers().items()
    return tensors | {f"bias.{name}": router.e_score_correction_bias.clone() for name, router in routers}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole"), {}, resume=False, steps=4)


@pytest.mark.ranks
@pytest.mark.parametrize("writer", LAYOUTS)
def test_what_one_layout_wrote_others_read(writer, uninterrupted, tmp_path):
    n_ranks, parallel = LAYOUTS[writer]
    saved: dict = {}
    for _, _, here, _ in run_ranks(train, n_ranks, tmp_path, parallel, False, 2, timeout=120):
        saved |= here
    names = list(LAYOUTS)
    for reader in dict.fromkeys([names[0], names[-1], names[names.index(writer) - 1]]):
        n_ranks, parallel = LAYOUTS[reader]
        together = set()
        for losses, loaded, at_end, written in run_ranks(train, n_ranks, tmp_path, parallel, True, 2, timeout=120):
            together |= loaded.keys()
            different = [name for name in loaded if not torch.equal(loaded[name], saved[name])]
            assert not different, (reader, different[:3])
            assert losses == pytest.approx(uninterrupted[0][2:], rel=1e-9)
            assert all((at_end[n] - uninterrupted[2][n]).norm() <= 1e-8 * uninterrupted[2][n].norm() for n in at_end)
            assert written == uninterrupted[3]
        assert together == saved.keys(), reader


@pytest.mark.ranks
def test_mixed_precision_resumes_from_its_master_weights(tmp_path):
    """bf16 weights would lose small steps: masters are what is saved, and what another layout goes on from."""
    _, _, saved, _ = run_ranks(train, 2, tmp_path, {"zero_stage": 2}, False, 2, precision="mixed", timeout=120)[0]
    assert saved["model.norm.weight"].dtype == torch.float32
    assert not torch.equal(saved["model.norm.weight"], saved["model.norm.weight"].bfloat16().float())
    losses, loaded, _, _ = run_ranks(
        train, 4, tmp_path, {"tp": 2, "zero_stage": 3}, True, 1, precision="mixed", timeout=120
    )[0]
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    at_home = run_ranks(train, 2, tmp_path, {"zero_stage": 2}, True, 1, precision="mixed", timeout=120)[0][0]
    assert losses == pytest.approx(at_home, rel=2**-8)  # bf16 rounds sums to eight bits, in another order
