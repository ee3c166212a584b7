"""`engine: torch` gives the same numbers as one serial process, holds what it should, and refuses what it cannot do."""

import pytest
import torch

from deepseek_lab.learn import run_ranks
from deepseek_lab.model import DeepSeekModel, generate
from deepseek_lab.parallel import torch_engine
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.parallel.mesh import Mesh, build_mesh
from deepseek_lab.train.config import RunConfig
from deepseek_lab.train.loop import Trainer
from tests.parity import checks
from tests.parity.design import AXES
from tests.parity.harness import config_of, deviation, global_batch, run_cells

BASE = {name: values[0] for name, values in AXES.items()} | {"engine": "torch", "uneven": True}
CELLS = [
    {"dp": 2, "zero_stage": 0, "accumulation": 3},
    {"dp": 2, "zero_stage": 2, "accumulation": 3, "recompute": "selective"},
    {"dp": 2, "zero_stage": 3, "tied": True, "recompute": "full"},
    {"tp": 2, "zero_stage": 0, "recompute": "selective", "q_lora_rank": None},
    {"tp": 2, "zero_stage": 0, "sequence_parallel": True, "tied": True, "recompute": "full"},
    {"dp": 2, "tp": 2, "zero_stage": 0, "accumulation": 3, "sequence_parallel": True},
    {"dp": 2, "tp": 2, "zero_stage": 2, "tied": True},
    {"dp": 2, "tp": 2, "zero_stage": 3, "accumulation": 3, "sequence_parallel": True},
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return run_cells([{**BASE, **cell} for cell in CELLS], tmp_path_factory.mktemp("cells"))


@pytest.mark.ranks
@pytest.mark.parametrize("number", range(len(CELLS)))
def test_every_layout_is_the_serial_run_and_holds_its_share(number, reports):
    for check in checks.CHECKS:
        check(reports[number])


def trainer_of(cell, out):
    parallel = ParallelConfig(dp=cell["dp"], tp=cell["tp"])
    mesh = build_mesh(parallel, "cpu") if torch.distributed.is_initialized() else Mesh(None)
    trainer = Trainer(config_of(cell), {}, mesh, torch.device("cpu"), out)
    trainer.fingerprint = dict  # there are no tokens to tell apart
    return trainer, mesh


def logits_and_tokens(cell, out):
    """In evaluation mode, where the sequence is whole; generated tokens reuse latents."""
    trainer, _ = trainer_of(cell, out)
    ids = global_batch(0, uneven=False).input_ids
    with torch.no_grad():
        trainer.model.eval()
        logits = trainer.model(ids)
    trainer.save()  # which treats rank 0 in its own way
    return logits, list(generate.stream(trainer.model, [1, 2, 3], max_new_tokens=5, temperature=0))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "cell", [{"dp": 2, "zero_stage": 2}, {"dp": 2, "zero_stage": 3}, {"tp": 2, "sequence_parallel": True}]
)
def test_evaluation_and_generation_are_serial_too(cell, tmp_path):
    logits, tokens = logits_and_tokens({**BASE, "engine": "lab"}, tmp_path / "serial")
    for their_logits, their_tokens in run_ranks(logits_and_tokens, 2, {**BASE, **cell}, tmp_path / "ranks"):
        assert deviation(their_logits, logits) < 1e-12
        assert their_tokens == tokens


def everything(trainer):
    kinds = ("model", "exp_avg", "exp_avg_sq")
    return {(kind, *item): whole for kind in kinds for *item, whole in trainer.engine.full(kind, trainer.optimizer)}


def loaded_by_the_other(out):
    """For each engine, what of its state the other does not get back from its checkpoint."""
    layout = {**BASE, "dp": 2, "tp": 2, "zero_stage": 3}
    whole, differing = global_batch(0, uneven=False), []
    for saver, loader in (("torch", "lab"), ("lab", "torch")):
        trainer, mesh = trainer_of({**layout, "engine": saver}, out / saver)
        batch = list(whole.split(6))[mesh.rank("dp")]
        trainer.step(batch, whole.labels.numel())
        trainer.save()
        other, _ = trainer_of({**layout, "engine": loader}, out / saver)
        assert not other.resume()
        ours, theirs = everything(trainer), everything(other)
        assert ours.keys() == theirs.keys()
        differing += [(saver, *key) for key in ours if not torch.equal(ours[key], theirs[key])]
    return differing


