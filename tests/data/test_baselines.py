"""The counting tables are probabilities, fitted on the training side; the compressors are what they are named after."""

import gzip
import lzma
import math

import numpy as np
import pytest

from deepseek_lab.data import baselines as baselines_module
from deepseek_lab.data.baselines import baselines, bigram_bits, gzip_size, unigram_bits, xz_size
from deepseek_lab.data.corpus import load_corpus
from deepseek_lab.data.tokenizer import load_tokenizer
from deepseek_lab.data.tokens import prepare

RANDOM = np.random.default_rng(0).integers(0, 7, 4000)


@pytest.mark.parametrize("bits", [unigram_bits, bigram_bits])
def test_probabilities_of_the_next_token_sum_to_one(bits):
    for first in range(7):
        total = sum(2.0 ** -bits(RANDOM, np.array([first, following]), 7) for following in range(7))
        assert total == pytest.approx(1, abs=1e-12)


def test_unigram_by_hand():
    # counts 2, 1, 0 plus one, over 3 + 3
    assert unigram_bits(np.array([0, 0, 1]), np.array([9, 0, 2]), 3) == pytest.approx(-math.log2(3 / 6 * 1 / 6))


def test_bigram_learns_what_the_unigram_cannot():
    cycle = np.arange(20_000) % 4
    assert unigram_bits(cycle, cycle[:1001], 4) == pytest.approx(2000, rel=1e-3)
    assert bigram_bits(cycle, cycle[:1001], 4) < 10


def test_bigram_of_independent_tokens_is_no_worse_than_the_unigram():
    fresh = np.random.default_rng(1).integers(0, 7, 4000)
    assert bigram_bits(RANDOM, fresh, 7) < 1.01 * unigram_bits(RANDOM, fresh, 7)


def test_compressors_are_gzip_and_xz_at_level_nine():
    chunks = [b"some text, " * 50, bytes(RANDOM.astype(np.uint8))]
    whole = b"".join(chunks)
    assert gzip_size(chunks) == len(gzip.compress(whole, 9))
    assert xz_size(chunks) == len(lzma.compress(whole, preset=9))


def test_on_an_own_corpus_computed_once_and_priming_helps(tmp_path, monkeypatch):
    text = "".join(f"{word} " for word in np.random.default_rng(0).choice(["cat", "sat", "mat", "猫"], 20_000))
    (tmp_path / "own.txt").write_text(text.replace("mat ", "mat\n"), encoding="utf-8")
    corpus = load_corpus(tmp_path / "own.txt")
    tokens = prepare(corpus, load_tokenizer(), tmp_path / "cache")
    first = baselines(corpus, tokens)
    assert list(first) == ["unigram", "bigram", "gzip -9", "xz -9", "xz -9 primed"]
    assert all(0 < bits < 8 for bits in first.values())
    assert first["xz -9 primed"] < first["xz -9"]
    monkeypatch.setattr(baselines_module, "xz_size", lambda _: pytest.fail("compressed again"))
    assert baselines(corpus, tokens) == first
