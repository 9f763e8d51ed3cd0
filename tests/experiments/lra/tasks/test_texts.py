"""Text, same movie and Retrieval, on small data in the form of aclImdb and of the AAN pairs."""

import numpy as np
import pytest

from experiments.lra.tasks.task import load_task
from experiments.lra.tasks.texts import LEAST

MOVIES = 20  # of a half, the last of which has too few reviews


def write(root):
    """Reviews that begin with their movie and sentiment, so that a test can read them off."""
    rng = np.random.default_rng(0)
    for half, first in (("train", 100), ("test", 98 + MOVIES)):  # one movie is in both
        for kind in ("pos", "neg"):
            folder = root / "aclImdb" / half / kind
            folder.mkdir(parents=True)
            lines = []
            for movie in range(MOVIES):
                for _ in range(LEAST if movie < MOVIES - 1 else LEAST // 2 - 1):
                    title = f"tt{first + movie:07}"
                    text = f"{title} {kind} {len(lines)} " + "é" * int(rng.integers(1, 60))
                    name = f"{len(lines)}_{9 if kind == 'pos' else 2}.txt"
                    (folder / name).write_text(text, encoding="utf-8")
                    lines.append(f"http://www.imdb.com/title/{title}/usercomments\n")
            (folder.parent / f"urls_{kind}.txt").write_text("".join(lines))
    return root


@pytest.fixture
def imdb(tmp_path):
    return write(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return write(tmp_path_factory.mktemp("imdb"))


def load(root, name="text", **options):
    return load_task(name, root, cache_dir=root / "cache", **options)


def read(tokens):
    return (tokens[tokens > 0] - 1).astype(np.uint8).tobytes().decode("utf-8", "ignore")


def test_bytes_and_labels_are_those_of_the_files(shared):
    task = load(shared, max_length=400)
    n = (MOVIES - 1) * 2 * LEAST + 2 * (LEAST // 2 - 1)
    assert (task.length, task.vocab, task.classes) == (512, 257, 2)
    assert task.source == f"official, {n} + {n} + {n} examples"
    assert task.splits["val"] is task.splits["test"]
    for half in ("train", "test"):
        split = task.splits[half]
        texts = [read(row) for row in split.tokens]
        files = (shared / "aclImdb" / half).rglob("*_[0-9].txt")
        assert sorted(texts) == sorted(path.read_text("utf-8") for path in files)
        assert [" pos " in text for text in texts] == (split.labels == 1).tolist()
        assert split.lengths.tolist() == [len(text.encode()) for text in texts]
        assert 0.3 < split.labels[:40].mean() < 0.7  # good and bad ones are mixed
    assert task.baselines["majority"] == 0.5


def test_held_out_reviews_leave_train(shared):
    task, whole = load(shared, held_out=0.25), load(shared)
    train, val, test = (task.splits[name] for name in ("train", "val", "test"))
    assert len(val) == round(len(whole.splits["train"]) / 4)
    parts = [read(row) for split in (train, val) for row in split.tokens]
    assert sorted(parts) == sorted(read(row) for row in whole.splits["train"].tokens)
    np.testing.assert_array_equal(test.tokens, whole.splits["test"].tokens)
    few = load(shared, limit=5, max_length=20)
    for name in ("train", "val", "test"):
        split, tokens = few.splits[name], whole.splits[name].tokens[:5, :20]
        assert split.tokens.shape == (5, 32) and split.lengths.max() == 20
        np.testing.assert_array_equal(split.tokens[:, :20], tokens)


def test_broken_folders_and_lists_are_named(imdb):
    path = imdb / "aclImdb" / "train" / "urls_pos.txt"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:50]))
    with pytest.raises(ValueError, match=r"urls_pos\.txt"):
        load(imdb, "imdb_same_movie")
    path.unlink()
    load(imdb)  # Text does not need the lists of movies
    with pytest.raises(ValueError, match=r"aclImdb/train lacks .*urls_pos\.txt"):
        load(imdb, "imdb_same_movie")


# ---- same movie

SIZES = {"examples": [200, 40, 60], "max_length": 250}


