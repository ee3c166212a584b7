"""A batch follows from (seed, step, rank, size) only; each token is learnt from once an epoch; ranks only share out."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from deepseek_lab.data.batches import IGNORE, rank_slice, rows_per_epoch, train_batch, val_batches
from deepseek_lab.data.tokens import TokenFile


def stream(n_tokens, documents_at=(0,)):
    """Token i is i + 1, except end-of-text, 0, where documents open."""
    ids = np.arange(1, n_tokens + 1, dtype=np.uint32)
    ids[list(documents_at)] = 0
    file = TokenFile(Path("unused"), n_tokens, n_tokens, vocab_size=1 << 20, eot_id=0, tokenizer="")
    file.__dict__["ids"] = ids
    return file


def same(a, b):
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("input_ids", "labels", "doc_ids"))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n", [0, 1, 5, 8, 100])
def test_slices_cover_everything_once_and_differ_by_at_most_one(n, size):
    slices = [rank_slice(n, rank, size) for rank in range(size)]
    assert [i for part in slices for i in range(n)[part]] == list(range(n))
    assert max(part.stop - part.start for part in slices) - min(part.stop - part.start for part in slices) <= 1


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="rank=4 is not one of the 4 ranks"):
        rank_slice(8, 4, 4)


def test_a_batch_depends_on_its_arguments_only():
    tokens = stream(1000)
    arguments = dict(global_batch_size=6, seq_len=16)
    first = train_batch(tokens, seed=3, step=20, **arguments)
    for step in (0, 500, 7):  # asked in any order, in between
        train_batch(tokens, seed=3, step=step, **arguments)
    assert same(train_batch(tokens, seed=3, step=20, **arguments), first)
    assert not same(train_batch(tokens, seed=4, step=20, **arguments), first)
    assert not same(train_batch(tokens, seed=3, step=21, **arguments), first)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 11])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(size):
    tokens = stream(777, documents_at=(0, 100, 101, 500))
    arguments = dict(seed=1, step=9, global_batch_size=8, seq_len=10)
    whole = train_batch(tokens, **arguments)
    parts = [train_batch(tokens, rank=rank, size=size, **arguments) for rank in range(size)]
    for name in ("input_ids", "labels", "doc_ids"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


@pytest.mark.parametrize("n_tokens", [97, 101, 160, 161, 162])
@pytest.mark.parametrize("global_batch_size", [1, 4, 7])
def test_every_token_is_a_label_once_an_epoch(n_tokens, global_batch_size):
    tokens, seq_len = stream(n_tokens), 16
    n_rows = rows_per_epoch(tokens, seq_len)
    seen = Counter()
    for step in range(global_batch_size * n_rows):  # global_batch_size² epochs, in whole batches
        labels = train_batch(tokens, seed=0, step=step, global_batch_size=global_batch_size, seq_len=seq_len).labels
        seen.update(labels[labels != IGNORE].tolist())
    assert seen == {token: global_batch_size**2 for token in range(2, n_tokens + 1)}


def test_epochs_are_shuffled_differently():
    tokens = stream(1601)
    epochs = [train_batch(tokens, seed=0, step=step, global_batch_size=100, seq_len=16).input_ids for step in (0, 1)]
    assert not torch.equal(*epochs)
    assert torch.equal(epochs[0].sort(dim=0).values, epochs[1].sort(dim=0).values)


@pytest.mark.parametrize("size", [1, 2, 3, 40])
@pytest.mark.parametrize("n_tokens", [5, 97, 161, 162])
def test_every_validation_token_is_a_label_once_over_all_ranks(n_tokens, size):
    tokens = stream(n_tokens)
    seen = Counter()
    for rank in range(size):
        for batch in val_batches(tokens, seq_len=16, batch_size=3, rank=rank, size=size):
            assert 0 < len(batch.labels) <= 3
            seen.update(batch.labels[batch.labels != IGNORE].tolist())
    assert seen == {token: 1 for token in range(2, n_tokens + 1)}


def test_labels_are_the_next_token_and_padding_has_none():
    (batch,) = val_batches(stream(6), seq_len=4, batch_size=2)
    assert batch.input_ids.tolist() == [[0, 2, 3, 4], [5, 0, 0, 0]]
    assert batch.labels.tolist() == [[2, 3, 4, 5], [6, IGNORE, IGNORE, IGNORE]]
    assert (batch.input_ids.dtype, batch.labels.dtype, batch.doc_ids.dtype) == (torch.int64, torch.int64, torch.int32)


def test_documents_are_numbered_from_where_they_open():
    (batch,) = val_batches(stream(9, documents_at=(0, 3, 5)), seq_len=8, batch_size=1)
    assert batch.input_ids.tolist() == [[0, 2, 3, 0, 5, 0, 7, 8]]
    assert batch.doc_ids.tolist() == [[1, 1, 1, 2, 2, 3, 3, 3]]


def test_a_corpus_shorter_than_one_sequence_is_refused():
    with pytest.raises(ValueError, match=r"has 16 tokens, but one sequence of seq_len=16 needs 17; .* at most 15"):
        train_batch(stream(16), seed=0, step=0, global_batch_size=1, seq_len=16)
    train_batch(stream(17), seed=0, step=0, global_batch_size=1, seq_len=16)
