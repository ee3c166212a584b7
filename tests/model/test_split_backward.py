"""A backward in two parts gives what one gives, and W needs neither the graph nor the weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepseek_lab.model import DeepSeekConfig, DeepSeekModel, split_backward
from deepseek_lab.parallel.recompute import apply_recompute

CONFIG = DeepSeekConfig.preset("tiny", num_hidden_layers=2, hidden_size=32, vocab_size=64, aux_loss_alpha=0.01)
IDS = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))


def loss_of(model):
    return model.loss_sum(IDS[:, :-1], IDS[:, 1:])[0]


def in_two_parts(loss):
    parts = split_backward.WeightParts()
    with split_backward.deferring(parts):
        loss().backward()
    return parts


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_two_parts_are_one_backward(recompute):
    whole = DeepSeekModel(CONFIG).double().train()
    loss_of(whole).backward()
    model = DeepSeekModel(CONFIG).double().train()
    apply_recompute(model, recompute)
    parts = split_backward.WeightParts()
    with split_backward.deferrable():
        loss = loss_of(model)
    with split_backward.deferring(parts):
        loss.backward()
    early = {name for name, w in model.named_parameters() if w.grad is not None and w.grad.any()}
    assert any("layernorm" in name for name in early)
    late = {name for name, w in model.named_parameters() if id(w) in parts.weights}
    assert any("q_b_proj" in name for name in late)
    assert any(".experts." in name for name in late)
    assert not early & late
    parts.run()
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name


def test_every_linear_layer_can_be_split_whoever_calls_it():
    layer = nn.Linear(3, 2, bias=False).double()
    x = torch.randn(5, 3, dtype=torch.double)
    with split_backward.deferrable():
        loss = F.linear(layer(x), torch.ones(1, 2, dtype=torch.double)).sum()
    parts = in_two_parts(lambda: loss)
    assert layer.weight.grad is None
    parts.run()
    assert torch.allclose(layer.weight.grad, x.sum(0).expand(2, 3), atol=1e-12)


def test_a_weight_used_twice_is_handed_over_once_and_added_to_what_is_there():
    weight = nn.Parameter(torch.eye(2, dtype=torch.double))
    weight.grad = held = torch.ones(2, 2, dtype=torch.double)
    seen = []
    weight.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad.clone()))
    x = torch.tensor([[1.0, 2.0]], dtype=torch.double)
    with split_backward.deferrable():
        loss = F.linear(F.linear(x, weight), weight).sum()
    parts = in_two_parts(lambda: loss)
    seen.clear()
    parts.run()
    assert weight.grad is held  # a view of a bucket must stay one
    assert len(seen) == 1
    assert torch.equal(held - 1, torch.tensor([[2.0, 4.0], [2.0, 4.0]], dtype=torch.double))


def test_outside_of_deferring_nothing_is_put_off():
    layer = nn.Linear(3, 2, bias=False)
    with split_backward.deferrable():
        layer(torch.ones(1, 3)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.ones(2, 3))
