"""What happens after backward: which weights decay, what plain SGD does, when the router's bias moves."""

import torch

from deepseek_lab.data.batches import IGNORE, Batch
from deepseek_lab.model import DeepSeekConfig
from deepseek_lab.parallel.mesh import Mesh
from deepseek_lab.train import optim
from deepseek_lab.train.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from deepseek_lab.train.loop import Trainer

MODEL = DeepSeekConfig.preset("tiny", num_hidden_layers=3, hidden_size=32, vocab_size=64, intermediate_size=48)
ROWS, T = 7, 16


def trainer_for(out, **settings):
    config = RunConfig(
        model=MODEL,
        data=DataConfig(seq_len=T),
        optim=OptimConfig(**settings),
        train=TrainConfig(global_batch_size=ROWS, micro_batch_size=2),  # four passes a step
        precision="fp64",
    )
    return Trainer(config, {}, Mesh(None), torch.device("cpu"), out)


def some_batch():
    ids = torch.randint(MODEL.vocab_size, (ROWS, T + 1), generator=torch.Generator().manual_seed(0))
    return Batch(ids[:, :-1], ids[:, 1:], torch.zeros(ROWS, T, dtype=torch.int32))


def test_sgd_moves_against_the_gradient(tmp_path):
    trainer = trainer_for(tmp_path, name="sgd", lr=0.1, min_lr=0.1, warmup_steps=0, weight_decay=0.0, clip_norm=0)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    batch = some_batch()
    trainer.step(batch, int((batch.labels != IGNORE).sum()))
    gradients = dict(trainer.engine.full("grad"))
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] - 0.1 * gradients[name], rtol=1e-12, atol=1e-15)


def test_matrices_decay_and_vectors_do_not(tmp_path):
    trainer = trainer_for(tmp_path, weight_decay=0.1)
    counts = {
        group["weight_decay"]: sum(p.numel() for p in group["params"]) for group in trainer.optimizer.param_groups
    }
    sizes = {p.dim() > 1: 0 for p in trainer.model.parameters()}
    for p in trainer.model.parameters():
        sizes[p.dim() > 1] += p.numel()
    assert counts == {0.1: sizes[True], 0.0: sizes[False]}


def test_router_bias_moves_once_a_step_by_the_global_visits(tmp_path):
    trainer, batch = trainer_for(tmp_path), some_batch()
    router = next(iter(trainer.model.routers().values()))
    trainer.backward(batch, 1)
    visits = router.visits_E.clone()
    assert visits.sum() == batch.input_ids.numel() * MODEL.num_experts_per_tok
    optim.balance_experts(trainer.model, 0.001, None)
    expected = 0.001 * (visits.double().mean() - visits).sign()
    torch.testing.assert_close(router.e_score_correction_bias, expected)
    assert not router.visits_E.any()
