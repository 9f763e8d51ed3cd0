"""The labelled reviews of aclImdb (Maas et al., 2011), as bytes."""

import csv
import io
import re
from pathlib import Path

import numpy as np

from experiments.common.files import read_lines, read_text, reading
from experiments.common.progress import progress
from experiments.lra.tasks.cache import Arrays, cached, fingerprint, named
from experiments.lra.tasks.task import require

FOLDER = "aclImdb"
HALVES = ("train", "test")
KINDS = ("neg", "pos")  # of label 0 and 1
CSV = "IMDB Dataset.csv"  # of Kaggle: all reviews in one file, without splits and movies
SENTIMENTS = {"negative": 0, "positive": 1}
MOVIE = re.compile(r"/title/(tt\d+)")


def reviews(data_dir: Path, cache_dir: Path) -> Arrays:
    """All reviews, in a fixed random order, as arrays for train and test.

    `train` has the bytes of all reviews end to end (uint8), `train_lengths` and `train_labels` are
    per review, and so is `train_movies`: the number of its movie, -1 if no list has it.
    """
    fetch = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
    folder = require(data_dir, FOLDER, fetch=fetch)
    files = {(half, kind): _files(folder / half / kind) for half in HALVES for kind in KINDS}
    lists = [folder / half / f"urls_{kind}.txt" for half in HALVES for kind in KINDS]
    paths = [path for some in files.values() for path in some]
    paths += [path for path in lists if path.exists()]

    def make() -> Arrays:
        arrays = {}
        for half in HALVES:
            arrays |= _half(folder, half, [files[half, kind] for kind in KINDS])
        return arrays

    return cached(cache_dir, "imdb", {"files": fingerprint(paths)}, make)


def csv_reviews(path: Path, cache_dir: Path) -> Arrays:
    """The reviews of a CSV file with the columns review and sentiment, each once.

    The first half is train and the rest is test, in the order of the file. Arrays as in `reviews`,
    without movies.
    """
    form = f"it has the columns review and sentiment ({' or '.join(SENTIMENTS)})"

    def make() -> Arrays:
        found: dict[bytes, int] = {}
        rows = csv.DictReader(io.StringIO(read_text(path, form), newline=""), strict=True)
        with reading(path, form):
            for row in rows:
                with reading(f"{path}, line {rows.line_num}", form):
                    if not row["review"]:
                        raise ValueError("the review is empty")
                    found.setdefault(row["review"].encode(), SENTIMENTS[row["sentiment"]])
            if len(found) < 2:
                raise ValueError("it has less than two reviews")
        texts, labels, half = list(found), np.array(list(found.values())), len(found) // 2
        arrays: Arrays = {}
        for name, own in (("train", slice(half)), ("test", slice(half, None))):
            flat = np.frombuffer(b"".join(texts[own]), np.uint8)
            lengths = np.array([len(text) for text in texts[own]], np.int32)
            arrays |= named(name, flat, lengths, labels[own])
        return arrays

    return cached(cache_dir, "imdb-csv", {"files": fingerprint([path])}, make)


def _files(folder: Path) -> list[Path]:
    """The reviews of a folder, by number."""
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}: unpack aclImdb_v1.tar.gz again")
    paths = sorted((_number(path), path) for path in folder.iterdir() if path.suffix == ".txt")
    if not paths:
        raise ValueError(f"{folder} has no reviews: unpack aclImdb_v1.tar.gz again")
    return [path for _, path in paths]


def _number(path: Path) -> int:
    """N of N_RATING.txt, which is the line of its movie in the list of movies."""
    number, _, rating = path.stem.partition("_")
    if not number.isdecimal() or not rating.isdecimal():
        raise ValueError(f"{path}: a review has a name like NUMBER_RATING.txt; move this file away")
    return int(number)


def _half(folder: Path, half: str, files: list[list[Path]]) -> Arrays:
    paths = [path for some in files for path in some]
    order = np.random.default_rng(0).permutation(len(paths))
    texts = []
    for i in progress(order.tolist(), len(paths), f"reading the {half} reviews"):
        text = paths[i].read_bytes()
        if not text:
            raise ValueError(f"{paths[i]} is empty: unpack aclImdb_v1.tar.gz again")
        texts.append(text)
    movies = [
        _movies(folder / half / f"urls_{kind}.txt", some)
        for kind, some in zip(KINDS, files, strict=True)
    ]
    labels = np.repeat([0, 1], [len(some) for some in files])
    return {
        half: np.frombuffer(b"".join(texts), np.uint8),
        f"{half}_lengths": np.array([len(text) for text in texts], np.int32),
        f"{half}_labels": labels[order].astype(np.int64),
        f"{half}_movies": np.concatenate(movies)[order],
    }


def _movies(path: Path, files: list[Path]) -> np.ndarray:
    """The number of the movie, ttNUMBER in its address, of each review."""
    if not path.exists():
        return np.full(len(files), -1)
    titles = []
    for number, content in read_lines(path, "unpack aclImdb_v1.tar.gz again"):
        line = content.decode("utf-8", "replace")
        found = MOVIE.search(line)
        if not found:
            raise ValueError(f"{path}, line {number}: {line[:60]!r} is not the address of a movie")
        titles.append(int(found[1][2:]))
    numbers = [_number(file) for file in files]
    if max(numbers) >= len(titles):
        raise ValueError(
            f"{path} has {len(titles)} lines, but there is a review number {max(numbers)}: "
            "unpack aclImdb_v1.tar.gz again"
        )
    return np.array(titles)[numbers]
