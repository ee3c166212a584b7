"""Memory on paper: the table of the ZeRO paper, the model's own parameters, and what autograd really keeps."""

import sys

import cloudpickle
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepseek_lab.learn.ranks import run_ranks
from deepseek_lab.model import DeepSeekConfig, DeepSeekModel
from deepseek_lab.parallel import tensor
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.parallel.recompute import apply_recompute
from deepseek_lab.plan import memory

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# --- state ----------------------------------------------------------------------------------------------------

# ZeRO, arXiv 1910.02054v3, table 1: GB a GPU for 7.5 billion, 128 billion and 10¹² parameters, each at stages 1, 2, 3.
# The paper mixes rounding and cutting off (2218.75 is printed as 2218, 1.875 as 1.88).
TABLE = {
    1: (120, 120, 120, 2048, 2048, 2048, 16000, 16000, 16000),
    4: (52.5, 41.3, 30, 896, 704, 512, 7000, 5500, 4000),
    16: (35.6, 21.6, 7.5, 608, 368, 128, 4750, 2875, 1000),
    64: (31.4, 16.6, 1.88, 536, 284, 32, 4187, 2218, 250),
    256: (30.4, 15.4, 0.47, 518, 263, 8, 4046, 2054, 62.5),
    1024: (30.1, 15.1, 0.12, 513, 257, 2, 4011, 2013, 15.6),
}


@pytest.mark.parametrize("n_ranks", TABLE)
def test_state_is_that_of_the_papers_table(n_ranks):
    sizes = [(n, stage) for n in (7_500_000_000, 128_000_000_000, 10**12) for stage in (1, 2, 3)]
    for (n_params, stage), published in zip(sizes, TABLE[n_ranks], strict=True):
        gigabytes = sum(memory.zero_state_bytes(n_params, n_ranks, stage).values()) / 1e9
        assert gigabytes == pytest.approx(published, abs=1 if published >= 100 else 0.06)


