"""Texts and tokens of language models, and what is wrong with them."""

from importlib import metadata

import numpy as np
import pytest
import torch

from experiments.lm.run import Windows, train
from experiments.lm.text import (
    BYTE_END,
    digest_of,
    load_corpus,
    read_texts,
    refuse_vocabulary,
    split,
)


def load(data, tmp_path, tokenizer="bytes", **options):
    return load_corpus(str(data), tokenizer, str(tmp_path / "cache"), **options)


def documents(ids):
    """The documents of byte tokens."""
    parts = np.split(ids, np.flatnonzero(ids == BYTE_END) + 1)
    return [bytes(part[:-1].astype(np.uint8)) for part in parts if len(part)]


def test_bytes_of_a_folder_come_back(texts, tmp_path):
    corpus = load(texts, tmp_path)
    found = documents(corpus.train) + documents(corpus.val)
    assert sorted(found) == sorted(path.read_bytes() for path in texts.iterdir())
    assert len(documents(corpus.val)) == 2 and corpus.vocab == 257
    size = sum(map(len, documents(corpus.val)))
    assert corpus.bytes_per_token == size / (size + 2)  # each document has an end
    (texts / "copy.txt").write_bytes((texts / "0.txt").read_bytes())
    assert load(texts, tmp_path).digest == corpus.digest  # each document once


def test_one_document_gives_its_end_for_validation_cut_between_two_characters():
    for letters in range(4):
        text = "漢字" * 100 + "a" * letters
        train, val = split([text.encode()])
        assert train[0].decode() + val[0].decode() == text
        assert 30 <= len(val[0]) <= 33


def test_the_standard_library_is_at_hand_and_the_same_each_time():
    (_, texts), (_, again) = (read_texts("stdlib", "*") for _ in range(2))
    assert digest_of(texts) == digest_of(again) and sum(map(len, texts)) >= 2**17


def test_packages_are_read_without_their_tests(monkeypatch, tmp_path):
    files = {
        "b-2.0.dist-info/METADATA": "Name: b\nVersion: 2.0\n",
        "b-2.0.dist-info/RECORD": "b/__init__.py,,\nb/tests/test_b.py,,\n",
        "b/__init__.py": "x = 2\n", "b/tests/test_b.py": "x = 3\n",
        "a-1.0.dist-info/METADATA": "Name: a\nVersion: 1.0\n",
        "a-1.0.dist-info/RECORD": "a.py,,\na.txt,,\ngone.py,,\n",
        "a.py": "x = 1\n", "a.txt": "no",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = list(metadata.distributions(path=[str(tmp_path)]))
    monkeypatch.setattr(metadata, "distributions", lambda: found)
    assert read_texts("packages", "*") == ("packages", [b"x = 1\n", b"x = 2\n"])


def test_bpe_is_trained_once_and_decodes(texts, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    corpus = load(texts, tmp_path, "bpe:300")
    path = next((tmp_path / "cache").glob("lm-*.json"))
    first = np.split(corpus.val, np.flatnonzero(corpus.val == corpus.end))[0]
    text = tokenizers.Tokenizer.from_file(str(path)).decode(first.tolist())
    assert text.encode() in {file.read_bytes() for file in texts.iterdir()}
    written = path.stat().st_mtime_ns
    again = load(texts, tmp_path, "bpe:300")
    assert path.stat().st_mtime_ns == written and (again.train == corpus.train).all()
    larger = load(texts, tmp_path, "bpe:320")
    assert corpus.vocab <= 300 <= larger.train.max() < larger.vocab <= 320


def test_bpe_is_trained_on_the_training_part_alone(texts, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    parts = [b"ab" * 20, b"ab" * 21], [b"yz" * 20, b"yz" * 21]
    monkeypatch.setattr("experiments.lm.text.split", lambda texts: parts)
    corpus = load(texts, tmp_path, "bpe:300")
    # 82 bytes each: those of the validation part stay single, with two ends of documents
    assert len(corpus.train) < 20 and len(corpus.val) == 84


def bins(folder, ids):
    folder.mkdir()
    for name in ("train.bin", "val.bin"):
        np.array(ids, np.uint16).tofile(folder / name)
    return str(folder)


def test_nanogpt_files_are_read(tmp_path):
    corpus = load(bins(tmp_path / "bins", range(500)), tmp_path)
    assert corpus.train.tolist() == list(range(500)) and corpus.end == 50_256
    refuse_vocabulary(corpus, 500, "")
    with pytest.raises(ValueError, match="give vocab=500 or more"):
        refuse_vocabulary(corpus, 499, "")


BAD = {
    "binary": "not UTF-8 text, such as c.txt; leave them out",
    "missing": "no such folder",
    "short": "a window of context=32 needs 33: give more text",
    "odd.bin": "has 3 bytes: give uint16 tokens",
    "tokenizer": "tokenizer=bpe:300: pip install tokenizers",
    "vocabulary": "the vocabulary 257 ids .*made with another tokenizer",
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_data_are_one_line_and_leave_nothing(kind, settings, tmp_path, monkeypatch):
    folder, changes = tmp_path / "bad", {}
    folder.mkdir()
    if kind == "binary":
        (folder / "a.txt").write_text("text")
        (folder / "c.txt").write_bytes(b"\xff\xfe")
    if kind == "short":
        (folder / "a.txt").write_text("too short")
    if kind == "odd.bin":
        (folder / "train.bin").write_bytes(b"123")
    data = folder / "none" if kind == "missing" else folder
    if kind == "tokenizer":
        monkeypatch.setattr("experiments.lm.text.find_spec", lambda name: None)
        changes["tokenizer"] = "bpe:300"
    if kind == "vocabulary":
        data, changes = bins(tmp_path / "bins", range(500)), {"vocab": 257}
    with pytest.raises(ValueError, match=BAD[kind]) as found:
        train(settings(data=str(data), **changes))
    assert "\n" not in str(found.value)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "cache").exists()


def test_windows_follow_one_another():
    windows = Windows(np.arange(60_000, 60_021, dtype=np.uint16), 5, torch.device("cpu"))
    assert len(windows) == 4
    tokens, _, targets = windows.batch(torch.tensor([0, 3]))
    assert tokens.tolist() == [[*range(60_000, 60_005)], [*range(60_015, 60_020)]]
    assert (targets == tokens + 1).all()
    for count, expected in ((3, 3), (9, 4)):  # no more than there are
        ids = np.zeros(21, np.uint16)
        assert len(Windows(ids, 5, torch.device("cpu"), count)) == expected
    assert len(Windows(ids[:20], 5, torch.device("cpu"))) == 3  # the last has no next token
