"""A recorded step puts every message down to the axis that it went along."""

from types import SimpleNamespace

import numpy as np
import pytest

from deepseek_lab.learn import run_ranks
from deepseek_lab.learn.chapters import c09_compose
from deepseek_lab.parallel.config import ParallelConfig
from deepseek_lab.train.config import DataConfig, RunConfig, TrainConfig

V, D, STAGES = 64, 32, (2, 4)


def record(parallel):
    config = RunConfig(
        model=c09_compose.small_config(num_hidden_layers=4, hidden_size=D, vocab_size=V),
        data=DataConfig(seq_len=16),
        train=TrainConfig(steps=1, global_batch_size=4, micro_batch_size=1),
        parallel=parallel,
    )
    ids = np.arange(400, dtype=np.uint16) % V
    text = SimpleNamespace(ids=ids, n_tokens=len(ids), n_bytes=len(ids), eot_id=0, tokenizer="none")
    return c09_compose.record_step(config, {"train": text, "val": text})[0].axes


@pytest.mark.ranks
@pytest.mark.parametrize("stages", STAGES)
def test_the_ends_add_up_the_tied_table_and_no_more_than_a_few_numbers_besides(stages):
    """With two stages pp has the same ranks, with four no axis has.  Only the two ends hold the table, in fp32."""
    axes = run_ranks(record, stages, ParallelConfig(pp=stages))[0]
    table = 2 / stages * V * D * 4
    assert table <= axes["ends"]["bytes"] < table + 100, "losses and norms, where the two ends are all ranks"
    assert "world" not in axes, "the whole pipeline is pp"
    assert axes["pp"]["bytes"] > 0
