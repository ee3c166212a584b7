"""Text to token ids and back: a byte-level BPE of 4,096 pieces, shipped with the package.

Byte-level means that no text is out of vocabulary: what the merges do not cover is spelt out in bytes. Digits are
grouped by at most three and Chinese is kept apart from Latin, as DeepSeek's own tokenizers do. Token 0,
`<|endoftext|>`, opens every document; only its id means that, never text that happens to contain those characters.

    python -m deepseek_lab.data.tokenizer --vocab-size 8192 --out my_tokenizer.json my_texts/
"""

import argparse
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from deepseek_lab.data.corpus import load_corpus

SHIPPED = Path(__file__).parent / "assets" / "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 4096


class Tokenizer:
    """A thin wrapper of `tokenizers.Tokenizer`. `eot_id` is its special token, `fingerprint` a hash of its JSON."""

    def __init__(self, backend: tokenizers.Tokenizer):
        eot_id = backend.token_to_id(END_OF_TEXT)
        if eot_id is None:
            raise ValueError(
                f"this tokenizer has no {END_OF_TEXT} token; train one with `python -m deepseek_lab.data.tokenizer`"
            )
        backend.encode_special_tokens = True  # text may not forge the end of a document
        self.backend = backend
        self.eot_id: int = eot_id
        self.vocab_size: int = backend.get_vocab_size()
        self.fingerprint = hashlib.sha256(backend.to_str().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without end-of-text around it."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, on all cores."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; end-of-text is left out, and a character cut in half becomes U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as one JSON file, under its final name only once it is whole."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        self.backend.save(str(partial))
        os.replace(partial, path)


def load_tokenizer(path: str | Path | None = None) -> Tokenizer:
    """The shipped tokenizer, or the one in the JSON file `path`.

    Raises FileNotFoundError when there is none, ValueError when the file is not a tokenizer or has no end-of-text.
    """
    path = SHIPPED if path is None else Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer {path} does not exist; `python -m deepseek_lab.data.tokenizer --out {path}`"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is not a tokenizer of the `tokenizers` library: {error}") from error
    return Tokenizer(backend)


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError unless every token id is below the model's `vocab_size`. Spare rows in the model do no harm."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the model's vocab_size is {vocab_size}; "
            f"set vocab_size to at least {tokenizer.vocab_size}, or give the tokenizer that the model was built for"
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int = DEFAULT_VOCAB_SIZE) -> Tokenizer:
    """Learn a byte-level BPE with `vocab_size` tokens, end-of-text among them.

    Raises ValueError when `vocab_size` leaves no room for the 256 bytes, or the texts are too few to fill it.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size={vocab_size} is too small: 256 bytes and {END_OF_TEXT} need 257")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex(r"\p{Han}+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() < vocab_size:
        raise ValueError(
            f"the texts give only {backend.get_vocab_size()} tokens, not {vocab_size}; "
            "give more text or a smaller vocab_size"
        )
    return Tokenizer(backend)


def _training_texts(sources: Sequence[str | None]) -> Iterator[str]:
    for source in sources or [None]:
        yield from (document.text for split, document in load_corpus(source).documents() if split == "train")


def main() -> None:
    """Train a tokenizer from the command line."""
    parser = argparse.ArgumentParser(prog="python -m deepseek_lab.data.tokenizer", description=main.__doc__)
    parser.add_argument("--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("text", nargs="*", help=".txt or .jsonl files or directories (default: the shipped corpus)")
    arguments = parser.parse_args()
    try:
        tokenizer = train_tokenizer(_training_texts(arguments.text), arguments.vocab_size)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    tokenizer.save(arguments.out)
    sample = next(_training_texts(arguments.text))[:2000]
    ratio = len(sample.encode()) / len(tokenizer.encode(sample))
    print(f"{arguments.out}: {tokenizer.vocab_size} tokens, {ratio:.2f} bytes a token on the first training text")


if __name__ == "__main__":
    main()
