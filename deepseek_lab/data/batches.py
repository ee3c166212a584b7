"""Batches as a pure function: what rank r of R sees at step s follows from (seed, s, r, R), and from nothing else.

There is no iterator to save, so nothing to lose: a run resumed at step s asks for step s. Rows are consecutive windows
of the token stream, shuffled anew in every epoch; a rank's part is a slice of the *global* batch, so changing the
number of ranks moves rows between them and never changes what the step learns from.

Shapes: B rows of this rank, T tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from deepseek_lab.data.tokens import TokenFile

IGNORE = -100  # a label that takes no part in the loss
PADDING = -1  # the document of a token that is there only to fill a row


@dataclass(frozen=True)
class Batch:
    """input_ids and labels (B, T) int64, labels already shifted, IGNORE where there is nothing to predict.

    doc_ids (B, T) int32 count the documents opened so far in the row; PADDING where there is no text. Where the model
    is asked to keep documents apart, tokens attend to each other only if these are equal.
    """

    input_ids: Tensor
    labels: Tensor
    doc_ids: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)

    def split(self, size: int) -> Iterator["Batch"]:
        """Consecutive parts of `size` rows; the last may have fewer."""
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            yield Batch(self.input_ids[rows], self.labels[rows], self.doc_ids[rows])

    def real(self) -> Tensor | None:
        """(B, T), true where there is text; None if there is nothing else."""
        real_BT = self.doc_ids != PADDING
        return None if real_BT.all() else real_BT

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        return Batch(self.input_ids.to(device), self.labels.to(device), self.doc_ids.to(device))


def fill_up(parts: Iterable[Batch], n: int, seq_len: int) -> Iterator[Batch]:
    """The batches in `parts`, then single rows in which nothing counts, until there are `n`.

    In a pass ranks may need each other, to gather weights or to add up a layer, so all must make equally many.
    """
    count = 0
    for part in parts:
        yield part
        count += 1
    ids = torch.zeros(1, seq_len, dtype=torch.int64)
    for _ in range(n - count):
        yield Batch(ids, torch.full_like(ids, IGNORE), torch.full_like(ids, PADDING, dtype=torch.int32))


def rank_slice(n: int, rank: int, size: int) -> slice:
    """The part of n rows that is `rank`'s of `size`: contiguous, in rank order, sizes differing by at most one."""
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} is not one of the {size} ranks 0..{size - 1}")
    return slice(n * rank // size, n * (rank + 1) // size)


def rows_per_epoch(tokens: TokenFile, seq_len: int) -> int:
    """`rows_of` a stream that is long enough to train on.

    Raises ValueError when the stream is shorter than one sequence.
    """
    if tokens.n_tokens <= seq_len:
        raise ValueError(
            f"the corpus has {tokens.n_tokens} tokens, but one sequence of seq_len={seq_len} needs {seq_len + 1}; "
            f"give more text, or a seq_len of at most {max(tokens.n_tokens - 1, 0)}"
        )
    return rows_of(tokens, seq_len)


def train_batch(
    tokens: TokenFile, *, seed: int, step: int, global_batch_size: int, seq_len: int, rank: int = 0, size: int = 1
) -> Batch:
    """This rank's rows of the global batch of `step`, counted from 0.

    Concatenated in rank order, the ranks' batches are the same global batch for any `size`. Every row of the stream
    comes once an epoch, and a batch may span two epochs. Raises ValueError when the corpus is shorter than a sequence.
    """
    n_rows = rows_per_epoch(tokens, seq_len)
    mine = rank_slice(global_batch_size, rank, size)
    positions = range(step * global_batch_size + mine.start, step * global_batch_size + mine.stop)
    rows = [_permutation(n_rows, seed, position // n_rows)[position % n_rows] for position in positions]
    return _gather(tokens, rows, seq_len)


def val_batches(tokens: TokenFile, *, seq_len: int, batch_size: int, rank: int = 0, size: int = 1) -> Iterator[Batch]:
    """This rank's validation batches, in order: over all ranks every token is a label exactly once.

    Ranks may get different numbers of batches, or none; see `fill_up`.
    """
    mine = rank_slice(rows_of(tokens, seq_len), rank, size)
    for start in range(mine.start, mine.stop, batch_size):
        yield _gather(tokens, range(start, min(start + batch_size, mine.stop)), seq_len)


def rows_of(tokens: TokenFile, seq_len: int) -> int:
    """How many rows of `seq_len` tokens hold every token once as a label; the last row may be padded."""
    return -(-(tokens.n_tokens - 1) // seq_len)


@lru_cache(maxsize=4)
def _permutation(n_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n_rows)


def _gather(tokens: TokenFile, rows: Sequence[int], seq_len: int) -> Batch:
    input_ids = np.full((len(rows), seq_len), tokens.eot_id, np.int64)
    labels = np.full((len(rows), seq_len), IGNORE, np.int64)
    for b, row in enumerate(rows):
        window = tokens.ids[row * seq_len : (row + 1) * seq_len + 1]
        input_ids[b, : len(window) - 1] = window[:-1]
        labels[b, : len(window) - 1] = window[1:]
    doc_ids = np.cumsum(input_ids == tokens.eot_id, axis=1, dtype=np.int32)
    doc_ids[labels == IGNORE] = PADDING
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), torch.from_numpy(doc_ids))
