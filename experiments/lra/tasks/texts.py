"""The tasks of texts, which are read byte by byte: Text, same movie and Retrieval.

Text (reviews of movies): is one positive or negative? LRA keeps 1,000 bytes of a review in its
configuration and 4K in its paper; both are in use. Half of the reviews are longer than 1,000 bytes,
and 3 % longer than 4,000.

Same movie: are two texts, each of several reviews, about the same movie? This is a stand-in for
Retrieval when its files are missing. It has the same length and form, but its accuracies cannot be
compared. A text is three reviews of a movie, or four if three have fewer than `max_length` bytes.
Two shortcuts are removed. All texts are drawn in the same way, so neither a text alone nor its
length gives the label away. Reviews of a movie agree, which alone would give 68 %; so texts of
pairs that do not match have as many positive reviews as those of pairs that do.

Retrieval: does one of two papers cite the other? Official data:
`tsv_data/new_aan_pairs.{train,eval,test}.tsv` of the LRA release, pairs of papers of the ACL
anthology network (Radev et al., 2013).
"""

import hashlib
import re
from collections.abc import Iterable
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.common.files import read_lines, reading
from experiments.common.work import progress
from experiments.lra.tasks import task

REVIEWS = (25_000, 25_000, 25_000)
PAIRS = (147_086, 18_090, 17_437)
FOLDER = "aclImdb"
HALVES = ("train", "test")
KINDS = ("neg", "pos")  # of label 0 and 1
MOVIE = re.compile(r"/title/tt(\d+)")
UNPACK = "unpack aclImdb_v1.tar.gz again"

# of same movie
HALF = {"train": "train", "val": "train", "test": "test"}
TRIES = 1000
LEAST = 8  # reviews of a movie: two texts of four
HELD_OUT = 0.1  # of the movies of train, for val
BLANK = b"\n"  # between reviews

# of Retrieval
AAN = "tsv_data"
NAMES = {"train": "train", "val": "eval", "test": "test"}
FILES = {split: f"new_aan_pairs.{name}.tsv" for split, name in NAMES.items()}
LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}
COLUMNS = ("label", "id1", "id2", "text1", "text2")
CUT = 10_000  # bytes of a text that LRA keeps before it cuts to max_length


def _task(name: str, source: str, splits: dict[str, task.Split]) -> task.Task:
    """Return a task of bytes with two classes."""
    return task.Task(name, source, classes=2, vocab=task.BYTE_VOCAB, splits=splits)


# ---- Text


def load_text(
    data_dir: Path,
    *,
    cache_dir: Path,
    seed: int = 0,
    max_length: int = 1000,
    held_out: float = 0.0,
    limit: int | None = None,
) -> task.Task:
    """Return the Text task, from `aclImdb` (Maas et al., 2011).

    Args:
        max_length: bytes kept of a review; the padded length is the next power of two.
        held_out: the share of train, drawn from `seed`, that becomes val. With 0 val is the test
            split, as in LRA, so the best checkpoint is chosen on the test split.
        limit: the first examples of each split only.
    """
    task.padded_length(max_length)  # refuses what is no length
    if not isinstance(held_out, int | float) or not 0 <= held_out < 1:
        raise ValueError(f"held_out={held_out}: give a share from 0 to below 1")
    data = reviews(data_dir, cache_dir)
    splits = task.padded_splits(data, max_length, None if held_out else limit, HALVES)
    splits["val"] = splits["test"]
    if held_out:
        splits["train"], splits["val"] = _divide(splits["train"], held_out, seed)
    splits = {name: splits[name].first(limit) for name in task.SPLITS}
    return _task("text", task.source("official", splits, REVIEWS), splits)


def _divide(split: task.Split, held_out: float, seed: int) -> tuple[task.Split, task.Split]:
    """Return train and val, each in the original order."""
    n = len(split)
    order = np.random.default_rng([seed, n]).permutation(n)
    val = max(1, round(held_out * n))
    return split.take(np.sort(order[val:])), split.take(np.sort(order[:val]))


# ---- the reviews


def reviews(data_dir: Path, cache_dir: Path) -> task.Arrays:
    """Return all reviews, in a fixed random order, as arrays for train and test.

    `train` has the bytes of all reviews end to end (uint8), `train_lengths` and `train_labels` are
    per review, and so is `train_movies`: the number of its movie, -1 if no list has it.
    """
    fetch = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
    folder = task.require(data_dir, FOLDER, fetch=fetch)
    files = {(half, kind): _files(folder / half / kind) for half in HALVES for kind in KINDS}
    lists = [folder / half / f"urls_{kind}.txt" for half in HALVES for kind in KINDS]
    paths = [path for some in files.values() for path in some]
    paths += [path for path in lists if path.exists()]

    def make() -> task.Arrays:
        arrays = {}
        for half in HALVES:
            arrays |= _half(folder, half, [files[half, kind] for kind in KINDS])
        return arrays

    return task.cached(cache_dir, "imdb", {"files": task.fingerprint(paths)}, make)


