"""Token files: a corpus turned into one long row of ids on disk, read through a memory map.

The stream is EOT d1 EOT d2 ...: the end-of-text token *opens* every document. Files are keyed by the content of the
corpus and of the tokenizer, so a second run finds them, and a changed text or tokenizer never meets stale ids. Each is
complete or absent: it is written under another name and renamed. Ranks may all call `prepare` at once: one writes.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from deepseek_lab.data.corpus import Corpus, Document, Split, load_corpus
from deepseek_lab.data.tokenizer import Tokenizer

BATCH_CHARACTERS = 1 << 20  # text held in memory while tokenising


@dataclass(frozen=True)
class TokenFile:
    """A stream of token ids in `path` (.bin; its facts in the .json beside it). `ids` maps it; nothing is loaded.

    n_bytes: UTF-8 bytes of the text, without end-of-text tokens: the denominator of "bits per byte".
    """

    path: Path
    n_tokens: int
    n_bytes: int
    vocab_size: int
    eot_id: int
    tokenizer: str

    @classmethod
    def open(cls, path: str | Path) -> "TokenFile":
        """Raises FileNotFoundError when it is missing and ValueError when its length is not what its facts say."""
        path = Path(path)
        facts = path.with_suffix(".json")
        if not path.is_file() or not facts.is_file():
            raise FileNotFoundError(f"token file {path} or its {facts.name} does not exist; make it with data.prepare")
        file = cls(path=path, **json.loads(facts.read_text(encoding="utf-8")))
        expected = file.n_tokens * _dtype(file.vocab_size).itemsize
        if path.stat().st_size != expected:
            raise ValueError(
                f"token file {path} has {path.stat().st_size} bytes, expected {expected}; "
                f"delete the folder {path.parent} and it will be built again"
            )
        return file

    @cached_property
    def ids(self) -> np.ndarray:
        """(n_tokens,) uint16 or uint32, read only."""
        return np.memmap(self.path, dtype=_dtype(self.vocab_size), mode="r")

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key != "ids"}  # the map stays, only facts travel


def prepare(
    source: str | Path | Corpus | None, tokenizer: Tokenizer, cache_dir: str | Path | None = None
) -> dict[Split, TokenFile]:
    """Tokenise a corpus (None: the shipped one) into {"train": TokenFile, "val": TokenFile}, or find it done already.

    cache_dir defaults to the environment's DEEPSEEK_LAB_CACHE, else ~/.cache/deepseek_lab. Memory stays bounded however
    large the corpus. Raises what `load_corpus` raises, and ValueError when a side of the split would be empty.
    """
    corpus = source if isinstance(source, Corpus) else load_corpus(source)
    cache = Path(cache_dir or os.environ.get("DEEPSEEK_LAB_CACHE") or "~/.cache/deepseek_lab").expanduser()
    folder = cache / f"tokens-{corpus.fingerprint[:16]}-{tokenizer.fingerprint[:16]}"
    if not folder.is_dir():
        with _lock(folder):
            if not folder.is_dir():
                partial = folder.with_name(f"{folder.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)  # of a writer that was killed: we hold the lock
                _write(corpus, tokenizer, partial)
                os.replace(partial, folder)
    return {"train": TokenFile.open(folder / "train.bin"), "val": TokenFile.open(folder / "val.bin")}


def _dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Only one process on this machine is inside at a time; the system releases the lock of one that dies."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_suffix(".lock").open("w")
    except OSError as error:
        raise OSError(
            f"cannot write to {folder.parent}: {error}; set DEEPSEEK_LAB_CACHE to a folder of yours"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _batches(corpus: Corpus) -> Iterator[list[tuple[Split, Document]]]:
    batch: list[tuple[Split, Document]] = []
    size = 0
    for item in corpus.documents():
        batch.append(item)
        size += len(item[1].text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def _write(corpus: Corpus, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir()
    dtype = _dtype(tokenizer.vocab_size)
    counts: dict[Split, np.ndarray] = {"train": np.zeros(3, np.int64), "val": np.zeros(3, np.int64)}
    with (folder / "train.bin").open("wb") as train, (folder / "val.bin").open("wb") as val:
        files = {"train": train, "val": val}
        for batch in _batches(corpus):
            encoded = tokenizer.encode_batch([document.text for _, document in batch])
            for (split, document), ids in zip(batch, encoded, strict=True):
                np.array([tokenizer.eot_id, *ids], dtype).tofile(files[split])
                counts[split] += 1, len(ids) + 1, len(document.text.encode())
    for split, (n_documents, n_tokens, n_bytes) in counts.items():
        path = folder / f"{split}.bin"
        if not n_documents:
            total = sum(int(count[0]) for count in counts.values())
            raise ValueError(
                f"the corpus has {total} documents, so nothing is left for {split}; "
                "give at least two, or more text (plain text is cut into documents of 8 KiB)"
            )
        facts = asdict(
            TokenFile(path, int(n_tokens), int(n_bytes), tokenizer.vocab_size, tokenizer.eot_id, tokenizer.fingerprint)
        )
        del facts["path"]
        path.with_suffix(".json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
