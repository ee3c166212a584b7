"""Sampling text, one token at a time, from a model with latent caches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deepseek_lab.model.transformer import DeepSeekModel


def sample_next(
    logits_V: Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> int:
    """Draw a token from softmax(`logits_V` / `temperature`), restricted to the likeliest tokens.

    `top_k` keeps the k likeliest (0: all); `top_p` then keeps the smallest set of likeliest tokens whose probability
    reaches p, the token that crosses p included (Holtzman et al., arXiv 1904.09751, section 3.1).  A temperature of
    zero takes the likeliest token.

    Args:
        logits_V: (V,).

    Returns:
        The token's number.
    """
    if temperature == 0:
        return int(logits_V.argmax())
    scaled, tokens = (logits_V / temperature).sort(descending=True)
    if top_k:
        scaled, tokens = scaled[:top_k], tokens[:top_k]
    probabilities = scaled.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities = probabilities.where(before < top_p, 0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


@torch.no_grad()
def stream(
    model: DeepSeekModel,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    seed: int = 0,
    eos_id: int | None = None,
) -> Iterator[int]:
    """Yield new tokens after `prompt_ids` until `max_new_tokens`, `eos_id` or the model's longest position.

    Raises:
        ValueError: for an empty prompt, or one longer than `max_position_embeddings`.
    """
    limit = model.config.max_position_embeddings
    if not 0 < len(prompt_ids) <= limit:
        raise ValueError(f"the prompt has {len(prompt_ids)} tokens; it must have from 1 to {limit}")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        caches = model.new_caches()
        new = torch.tensor([prompt_ids], device=device)
        for _ in range(min(max_new_tokens, limit - len(prompt_ids))):
            logits_V = model(new, caches=caches)[0, -1].float().cpu()
            token = sample_next(logits_V, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
            if token == eos_id:
                return
            yield token
            new = torch.tensor([[token]], device=device)
    finally:
        model.train(was_training)