def _files(folder: Path) -> list[Path]:
    """Return the reviews of a folder by number, the N of N_RATING.txt."""
    if not (paths := sorted(folder.glob("[0-9]*_[0-9]*.txt"), key=_number)):
        raise ValueError(f"no reviews in {folder}: {UNPACK}")
    return paths


def _number(path: Path) -> int:
    """Return the number of a review, which is the line of its movie in the list of movies."""
    return int(path.stem.partition("_")[0])


def _half(folder: Path, half: str, files: list[list[Path]]) -> task.Arrays:
    paths = [path for some in files for path in some]
    order = np.random.default_rng(0).permutation(len(paths))
    what = f"reading the {half} reviews"
    texts = [paths[i].read_bytes() for i in progress(order.tolist(), len(paths), what)]
    lists = (folder / half / f"urls_{kind}.txt" for kind in KINDS)
    movies = np.concatenate([*map(_movies, lists, files)])
    labels = np.repeat([0, 1], [len(some) for some in files])
    return task.named(half, texts, labels[order]) | {f"{half}_movies": movies[order]}


def _movies(path: Path, files: list[Path]) -> np.ndarray:
    """Return the number of the movie, ttNUMBER in its address, of each review."""
    if not path.exists():
        return np.full(len(files), -1)
    with reading(path, UNPACK, "does not have the address of a movie for each review"):
        titles = [int(title) for title in MOVIE.findall(path.read_text("utf-8"))]
        return np.array(titles)[[_number(file) for file in files]]


# ---- same movie


def load_same_movie(
    data_dir: Path,
    *,
    cache_dir: Path,
    seed: int = 0,
    examples: Iterable[int] = PAIRS,
    max_length: int = 4000,
    limit: int | None = None,
) -> task.Task:
    """Return the same-movie task. Train, val and test have no movie in common.

    Args:
        seed: of the movies held out for val and of the pairs. Pair i of a split depends on
            (seed, i) alone.
        examples: pairs of train, val and test, half of them of the same movie.
        max_length: bytes kept of a text; the padded length is the next power of two.
        limit: the first examples of each split only.
    """
    length, sizes = task.padded_length(max_length), task.split_sizes(examples)
    data = reviews(data_dir, cache_dir)
    movies = {half: data[f"{half}_movies"] for half in HALVES}
    for half, numbers in movies.items():
        if numbers.min() < 0:
            raise ValueError(
                f"{FOLDER}/{half} lacks urls_neg.txt or urls_pos.txt, which name the movie of each "
                f"review: {UNPACK}"
            )
    sizes = [min(size, limit or size) for size in sizes]
    facts = [data[f"{half}_{what}"] for half in movies for what in ("lengths", "labels", "movies")]
    key = {
        "examples": sizes,
        "seed": seed,
        "max_length": max_length,
        "reviews": [hashlib.sha256(fact.tobytes()).hexdigest() for fact in facts],
    }
    libraries = {half: Library(data, half, max_length) for half in movies}

    def make() -> task.Arrays:
        shelves = _shelves(movies, seed)
        return {
            name: _pairs(libraries[HALF[name]], shelves[name], size, [seed, i], name)
            for i, (name, size) in enumerate(zip(task.SPLITS, sizes, strict=True))
        }

    pairs, splits = task.cached(cache_dir, "imdb-same-movie", key, make), {}
    for name in task.SPLITS:
        texts = [libraries[HALF[name]].text(numbers) for numbers in pairs[name].reshape(-1, 4)]
        lengths = np.array([len(text) for text in texts], np.int32)
        flat = np.frombuffer(b"".join(texts), np.uint8)
        tokens = task.pad(flat, lengths, max_length, length).reshape(-1, 2, length)
        labels = np.arange(len(pairs[name]), dtype=np.int64) % 2
        splits[name] = task.Split(tokens, labels, lengths.reshape(-1, 2))
    return _task("imdb_same_movie", task.source("IMDB same movie", splits, PAIRS), splits)


class Library:
    """The reviews of one half. A text is the numbers of four of them, -1 where there are three."""

    def __init__(self, data: task.Arrays, half: str, enough: int):
        self.flat, self.lengths = data[half].tobytes(), data[f"{half}_lengths"]
        self.labels = data[f"{half}_labels"]
        self.ends = np.cumsum(self.lengths, dtype=np.int64)
        self.enough = enough

    def text(self, numbers: np.ndarray) -> bytes:
        """Return the reviews of these numbers, cut to `enough` bytes."""
        numbers = numbers[numbers >= 0]
        parts = (self.flat[self.ends[i] - self.lengths[i] : self.ends[i]] for i in numbers)
        return BLANK.join(parts)[: self.enough]

    def fill(self, numbers: np.ndarray) -> np.ndarray:
        """Four reviews, without the last where three have enough bytes."""
        if self.lengths[numbers[:3]].sum() + 2 * len(BLANK) >= self.enough:
            numbers[3] = -1
        return numbers

    def mood(self, numbers: np.ndarray) -> tuple[int, int]:
        """Return the number of reviews, and how many of them are positive."""
        numbers = numbers[numbers >= 0]
        return len(numbers), int(self.labels[numbers].sum())


