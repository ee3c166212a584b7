"""Token files hold what the corpus says, are never half written, and are made once however many ranks ask."""

import multiprocessing
import os
import pickle

import numpy as np
import pytest

from deepseek_lab.data import tokens as tokens_module
from deepseek_lab.data.corpus import load_corpus
from deepseek_lab.data.tokenizer import load_tokenizer
from deepseek_lab.data.tokens import TokenFile, prepare


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture
def own(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "own.txt").write_text("Some text, 一些文字。\n" * 3000, encoding="utf-8")
    return tmp_path / "text"


def test_stream_is_end_of_text_then_document_again_and_again(own, tokenizer, tmp_path):
    files = prepare(own, tokenizer, tmp_path / "cache")
    corpus = load_corpus(own)
    for split, documents in (("train", corpus.train), ("val", corpus.val)):
        expected = [i for document in documents for i in (tokenizer.eot_id, *tokenizer.encode(document.text))]
        assert files[split].ids.tolist() == expected
        assert files[split].n_tokens == len(expected)
        assert files[split].n_bytes == sum(len(document.text.encode()) for document in documents)
        assert files[split].vocab_size == tokenizer.vocab_size


def test_ids_are_mapped_not_loaded_and_a_file_travels_as_facts(own, tokenizer, tmp_path):
    file = prepare(own, tokenizer, tmp_path / "cache")["train"]
    assert isinstance(file.ids, np.memmap)
    assert file.ids.dtype == np.uint16
    assert len(pickle.dumps(file)) < 1000
    assert (pickle.loads(pickle.dumps(file)).ids == file.ids).all()


def test_memory_is_bounded_by_batches_of_documents(own, tokenizer, tmp_path, monkeypatch):
    whole = prepare(own, tokenizer, tmp_path / "whole")["train"].ids
    monkeypatch.setattr(tokens_module, "BATCH_CHARACTERS", 10_000)
    largest = 0

    class Watched:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def encode_batch(self, texts):
            nonlocal largest
            largest = max(largest, sum(map(len, texts)))
            return tokenizer.encode_batch(texts)

    assert (prepare(own, Watched(), tmp_path / "batched")["train"].ids == whole).all()
    assert largest < 20_000


def test_second_call_finds_the_file_and_changed_text_does_not(own, tokenizer, tmp_path, monkeypatch):
    first = prepare(own, tokenizer, tmp_path / "cache")["train"]
    with monkeypatch.context() as patch:
        patch.setattr(tokens_module, "_write", lambda *_: pytest.fail("tokenised again"))
        assert prepare(own, tokenizer, tmp_path / "cache")["train"] == first
    (own / "own.txt").write_text("Other text.\n" * 3000)
    assert prepare(own, tokenizer, tmp_path / "cache")["train"].path != first.path


def test_cache_lies_where_the_environment_says(own, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPSEEK_LAB_CACHE", str(tmp_path / "elsewhere"))
    assert prepare(own, tokenizer)["val"].path.is_relative_to(tmp_path / "elsewhere")


def _prepare_and_count(own, cache, barrier, writes, queue):
    write = tokens_module._write

    def counted(*arguments):
        with writes.get_lock():
            writes.value += 1
        write(*arguments)

    tokens_module._write = counted
    tokenizer = load_tokenizer()
    barrier.wait()
    queue.put(prepare(own, tokenizer, cache)["train"].ids.tobytes())


def test_four_ranks_at_once_one_writes_and_all_see_the_same(own, tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, writes, queue = context.Barrier(4), context.Value("i", 0), context.Queue()
    arguments = (own, tmp_path / "cache", barrier, writes, queue)
    ranks = [context.Process(target=_prepare_and_count, args=arguments) for _ in range(4)]
    for rank in ranks:
        rank.start()
    seen = {queue.get(timeout=60) for _ in ranks}
    for rank in ranks:
        rank.join(timeout=60)
    assert len(seen) == 1
    assert writes.value == 1


def test_a_writer_that_dies_leaves_nothing_that_looks_finished(own, tokenizer, tmp_path, monkeypatch):
    class Dying:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def encode_batch(self, texts):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(own, Dying(), tmp_path / "cache")
    assert prepare(own, tokenizer, tmp_path / "cache")["train"].n_tokens > 0
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_a_truncated_file_is_refused(own, tokenizer, tmp_path):
    path = prepare(own, tokenizer, tmp_path / "cache")["train"].path
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(ValueError, match=r"train\.bin has \d+ bytes, expected \d+; delete the folder"):
        prepare(own, tokenizer, tmp_path / "cache")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"train\.bin"):
        TokenFile.open(path)


def test_a_corpus_of_one_document_cannot_be_split(tokenizer, tmp_path):
    (tmp_path / "short.txt").write_text("one short document")
    with pytest.raises(ValueError, match="has 1 documents, so nothing is left for val"):
        prepare(tmp_path / "short.txt", tokenizer, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(own, tokenizer, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="set DEEPSEEK_LAB_CACHE to a folder of yours"):
        prepare(own, tokenizer, tmp_path / "file" / "cache")
