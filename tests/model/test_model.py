"""Properties of the serial model that no peer is needed for."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepseek_lab import slots
from deepseek_lab.model import DeepSeekConfig, DeepSeekModel
from deepseek_lab.model.loss import ROWS, cross_entropy_sum
from deepseek_lab.model.moe import GroupedSwiGLU
from deepseek_lab.model.norm import RMSNorm, rms_norm

SMALL = DeepSeekConfig.preset("tiny", num_hidden_layers=3, vocab_size=128, hidden_size=64)
# Totals of arXiv 2405.04434 and 2412.19437, worked out to the last parameter; V3's with and without router biases.
PUBLISHED = {"deepseek_v2_lite": 15_706_484_224, "deepseek_v2": 235_741_434_880, "deepseek_v3": 671_026_404_352}


def ids_of(config, *shape, seed=0):
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("preset", PUBLISHED)
def test_parameter_counts_are_the_published_totals(preset):
    with torch.device("meta"):
        model = DeepSeekModel(DeepSeekConfig.preset(preset))
    assert model.num_parameters() == PUBLISHED[preset]
    biases = 58 * 256 if preset == "deepseek_v3" else 0
    assert model.num_parameters(router_bias=True) == PUBLISHED[preset] + biases


def test_tiny_splits_over_every_later_layout():
    config = DeepSeekConfig.preset("tiny")
    assert config.num_hidden_layers >= 8
    assert config.num_attention_heads % 4 == config.n_routed_experts % 4 == config.vocab_size % 4 == 0


def test_generation_with_the_latent_cache_equals_the_full_pass():
    for config in (SMALL, dataclasses.replace(SMALL, q_lora_rank=None)):
        model = DeepSeekModel(config).double().eval()
        ids = ids_of(config, 2, 24)
        caches = model.new_caches()
        parts = [model(ids[:, :9], caches=caches)] + [model(ids[:, t : t + 1], caches=caches) for t in range(9, 24)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(ids), rtol=1e-10, atol=1e-12)
        per_token = config.kv_lora_rank + config.qk_rope_head_dim
        assert sum(cache.elements for cache in caches) == 2 * 24 * per_token * config.num_hidden_layers


def test_v3_caches_70272_bytes_a_token_in_bf16():
    config = DeepSeekConfig.preset("deepseek_v3")  # arXiv 2505.09343, table 1
    assert 2 * (config.kv_lora_rank + config.qk_rope_head_dim) * config.num_hidden_layers == 70_272


def test_a_token_sees_no_later_token():
    model = DeepSeekModel(SMALL).double()
    ids = ids_of(SMALL, 1, 16)
    changed = ids.clone()
    changed[0, 10] = (changed[0, 10] + 1) % SMALL.vocab_size
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=1e-10, atol=1e-13)
    assert ((before - after).abs().amax(dim=-1)[0, 10:] > 1e-6).all()


def test_with_document_ids_a_packed_row_equals_its_documents_apart():
    # Rotary positions are relative, so that a document may start anywhere in the row.
    model = DeepSeekModel(SMALL).double()
    first, second = ids_of(SMALL, 1, 7), ids_of(SMALL, 1, 12, seed=1)
    doc_ids = torch.tensor([[1] * 7 + [2] * 12])
    packed = model(torch.cat((first, second), dim=1), doc_ids)
    torch.testing.assert_close(packed[:, :7], model(first), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(packed[:, 7:], model(second), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
def test_the_norms_written_out_gradients_are_those_of_autograd(dtype, tolerance):
    norm = RMSNorm(16, eps=0.05).to(torch.promote_types(dtype, torch.float32))
    torch.nn.init.normal_(norm.weight)
    x, dy = torch.randn(2, 5, 16).to(dtype), torch.randn(2, 5, 16).to(dtype)
    x[0, 0] = 0
    inputs = x.requires_grad_(), norm.weight
    exact_inputs = [t.detach().double().requires_grad_() for t in inputs]
    got = torch.autograd.grad(norm(x), inputs, dy)
    expected = torch.autograd.grad(rms_norm(*exact_inputs, eps=0.05), exact_inputs, dy.double())
    for leaf, gradient, exact in zip(inputs, got, expected, strict=True):
        assert (gradient.dtype, gradient.shape) == (leaf.dtype, leaf.shape)
        assert (gradient.double() - exact).norm() < tolerance * exact.norm()


def test_a_norm_that_fills_the_slot_brings_its_own_gradient():
    def centred(x, weight, eps):  # layer norm
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, None, eps)

    norm, x, dy = RMSNorm(16), torch.randn(3, 16, requires_grad=True), torch.randn(3, 16)
    with slots.filled({"deepseek_lab.model.norm.rms_norm": centred}):
        got = torch.autograd.grad(norm(x), (x, norm.weight), dy)
    expected = torch.autograd.grad(centred(x, norm.weight, norm.eps), (x, norm.weight), dy)
    torch.testing.assert_close(got, expected)


def test_loss_sum_equals_the_loss_of_all_logits_at_once():
    model = DeepSeekModel(SMALL).double()
    ids, labels = ids_of(SMALL, 3, ROWS // 2), ids_of(SMALL, 3, ROWS // 2, seed=1)  # two chunks, the last one shorter
    labels[0, :5] = -100
    loss_sum, n_valid = model.loss_sum(ids, labels, label_smoothing=0.1)
    (loss_sum / n_valid).backward()
    chunked = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss = model.loss(model(ids), labels, label_smoothing=0.1)
    loss.backward()
    assert n_valid == 3 * ROWS // 2 - 5
    torch.testing.assert_close(loss_sum / n_valid, loss, rtol=1e-12, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(chunked[name], p.grad, rtol=1e-9, atol=1e-14, msg=name)


def test_ignored_labels_change_nothing_and_no_label_at_all_is_zero():
    logits, labels = torch.randn(6, 11, dtype=torch.float64), torch.tensor([3, -100, 0, 10, -100, 5])
    kept = labels != -100
    torch.testing.assert_close(cross_entropy_sum(logits, labels), cross_entropy_sum(logits[kept], labels[kept]))
    loss_sum, n_valid = cross_entropy_sum(logits, torch.full((6,), -100))
    assert (loss_sum, n_valid) == (0, 0)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_equals_torchs(smoothing):
    logits, labels = torch.randn(50, 17, dtype=torch.float64), torch.randint(17, (50,))
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(cross_entropy_sum(logits, labels, smoothing)[0], expected, rtol=1e-12, atol=0)


class _NarrowTensors(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float32, torch.bfloat16, torch.float16):
                self.seen.add(str(function))
        return result


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"scoring_func": "softmax", "topk_method": "group_limited_greedy"},
        {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 64}},
    ],
)
def test_in_fp64_no_narrower_float_appears_anywhere(change):
    config = dataclasses.replace(SMALL, **change)
    model = DeepSeekModel(config).double()
    ids = ids_of(config, 2, 16)
    with _NarrowTensors() as mode:
        loss_sum, n_valid = model.loss_sum(ids, ids)
        (loss_sum / n_valid).backward()
        model(ids)
    assert not mode.seen


def test_bf16_autocast_keeps_the_loss_close_and_the_weights_fp32():
    model = DeepSeekModel(SMALL)
    ids = ids_of(SMALL, 2, 32)
    exact, n = model.loss_sum(ids, ids)
    with torch.autocast("cpu", torch.bfloat16):
        loss_sum, _ = model.loss_sum(ids, ids)
    (loss_sum / n).backward()
    assert loss_sum.dtype == torch.float32
    assert abs(loss_sum / exact - 1) < 2**-7  # a bf16 has 8 bits
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_weights_depend_on_seed_and_name_only():
    small = DeepSeekModel(SMALL, seed=1)
    deeper = DeepSeekModel(dataclasses.replace(SMALL, num_hidden_layers=5), seed=1)
    other = DeepSeekModel(SMALL, seed=2)
    for name, p in small.named_parameters():
        assert torch.equal(p, deeper.get_parameter(name))
    assert not torch.equal(small.lm_head.weight, other.lm_head.weight)
    assert small.lm_head.weight.std().item() == pytest.approx(SMALL.initializer_range, rel=0.05)


def test_expert_gradients_by_finite_differences_with_an_idle_expert():
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    index = torch.tensor([[0, 2], [2, 3], [0, 2], [2, 0], [3, 2], [2, 3]])  # nobody visits expert 1
    inputs = (random(6, 4), random(6, 2), random(4, 5, 4), random(4, 5, 4), random(4, 4, 5))
    counts = index.flatten().bincount(minlength=4)
    assert torch.autograd.gradcheck(lambda *args: GroupedSwiGLU.apply(*args, index, counts), inputs)


def test_all_tokens_to_one_expert_is_finite_and_idle_experts_get_zero_gradients():
    model = DeepSeekModel(dataclasses.replace(SMALL, n_group=1, topk_group=1, num_experts_per_tok=1))
    for router in model.routers().values():
        router.e_score_correction_bias[5] = 10.0
    ids = ids_of(SMALL, 2, 16)
    model.loss(model(ids), ids).backward()
    for layer in model.layers[1:]:
        assert layer.mlp.gate.visits_E.tolist() == [0, 0, 0, 0, 0, 32, 0, 0]
        for weights in (layer.mlp.experts.gate_proj, layer.mlp.experts.up_proj, layer.mlp.experts.down_proj):
            assert weights.grad.isfinite().all()
            assert weights.grad[5].any()
            assert not weights.grad[torch.arange(8) != 5].any()


def test_the_router_bias_chooses_but_does_not_weigh():
    model = DeepSeekModel(dataclasses.replace(SMALL, norm_topk_prob=False))
    router = next(iter(model.routers().values()))
    x = torch.randn(20, SMALL.hidden_size)
    router.e_score_correction_bias[:] = torch.linspace(-5, 5, 8)
    weight_TK, index_TK = router(x)
    scores_TE = (x @ router.weight.T).sigmoid()
    assert (index_TK >= 4).all()
    torch.testing.assert_close(weight_TK, scores_TE.gather(1, index_TK))


def test_groups_limit_which_experts_a_token_reaches():
    model = DeepSeekModel(dataclasses.replace(SMALL, n_group=4, topk_group=1))
    router = next(iter(model.routers().values()))
    _, index_TK = router(torch.randn(50, SMALL.hidden_size))
    assert (index_TK[:, 0] // 2 == index_TK[:, 1] // 2).all()


def test_softmax_routing_weighs_by_probability():
    config = dataclasses.replace(SMALL, scoring_func="softmax", topk_method="greedy", norm_topk_prob=False)
    router = next(iter(DeepSeekModel(config).routers().values()))
    x = torch.randn(20, SMALL.hidden_size)
    weight_TK, index_TK = router(x)
    p_TE = (x @ router.weight.T).softmax(dim=-1)
    torch.testing.assert_close(weight_TK, p_TE.topk(2, dim=-1).values)
    assert torch.equal(index_TK, p_TE.topk(2, dim=-1).indices)
    assert "e_score_correction_bias" not in dict(router.named_buffers())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 3}, r"n_group=3 does not divide n_routed_experts=8; use one of \[1, 2, 4, 8\]"),
        ({"num_experts_per_tok": 5}, "must be from 1 to 4"),
        ({"topk_group": 5}, "topk_group=5"),
        ({"n_group": 8, "topk_group": 8}, "leaves one expert a group"),
        ({"qk_rope_head_dim": 15}, "must be even"),
        ({"hidden_size": 0}, "hidden_size=0 must be positive"),
        ({"scoring_func": "tanh"}, "use one of sigmoid, softmax"),
        ({"rope_scaling": {"type": "linear"}}, "use 'yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "original_max_position_embeddings"),
        ({"n_routed_experts": 0}, "n_routed_experts=0"),
        ({"aux_loss_alpha": -0.1}, "0 turns the loss off"),
        ({"capacity_factor": 0.0}, "must be positive, or None"),
    ],
)
def test_impossible_configurations_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean hidden_size"):
        DeepSeekConfig.preset("tiny", hiden_size=64)
    with pytest.raises(ValueError, match="choose one of tiny"):
        DeepSeekConfig.preset("huge")
