"""PipeDream on real ranks: the very updates that its formula says, with as many versions of the weights as it says."""

import itertools

import pytest
import torch
from torch import nn
from torch.func import functional_call

from deepseek_lab.learn import run_ranks
from deepseek_lab.parallel import collectives
from deepseek_lab.parallel.pipedream import StashedWeights, train_pipedream
from deepseek_lab.plan.schedules import staleness

MICRO_BATCHES, LR = 10, 0.05


def problem(n_stages):
    """Stages of unlike widths in fp64, and micro-batches for them."""
    generator = torch.Generator().manual_seed(0)
    widths = [5, 7, 3, 6, 4][: n_stages + 1]
    stages = [nn.Sequential(nn.Linear(a, b), nn.Tanh()).double() for a, b in itertools.pairwise(widths)]
    for p in (p for stage in stages for p in stage.parameters()):
        p.data = torch.randn(p.shape, dtype=torch.float64, generator=generator) * 0.5
    inputs = [torch.randn(8, widths[0], dtype=torch.float64, generator=generator) for _ in range(MICRO_BATCHES)]
    targets = [torch.randn(8, widths[-1], dtype=torch.float64, generator=generator) for _ in range(MICRO_BATCHES)]
    return stages, inputs, targets


def loss_fn(y, target):
    return (y - target).square().mean()


def stale_sgd(stages, inputs, targets):
    """The formula, in one process: gradient t at the version that each stage is behind by, applied to version t."""
    versions = [[dict(stage.named_parameters())] for stage in stages]
    losses = []
    for t, (x, target) in enumerate(zip(inputs, targets, strict=True)):
        met = [versions[s][t - staleness(s, len(stages), t)] for s in range(len(stages))]
        for stage, weights in zip(stages, met, strict=True):
            x = functional_call(stage, weights, (x,))
        loss = loss_fn(x, target)
        losses.append(loss.item())
        gradients = iter(torch.autograd.grad(loss, [w for weights in met for w in weights.values()]))
        for history in versions:
            history.append({n: (w - LR * next(gradients)).detach().requires_grad_() for n, w in history[-1].items()})
    return [history[-1] for history in versions], losses


def on_a_rank(stash):
    rank, ranks = collectives.rank_in(), collectives.size_of()
    stages, inputs, targets = problem(ranks)
    before = [p.clone() for p in stages[rank].parameters()]
    with collectives.record() as trace:
        stage = train_pipedream(stages, inputs, targets, loss_fn, LR, stash=stash)
    assert all(torch.equal(a, b) for a, b in zip(before, stages[rank].parameters(), strict=True))
    weights, losses = stale_sgd(stages, inputs, targets)
    off = max(float((stage.weights.newest[n] - w).norm() / w.norm()) for n, w in weights[rank].items())
    sends = sum(event.op == "send" for event in trace.events)
    order = [str(span.action) for span in stage.spans]
    return off, stage.losses, losses, stage.most_versions, len(stage.weights.met), sends, order


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_real_ranks_make_the_formulas_updates(ranks):
    """MICRO_BATCHES steps of a few fp64 operations on well-scaled numbers stay within 1e-12 of each other."""
    for rank, (off, losses, expected, versions, left, sends, order) in enumerate(run_ranks(on_a_rank, ranks, True)):
        assert off < 1e-12
        assert versions == ranks - rank
        assert left == 0
        assert sends == MICRO_BATCHES * ((rank > 0) + (rank < ranks - 1))
        assert sum(action.startswith("U") for action in order) == MICRO_BATCHES
        if rank == ranks - 1:
            assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.ranks
def test_without_stashing_gradients_are_of_no_model():
    """The last stage is never stale, and so right in its first step; what it hands back is not, from the second on."""
    found = run_ranks(on_a_rank, 4, False)
    assert all(off > 1e-6 for off, *_ in found)
    assert [versions for _, _, _, versions, *_ in found] == [1, 1, 1, 1]


def test_one_stage_is_plain_sgd():
    stages, inputs, targets = problem(1)
    stage = train_pipedream(stages, inputs, targets, loss_fn, LR)
    sgd = torch.optim.SGD(stages[0].parameters(), lr=LR)
    for x, target in zip(inputs, targets, strict=True):
        sgd.zero_grad()
        loss_fn(stages[0](x), target).backward()
        sgd.step()
    for name, p in stages[0].named_parameters():
        torch.testing.assert_close(stage.weights.newest[name], p, rtol=1e-13, atol=1e-15)


def test_micro_batches_that_share_a_version_do_not_share_gradients():
    weights = StashedWeights({"w": torch.tensor([1.0])})
    assert weights.forward(0) is weights.forward(1)
    for m, gradient in ((0, 1.0), (1, 10.0)):
        (weights.met[m]["w"] * gradient).sum().backward()
        weights.update(m, lr=1.0)
    assert weights.newest["w"].item() == 1.0 - 1.0 - 10.0


def test_stages_must_be_as_many_as_ranks():
    stages, inputs, targets = problem(2)
    with pytest.raises(ValueError, match="2 stages cannot go to 1 ranks"):
        train_pipedream(stages, inputs, targets, loss_fn, LR)
