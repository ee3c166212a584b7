"""What a model has to beat: bits per byte of counting tables and of compressors, on the same validation text.

Bits per byte compare across tokenizers, and with file compressors: the bits that a predictor needs to encode the text,
over the UTF-8 bytes of that text. Eight is no knowledge at all. Everything here is fitted on the training side only.
"""

import json
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from deepseek_lab.data.corpus import Corpus, Split
from deepseek_lab.data.tokens import TokenFile

MAX_TOKENS = 20_000_000  # counting looks at no more of the training side than this
MAX_BYTES = 64 << 20  # nor do compressors: xz -9 looks back no further


def baselines(corpus: Corpus, tokens: dict[Split, TokenFile]) -> dict[str, float]:
    """Bits per byte of the validation text, by method.

    unigram           frequency of each training token, every count plus one
    bigram            (count of the pair + α · unigram) / (count of its first token + α), α tuned on training tokens
    gzip -9, xz -9    the validation text by itself, documents joined by a newline
    xz -9 primed      size(training + validation) - size(training): what xz needs once it has seen the training text

    Computed once, in seconds, and then read from a file beside the tokens.
    """
    cache = tokens["val"].path.with_name("baselines.json")
    if cache.is_file():
        return json.loads(cache.read_text(encoding="utf-8"))
    train, val = np.asarray(tokens["train"].ids[:MAX_TOKENS]), np.asarray(tokens["val"].ids)
    counting = {
        "unigram": unigram_bits(train, val, tokens["val"].vocab_size),
        "bigram": bigram_bits(train, val, tokens["val"].vocab_size),
    }
    result = {name: bits / tokens["val"].n_bytes for name, bits in counting.items()}
    with ThreadPoolExecutor() as pool:  # compressors let go of the interpreter's lock
        val_bytes = sum(map(len, _text(corpus, "val")))
        with_val = pool.submit(lambda: xz_size(_text(corpus, "train", "val")))
        train_alone = pool.submit(lambda: xz_size(_text(corpus, "train")))
        sizes = {"gzip -9": gzip_size(_text(corpus, "val")), "xz -9": xz_size(_text(corpus, "val"))}
        sizes["xz -9 primed"] = with_val.result() - train_alone.result()
    result |= {name: 8 * size / val_bytes for name, size in sizes.items()}
    partial = cache.with_name(f"{cache.name}.{os.getpid()}")
    partial.write_text(json.dumps(result, indent=1), encoding="utf-8")
    os.replace(partial, cache)
    return result


def unigram_bits(train: np.ndarray, target: np.ndarray, vocab_size: int) -> float:
    """Bits to encode target[1:] by token frequency."""
    return float(-np.log2(_unigram(train, vocab_size)[target[1:]]).sum())


def bigram_bits(train: np.ndarray, target: np.ndarray, vocab_size: int) -> float:
    """Bits to encode target[1:], each token given the one before; α is what serves a held-out part of `train` best."""
    held_out = np.arange(len(train)) // 64 % 20 == 0  # in blocks, from every source
    tuning = _BigramTable(train[~held_out], train[held_out], vocab_size)
    return _BigramTable(train, target, vocab_size).bits(min(2.0 ** np.arange(-4, 14), key=tuning.bits))


class _BigramTable:
    """The counts in `seen` that predicting `target` needs."""

    def __init__(self, seen: np.ndarray, target: np.ndarray, vocab_size: int):
        pairs, wanted = (ids[:-1].astype(np.int64) * vocab_size + ids[1:] for ids in (seen, target))
        known, counts = np.unique(pairs, return_counts=True)
        place = np.searchsorted(known, wanted).clip(max=len(known) - 1)
        self.pair = np.where(known[place] == wanted, counts[place], 0)
        self.first = np.bincount(seen[:-1], minlength=vocab_size)[target[:-1]]
        self.unigram = _unigram(seen, vocab_size)[target[1:]]

    def bits(self, alpha: float) -> float:
        return float(-np.log2((self.pair + alpha * self.unigram) / (self.first + alpha)).sum())


def _unigram(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    counts = np.bincount(ids, minlength=vocab_size) + 1.0
    return counts / counts.sum()


def _text(corpus: Corpus, *splits: Split) -> Iterator[bytes]:
    """The text of one side, then of the next, at most MAX_BYTES of each, streamed."""
    for wanted in splits:
        left = MAX_BYTES
        for split, document in corpus.documents():
            if split == wanted and left > 0:
                chunk = (document.text + "\n").encode()
                left -= len(chunk)
                yield chunk


def gzip_size(chunks: Iterable[bytes]) -> int:
    """Bytes of the concatenated chunks under `gzip -9`."""
    compressor = zlib.compressobj(9, wbits=31)
    return sum(len(compressor.compress(chunk)) for chunk in chunks) + len(compressor.flush())


def xz_size(chunks: Iterable[bytes]) -> int:
    """Bytes of the concatenated chunks under `xz -9`."""
    compressor = lzma.LZMACompressor(preset=9)
    return sum(len(compressor.compress(chunk)) for chunk in chunks) + len(compressor.flush())
