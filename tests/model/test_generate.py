"""Sampling: which tokens may come, and how often."""

import pytest
import torch

from deepseek_lab.model import DeepSeekConfig, DeepSeekModel
from deepseek_lab.model.generate import sample_next, stream

P = torch.tensor([0.5, 0.25, 0.15, 0.1])


def counts(n=4000, **kwargs):
    generator = torch.Generator().manual_seed(0)
    drawn = [sample_next(P.log(), generator=generator, **{"temperature": 1.0, **kwargs}) for _ in range(n)]
    return torch.tensor(drawn).bincount(minlength=4) / n


def test_frequencies_are_the_probabilities():
    assert (counts() - P).abs().max() < 3 * (0.25 / 4000) ** 0.5


def test_temperature_sharpens():
    expected = P**2 / (P**2).sum()
    assert (counts(temperature=0.5) - expected).abs().max() < 3 * (0.25 / 4000) ** 0.5
    assert sample_next(P.log(), temperature=0) == 0


def test_top_k_and_top_p_keep_the_likeliest():
    assert (counts(top_k=2) > 0).tolist() == [True, True, False, False]
    assert (counts(top_p=0.6) > 0).tolist() == [True, True, False, False]  # the token that crosses 0.6 is kept
    assert (counts(top_p=0.5) > 0).tolist() == [True, False, False, False]
    assert (counts(top_p=0.01) > 0).tolist() == [True, False, False, False]


def test_a_stream_is_repeatable_and_ends_at_the_longest_position():
    model = DeepSeekModel(DeepSeekConfig.preset("tiny", num_hidden_layers=2, max_position_embeddings=12))
    first, again = (list(stream(model, [1, 2, 3], max_new_tokens=50)) for _ in range(2))
    assert first == again
    assert len(first) == 9
    assert model.training  # left as it was found


def test_a_stream_ends_before_the_end_token():
    model = DeepSeekModel(DeepSeekConfig.preset("tiny", num_hidden_layers=2))
    free = list(stream(model, [5], max_new_tokens=20))
    ended = list(stream(model, [5], max_new_tokens=20, eos_id=free[4]))
    assert ended == free[: free.index(free[4])]


def test_an_empty_prompt_is_refused():
    model = DeepSeekModel(DeepSeekConfig.preset("tiny", num_hidden_layers=2))
    with pytest.raises(ValueError, match="from 1 to"):
        next(stream(model, [], max_new_tokens=1))