def test_each_stage_shares_out_one_thing_more():
    one_rank = {"parameters": 4000, "gradients": 4000, "optimizer": 8000}
    for stage, shared in enumerate([(), ("optimizer",), ("optimizer", "gradients"), tuple(one_rank)]):
        got = memory.zero_state_bytes(1000, 4, stage, 4, 4, 8)
        assert got == {kind: n // 4 if kind in shared else n for kind, n in one_rank.items()}
    with pytest.raises(ValueError, match="use 0, 1, 2 or 3"):
        memory.zero_state_bytes(1, 1, 4)


def test_a_share_is_rounded_up_to_whole_numbers():
    assert memory.padded(1001, 4) == 1004
    assert memory.padded(1000, 4) == 1000
    assert memory.zero_state_bytes(1001, 4, 3)["parameters"] == 2 * 251


def test_stage_3_on_128_ranks_leaves_less_than_a_hundredth():
    whole, share = (memory.zero_state_bytes(128 * 10**6, 128, stage)["parameters"] for stage in (0, 3))
    assert 1 - share / whole == 1 - 1 / 128  # 99.2%


# --- parameters -----------------------------------------------------------------------------------------------

KINDS = {
    "self_attn.q_a": "latents", "self_attn.kv_a": "latents", "self_attn": "attention", "layernorm": "norms",
    "shared_experts": "shared experts", "experts": "experts", "gate.weight": "router", "mlp": "dense",
    "embed_tokens": "embedding", "lm_head": "head", "norm": "norms",
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        DeepSeekConfig(),
        DeepSeekConfig(q_lora_rank=None, tie_word_embeddings=True, n_shared_experts=2),
        DeepSeekConfig(n_shared_experts=0, first_k_dense_replace=3),
        DeepSeekConfig.preset("deepseek_v2_lite"),
        DeepSeekConfig.preset("deepseek_v3"),
    ],
    ids=["tiny", "tied", "no shared expert", "v2 lite", "v3"],
)
def test_parameters_by_formula_are_the_models(config):
    with torch.device("meta"):
        model = DeepSeekModel(config)
    counted: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        kind = next(kind for part, kind in KINDS.items() if part in name)
        counted[kind] = counted.get(kind, 0) + parameter.numel()
    by_formula = memory.end_parameters(config)
    for layer in range(config.num_hidden_layers):
        for kind, n in memory.layer_parameters(config, layer).items():
            by_formula[kind] = by_formula.get(kind, 0) + n
    assert {kind: n for kind, n in by_formula.items() if n} == counted
    assert memory.parameters_of_a_rank(by_formula) == model.num_parameters()


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_tensor_parallelism_splits_what_the_formula_splits(tp, tied):
    config = DeepSeekConfig(tie_word_embeddings=tied, num_hidden_layers=2)
    with torch.device("meta"):
        model = DeepSeekModel(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    held = 0
    for name, shape in shapes.items():
        n = torch.Size(shape).numel()
        held += n // tp if tensor.layout_of(name, shape, False).dim is not None else n
    counts = [memory.layer_parameters(config, layer) for layer in range(2)] + [memory.end_parameters(config)]
    assert sum(memory.parameters_of_a_rank(c, tp) for c in counts) == held


# --- activations ----------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Follows every storage that operations make, to tell at any time how many bytes are still alive."""

    def __init__(self, model):
        super().__init__()
        self.others = {x.untyped_storage()._cdata for x in [*model.parameters(), *model.buffers()]}
        self.made = {}

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # as in learn.wiretap: else torch imports its compiler first

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.others:
                storage = StorageWeakRef(x.untyped_storage())
                self.made[storage.cdata] = (storage, x.untyped_storage().nbytes())
        return result

    def n_bytes(self):
        return sum(n_bytes for storage, n_bytes in self.made.values() if not storage.expired())


def kept_bytes(config, B, T, recompute, dtype, document_mask, group=None, sequence_parallel=False, autocast=False):
    """What is alive on this rank between the forward and the backward of a real model, autocast's weights left out."""
    model = DeepSeekModel(config).to(dtype).train()
    tensor.apply_tensor_parallel(model, group, sequence_parallel)
    apply_recompute(model, recompute)
    ids = torch.randint(0, config.vocab_size, (B, T))
    with Live(model) as live, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss_sum, _ = model.loss_sum(ids, ids, torch.zeros_like(ids) if document_mask else None)
        n_bytes = live.n_bytes()
    loss_sum.backward()
    multiplied = [p for name, p in model.named_parameters() if p.dim() > 1 and not name.startswith("embed_tokens")]
    narrowed = sum(2 * p.numel() for p in multiplied if p.shape != (config.n_routed_experts, config.hidden_size))
    return n_bytes - narrowed * autocast


CONFIG = DeepSeekConfig(vocab_size=512, num_hidden_layers=3)
B, T = 2, 96


def activations(config, precision, tp=1, **options):
    layout = ParallelConfig(tp=tp, recompute=options.pop("recompute"), sequence_parallel=options.pop("split", False))
    estimate = memory.estimate(
        config, layout, micro_batch_size=B, seq_len=T, precision=precision, world_size=tp, **options
    )
    return estimate["activations"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("document_mask", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_are_what_autograd_keeps(recompute, document_mask, precision):
    """Within 2%: token ids, masks and the tables of positions are left out of the formula."""
    for config in (CONFIG, DeepSeekConfig(vocab_size=512, q_lora_rank=None, n_shared_experts=2, num_hidden_layers=2)):
        dtype = torch.float64 if precision == "fp64" else torch.float32
        kept = kept_bytes(config, B, T, recompute, dtype, document_mask, autocast=precision == "bf16")
        formula = activations(config, precision, recompute=recompute, document_mask=document_mask)
        assert formula == pytest.approx(kept, rel=0.02)


@pytest.mark.ranks
@pytest.mark.parametrize("split", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_of_a_tensor_parallel_rank(recompute, split):
    """Within 5%: masks and small collectives' buffers are left out."""
    ranks = run_ranks(kept_bytes, 2, CONFIG, B, T, recompute, torch.float32, False, None, split)
    formula = activations(CONFIG, "fp32", tp=2, recompute=recompute, split=split)
    for kept in ranks:
        assert formula == pytest.approx(kept, rel=0.05)


# --- a layout -------------------------------------------------------------------------------------------------


def estimate(**changes):
    layout = ParallelConfig(**{k: v for k, v in changes.items() if k in ParallelConfig.__dataclass_fields__})
    options = {"micro_batch_size": 1, "seq_len": 4096, "world_size": 64, "precision": "mixed"}
    options |= {k: v for k, v in changes.items() if k in options}
    return memory.estimate(DeepSeekConfig.preset("deepseek_v2_lite"), layout, **options)


def test_an_estimate_adds_up_as_the_layout_says():
    n_params = 15_706_484_224  # DeepSeek-V2-Lite
    whole = estimate()
    assert whole["parameters"] == 2 * n_params
    assert whole["optimizer"] == 12 * n_params
    assert estimate(zero_stage=1)["optimizer"] == 12 * n_params / 64
    assert estimate(zero_stage=3)["parameters"] == 2 * n_params / 64
    assert estimate(micro_batch_size=2)["activations"] > 1.9 * whole["activations"]
    less = [estimate(recompute=r)["activations"] for r in ("none", "selective", "full")]
    assert less == sorted(less, reverse=True)
    assert estimate(tp=4, sequence_parallel=True)["activations"] < estimate(tp=4)["activations"] < less[0]
    assert estimate(zero_stage=3)["transient"] > whole["transient"]
