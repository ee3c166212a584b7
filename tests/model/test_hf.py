"""The same weights in transformers' DeepseekV3ForCausalLM give the same logits and the same gradients."""

import dataclasses

import pytest
import torch

from deepseek_lab.model import DeepSeekConfig, DeepSeekModel

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

SMALL = DeepSeekConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    q_lora_rank=16,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=12,
    routed_scaling_factor=2.5,
    initializer_range=0.1,  # large enough that every path shapes the output, not so large that rounding grows
)
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
CONFIGS = {
    "query compression, groups": SMALL,
    "no query compression": dataclasses.replace(SMALL, q_lora_rank=None),
    "yarn": dataclasses.replace(SMALL, rope_scaling={**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}),
    "yarn, plain scale": dataclasses.replace(SMALL, rope_scaling=YARN),
    "one group": dataclasses.replace(SMALL, n_group=1, topk_group=1, norm_topk_prob=False, n_shared_experts=2),
    "dense only": dataclasses.replace(SMALL, first_k_dense_replace=3),
    "tied embeddings": dataclasses.replace(SMALL, tie_word_embeddings=True),
}


class _Widened:
    """torch, but every mention of fp32 means fp64: lifts the peer's casts."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def casts_lifted(monkeypatch):
    from transformers import modeling_rope_utils
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    monkeypatch.setattr(modeling_deepseek_v3, "torch", _Widened())
    monkeypatch.setattr(modeling_rope_utils, "torch", _Widened())


def our_model(config):
    model = DeepSeekModel(config, seed=3)
    for index, router in enumerate(model.routers().values()):
        noise = torch.randn(config.n_routed_experts, generator=torch.Generator().manual_seed(index))
        router.e_score_correction_bias.copy_(0.1 * noise)
    return model


def their_model(folder):
    peer = transformers.DeepseekV3ForCausalLM.from_pretrained(
        folder, experts_implementation="eager", dtype=torch.float32, local_files_only=True
    )
    return peer.double()


def deviation(a, b):
    return ((a - b).norm() / b.norm()).item()


def worst_deviation(ours, theirs, config):
    """Norm-wise, over the logits and the gradient of every parameter."""
    ids = torch.randint(config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
    logits = ours(ids[:, :-1])
    ours.loss(logits, ids[:, 1:]).backward()
    their_logits = theirs(ids[:, :-1], use_cache=False).logits
    torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert logits.dtype == torch.float64
    found = {"logits": deviation(logits, their_logits)}
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        name = name.removeprefix("model.")
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            mine = torch.cat((gradients.pop(f"{stem}gate_proj"), gradients.pop(f"{stem}up_proj")), dim=1)
        else:
            mine = gradients.pop(name)
        found[name] = deviation(mine, parameter.grad)
    assert not gradients, f"no counterpart for {list(gradients)}"
    return max(found.items(), key=lambda item: item[1])


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_equal_the_peers(name, tmp_path, casts_lifted):
    ours = our_model(CONFIGS[name])
    ours.save_hf(tmp_path)
    where, worst = worst_deviation(ours.double(), their_model(tmp_path), CONFIGS[name])
    assert worst < 1e-9, where


@pytest.mark.parametrize("name", CONFIGS)
def test_with_the_peers_own_casts_only_fp32_rounding_remains(name, tmp_path):
    ours = our_model(CONFIGS[name])
    ours.save_hf(tmp_path)
    where, worst = worst_deviation(ours.double(), their_model(tmp_path), CONFIGS[name])
    assert worst < 1e-6, where


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_come_back_from_the_peer_unchanged(name, tmp_path):
    ours = our_model(CONFIGS[name])
    ours.save_hf(tmp_path / "ours")
    peer = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    peer.save_pretrained(tmp_path / "theirs")
    back = DeepSeekModel.from_hf(tmp_path / "theirs")
    assert back.config.to_dict().keys() == ours.config.to_dict().keys()
    assert back.config.tie_word_embeddings == ours.config.tie_word_embeddings
    state = ours.state_dict()
    assert state.keys() == back.state_dict().keys()
    for key, tensor in back.state_dict().items():
        assert torch.equal(tensor, state[key]), key
    ids = torch.randint(ours.config.vocab_size, (1, 20))
    assert torch.equal(ours(ids), back(ids))


def test_what_acts_in_training_only_is_exported_and_changes_no_logits(tmp_path):
    config = dataclasses.replace(SMALL, aux_loss_alpha=0.1, seq_aux=False, capacity_factor=0.5)
    ours = our_model(config)
    ours.save_hf(tmp_path)
    assert DeepSeekModel.from_hf(tmp_path).config == config
    ids = torch.randint(config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert deviation(ours.eval()(ids), their_model(tmp_path)(ids, use_cache=False).logits) < 1e-6


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scoring_func": "softmax", "topk_method": "greedy"}, "other logits"),
        ({"topk_method": "group_limited_greedy"}, "other logits"),
        ({"n_shared_experts": 0}, "shared experts"),
    ],
)
def test_what_v3_cannot_express_is_not_exported(change, reason, tmp_path):
    model = DeepSeekModel(dataclasses.replace(SMALL, **change))
    with pytest.raises(ValueError, match=reason):
        model.save_hf(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_lacks_a_tensor_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    our_model(SMALL).save_hf(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lack model.layers.1.mlp.experts.5.up_proj.weight"):
        DeepSeekModel.from_hf(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config.json"):
        DeepSeekModel.from_hf(tmp_path)
