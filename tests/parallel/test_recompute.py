"""Recomputation keeps less and changes nothing, not even the count of visits."""

import pytest
import torch

from deepseek_lab.model import DeepSeekConfig, DeepSeekModel
from deepseek_lab.parallel.recompute import apply_recompute

CONFIG = DeepSeekConfig.preset("tiny", num_hidden_layers=3, hidden_size=64, vocab_size=128)
IDS = torch.randint(128, (2, 65), generator=torch.Generator().manual_seed(0))


def one_pass(mode, training=True):
    model = DeepSeekModel(CONFIG).double().train(training)
    apply_recompute(model, mode)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_sum, _ = model.loss_sum(IDS[:, :-1], IDS[:, 1:])
    n_kept = sum(kept.values())
    loss_sum.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return gradients, [router.visits_E.tolist() for router in model.routers().values()], n_kept


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_the_same_gradients_and_visits_from_less_memory(mode):
    plain, visits, n_kept = one_pass("none")
    again, visits_again, n_kept_again = one_pass(mode)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert visits == visits_again
    if mode == "selective":  # at least the keys and values of all heads, in every layer
        heads = CONFIG.num_hidden_layers * 2 * 64 * CONFIG.num_attention_heads
        assert n_kept - n_kept_again >= 2 * heads * CONFIG.qk_head_dim * 8
    else:  # of every block, little more than its input
        assert n_kept_again < 0.3 * n_kept


def test_evaluation_keeps_its_own_way():
    """In evaluation mode nothing is wrapped, so that a cache can be filled."""
    assert one_pass("full", training=False)[2] == one_pass("none", training=False)[2]
