"""Retrieval, on small files in the form of the AAN pairs."""

import numpy as np
import pytest

from experiments.lra.tasks.load import load_task

ROWS = [
    (1.0, "P1", "P2", b'a "quoted" text', b"x" * 12_000),
    (0.0, "P3", "P4", "naïve".encode(), b"b"),
    (0.0, "P5", "P6", b"c", b"\x80 not UTF-8"),
    (1.0, "P7", "P8", b"", b"one side is empty"),
]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        b"\t".join([str(label).encode(), a.encode(), b.encode(), one, other])
        for label, a, b, one, other in rows
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")


@pytest.fixture
def release(tmp_path):
    folder = tmp_path / "lra_release" / "tsv_data"
    for i, name in enumerate(("train", "eval", "test")):
        write(folder / f"new_aan_pairs.{name}.tsv", ROWS[i:] + ROWS[:i])
    return tmp_path


def load(root, **options):
    return load_task("retrieval", root, cache_dir=root / "cache", **options)


def test_bytes_labels_and_lengths_are_those_of_the_files(release):
    task = load(release)
    assert (task.length, task.vocab, task.pair) == (4096, 257, True)
    assert task.source == "official, 4 + 4 + 4 examples"
    for i, name in enumerate(("train", "val", "test")):
        split = task.splits[name]
        for row, lengths, label, wanted in zip(
            split.tokens, split.lengths, split.labels, ROWS[i:] + ROWS[:i], strict=True
        ):
            assert label == wanted[0]
            for tokens, n, text in zip(row, lengths, wanted[3:], strict=True):
                text = text[:4000]
                assert n == max(len(text), 1)
                assert (tokens[: len(text)] - 1).astype(np.uint8).tobytes() == text
                assert not tokens[len(text) :].any()


def test_a_mark_before_and_blank_lines_after_the_rows_are_no_text(release):
    before = load(release).splits["train"]
    path = release / "lra_release" / "tsv_data" / "new_aan_pairs.train.tsv"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\n\r\n")
    after = load(release).splits["train"]
    np.testing.assert_array_equal(after.tokens, before.tokens)
    np.testing.assert_array_equal(after.labels, before.labels)


def test_limit_and_max_length(release):
    task = load(release, limit=2, max_length=8)
    assert task.splits["test"].tokens.shape == (2, 2, 8)
    assert task.splits["test"].lengths.tolist() == [[1, 8], [1, 8]]


def test_a_corrupt_row_is_named_and_nothing_is_cached(release):
    path = release / "lra_release" / "tsv_data" / "new_aan_pairs.eval.tsv"
    lines = path.read_bytes().split(b"\n")
    for line in (b"1.0\ta\tb\tone text", b"", b"yes\ta\tb\tc\td", b"2\ta\tb\tc\td"):
        path.write_bytes(b"\n".join([lines[0], line, *lines[2:]]))
        with pytest.raises(ValueError, match=r"new_aan_pairs\.eval\.tsv, line 2"):
            load(release)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"new_aan_pairs\.eval\.tsv"):
        load(release)
    assert not (release / "cache").exists()
