"""What the router decides: who counts, who is dropped, what balances the load; alike however a batch is split."""

import dataclasses
import math

import pytest
import torch

from deepseek_lab.model import DeepSeekConfig, moe
from deepseek_lab.model.moe import MoE

E, K, B, T = 8, 2, 3, 12
CONFIG = DeepSeekConfig(hidden_size=16, moe_intermediate_size=12, n_routed_experts=E, num_experts_per_tok=K)
ROUTERS = {"sigmoid": {}, "softmax": {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False}}


def layer_of(dtype=torch.float64, **changes):
    layer = MoE(dataclasses.replace(CONFIG, **changes)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    return layer


def tokens(*shape, seed=0):
    return torch.randn(*shape, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients(layer):
    return {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}


def deviation(a, b):
    return ((a - b).norm() / b.norm()).item()


def padded_pair():
    """A batch of rows with 12, 5 and 0 tokens, and the same rows without padding."""
    x_BTD, real_BT = tokens(B, T), torch.arange(T) < torch.tensor([12, 5, 0])[:, None]
    return x_BTD, real_BT, [x_BTD[:1], x_BTD[1:2, :5]]


@pytest.mark.parametrize("change", [{}, {"capacity_factor": 0.8}, {"aux_loss_alpha": 0.5, "capacity_factor": 1.0}])
@pytest.mark.parametrize("router", ROUTERS)
def test_a_padded_batch_routes_like_the_unpadded_one(router, change):
    padded, plain = (layer_of(**ROUTERS[router], **change) for _ in range(2))
    x_BTD, real_BT, rows = padded_pair()
    y_BTD = padded(x_BTD, real_BT)
    y_BTD[real_BT].square().sum().backward()
    for row, y in zip(rows, (y_BTD[:1], y_BTD[1:2, :5]), strict=True):
        expected = plain(row)
        expected.square().sum().backward()
        assert deviation(y, expected) < 1e-12
    for name in ("visits_E", "dropped_E"):
        assert torch.equal(getattr(padded.gate, name), getattr(plain.gate, name)), name
    assert padded.gate.visits_E.sum() == 17 * K
    assert deviation(padded.gate.aux_loss_sum + 1, plain.gate.aux_loss_sum + 1) < 1e-12
    expected = gradients(plain)
    for name, gradient in gradients(padded).items():
        assert deviation(gradient, expected[name]) < 1e-12, name


def test_padding_gets_the_shared_experts_only():
    layer = layer_of()
    x_BTD, real_BT, _ = padded_pair()
    _, index_TK = layer.gate(x_BTD, real_BT)
    assert torch.equal((index_TK == E).all(dim=1), ~real_BT.flatten())
    y_BTD = layer(x_BTD, real_BT)
    torch.testing.assert_close(y_BTD[~real_BT], layer.shared_experts(x_BTD)[~real_BT], rtol=0, atol=0)


def test_a_mask_of_all_tokens_changes_no_bit():
    for training in (True, False):
        with_mask, without = (layer_of(torch.float32).train(training) for _ in range(2))
        x_BTD = tokens(B, T).float()
        y_BTD, expected = with_mask(x_BTD, torch.ones(B, T, dtype=torch.bool)), without(x_BTD)
        assert torch.equal(y_BTD, expected)
        for y in (y_BTD, expected):
            y.square().sum().backward()
        assert all(torch.equal(g, gradients(without)[name]) for name, g in gradients(with_mask).items())


def test_nothing_but_padding_is_fine_and_adds_nothing():
    layer = layer_of(aux_loss_alpha=0.1, capacity_factor=1.0)
    layer(tokens(2, 4), torch.zeros(2, 4, dtype=torch.bool)).sum().backward()
    assert not layer.gate.visits_E.any()
    assert layer.gate.aux_loss_sum == 0
    for name, gradient in gradients(layer).items():
        assert bool(gradient.any()) == name.startswith("shared_experts"), name


# --- capacity -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.25])
def test_capacity_holds_in_every_sequence_and_the_lowest_scores_go(factor):
    layer = layer_of(capacity_factor=factor)
    x_BTD, real_BT, _ = padded_pair()
    _, chosen_TK = router_without_capacity(layer)(x_BTD, real_BT)
    _, index_TK = layer.gate(x_BTD, real_BT)
    scores_BTE = (x_BTD @ layer.gate.weight.T).sigmoid()
    chosen, index = (i.view(B, T, K) for i in (chosen_TK, index_TK))
    n_dropped = 0
    for b in range(B):
        capacity = math.ceil(factor * K * int(real_BT[b].sum()) / E)
        for e in range(E):
            wanted = {t for t in range(T) if e in chosen[b, t]}
            taken = {t for t in range(T) if e in index[b, t]}
            best = sorted(wanted, key=lambda t: -scores_BTE[b, t, e].item())
            assert taken == set(best[:capacity])
            n_dropped += len(wanted) - len(taken)
    assert n_dropped > 0 or factor > 1
    assert layer.gate.dropped_E.sum() == n_dropped


def router_without_capacity(layer):
    free = layer_of()
    free.load_state_dict(layer.state_dict())
    return free.gate


def test_a_dropped_visit_adds_nothing_and_the_others_keep_their_weights():
    layer = layer_of(capacity_factor=0.5)
    x_BTD = tokens(B, T)
    weight_TK, index_TK = layer.gate(x_BTD)
    free_TK, _ = router_without_capacity(layer)(x_BTD)
    taken_TK = index_TK < E
    assert not taken_TK.all()
    assert torch.equal(weight_TK, free_TK * taken_TK)
    assert layer.gate.dropped_E.sum() == (~taken_TK).sum()


def test_visits_are_counted_as_chosen_and_the_dropped_ones_among_them():
    layer, free = layer_of(capacity_factor=0.5), layer_of()
    for module in (layer, free):
        module(tokens(B, T))
    assert torch.equal(layer.gate.visits_E, free.gate.visits_E)
    assert 0 < layer.gate.dropped_E.sum() < layer.gate.visits_E.sum()
    assert not free.gate.dropped_E.any()


def test_of_equal_scores_the_earlier_tokens_stay():
    index_BTK = torch.zeros(1, 6, 1, dtype=torch.long)
    kept = moe.drop_beyond_capacity(torch.ones(1, 6, 2), index_BTK, torch.ones(1, 6, dtype=torch.bool), 1.0)
    assert kept.flatten().tolist() == [0, 0, 0, 2, 2, 2]


def test_capacity_is_for_training_so_that_no_token_depends_on_later_ones():
    layer = layer_of(capacity_factor=0.3).eval()
    x_BTD = tokens(B, T)
    torch.testing.assert_close(layer(x_BTD)[:, :5], layer(x_BTD[:, :5]), rtol=1e-12, atol=1e-14)


# --- balance --------------------------------------------------------------------------------------------------


def test_the_balance_loss_by_hand():
    # Expert 0 has 3 of 4 visits, so f = 2 · 3/4; its mean share is (0.8 + 0.6 + 0.5 + 0.1) / 4 = 0.5.
    share_T = torch.tensor([0.8, 0.6, 0.5, 0.1])
    scores_BTE = torch.stack((share_T, 1 - share_T), dim=-1)[None] * torch.tensor([1.0, 0.3, 0.2, 0.9])[:, None]
    index_BTK = torch.tensor([[[0], [0], [0], [1]]])
    real_BT = torch.ones(1, 4, dtype=torch.bool)
    loss_B = moe.sequence_balance_loss(scores_BTE, index_BTK, real_BT)
    torch.testing.assert_close(loss_B, torch.tensor([1.5 * 0.5 + 0.5 * 0.5]))
    # Without the last token expert 0 has all visits, f = 2, and its mean share is 1.9 / 3.
    real_BT[0, 3] = False
    torch.testing.assert_close(moe.sequence_balance_loss(scores_BTE, index_BTK, real_BT), torch.tensor([2 * 1.9 / 3]))


@pytest.mark.parametrize("router", ROUTERS)
def test_the_gradient_is_that_of_the_formula_added_to_the_loss(router):
    alpha = 0.3
    layer, plain = layer_of(**ROUTERS[router], aux_loss_alpha=alpha), layer_of(**ROUTERS[router])
    layer.gate.n_sequences, layer.gate.aux_share = 5, 0.5
    x_BTD = tokens(B, T)
    layer(x_BTD).square().sum().backward()

    logits_BTE = x_BTD @ plain.gate.weight.T
    scores_BTE = logits_BTE.softmax(-1) if router == "softmax" else logits_BTE.sigmoid()
    _, index_TK = plain.gate(x_BTD)
    loss = 0.0
    for b in range(B):
        for e in range(E):
            f = E / (K * T) * (index_TK.view(B, T, K)[b] == e).double().sum()
            loss = loss + f * (scores_BTE[b, :, e] / scores_BTE[b].sum(dim=-1)).mean()
    (plain(x_BTD).square().sum() + 0.5 * alpha * loss / 5).backward()
    assert deviation(layer.gate.aux_loss_sum, loss.detach()) < 1e-12
    expected = gradients(plain)
    for name, gradient in gradients(layer).items():
        assert deviation(gradient, expected[name]) < 1e-12, name


def aux_gradient(layer, parts):
    """The router's gradient from the auxiliary loss alone, over all passes of one step."""
    layer.gate.n_sequences = 4
    for x_BTD in parts:
        (0 * layer(x_BTD).sum()).backward()
    return layer.gate.weight.grad


def test_the_gradient_does_not_depend_on_the_split_into_micro_batches():
    x_BTD = tokens(4, T)
    whole = aux_gradient(layer_of(aux_loss_alpha=0.1), [x_BTD])
    assert whole.norm() > 0
    for parts in (x_BTD.split(1), x_BTD.split(2), x_BTD.split(3)):
        assert deviation(aux_gradient(layer_of(aux_loss_alpha=0.1), parts), whole) < 1e-12


def test_the_batch_wise_loss_does_and_of_single_sequences_it_is_the_same():
    x_BTD = tokens(4, T)
    whole = aux_gradient(layer_of(aux_loss_alpha=0.1, seq_aux=False), [x_BTD])
    single = aux_gradient(layer_of(aux_loss_alpha=0.1, seq_aux=False), x_BTD.split(1))
    assert deviation(single, aux_gradient(layer_of(aux_loss_alpha=0.1), [x_BTD])) < 1e-12
    assert deviation(single, whole) > 1e-3
    merged = aux_gradient(layer_of(aux_loss_alpha=0.4), [x_BTD.view(1, 4 * T, -1)])  # one sequence of four's weight
    assert deviation(whole, merged) < 1e-12


def test_a_repeated_pass_counts_nothing_and_has_the_same_gradient():
    changes = {"aux_loss_alpha": 0.1, "capacity_factor": 0.5}
    layer, again = layer_of(**changes), layer_of(**changes)
    layer(tokens(B, T)).sum().backward()
    with moe.not_counting():
        again(tokens(B, T)).sum().backward()
    assert not again.gate.visits_E.any()
    assert not again.gate.dropped_E.any()
    assert again.gate.aux_loss_sum == 0
    assert all(torch.equal(g, gradients(layer)[name]) for name, g in gradients(again).items())


def test_evaluation_counts_nothing():
    layer = layer_of(aux_loss_alpha=0.1, capacity_factor=0.5)
    layer.eval()(tokens(B, T))
    with torch.no_grad():
        layer.train()(tokens(B, T))
    assert not layer.gate.visits_E.any()
    assert not layer.gate.dropped_E.any()
    assert layer.gate.aux_loss_sum == 0


def test_all_tokens_to_one_expert_is_finite_and_idle_experts_get_zero_gradients():
    layer = layer_of(aux_loss_alpha=0.1, capacity_factor=0.5, n_group=1, topk_group=1, num_experts_per_tok=1)
    layer.gate.e_score_correction_bias[5] = 10.0
    layer(tokens(B, T)).square().sum().backward()
    assert layer.gate.visits_E[5] == B * T
    assert layer.gate.dropped_E[5] == B * (T - 1)  # ceil(0.5 · 12 / 8) = 1 stays in each sequence
    for name, gradient in gradients(layer).items():
        assert gradient.isfinite().all(), name
        if name.startswith("experts."):
            assert not gradient[torch.arange(E) != 5].any()
            assert gradient[5].any()


def test_no_token_at_all_is_fine():
    layer = layer_of()
    x_BTD = tokens(0, T).requires_grad_()
    layer(x_BTD).sum().backward()
    assert x_BTD.grad.shape == x_BTD.shape
    assert not any(g.any() for g in gradients(layer).values())


def test_the_bias_step_by_hand():
    bias_LE = torch.tensor([[0.0, 0.5, -0.5], [0.0, 0.0, 0.0]])
    visits_LE = torch.tensor([[1, 2, 3], [4, 4, 1]])
    moved = moe.router_bias_step(bias_LE, visits_LE, 0.1)
    torch.testing.assert_close(moved, torch.tensor([[0.1, 0.5, -0.6], [-0.1, -0.1, 0.1]]))
