"""The decoder: embedding, blocks of latent attention and feed-forward, norm, output head.

Serial and readable; it knows nothing of ranks.  Modules and parameters carry the names of DeepSeek's published
checkpoints (without the leading `model.`), so that weights map one to one; see `hf.py`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn

from deepseek_lab.model import hf, loss, rope
from deepseek_lab.model.attention import MLA, LatentCache
from deepseek_lab.model.config import DeepSeekConfig
from deepseek_lab.model.mlp import SwiGLU
from deepseek_lab.model.moe import MoE, Router
from deepseek_lab.model.norm import RMSNorm


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: DeepSeekConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MLA(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config) if config.is_moe(layer) else SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        x_BTD: Tensor,
        tables: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: LatentCache | None = None,
        real_BT: Tensor | None = None,
    ) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), tables, mask, cache)
        h_BTD = self.post_attention_layernorm(x_BTD)
        return x_BTD + (self.mlp(h_BTD, real_BT) if isinstance(self.mlp, MoE) else self.mlp(h_BTD))


class DeepSeekModel(nn.Module):
    """A DeepSeek-style causal language model.

    Args:
        config: the architecture.
        seed: weights are drawn for each parameter from (seed, parameter name), so that they depend neither on the
            order of construction nor on how a model is later split over ranks.  On the meta device nothing is drawn.
    """

    def __init__(self, config: DeepSeekConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Head(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Give every parameter its `initial_weight`."""
        for name, parameter in self.named_parameters():
            if parameter.device.type != "meta":
                parameter.copy_(initial_weight(name, parameter.shape, self.config, seed))

    def forward(
        self, input_ids: Tensor, doc_ids: Tensor | None = None, caches: list[LatentCache] | None = None
    ) -> Tensor:
        """Logits (B, T, V) for the token after each of `input_ids` (B, T); the arguments are those of `hidden`."""
        return self.lm_head(self.hidden(input_ids, doc_ids, caches))

    def hidden(
        self,
        input_ids: Tensor,
        doc_ids: Tensor | None = None,
        caches: list[LatentCache] | None = None,
        real_BT: Tensor | None = None,
    ) -> Tensor:
        """What the output head reads, (B, T, D).

        Args:
            doc_ids: (B, T), the document of each token; attention then never crosses from one to another.
            caches: one `LatentCache` a layer, for generation; positions go on from what they hold.
            real_BT: true where there is text; the rest is padding, which visits no routed expert.  None: all is text.
        """
        x_BTD = self.embed_tokens(input_ids)
        return self.norm(self.run_blocks(range(len(self.layers)), x_BTD, input_ids, doc_ids, caches, real_BT))

    def run_blocks(
        self,
        layers: range,
        x_BTD: Tensor,
        input_ids: Tensor,
        doc_ids: Tensor | None = None,
        caches: list[LatentCache] | None = None,
        real_BT: Tensor | None = None,
    ) -> Tensor:
        """Some consecutive blocks; the arguments are those of `hidden`."""
        if doc_ids is not None and caches is not None:
            raise ValueError("doc_ids are for packed training batches, caches for generation: give one of them")
        T = input_ids.shape[1]
        past = len(caches[layers[0]]) if caches else 0
        positions_T = torch.arange(past, past + T, device=input_ids.device)
        tables = rope.rope_tables(self.config, positions_T, torch.promote_types(x_BTD.dtype, torch.float32))
        mask_B1TT = None if doc_ids is None else document_mask(doc_ids)
        for layer in layers:
            x_BTD = self.layers[layer](x_BTD, tables, mask_B1TT, caches[layer] if caches else None, real_BT)
        return x_BTD

    def blocks(self) -> list[Block]:
        """The blocks that are here: a pipeline stage holds only some of them."""
        return [block for block in self.layers if isinstance(block, Block)]

    def loss_sum(
        self,
        input_ids: Tensor,
        labels: Tensor,
        doc_ids: Tensor | None = None,
        label_smoothing: float = 0.0,
        real_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy of `labels` (B, T), nats, and how many of them counted: what the trainer minimises.

        The same numbers as `loss.cross_entropy_sum(model(input_ids), labels)`, without ever holding all logits.
        """
        return self.lm_head(self.hidden(input_ids, doc_ids, real_BT=real_BT), labels, label_smoothing)

    def loss(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Mean cross-entropy, nats, over the labels that are not -100; zero when there are none."""
        loss_sum, n_valid = loss.cross_entropy_sum(logits, labels, label_smoothing)
        return loss_sum / n_valid.clamp(min=1)

    def new_caches(self) -> list[LatentCache]:
        """Empty caches for one batch of generation."""
        return [LatentCache() for _ in self.layers]

    def routers(self) -> dict[str, Router]:
        """The router of every mixture-of-experts layer, by module name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Router)}

    def num_parameters(self, router_bias: bool = False) -> int:
        """Trainable numbers, tied ones once; with `router_bias`, the routers' bias buffers too.

        DeepSeek-V3's published 671,026,419,200 counts those buffers (58 layers of 256).
        """
        count = sum(parameter.numel() for parameter in self.parameters())
        if router_bias:
            count += sum(buffer.numel() for name, buffer in self.named_buffers() if name.endswith("correction_bias"))
        return count

    @classmethod
    def from_hf(cls, folder: str | Path) -> DeepSeekModel:
        """Load a folder of `config.json` and safetensors written by `transformers` or by `save_hf`."""
        return hf.load(cls, Path(folder))

    def save_hf(self, folder: str | Path) -> None:
        """Write a folder that `transformers` loads as `DeepseekV3ForCausalLM`.

        Raises:
            ValueError: when the architecture is one that DeepSeek-V3's class cannot express.
        """
        hf.save(self, Path(folder))


class Head(nn.Linear):
    """The output head, which also holds the loss: together they need never hold all logits."""

    def forward(self, x_BTD: Tensor, labels: Tensor | None = None, label_smoothing: float = 0.0):  # type: ignore[override]
        """Logits (B, T, V); with `labels` (B, T) their summed cross-entropy instead, and how many of them counted."""
        if labels is None:
            return super().forward(x_BTD)
        return loss.head_loss_sum(x_BTD, self.weight, labels, label_smoothing)


def initial_weight(name: str, shape: torch.Size, config: DeepSeekConfig, seed: int) -> Tensor:
    """What the parameter `name` starts from, fp32: a normal of `initializer_range` for matrices, one for norms.

    Drawn from (seed, name) alone, so that it depends neither on the order of construction nor on how a model is split.
    """
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.empty(shape, dtype=torch.float32).normal_(generator=generator) * config.initializer_range


def document_mask(doc_ids: Tensor) -> Tensor:
    """(B, 1, T, T) boolean: true where the key is no later than the query and in the same document (B, T)."""
    T = doc_ids.shape[1]
    same_BTT = doc_ids[:, :, None] == doc_ids[:, None, :]
    return (same_BTT & torch.ones(T, T, dtype=torch.bool, device=doc_ids.device).tril())[:, None]
