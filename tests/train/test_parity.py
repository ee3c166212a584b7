"""No layout changes the mathematics: every split of the batch gives the serial gradients, in fp64.

The batch is uneven on purpose: seven sequences, two of them mostly padding, over up to four ranks and in passes of up
to three.  The reference is one process that takes them all at once.
"""

import dataclasses

import pytest
import torch

from deepseek_lab.data.batches import IGNORE, Batch, rank_slice
from deepseek_lab.learn import run_ranks
from deepseek_lab.model import DeepSeekConfig
from deepseek_lab.parallel import collectives, data_parallel
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.parallel.mesh import build_mesh
from deepseek_lab.train import optim
from deepseek_lab.train.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from deepseek_lab.train.loop import Trainer

MODEL = DeepSeekConfig.preset("tiny", num_hidden_layers=3, hidden_size=32, vocab_size=64, intermediate_size=48)
STEPS = 4
LAYOUTS = [(1, 1, "gloo"), (1, 3, "gloo"), (2, 7, "gloo"), (2, 1, "ring"), (4, 2, "gloo"), (4, 7, "ring")]


def config_for(micro_batch_size, collectives_by="gloo", model=MODEL):
    return RunConfig(
        model=model,
        data=DataConfig(seq_len=16),
        optim=OptimConfig(lr=1e-2, min_lr=1e-3, warmup_steps=1, clip_norm=0.5),
        train=TrainConfig(steps=STEPS, global_batch_size=7, micro_batch_size=micro_batch_size, label_smoothing=0.1),
        parallel=ParallelConfig(collectives=collectives_by),
        precision="fp64",
    )


def global_batch(step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(MODEL.vocab_size, (7, 17), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, 2:] = labels[5, 3:] = IGNORE
    return Batch(ids[:, :-1], labels, (torch.rand(7, 16, generator=generator) < 0.2).cumsum(1))


def train(config, out):
    """A few steps on this rank's share: per-step metrics, the first step's gradients, and the parameters at the end."""
    collectives.set_algorithm(config.parallel.collectives)
    mesh = build_mesh(config.parallel, "cpu")
    trainer = Trainer(config, {}, mesh, torch.device("cpu"), out)
    mine = rank_slice(7, mesh.rank("dp"), mesh.size("dp"))
    lines, gradients = [], {}
    for step in range(STEPS):
        whole = global_batch(step)
        batch = Batch(whole.input_ids[mine], whole.labels[mine], whole.doc_ids[mine])
        n_tokens, _ = trainer.agree(int((batch.labels != IGNORE).sum()), stop=False)
        lines.append(trainer.step(batch, n_tokens))
        if step == 0:  # clipped, which scales all by one number: a wrong global norm would show
            gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    return lines, gradients, trainer.model.state_dict()


def deviation(a, b):
    if not b.any():
        return float(a.abs().max() > 0)
    return ((a - b).norm() / b.norm()).item()


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    return train(config_for(7), tmp_path_factory.mktemp("serial"))


@pytest.mark.ranks
@pytest.mark.parametrize(("dp", "micro_batch_size", "by"), LAYOUTS)
def test_every_split_of_the_batch_gives_the_serial_run(dp, micro_batch_size, by, serial, tmp_path):
    lines, gradients, state = serial
    for rank_lines, rank_gradients, rank_state in run_ranks(
        train, dp, config_for(micro_batch_size, by), tmp_path, timeout=120
    ):
        for ours, theirs in zip(rank_lines, lines, strict=True):
            for key in ("loss", "grad_norm", "lr"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-10)
        for name, gradient in gradients.items():
            assert deviation(rank_gradients[name], gradient) < 1e-9, name
        for name, tensor in state.items():
            assert deviation(rank_state[name].double(), tensor.double()) < 1e-9, name


def mean_of_means(loss_sum, n_tokens, group=None):
    local = torch.tensor([float(loss_sum) / max(float(n_tokens), 1)], dtype=torch.float64)
    return collectives.all_reduce(local, group)[0] / collectives.size_of(group)


def forget_to_add_up(gradients, group=None):
    pass


def average_instead(gradients, group=None):
    own(gradients, group)
    for gradient in gradients:
        gradient /= collectives.size_of(group)


own = data_parallel.all_reduce_gradients


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("path", "wrong", "seen_in"),
    [
        ("deepseek_lab.parallel.data_parallel.global_token_mean", mean_of_means, "loss"),
        ("deepseek_lab.parallel.data_parallel.all_reduce_gradients", forget_to_add_up, "gradients"),
        ("deepseek_lab.parallel.data_parallel.all_reduce_gradients", average_instead, "grad_norm"),
    ],
)
def test_the_comparison_sees_planted_mistakes(path, wrong, seen_in, serial, tmp_path):
    lines, gradients, _ = run_ranks(train, 2, config_for(7), tmp_path, timeout=120, overrides={path: wrong})[0]
    if seen_in in lines[0]:  # gradients that are all too small by one factor look right once they are clipped
        assert lines[0][seen_in] != pytest.approx(serial[0][0][seen_in], rel=1e-4)
    else:
        assert max(deviation(gradients[name], serial[1][name]) for name in gradients) > 1e-2


def test_sgd_moves_against_the_gradient_and_decays_matrices_only(tmp_path):
    config = dataclasses.replace(
        config_for(7), optim=OptimConfig(name="sgd", lr=0.1, min_lr=0.1, warmup_steps=0, weight_decay=0.0, clip_norm=0)
    )
    trainer = Trainer(config, {}, build_mesh(config.parallel, "cpu"), torch.device("cpu"), tmp_path)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    batch = global_batch(0)
    trainer.step(batch, int((batch.labels != IGNORE).sum()))
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] - 0.1 * p.grad, rtol=1e-12, atol=1e-15)
    adamw = optim.build_optimizer(trainer.model, OptimConfig())
    decayed = {id(p) for group in adamw.param_groups if group["weight_decay"] for p in group["params"]}
    assert {name for name, p in before.items() if p.dim() < 2} == {
        name for name, p in trainer.model.named_parameters() if id(p) not in decayed
    }


def test_router_bias_moves_once_a_step_by_the_global_visits(tmp_path):
    config = config_for(2)  # four passes a step
    trainer = Trainer(config, {}, build_mesh(config.parallel, "cpu"), torch.device("cpu"), tmp_path)
    batch = global_batch(0)
    router = next(iter(trainer.model.routers().values()))
    trainer.backward(batch, 1)
    visits = router.visits_E.clone()
    assert visits.sum() == batch.input_ids.numel() * MODEL.num_experts_per_tok
    optim.balance_experts(trainer.model, 0.001, None)
    expected = 0.001 * (visits.double().mean() - visits).sign()
    torch.testing.assert_close(router.e_score_correction_bias, expected)
    assert not router.visits_E.any()
