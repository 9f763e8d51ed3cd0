"""Text: is a review of a movie positive or negative? It is read byte by byte.

LRA keeps 1,000 bytes of a review in its configuration and 4K in its paper; both are in use. Half of
the reviews are longer than 1,000 bytes, and 3 % longer than 4,000.
"""

import re
from pathlib import Path

import numpy as np

from experiments.common.files import read_lines
from experiments.common.work import progress
from experiments.lra.tasks import task

SIZES = (25_000, 25_000, 25_000)
FOLDER = "aclImdb"
HALVES = ("train", "test")
KINDS = ("neg", "pos")  # of label 0 and 1
MOVIE = re.compile(r"/title/(tt\d+)")
UNPACK = "unpack aclImdb_v1.tar.gz again"


def load(
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
    return task.Task(
        name="text",
        source=task.source("official", splits, SIZES),
        classes=2,
        vocab=task.BYTE_VOCAB,
        splits=splits,
    )


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
    """Return the reviews of a folder, by number."""
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}: {UNPACK}")
    paths = sorted((_number(path), path) for path in folder.iterdir() if path.suffix == ".txt")
    if not paths:
        raise ValueError(f"{folder} has no reviews: {UNPACK}")
    return [path for _, path in paths]


def _number(path: Path) -> int:
    """Return N of N_RATING.txt, which is the line of its movie in the list of movies."""
    number, _, rating = path.stem.partition("_")
    if not number.isdecimal() or not rating.isdecimal():
        raise ValueError(f"{path}: a review has a name like NUMBER_RATING.txt; move this file away")
    return int(number)


def _half(folder: Path, half: str, files: list[list[Path]]) -> task.Arrays:
    paths = [path for some in files for path in some]
    order = np.random.default_rng(0).permutation(len(paths))
    texts = []
    for i in progress(order.tolist(), len(paths), f"reading the {half} reviews"):
        text = paths[i].read_bytes()
        if not text:
            raise ValueError(f"{paths[i]} is empty: {UNPACK}")
        texts.append(text)
    movies = [
        _movies(folder / half / f"urls_{kind}.txt", some)
        for kind, some in zip(KINDS, files, strict=True)
    ]
    labels = np.repeat([0, 1], [len(some) for some in files])
    return task.named(half, texts, labels[order]) | {
        f"{half}_movies": np.concatenate(movies)[order]
    }


def _movies(path: Path, files: list[Path]) -> np.ndarray:
    """Return the number of the movie, ttNUMBER in its address, of each review."""
    if not path.exists():
        return np.full(len(files), -1)
    titles = []
    for number, content in read_lines(path, UNPACK):
        line = content.decode("utf-8", "replace")
        found = MOVIE.search(line)
        if not found:
            raise ValueError(f"{path}, line {number}: {line[:60]!r} is not the address of a movie")
        titles.append(int(found[1][2:]))
    numbers = [_number(file) for file in files]
    if max(numbers) >= len(titles):
        raise ValueError(
            f"{path} has {len(titles)} lines, but there is a review {max(numbers)}: {UNPACK}"
        )
    return np.array(titles)[numbers]
