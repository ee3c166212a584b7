"""The shipped text is what DATA_LICENSES.md says; the split leaks nothing; own files work, and bad ones are named."""

import json
import lzma
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from deepseek_lab.data.corpus import PIECE_BYTES, aligned_paragraphs, load_corpus

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shipped():
    return load_corpus()


def letters(text):
    return "".join(c for c in text.casefold() if c.isalpha())


def is_long(line):
    chinese = any("\u4e00" <= c <= "\u9fff" for c in line)
    return len(line) >= (10 if chinese else 30)


def test_every_source_is_licensed_and_on_both_sides(shipped):
    licences = (ROOT / "DATA_LICENSES.md").read_text(encoding="utf-8")
    sources = {document.source for document in shipped.train}
    assert sources == {document.source for document in shipped.val}
    assert all(f"`{source}`" in licences for source in sources)


def test_validation_is_three_to_five_percent_of_each_language(shipped):
    size = {side: Counter() for side in ("train", "val")}
    for side, documents in (("train", shipped.train), ("val", shipped.val)):
        for document in documents:
            size[side][document.lang] += len(document.text.encode())
    for lang in ("en", "zh"):
        share = size["val"][lang] / (size["val"][lang] + size["train"][lang])
        assert 0.03 <= share <= 0.05, lang


def test_a_page_and_its_translation_are_on_the_same_side(shipped):
    side = defaultdict(set)
    langs = defaultdict(set)
    for split, document in shipped.documents():
        side[document.id].add(split)
        langs[document.id].add(document.lang)
    assert all(len(splits) == 1 for splits in side.values())
    assert sum(len(both) == 2 for both in langs.values()) > 1000


def test_no_long_paragraph_occurs_twice_so_none_leaks_into_validation(shipped):
    paragraphs = [document.text for document in shipped.train + shipped.val if document.source == "tang-song-poems"]
    for document in shipped.train + shipped.val:
        if document.source != "tang-song-poems":
            paragraphs += [line for line in document.text.split("\n") if is_long(letters(line))]
    assert len(paragraphs) > 40_000
    assert not [paragraph for paragraph, count in Counter(map(letters, paragraphs)).items() if count > 1]


def test_aligned_paragraphs_are_translations(shipped):
    pairs = list(aligned_paragraphs(shipped))
    assert len(pairs) > 30_000
    # Digits survive translation: where both lines have some, they mostly agree.
    digits = [({*filter(str.isdigit, en)}, {*filter(str.isdigit, zh)}) for _, en, zh in pairs]
    both = [(en, zh) for en, zh in digits if en and zh]
    assert sum(en == zh for en, zh in both) > 0.8 * len(both) > 0


def test_own_text_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path):
    text = "".join(f"line {i} 一行\n" for i in range(5000))
    (tmp_path / "own.txt").write_text(text, encoding="utf-8")
    documents = [document for _, document in load_corpus(tmp_path / "own.txt").documents()]
    assert "\n".join(document.text for document in documents) + "\n" == text
    assert max(len(document.text.encode()) for document in documents) < PIECE_BYTES + 100
    assert len({document.id for document in documents}) == len(documents) > 2


def test_a_single_endless_line_is_cut_between_characters(tmp_path):
    text = "长" * 300_000
    (tmp_path / "line.txt").write_text(text, encoding="utf-8")
    documents = [document for _, document in load_corpus(tmp_path / "line.txt").documents()]
    assert "".join(document.text for document in documents) == text
    assert max(len(document.text.encode()) for document in documents) <= 8 * PIECE_BYTES + 3


def test_directory_of_jsonl_and_text_plain_and_compressed(tmp_path):
    records = [{"text": "an English page", "id": "p", "lang": "en"}, {"text": "一页中文", "id": "p", "lang": "zh"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt.xz").write_bytes(lzma.compress("\ufeffplain text".encode()))
    (tmp_path / "ignored.pdf").write_bytes(b"%PDF")
    corpus = load_corpus(tmp_path)
    assert [document.text for document in corpus.train] == ["an English page", "一页中文"]
    assert [document.text for document in corpus.val] == ["plain text"]
    assert corpus.train[1].lang == "zh"


def test_fingerprint_follows_content_not_place(tmp_path):
    for name, text in (("one", "same"), ("two", "same"), ("three", "other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.txt").write_text(text)
    one, two, three = (load_corpus(tmp_path / name).fingerprint for name in ("one", "two", "three"))
    assert one == two != three


def test_missing_and_empty_and_foreign_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt does not exist"):
        load_corpus(tmp_path / "nowhere.txt")
    with pytest.raises(ValueError, match=r"no file ending in"):
        load_corpus(tmp_path)
    (tmp_path / "book.pdf").write_bytes(b"%PDF")
    with pytest.raises(ValueError, match=r"book\.pdf is neither text nor JSON lines"):
        load_corpus(tmp_path / "book.pdf")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"empty\.txt is empty"):
        load_corpus(tmp_path)


@pytest.mark.parametrize("before", [3, 100_000, 8 * PIECE_BYTES - 1])
def test_undecodable_byte_is_named_with_its_offset(tmp_path, before):
    (tmp_path / "latin.txt").write_bytes(b"a" * before + b"\xe9\n more")
    with pytest.raises(ValueError, match=rf"latin\.txt is not UTF-8: undecodable byte at offset {before};"):
        list(load_corpus(tmp_path).documents())
    (tmp_path / "latin.txt").unlink()
    first = b'{"text": "fine"}\n'
    (tmp_path / "latin.jsonl").write_bytes(first + b'{"text": "\xe9"}\n')
    with pytest.raises(ValueError, match=rf"latin\.jsonl is not UTF-8: undecodable byte at offset {len(first) + 10};"):
        list(load_corpus(tmp_path).documents())


@pytest.mark.parametrize(("line", "says"), [("{oops", "line 2 is not JSON"), ('{"txt": "x"}', "line 2 has no text")])
def test_bad_json_line_is_named(tmp_path, line, says):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=says):
        list(load_corpus(tmp_path).documents())