def _shelves(movies: dict[str, np.ndarray], seed: int) -> dict[str, list[np.ndarray]]:
    """For each split the movies with enough reviews, as the numbers of their reviews."""
    groups = (pd.Series(movies[half]).groupby(movies[half]).indices for half in HALVES)
    train, test = ({n: some for n, some in g.items() if len(some) >= LEAST} for g in groups)
    train = {title: group for title, group in train.items() if title not in test}
    if len(train) < 4 or len(test) < 2:
        raise ValueError(
            f"{FOLDER} has {len(train)} movies of train and {len(test)} of test with {LEAST} "
            f"reviews or more: {UNPACK}"
        )
    titles = list(train)  # by number, as pandas groups them
    held = max(2, round(HELD_OUT * len(titles)))
    order = np.random.default_rng([seed, len(task.SPLITS)]).permutation(len(titles))
    return {
        "train": [train[titles[i]] for i in np.sort(order[held:])],
        "val": [train[titles[i]] for i in np.sort(order[:held])],
        "test": list(test.values()),
    }


def _pairs(
    library: Library, movies: list[np.ndarray], n: int, stream: list[int], name: str
) -> np.ndarray:
    """int32 (n, 2, 4): the texts of pairs of other movies (even) and of the same one (odd)."""
    # A movie is drawn as often as it has reviews.
    weights = np.cumsum([len(movie) for movie in movies])
    pairs = []
    for i in progress(range(0, n, 2), -(-n // 2), f"pairing the {name} reviews"):
        rng = np.random.default_rng([*stream, i])
        _, match = _draw(rng, library, movies, weights)
        movie, other = None, []
        for side in (0, 1):
            wanted = library.mood(match[side])
            for tries in count():
                new, texts = _draw(rng, library, movies, weights)
                # A small data set may have no other such text.
                if new != movie and (library.mood(texts[side]) == wanted or tries > TRIES):
                    break
            movie = new
            other.append(texts[side])
        pairs += [other, match]
    return np.array(pairs[:n], np.int32)


def _draw(
    rng: np.random.Generator, library: Library, movies: list[np.ndarray], weights: np.ndarray
) -> tuple[int, list[np.ndarray]]:
    """Return a movie, and two texts about it."""
    movie = int(np.searchsorted(weights, rng.random() * weights[-1], side="right"))
    order = rng.permutation(movies[movie])
    return movie, [library.fill(order[:4]), library.fill(order[4:8])]


# ---- Retrieval


def load_retrieval(
    data_dir: Path,
    *,
    cache_dir: Path,
    seed: int = 0,
    max_length: int = 4000,
    limit: int | None = None,
) -> task.Task:
    """Return the Retrieval task, from `tsv_data`.

    Args:
        max_length: bytes kept of a text; the padded length is the next power of two.
        limit: the first examples of each split only.
    """
    length = task.padded_length(max_length)
    stand_in = "task=imdb_same_movie, which pairs the reviews of aclImdb"
    paths, most = task.release_files(data_dir, AAN, FILES, stand_in), min(max_length, CUT)
    make = partial(read_pairs, most=most)
    data = task.cached_files(cache_dir, "retrieval", paths, make, max_length=most)
    splits = {}
    for name in task.SPLITS:
        labels = data[f"{name}_labels"][:limit]
        lengths = data[f"{name}_lengths"][: 2 * len(labels)]
        tokens = task.pad(data[name], lengths, max_length, length).reshape(-1, 2, length)
        # An empty text counts as one token of padding.
        splits[name] = task.Split(tokens, labels, np.maximum(lengths, 1).reshape(-1, 2))
    return _task("retrieval", task.source("official", splits, PAIRS), splits)


def read_pairs(path: Path, most: int) -> tuple[list[bytes], list[int]]:
    """Return the first `most` bytes of the texts of each pair, and the labels of pairs.

    Raises:
        ValueError: a row has not five columns, or its label is not 0 or 1. Names file and line.
    """
    texts, labels = [], []
    for number, line in progress(read_lines(path, task.AGAIN), None, f"reading {path.name}"):
        cells = line.split(b"\t")
        if len(cells) != len(COLUMNS) or cells[0] not in LABELS:
            columns = ", ".join(COLUMNS)
            raise ValueError(f"{path}, line {number}: not {columns}, with tabs and label 0 or 1")
        labels.append(LABELS[cells[0]])
        texts += [text[:most] for text in cells[3:]]
    if not labels:
        raise ValueError(f"{path} has no rows")
    return texts, labels
