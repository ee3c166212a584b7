"""Documents, and which side of the split each one is on.

The package ships ten megabytes of English and Chinese (`DATA_LICENSES.md` says whose); your own .txt or .jsonl files
work in their place. Reading is streamed: a `Corpus` holds file names, not text, so it may be larger than memory.

One idea: the split is by *document*, never by line or by token, and documents that share an `id` (an English page and
its Chinese translation) are never parted. Every 25th id, beginning with the second, is held out: 4 % for validation.
"""

import codecs
import hashlib
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Literal

SHIPPED = Path(__file__).parent / "assets" / "corpus.jsonl.xz"
SUFFIXES = (".jsonl", ".txt", ".jsonl.xz", ".txt.xz")
HOLD_OUT_EVERY = 25
PIECE_BYTES = (
    8192  # a plain text file has no documents of its own: it is cut at line ends into pieces of about this size
)

Split = Literal["train", "val"]


@dataclass(frozen=True)
class Document:
    """One text, with what is known about it. Documents next to each other with the same `id` are translations."""

    text: str
    source: str = ""
    topic: str = ""
    lang: str = ""
    id: str = ""


@dataclass(frozen=True)
class Corpus:
    """Text files, read on demand. `train` and `val` are lists for corpora that fit in memory; `documents()` streams."""

    files: tuple[Path, ...]

    def documents(self) -> Iterator[tuple[Split, Document]]:
        """Every document in file order, with its side of the split. Holds one document at a time.

        Raises ValueError, naming file and place, for bytes that are not UTF-8 and lines that are not documents.
        """
        group, previous_id = -1, None
        for path in self.files:
            read = _read_jsonl if ".jsonl" in path.suffixes else _read_text
            for document in read(path):
                if document.id != previous_id:
                    group, previous_id = group + 1, document.id
                yield ("val" if group % HOLD_OUT_EVERY == 1 else "train"), document

    @cached_property
    def train(self) -> list[Document]:
        return self._both["train"]

    @cached_property
    def val(self) -> list[Document]:
        return self._both["val"]

    @cached_property
    def _both(self) -> dict[Split, list[Document]]:
        both: dict[Split, list[Document]] = {"train": [], "val": []}
        for split, document in self.documents():
            both[split].append(document)
        return both

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what the files contain, wherever they lie."""
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(path.name.encode() + b"\0")
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def load_corpus(source: str | Path | None = None) -> Corpus:
    """The shipped corpus, or one's own: a .txt or .jsonl file (optionally .xz), or a directory of them.

    A line of a .jsonl file is an object with `text`, and optionally `source`, `topic`, `lang` and `id`. Nothing is read
    yet except sizes. Raises FileNotFoundError or ValueError, saying which path is missing, empty or of another kind.
    """
    if source is None:
        return Corpus((SHIPPED,))
    path = Path(source).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"corpus {path} does not exist; give a .txt or .jsonl file, or a directory of them")
    files = [path]
    if path.is_dir():
        visible = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        files = sorted(p for p in visible if p.is_file() and p.name.endswith(SUFFIXES))
        if not files:
            raise ValueError(f"corpus {path} is a directory with no file ending in {', '.join(SUFFIXES)}")
    for file in files:
        if not file.name.endswith(SUFFIXES):
            raise ValueError(
                f"corpus {file} is neither text nor JSON lines; its name must end in {', '.join(SUFFIXES)}"
            )
        if file.stat().st_size == 0:
            raise ValueError(f"corpus file {file} is empty; remove it or give another")
    return Corpus(tuple(files))


def aligned_paragraphs(corpus: Corpus) -> Iterator[tuple[Document, str, str]]:
    """(Chinese document, English line, Chinese line) for every line of the shipped corpus with a known translation."""
    for path in corpus.files:
        if ".jsonl" not in path.suffixes:
            continue
        english: dict = {}
        for _, record in _records(path):
            if record.get("lang") == "en":
                english = record
            elif "aligned" in record and record["id"] == english.get("id"):
                source_lines, document = english["text"].split("\n"), _document(record, "")
                for line, translation in zip(record["aligned"], record["text"].split("\n"), strict=True):
                    if line is not None:
                        yield document, source_lines[line], translation


def _open(path: Path) -> BinaryIO:
    return lzma.open(path) if path.suffix == ".xz" else path.open("rb")  # type: ignore[return-value]


def _not_utf8(path: Path, offset: int) -> ValueError:
    return ValueError(
        f"{path} is not UTF-8: undecodable byte at offset {offset}; convert the file, or remove that byte"
    )


def _records(path: Path) -> Iterator[tuple[int, dict]]:
    offset = 0
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line.decode("utf-8")) if line.strip() else None
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset + error.start) from error
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, line {number} is not JSON: {error.msg}; expected one object a line"
                ) from error
            offset += len(line)
            if record is not None:
                if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                    raise ValueError(f'{path}, line {number} has no text; expected an object like {{"text": "..."}}')
                yield number, record


def _document(record: dict, default_id: str) -> Document:
    source, topic, lang, id = (str(record.get(key) or "") for key in ("source", "topic", "lang", "id"))
    return Document(record["text"], source, topic, lang, id or default_id)


def _read_jsonl(path: Path) -> Iterator[Document]:
    for number, record in _records(path):
        if record["text"].strip():
            yield _document(record, f"{path.name}:{number}")


def _read_text(path: Path) -> Iterator[Document]:
    """Pieces of whole lines; a single line longer than eight pieces is cut too, so that memory stays bounded."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    piece, size, offset, count = "", 0, 0, 0
    with _open(path) as file:
        while True:
            chunk = file.readline(8 * PIECE_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                decoded = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset - pending + error.start) from error
            piece += decoded.lstrip("\ufeff") if offset == 0 else decoded
            size, offset = size + len(chunk), offset + len(chunk)
            if size >= PIECE_BYTES or not chunk:
                if piece.strip():
                    yield Document(piece.strip("\n"), source=path.name, id=f"{path.name}:{count}")
                    count += 1
                piece, size = "", 0
            if not chunk:
                return