def movies(tokens):
    return {word for word in read(tokens).split() if len(word) == 9 and word[:2] == "tt"}


def test_pairs_are_of_one_movie_exactly_where_the_label_says_so(shared):
    task = load(shared, "imdb_same_movie", **SIZES)
    assert (task.pair, task.length, task.vocab) == (True, 256, 257)
    assert task.source == "IMDB same movie, 200 + 40 + 60 examples"
    seen = {}
    for name, split in task.splits.items():
        assert split.tokens.shape[1:] == (2, 256) and split.labels.mean() == 0.5
        found = [[movies(text) for text in pair] for pair in split.tokens]
        for (a, b), label in zip(found, split.labels, strict=True):
            assert len(a) == len(b) == 1 and (a == b) == (label == 1)
        seen[name] = set().union(*(side for pair in found for side in pair))
        widths = (split.tokens > 0).sum(2)
        assert (widths == split.lengths).all() and split.lengths.max() == 250
    assert not seen["train"] & seen["val"] and not (seen["train"] | seen["val"]) & seen["test"]
    assert len(seen["test"]) == MOVIES - 1  # the last has too few reviews


def test_the_texts_of_a_pair_share_no_review(shared):
    split = load(shared, "imdb_same_movie", **(SIZES | {"max_length": 600})).splits["train"]
    for a, b in split.tokens[split.labels == 1]:
        one, other = (read(text).split("\n") for text in (a, b))
        assert len(one) == len(other) == 4
        assert len({*one, *other}) == len(one + other)


def test_pairs_that_do_not_match_have_the_sentiments_of_those_that_do(shared):
    split = load(shared, "imdb_same_movie", examples=[200, 2, 2], max_length=4000).splits["train"]
    good = [[read(text).count(" pos ") for text in pair] for pair in split.tokens]
    assert good[0::2] == good[1::2]
    assert len({tuple(pair) for pair in good}) > 5


def test_a_pair_depends_on_seed_and_index_alone(shared):
    whole = load(shared, "imdb_same_movie", **SIZES)
    for few in (
        load(shared, "imdb_same_movie", **SIZES, limit=7),
        load(shared, "imdb_same_movie", **(SIZES | {"examples": [7, 7, 7]})),
    ):
        for name in ("train", "val", "test"):
            np.testing.assert_array_equal(few.splits[name].tokens, whole.splits[name].tokens[:7])
    other = load(shared, "imdb_same_movie", **SIZES, seed=1).splits["test"]
    assert not np.array_equal(other.tokens, whole.splits["test"].tokens)


# ---- retrieval

ROWS = [
    (1.0, "P1", "P2", b'a "quoted" text', b"x" * 12_000),
    (0.0, "P3", "P4", "naïve".encode(), b"b"),
    (0.0, "P5", "P6", b"c", b"\x80 not UTF-8"),
    (1.0, "P7", "P8", b"", b"one side is empty"),
]


def write_pairs(path, rows):
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
        write_pairs(folder / f"new_aan_pairs.{name}.tsv", ROWS[i:] + ROWS[:i])
    return tmp_path


def test_bytes_labels_and_lengths_are_those_of_the_files(release):
    task = load(release, "retrieval")
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
    few = load(release, "retrieval", limit=2, max_length=8).splits["test"]
    assert few.tokens.shape == (2, 2, 8) and few.lengths.tolist() == [[1, 8], [1, 8]]


def test_a_corrupt_row_is_named_and_nothing_is_cached(release):
    path = release / "lra_release" / "tsv_data" / "new_aan_pairs.eval.tsv"
    lines = path.read_bytes().split(b"\n")
    for line in (b"1.0\ta\tb\tone text", b"", b"yes\ta\tb\tc\td", b"2\ta\tb\tc\td"):
        path.write_bytes(b"\n".join([lines[0], line, *lines[2:]]))
        with pytest.raises(ValueError, match=r"new_aan_pairs\.eval\.tsv, line 2"):
            load(release, "retrieval")
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"new_aan_pairs\.eval\.tsv"):
        load(release, "retrieval")
    assert not (release / "cache").exists()
