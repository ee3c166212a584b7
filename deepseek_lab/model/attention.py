"""Multi-head latent attention, MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1).

The one idea: keys and values of all heads are linear in one small latent vector per token, so only that latent and a
single rotated key shared by the heads need to be cached.  For training the latent is expanded into per-head keys and
values; for generation the expansion is folded into the query and the output instead, and attention runs in latent
space (section 2.1.2, "absorbed").

Shapes: B batch, T new tokens, S all tokens so far, D width, H heads, r `kv_lora_rank`; q and k heads have
`qk_nope_head_dim` (n) plain and `qk_rope_head_dim` (p) rotated components, v heads `v_head_dim` (v).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepseek_lab.model import rope
from deepseek_lab.model.config import DeepSeekConfig
from deepseek_lab.model.norm import RMSNorm


class MLA(nn.Module):
    """Causal latent attention; queries are compressed too when `q_lora_rank` is set."""

    def __init__(self, config: DeepSeekConfig):
        super().__init__()
        heads, width = config.num_attention_heads, config.hidden_size
        self.config = config
        self.scale = rope.softmax_scale(config)
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(width, heads * config.qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * config.v_head_dim, width, bias=False)

    def forward(
        self,
        x_BTD: Tensor,
        tables: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: "LatentCache | None" = None,
    ) -> Tensor:
        """Attend; (B, T, D) to (B, T, D).

        Args:
            tables: cosines and sines of the T positions, from `rope.rope_tables`.
            mask: boolean, broadcastable to (B, H, T, T), true where a query may look; None is plain causal.
            cache: holds the S - T earlier tokens, and receives the T new ones.
        """
        q_nope_BHTn, q_rope_BHTp = self._queries(x_BTD, tables)
        latent_BTr, k_rope_B1Tp = self._latents(x_BTD, tables)
        if cache is None:
            out_BHTv = self._attend_expanded(q_nope_BHTn, q_rope_BHTp, latent_BTr, k_rope_B1Tp, mask)
        else:
            latent_BSr, k_rope_B1Sp = cache.append(latent_BTr, k_rope_B1Tp)
            out_BHTv = self._attend_absorbed(q_nope_BHTn, q_rope_BHTp, latent_BSr, k_rope_B1Sp)
        return self.o_proj(out_BHTv.transpose(1, 2).flatten(2))

    def _queries(self, x_BTD: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        config = self.config
        if config.q_lora_rank is None:
            q_BTF = self.q_proj(x_BTD)
        else:
            q_BTF = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))
        q_BHTd = q_BTF.unflatten(-1, (-1, config.qk_head_dim)).transpose(1, 2)
        q_nope_BHTn, q_rope_BHTp = q_BHTd.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        return q_nope_BHTn, rope.apply_rope(q_rope_BHTp, *tables)

    def _latents(self, x_BTD: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        config = self.config
        compressed_BTc = self.kv_a_proj_with_mqa(x_BTD)
        latent_BTr, k_rope_BTp = compressed_BTc.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        return self.kv_a_layernorm(latent_BTr), rope.apply_rope(k_rope_BTp[:, None], *tables)

    def _attend_expanded(
        self, q_nope_BHTn: Tensor, q_rope_BHTp: Tensor, latent_BTr: Tensor, k_rope_B1Tp: Tensor, mask: Tensor | None
    ) -> Tensor:
        config = self.config
        kv_BHTd = self.kv_b_proj(latent_BTr).unflatten(-1, (-1, config.qk_nope_head_dim + config.v_head_dim))
        k_nope_BHTn, v_BHTv = kv_BHTd.transpose(1, 2).split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        q_BHTd = torch.cat((q_nope_BHTn, q_rope_BHTp), dim=-1)
        k_BHTd = torch.cat((k_nope_BHTn, k_rope_B1Tp.expand(-1, k_nope_BHTn.shape[1], -1, -1)), dim=-1)
        # Fused attention wants heads of one size: values are padded with zeros, and the padding cut off afterwards.
        v_BHTd = F.pad(v_BHTv, (0, config.qk_head_dim - config.v_head_dim))
        out_BHTd = F.scaled_dot_product_attention(
            q_BHTd, k_BHTd, v_BHTd, attn_mask=mask, is_causal=mask is None, scale=self.scale
        )
        return out_BHTd[..., : config.v_head_dim]

    def _attend_absorbed(
        self, q_nope_BHTn: Tensor, q_rope_BHTp: Tensor, latent_BSr: Tensor, k_rope_B1Sp: Tensor
    ) -> Tensor:
        config = self.config
        w_Hdr = self.kv_b_proj.weight.unflatten(0, (-1, config.qk_nope_head_dim + config.v_head_dim))
        w_k_Hnr, w_v_Hvr = w_Hdr.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        q_BHTc = torch.cat((q_nope_BHTn @ w_k_Hnr, q_rope_BHTp), dim=-1)
        latent_B1Sr = latent_BSr[:, None]
        scores_BHTS = q_BHTc @ torch.cat((latent_B1Sr, k_rope_B1Sp), dim=-1).mT * self.scale
        T, S = scores_BHTS.shape[-2:]
        future_TS = torch.ones(T, S, dtype=torch.bool, device=scores_BHTS.device).triu(S - T + 1)
        weights_BHTS = scores_BHTS.masked_fill(future_TS, float("-inf")).softmax(dim=-1)
        return (weights_BHTS @ latent_B1Sr) @ w_v_Hvr.mT


class LatentCache:
    """What one MLA layer remembers: (B, S, r) latents and (B, 1, S, p) rotated keys; r + p numbers a token."""

    def __init__(self) -> None:
        self.latent_BSr: Tensor | None = None
        self.k_rope_B1Sp: Tensor | None = None

    def append(self, latent_BTr: Tensor, k_rope_B1Tp: Tensor) -> tuple[Tensor, Tensor]:
        """Add T new tokens, and return all S."""
        if self.latent_BSr is None or self.k_rope_B1Sp is None:
            self.latent_BSr, self.k_rope_B1Sp = latent_BTr, k_rope_B1Tp
        else:
            self.latent_BSr = torch.cat((self.latent_BSr, latent_BTr), dim=1)
            self.k_rope_B1Sp = torch.cat((self.k_rope_B1Sp, k_rope_B1Tp), dim=2)
        return self.latent_BSr, self.k_rope_B1Sp

    def __len__(self) -> int:
        return 0 if self.latent_BSr is None else self.latent_BSr.shape[1]

    @property
    def elements(self) -> int:
        """Numbers stored, over the whole batch."""
        return sum(t.numel() for t in (self.latent_BSr, self.k_rope_B1Sp) if t is not None)