@pytest.mark.ranks
def test_the_engines_load_each_others_checkpoints_bit_for_bit(tmp_path):
    assert run_ranks(loaded_by_the_other, 4, tmp_path, timeout=90) == [[]] * 4


def bytes_in_a_step(parallel):
    """State of a rank between forward and backward, and after it."""
    cell = {**BASE, "dp": 2}
    mesh = build_mesh(ParallelConfig(), "cpu")
    engine = torch_engine.parallelize(config_of(cell).model, mesh, parallel)
    optimizer = torch.optim.SGD([p for group in engine.optimizer_tensors() for p in group])
    batch = global_batch(0, uneven=False)
    engine.model.train()
    with engine.micro_batch(last=True):
        loss_sum, _ = engine.model.loss_sum(batch.input_ids, batch.labels)
        between = engine.state_bytes(optimizer)
        loss_sum.backward()
    return between["parameters"], engine.state_bytes(optimizer)["parameters"]


@pytest.mark.ranks
def test_stage_2_keeps_gathered_weights_until_backward_and_stage_3_does_not():
    n_bytes = 4 * sum(p.numel() for p in DeepSeekModel(config_of({**BASE, "dp": 1}).model).parameters())
    stage_2, stage_2_after = run_ranks(bytes_in_a_step, 2, ParallelConfig(zero_stage=2))[0]
    stage_3, stage_3_after = run_ranks(bytes_in_a_step, 2, ParallelConfig(zero_stage=3))[0]
    assert stage_2 > 1.4 * n_bytes
    assert max(stage_2_after, stage_3, stage_3_after) < 0.6 * n_bytes


@pytest.mark.parametrize(
    ("settings", "precision", "message"),
    [
        ({"zero_stage": 1}, "fp32", "no parallel.zero_stage=1: .* use 0, 2 or 3, or engine: lab"),
        ({"compression": "int8"}, "fp32", "no parallel.compression='int8': use none"),
        ({"collectives": "ring"}, "fp32", "no parallel.collectives='ring': use gloo"),
        ({"overlap": False}, "fp32", "no parallel.overlap=false"),
        ({}, "mixed", "no parallel.zero_stage=0 with precision='mixed': .* use 2 or 3"),
    ],
)
def test_what_pytorch_has_no_part_for_is_refused_with_the_configuration(settings, precision, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(parallel=ParallelConfig(**settings), precision=precision, engine="torch")


def test_mixed_precision_on_one_rank_is_refused():
    config, parallel = config_of({**BASE, "dp": 1}).model, ParallelConfig(zero_stage=2)
    with pytest.raises(ValueError, match="need dp > 1"):
        torch_engine.parallelize(config, Mesh(None), parallel, dtype=torch.bfloat16, master_dtype=torch.float32)


def test_a_tensor_of_another_shape_is_refused():
    engine = torch_engine.parallelize(config_of({**BASE, "dp": 1}).model, Mesh(None), ParallelConfig())
    with pytest.raises(ValueError, match=r"norm.weight has shape \(32,\), not \(31,\)"):
        engine.assign("model", "norm.weight", torch.ones(31))


def mixed_step(parallel):
    engine = torch_engine.parallelize(
        config_of({**BASE, "dp": 2}).model,
        build_mesh(parallel, "cpu"),
        parallel,
        dtype=torch.bfloat16,
        master_dtype=torch.float32,
    )
    batch = global_batch(0, uneven=False)
    engine.model.train()
    with engine.micro_batch(last=True):
        loss_sum, n_valid = engine.model.loss_sum(batch.input_ids, batch.labels)
        (loss_sum / n_valid).backward()
    engine.finish_backward()
    norm = engine.grad_norm().item()
    return norm, {p.dtype for group in engine.optimizer_tensors() for p in group}


@pytest.mark.ranks
def test_mixed_precision_keeps_wide_weights_in_the_shards():
    for norm, dtypes in run_ranks(mixed_step, 2, ParallelConfig(zero_stage=2)):
        assert dtypes == {torch.float32}
        assert 0 < norm < float("inf")
