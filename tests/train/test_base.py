"""The model that ships with the package: what `make train-long` made."""

import math

import torch

from deepseek_lab.data import batches
from deepseek_lab.data.baselines import bigram_bits
from deepseek_lab.data.tokenizer import load_tokenizer
from deepseek_lab.data.tokens import prepare
from deepseek_lab.model.generate import stream
from deepseek_lab.train.restore import BASE, load_model


@torch.no_grad()
def test_it_beats_the_bigram_table_on_the_same_validation_tokens():
    model, tokenizer = load_model()
    tokens = prepare(None, tokenizer)
    rows, T = 48, 128
    bits = 0.0
    for number, batch in enumerate(batches.val_batches(tokens["val"], seq_len=T, batch_size=8)):
        if number % 20 == 0 and rows:  # a few from everywhere: the sources follow one another
            loss_sum, _ = model.loss_sum(batch.input_ids, batch.labels, batch.doc_ids)
            ids = torch.cat((batch.input_ids[:1, :1], batch.labels.flatten()[None]), dim=1)[0]
            table = bigram_bits(tokens["train"].ids, ids.numpy(), tokenizer.vocab_size)
            bits += loss_sum.item() / math.log(2) - table
            rows -= 8
    assert bits < 0


def test_it_writes_in_both_languages_and_is_small():
    model, tokenizer = load_model()
    for prompt, alphabet in (("In the beginning", str.isascii), ("要插入", lambda c: "一" <= c <= "鿿")):
        new = tokenizer.decode(list(stream(model, tokenizer.encode(prompt), max_new_tokens=30)))
        assert sum(map(alphabet, new)) > len(new) / 2
    assert sum(file.stat().st_size for file in BASE.iterdir()) < 8e6
    assert load_tokenizer().vocab_size == model.config.vocab_size
