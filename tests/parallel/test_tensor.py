"""Tensor parallelism: loss, logits and the gradient of every parameter are the serial model's; traffic is counted.

Tolerance: one step of round-off in fp64, amplified by a few layers, stays far below 1e-9 of a tensor's norm.
"""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from deepseek_lab.learn.ranks import run_ranks
from deepseek_lab.model import DeepSeekConfig, DeepSeekModel, generate, loss
from deepseek_lab.parallel import collectives, tensor
from deepseek_lab.parallel.collectives import record
from deepseek_lab.parallel.tensor import Layout, apply_tensor_parallel

pytestmark = pytest.mark.ranks
cloudpickle.register_pickle_by_value(sys.modules[__name__])
TOLERANCE = 1e-9
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "initializer_range": 0.2,
}
CASES = {
    "default": ({}, {}),
    "no q_lora": ({"q_lora_rank": None}, {}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "dense": ({"first_k_dense_replace": 2}, {}),
    "no shared expert": ({"n_shared_experts": 0}, {}),
    "softmax router": ({"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False}, {}),
    "smoothing": ({}, {"label_smoothing": 0.1}),
    "documents": ({}, {"documents": True}),
    "sequence parallel": ({}, {"sequence_parallel": True}),
    "sequence parallel, tied, smoothing": (
        {"tie_word_embeddings": True, "q_lora_rank": None},
        {"sequence_parallel": True, "label_smoothing": 0.1},
    ),
    "sequence parallel, dense": ({"first_k_dense_replace": 2}, {"sequence_parallel": True}),
}


def small_model(**overrides):
    return DeepSeekModel(DeepSeekConfig.preset("tiny", **{**SMALL, **overrides}), seed=1).double()


def tokens(documents=False):
    """Ids and labels (3, 8), of which rows count 8, 3 and no labels; and where documents begin."""
    generator = torch.Generator().manual_seed(2)
    ids, labels = torch.randint(SMALL["vocab_size"], (2, 3, 8), generator=generator)
    labels[1, 3:] = labels[2] = loss.IGNORE_INDEX
    doc_ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]]).expand(3, -1) if documents else None
    return ids, labels, doc_ids


