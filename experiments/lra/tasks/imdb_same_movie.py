"""Same movie: are two texts, each of several reviews, about the same movie? From aclImdb.

This is a stand-in for Retrieval when its files are missing. It has the same length and form, but
its accuracies cannot be compared. A text is three reviews of a movie, or four if three have fewer
than `max_length` bytes.

Two shortcuts are removed. All texts are drawn in the same way, so neither a text alone nor its
length gives the label away. Reviews of a movie agree, which alone would give 68 %; so texts of
pairs that do not match have as many positive reviews as those of pairs that do.
"""

import hashlib
from collections.abc import Iterable
from itertools import count
from pathlib import Path

import numpy as np

from experiments.common.work import progress
from experiments.lra.tasks import task
from experiments.lra.tasks.text import FOLDER, reviews

HALF = {"train": "train", "val": "train", "test": "test"}
SIZES = (147_086, 18_090, 17_437)  # as many as Retrieval has
TRIES = 1000
LEAST = 8  # reviews of a movie: two texts of four
HELD_OUT = 0.1  # of the movies of train, for val
BLANK = b"\n"  # between reviews


def load(
    data_dir: Path,
    *,
    cache_dir: Path,
    seed: int = 0,
    examples: Iterable[int] = SIZES,
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
    movies = {half: data[f"{half}_movies"] for half in ("train", "test")}
    for half, numbers in movies.items():
        if numbers.min() < 0:
            raise ValueError(
                f"{FOLDER}/{half} lacks urls_neg.txt or urls_pos.txt, which name the movie of each "
                "review: unpack aclImdb_v1.tar.gz again"
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
    moods = [libraries[HALF[name]].same_mood(pairs[name]) for name in ("train", "test")]
    same = task.best_constant(splits["train"], splits["test"], (moods[0], moods[1]))
    return task.Task(
        name="imdb_same_movie",
        source=task.source("IMDB same movie", splits, SIZES),
        classes=2,
        vocab=task.BYTE_VOCAB,
        splits=splits,
        baselines={"same sentiment": same},
    )


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

    def same_mood(self, pairs: np.ndarray) -> np.ndarray:
        """Whether most reviews of both texts of a pair have the same sentiment, (n,)."""
        good = np.where(pairs >= 0, 2 * self.labels[pairs] - 1, 0).sum(2) > 0
        return good[:, 0] == good[:, 1]


def _shelves(movies: dict[str, np.ndarray], seed: int) -> dict[str, list[np.ndarray]]:
    """For each split the movies with enough reviews, as the numbers of their reviews."""
    by_number = {}
    for half, numbers in movies.items():
        order = np.argsort(numbers, kind="stable")
        titles, starts = np.unique(numbers[order], return_index=True)
        groups = np.split(order, starts[1:])
        by_number[half] = {
            title: group
            for title, group in zip(titles.tolist(), groups, strict=True)
            if len(group) >= LEAST
        }
    train, test = by_number["train"], by_number["test"]
    train = {title: group for title, group in train.items() if title not in test}
    if len(train) < 4 or len(test) < 2:
        raise ValueError(
            f"{FOLDER} has {len(train)} movies of train and {len(test)} of test with {LEAST} "
            "reviews or more: unpack aclImdb_v1.tar.gz again"
        )
    titles = sorted(train)
    held = max(2, round(HELD_OUT * len(titles)))
    order = np.random.default_rng([seed, len(task.SPLITS)]).permutation(len(titles))
    return {
        "train": [train[titles[i]] for i in np.sort(order[held:])],
        "val": [train[titles[i]] for i in np.sort(order[:held])],
        "test": [test[title] for title in sorted(test)],
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
