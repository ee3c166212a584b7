"""A trained model out of a run's folder: to generate with, or for transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from deepseek_lab.data.tokenizer import Tokenizer, load_tokenizer
from deepseek_lab.model import DeepSeekModel
from deepseek_lab.train import checkpoint, config

BASE = Path(__file__).parent / "assets" / "base"  # what `make train-long` made: weights in the published layout


def load_model(run: Path | None = None) -> tuple[DeepSeekModel, Tokenizer]:
    """The model of the run's newest good checkpoint, in evaluation mode, and its tokenizer; None: the shipped model.

    Raises:
        FileNotFoundError: when the folder holds no run.
        checkpoint.CheckpointError: when the run has no checkpoint that can be read.
    """
    if run is None:
        return DeepSeekModel.from_hf(BASE).float().eval(), load_tokenizer()
    if not (run / "config.yaml").is_file():
        raise FileNotFoundError(f"{run} holds no run: it has no config.yaml; give the --out folder of a training run")
    settings = config.load(run / "config.yaml")
    found, refused = checkpoint.latest(run / "checkpoints")
    if found is None:
        raise checkpoint.CheckpointError("; ".join(refused) or f"{run} has no checkpoint yet")
    model = DeepSeekModel(settings.model)
    if settings.precision == "fp64":
        model = model.double()
    checkpoint.load_weights(found.tensors(), model)
    return model.eval(), load_tokenizer(settings.data.tokenizer)


def export_run(run: Path, folder: Path, dtype: str = "fp32") -> None:
    """Write weights, as "fp32" or "bf16", `config.json` and tokenizer files that `transformers` reads.

    Raises:
        ValueError: when DeepSeek-V3's class cannot express the model.
    """
    model, tokenizer = load_model(run)
    model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]).save_hf(folder)
    tokenizer.save(folder / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    partial = folder / "tokenizer_config.json.partial"
    partial.write_text(json.dumps(settings, indent=2) + "\n")
    os.replace(partial, folder / "tokenizer_config.json")