def deviation(got, expected):
    """‖got - expected‖ / ‖expected‖; where the expected is zero, so must the other be."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype == torch.float64
    if not expected.any():
        return 0.0 if not got.any() else float("inf")
    return ((got - expected).norm() / expected.norm()).item()


def gathered(x, layout, group=None):
    """The full tensor of a parameter or of its gradient."""
    if layout.dim is not None:
        parts = [torch.empty_like(x) for _ in range(collectives.size_of(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, layout.dim)
    return collectives.all_reduce(x.clone(), group) if layout.partial else x


def worst_deviations(cases, groups=None):
    """For every case the worst deviation from the serial model over loss, count, router visits and all gradients."""
    group = (
        dist.new_group(groups[dist.get_rank() // len(groups[0])], use_local_synchronization=True) if groups else None
    )
    worst = {}
    for case, (overrides, how) in cases.items():
        ids, labels, doc_ids = tokens(how.get("documents", False))
        smoothing = how.get("label_smoothing", 0.0)
        serial, split = small_model(**overrides), small_model(**overrides)
        layouts = apply_tensor_parallel(split, group, how.get("sequence_parallel", False))
        losses = []
        for model in (serial, split):
            loss_sum, n_valid = model.loss_sum(ids, labels, doc_ids, smoothing)
            (loss_sum / n_valid).backward()
            losses.append(loss_sum.detach())
            assert n_valid == 11
        found = {"loss": deviation(losses[1], losses[0])}
        ours = dict(split.named_parameters())
        assert set(layouts) == set(ours)
        for name, parameter in serial.named_parameters():
            assert layouts[name].full_shape == tuple(parameter.shape)
            found[name] = deviation(gathered(ours[name].grad, layouts[name], group), parameter.grad)
        for name, router in serial.routers().items():
            assert torch.equal(split.routers()[name].visits_E, router.visits_E)
        name = max(found, key=found.get)
        worst[case] = (name, found[name])
    return worst


@pytest.mark.parametrize("tp", [2, 4])
def test_loss_and_every_gradient_equal_the_serial_ones(tp):
    for worst in run_ranks(worst_deviations, tp, CASES, timeout=60):
        assert worst.keys() == CASES.keys()
        for case, (name, value) in worst.items():
            assert value <= TOLERANCE, f"{case}: {name}"


def strided(w, dim, rank, size):
    return w.index_select(dim, torch.arange(rank, w.shape[dim], size, device=w.device))


def test_strided_slices_are_noticed():
    """Pitfall 18: every R-th row instead of a band.  The shapes agree, and the loss of a fresh model nearly does."""
    cases = {"dense": CASES["dense"]}
    overrides = {"deepseek_lab.parallel.tensor.shard": strided}
    for worst in run_ranks(worst_deviations, 2, cases, timeout=60, overrides=overrides):
        assert worst["dense"][1] > 0.01


def test_ranks_are_numbered_within_the_group():
    cases = {name: CASES[name] for name in ("default", "sequence parallel")}
    for worst in run_ranks(worst_deviations, 4, cases, [[0, 1], [2, 3]], timeout=60):
        assert max(value for _, value in worst.values()) <= TOLERANCE


def test_one_rank_changes_nothing():
    model = small_model()
    before = {name: id(w) for name, w in model.named_parameters()}
    layouts = apply_tensor_parallel(model, sequence_parallel=True)
    assert {name: id(w) for name, w in model.named_parameters()} == before
    assert type(model.lm_head).__name__ == "Head"
    assert all(layout == Layout(layout.full_shape) for layout in layouts.values())


# --- memory and replicas --------------------------------------------------------------------------------------


def split_on_meta_and_real():
    config = DeepSeekConfig.preset("tiny", **SMALL)
    real = DeepSeekModel(config, seed=1)
    with torch.device("meta"):
        meta = DeepSeekModel(config)
    layouts = apply_tensor_parallel(real, sequence_parallel=True)
    assert apply_tensor_parallel(meta, sequence_parallel=True) == layouts
    full = dict(DeepSeekModel(config, seed=1).named_parameters())
    for (name, a), (other, b) in zip(real.named_parameters(), meta.named_parameters(), strict=True):
        assert (name, a.shape) == (other, b.shape)
        assert b.is_meta
        layout = layouts[name]
        if layout.dim is not None:
            a = tensor.shard(full[name], layout.dim, collectives.rank_in(), 4)
            assert torch.equal(real.get_parameter(name), a)
            assert real.get_parameter(name).untyped_storage().nbytes() == full[name].nbytes // 4
    return {name: (layout.dim, layout.partial) for name, layout in layouts.items() if name.startswith("layers.1.")}


def test_ranks_hold_contiguous_slices_on_meta_too():
    """What is split and along which dim, what is whole with partial gradients, written out for one layer."""
    attention, feed_forward = "layers.1.self_attn.", "layers.1.mlp."
    expected = dict.fromkeys(
        [
            "layers.1.input_layernorm.weight",
            "layers.1.post_attention_layernorm.weight",
            attention + "q_a_proj.weight",
            attention + "q_a_layernorm.weight",
            attention + "kv_a_proj_with_mqa.weight",
            attention + "kv_a_layernorm.weight",
            feed_forward + "gate.weight",
        ],
        (None, True),
    )
    expected |= {attention + f"{name}.weight": (0, False) for name in ("q_b_proj", "kv_b_proj")}
    expected |= {feed_forward + f"shared_experts.{name}_proj.weight": (0, False) for name in ("gate", "up")}
    expected |= {feed_forward + f"experts.{name}_proj": (1, False) for name in ("gate", "up")}
    expected |= {feed_forward + "experts.down_proj": (2, False)}
    expected |= {attention + "o_proj.weight": (1, False), feed_forward + "shared_experts.down_proj.weight": (1, False)}
    assert all(layouts == expected for layouts in run_ranks(split_on_meta_and_real, 4))


def train(sequence_parallel):
    """Ten steps of Adam; returns the parameters that every rank holds whole."""
    model = small_model().float()
    layouts = apply_tensor_parallel(model, None, sequence_parallel)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    ids, labels, _ = tokens()
    for _ in range(10):
        optimizer.zero_grad()
        loss_sum, n_valid = model.loss_sum(ids, labels)
        (loss_sum / n_valid).backward()
        for name, parameter in model.named_parameters():
            if layouts[name].partial:
                collectives.all_reduce(parameter.grad)
        optimizer.step()
    return {name: w.detach() for name, w in model.named_parameters() if layouts[name].dim is None}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_replicated_parameters_stay_equal_to_the_last_bit(sequence_parallel):
    """Pitfall 9: under sequence parallelism norm weights drift apart unless their gradients are summed."""
    first, *others = run_ranks(train, 4, sequence_parallel, timeout=60)
    assert any("layernorm" in name for name in first)
    for other in others:
        for name, weight in first.items():
            assert torch.equal(weight, other[name]), name


# --- traffic --------------------------------------------------------------------------------------------------


def traffic(sequence_parallel, label_smoothing=0.0):
    """(operation, payload bytes) of forward and of backward, for models of one and of two layers."""
    ids, labels, _ = tokens()
    counts = []
    for layers in (1, 2):
        model = small_model(num_hidden_layers=layers).float()
        apply_tensor_parallel(model, None, sequence_parallel)
        with record() as forward:
            loss_sum, _ = model.loss_sum(ids, labels, None, label_smoothing)
        with record() as backward:
            loss_sum.backward()
        counts.append([[(e.op, e.payload_bytes) for e in trace.events] for trace in (forward, backward)])
    return counts


def test_a_block_needs_two_all_reduces_forward_and_two_backward():
    activation, row = 3 * 8 * SMALL["hidden_size"] * 4, 3 * 8 * 4
    for (forward_1, backward_1), (forward_2, backward_2) in run_ranks(traffic, 2, False):
        one = ("all_reduce", activation)
        assert forward_1 == [one] * (1 + 2) + [("all_reduce", row), ("all_reduce", 2 * row)]
        assert forward_2 == [one] * (1 + 4) + [("all_reduce", row), ("all_reduce", 2 * row)]
        assert backward_1 == [one] * (1 + 2)
        assert backward_2 == [one] * (1 + 4)


def test_with_sequence_parallelism_each_is_a_gather_and_a_scatter():
    """The same bytes on a ring: an all-reduce is a reduce-scatter and an all-gather."""
    activation, row = 3 * 8 * SMALL["hidden_size"] * 4, 3 * 8 * 4
    scatter, gather = ("reduce_scatter", activation), ("all_gather", activation // 2)
    for (forward, backward), _ in run_ranks(traffic, 2, True):
        loss_parts = [("all_reduce", row), ("all_reduce", 2 * row)]
        assert forward == [scatter, gather, scatter, gather, scatter, gather, *loss_parts]
        assert backward == [scatter, gather, scatter, gather, scatter, gather]


def test_smoothing_costs_no_further_collective():
    row = 3 * 8 * 4
    for (forward, _), _ in run_ranks(traffic, 2, False, 0.1):
        assert forward[-2:] == [("all_reduce", row), ("all_reduce", 3 * row)]


# --- logits and generation ------------------------------------------------------------------------------------


def logits_and_text(sequence_parallel):
    found = []
    for split in (False, True):
        model = small_model()
        if split:
            apply_tensor_parallel(model, None, sequence_parallel)
        ids, labels, _ = tokens()
        logits = model(ids)
        model.loss(logits, labels).backward()
        gradient = model.norm.weight.grad
        if split and sequence_parallel:
            collectives.all_reduce(gradient)
        text = list(generate.stream(model, [1, 2, 3], max_new_tokens=12, temperature=1.0, seed=3))
        found.append((logits.detach(), gradient, text))
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_logits_their_gradient_and_generated_text_equal_the_serial_ones(sequence_parallel):
    for serial, split in run_ranks(logits_and_text, 4, sequence_parallel, timeout=60):
        assert deviation(split[0], serial[0]) <= TOLERANCE
        assert deviation(split[1], serial[1]) <= TOLERANCE
        assert split[2] == serial[2]
        assert len(set(split[2])) > 3


# --- the vocabulary-parallel loss at its edges ------------------------------------------------------------------


def losses_of(make_logits, labels, smoothing):
    full = make_logits().requires_grad_()
    expected, n_expected = loss.cross_entropy_sum(full, labels, smoothing)
    part = full.detach().chunk(collectives.size_of(), -1)[collectives.rank_in()].clone().requires_grad_()
    got, n_got = tensor.vocab_parallel_cross_entropy_sum(part, labels, None, smoothing)
    expected.backward()
    got.backward()
    assert n_got == n_expected
    assert n_got.dtype == torch.int64
    gradient = full.grad.chunk(collectives.size_of(), -1)[collectives.rank_in()]
    return got.detach(), expected.detach(), part.grad, gradient


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_huge_logits_is_finite(smoothing):
    """Logits of ±1,000: exponentials overflow unless the largest of all ranks is taken off first."""

    def huge():
        generator = torch.Generator().manual_seed(0)
        return 1000 * (2 * torch.rand(2, 5, 8, generator=generator, dtype=torch.float64) - 1)

    labels = torch.tensor([[0, 3, 7, 4, -100], [-100, 1, 2, 5, 6]])
    for got, expected, gradient, expected_gradient in run_ranks(losses_of, 4, huge, labels, smoothing):
        assert got.isfinite()
        assert deviation(got, expected) <= TOLERANCE
        # a gradient is 1/V ± a probability: compared to 1
        assert (gradient - expected_gradient).abs().max() <= TOLERANCE


def test_no_label_counts_nothing():
    labels = torch.full((2, 3), -100)
    for got, _, gradient, _ in run_ranks(losses_of, 2, lambda: torch.ones(2, 3, 8, dtype=torch.float64), labels, 0.1):
        assert got == 0
        assert not gradient.any()


# --- refusals -------------------------------------------------------------------------------------------------


def test_a_dimension_that_ranks_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"4 ranks do not divide dim 1 .* \(8, 6\); use 1, 2, 3 or 6"):
        tensor.shard(torch.zeros(8, 6), 1, 0, 4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        # 4 ranks would divide 6 heads x 12 rows of q_proj: into slices that cut through heads
        ({"num_attention_heads": 6}, "does not divide num_attention_heads=6; use 1, 2, 3 or 6"),
        ({"vocab_size": 62}, "does not divide vocab_size=62; use 1, 2, 31 or 62"),
        ({"intermediate_size": 42}, "does not divide intermediate_size=42"),
        ({"moe_intermediate_size": 18}, "does not divide moe_intermediate_size=18"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(overrides, message):
    def attempt():
        with pytest.raises(ValueError, match=message):
            apply_tensor_parallel(small_model(**overrides))

    run_ranks(attempt, 4)


def test_a_sequence_that_ranks_cannot_share_is_refused():
    def attempt():
        model = small_model()
        apply_tensor_parallel(model, None, sequence_parallel=True)
        with pytest.raises(ValueError, match="4 ranks cannot share a sequence of 6 tokens"):
            model.loss_sum(torch.zeros(1, 6, dtype=torch.long), torch.zeros(1, 6, dtype=torch.long))

    run_ranks(attempt, 4)
