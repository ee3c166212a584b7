"""FLOPs per token and utilization against published figures."""

import pytest
import torch

from deepseek_lab.model import DeepSeekConfig, DeepSeekModel
from deepseek_lab.plan import flops


@pytest.mark.parametrize(("preset", "gflops"), [("deepseek_v2", 155), ("deepseek_v3", 250)])
def test_training_cost_a_token_is_the_published_one(preset, gflops):
    # "Insights into DeepSeek-V3", arXiv 2505.09343, table 2, at 4,096 tokens.
    assert round(flops.flops_per_token(DeepSeekConfig.preset(preset), 4096) / 1e9) == gflops


@pytest.mark.parametrize("preset", ["tiny", "deepseek_v2_lite", "deepseek_v3"])
def test_active_parameters_are_the_models_own_less_what_a_token_does_not_meet(preset):
    config = DeepSeekConfig.preset(preset)
    with torch.device("meta"):
        model = DeepSeekModel(config)
    idle = config.n_routed_experts - config.num_experts_per_tok
    idle_experts = (config.num_hidden_layers - config.first_k_dense_replace) * idle
    expected = sum(p.numel() for p in model.parameters() if p.dim() >= 2) - model.embed_tokens.weight.numel()
    expected -= idle_experts * 3 * config.hidden_size * config.moe_intermediate_size
    assert flops.active_matmul_parameters(config) == expected


def test_v3_activates_the_derived_37_billion():
    # 36,625,603,584 without the embedding and with norms (61 layers of 2 x 7168 + 1536 + 512, and the last 7168).
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    assert flops.active_matmul_parameters(DeepSeekConfig.preset("deepseek_v3")) + norms == 36_625_603_584


def test_the_cost_counted_by_torch_is_ours():
    from torch.utils.flop_counter import FlopCounterMode

    config = DeepSeekConfig.preset("tiny", vocab_size=512, num_hidden_layers=3)
    model = DeepSeekModel(config)
    ids = torch.zeros(1, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids)
    # Forward is a third of the training cost, 2 FLOPs a weight; torch does not count the CPU's fused attention.
    assert counter.get_total_flops() == 2 * 64 * flops.active_matmul_parameters(config)


def test_mfu_is_the_share_of_the_dense_peak():
    assert flops.mfu(1000.0, 5e9, 1e13) == 0.5
    with pytest.raises(ValueError, match="must be positive"):
        flops.mfu(1.0, 1.0, 0.0)


def test_peaks_are_dense():
    assert flops.peak_of("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert flops.peak_of("NVIDIA H100 80GB HBM3", "bf16") == 989e12  # 1,979 with sparsity
    assert flops.peak_of("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert flops.peak_of("some other card", "bf16") is None
