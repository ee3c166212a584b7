"""Any text survives the round trip, end-of-text cannot be forged, and a tokenizer that does not fit is refused."""

import subprocess
import sys

import pytest

from deepseek_lab.data.corpus import load_corpus
from deepseek_lab.data.tokenizer import END_OF_TEXT, check_vocab, load_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def test_shipped_vocabulary_splits_over_four_ranks(tokenizer):
    assert tokenizer.vocab_size == 4096
    assert tokenizer.decode([tokenizer.eot_id]) == ""


@pytest.mark.parametrize(
    "text", ["", " \n\t", "床前明月光，疑是地上霜。", "naïve 😀 \x00 12345", "𧢒", f"a{END_OF_TEXT}b"]
)
def test_round_trip_and_no_forged_end_of_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot_id not in ids
    assert tokenizer.encode_batch([text, "x"])[0] == ids


def test_three_bytes_a_token_or_more_on_held_out_text_of_both_languages(tokenizer):
    for lang in ("en", "zh"):
        texts = [document.text for document in load_corpus().val if document.lang == lang]
        n_tokens = sum(map(len, tokenizer.encode_batch(texts)))
        assert sum(len(text.encode()) for text in texts) > 3 * n_tokens, lang


def test_one_command_trains_ones_own(tmp_path):
    text, out = tmp_path / "own.txt", tmp_path / "deep" / "own.json"
    text.write_text("the cat sat on the mat, the dog on the log\n" * 3000)
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "deepseek_lab.data.tokenizer"]
    subprocess.run([*command, "--vocab-size", "270", "--out", out, text], check=True)
    own = load_tokenizer(out)
    assert own.vocab_size == 270
    assert len(own.encode("the cat")) < len("the cat")
    refused = subprocess.run([*command, "--vocab-size", "5000", "--out", out, text], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "give more text or a smaller vocab_size" in refused.stderr


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="need 257"):
        train_tokenizer(["text"], 256)


def test_missing_and_foreign_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.json does not exist"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "foreign.json").write_text("{}")
    with pytest.raises(ValueError, match=r"foreign\.json is not a tokenizer"):
        load_tokenizer(tmp_path / "foreign.json")


def test_vocabulary_of_the_model_must_hold_every_token(tokenizer):
    check_vocab(tokenizer, 4096)
    check_vocab(tokenizer, 5000)
    with pytest.raises(
        ValueError, match=r"has 4096 tokens but the model's vocab_size is 4095; set vocab_size to at least 4096"
    ):
        check_vocab(tokenizer, 4095)
