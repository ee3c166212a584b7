"""Weights and configuration to and from the published Hugging Face layout (`config.json` and safetensors).

The published checkpoints store every expert's matrices apart and prefix the decoder with `model.`; here the experts
of a layer are stacked.  Nothing else differs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from deepseek_lab.model.config import DeepSeekConfig

if TYPE_CHECKING:
    from deepseek_lab.model.transformer import DeepSeekModel

WEIGHTS = "model.safetensors"


def config_to_hf(config: DeepSeekConfig) -> dict[str, Any]:
    """The `config.json` of `DeepseekV3ForCausalLM` for this architecture.

    Raises:
        ValueError: for a router other than V3's, or experts without a shared one, which that class cannot express.
    """
    has_experts = config.first_k_dense_replace < config.num_hidden_layers
    if has_experts and (config.scoring_func, config.topk_method) != ("sigmoid", "noaux_tc"):
        raise ValueError(
            f"DeepseekV3ForCausalLM knows only scoring_func='sigmoid' with topk_method='noaux_tc'; this model has "
            f"{config.scoring_func!r} with {config.topk_method!r}, so that its exported weights would give other logits"
        )
    if has_experts and not config.n_shared_experts:
        raise ValueError("DeepseekV3ForCausalLM always has shared experts; this model has n_shared_experts=0")
    return {
        **config.to_dict(),
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": config.num_attention_heads,
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def config_from_hf(values: dict[str, Any]) -> DeepSeekConfig:
    """The architecture that a `config.json` of DeepSeek-V3's class describes; fields of no effect here are dropped."""
    if values.get("model_type") != "deepseek_v3":
        raise ValueError(f"config.json has model_type={values.get('model_type')!r}; only 'deepseek_v3' can be loaded")
    for field, only in (("attention_bias", False), ("hidden_act", "silu"), ("rope_interleave", True)):
        if values.get(field, only) != only:
            raise ValueError(f"config.json has {field}={values[field]!r}; only {only!r} is supported")
    known = {name: values[name] for name in DeepSeekConfig.__dataclass_fields__ if name in values}
    rope = values.get("rope_parameters")  # how transformers 5 writes what used to be rope_theta and rope_scaling
    if rope:
        known["rope_theta"] = rope["rope_theta"]
        scaled = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type", "type")}
        known["rope_scaling"] = None if rope["rope_type"] == "default" else {"type": rope["rope_type"], **scaled}
    return DeepSeekConfig(**known)


def to_hf_state(model: DeepSeekModel) -> dict[str, Tensor]:
    """The model's weights under their published names, experts apart."""
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            if not model.config.tie_word_embeddings:
                state[name] = tensor
        else:
            names = hf_names(name, model.config.n_routed_experts)
            state |= zip(names, tensor if tensor.dim() == 3 else [tensor], strict=True)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def hf_names(name: str, n_experts: int) -> list[str]:
    """The published tensors that make up our tensor `name`: one, or one for each expert."""
    stem, _, matrix = name.rpartition(".")
    if stem.endswith(".experts"):
        return [f"model.{stem}.{expert}.{matrix}.weight" for expert in range(n_experts)]
    return [name if name == "lm_head.weight" else f"model.{name}"]


def save(model: DeepSeekModel, folder: Path) -> None:
    """See `DeepSeekModel.save_hf`; every file is complete before it gets its name, `config.json` last."""
    config = config_to_hf(model.config)
    config["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (WEIGHTS + ".partial")
    save_file(to_hf_state(model), partial, metadata={"format": "pt"})
    os.replace(partial, folder / WEIGHTS)
    partial = folder / "config.json.partial"
    partial.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(partial, folder / "config.json")


def load(cls: type[DeepSeekModel], folder: Path) -> DeepSeekModel:
    """See `DeepSeekModel.from_hf`; the parameters keep the type that the file stores."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json; give a folder written by transformers or save_hf")
    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    with torch.device("meta"):
        model = cls(config)
    tensors = dict(_read(folder))
    state: dict[str, Tensor] = {}
    for name, target in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        pieces = []
        for hf_name in hf_names(name, config.n_routed_experts):
            if hf_name not in tensors:
                raise ValueError(f"{folder}: the weights lack {hf_name}, which config.json asks for")
            pieces.append(tensors.pop(hf_name))
        joined = torch.stack(pieces) if target.dim() == 3 else pieces[0]
        if joined.shape != target.shape:
            raise ValueError(
                f"{folder}: {name} has shape {tuple(joined.shape)}, config.json asks for {tuple(target.shape)}"
            )
        state[name] = joined
    layers = {f"model.layers.{layer}" for layer in range(config.num_hidden_layers)}
    unused = [name for name in tensors if ".layers." not in name or ".".join(name.split(".")[:3]) in layers]
    unused = [name for name in unused if not (name == "lm_head.weight" and config.tie_word_embeddings)]
    if unused:
        raise ValueError(f"{folder}: config.json has no place for {len(unused)} tensors, the first {unused[0]}")
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    for router in model.routers().values():
        router.reset_counts(device="cpu")
    return model


def _read(folder: Path) -> Iterator[tuple[str, Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no *.safetensors file")
    for file in files:
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (not a mapping)
                tensor = reader.get_tensor(name)
                if tensor.dtype.itemsize == 1:
                    raise ValueError(f"{file.name}: {name} is {tensor.dtype}; convert the checkpoint to bf16 first")
                yield name, tensor
