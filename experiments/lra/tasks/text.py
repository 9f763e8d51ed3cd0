"""Text: is a review of a movie positive or negative? It is read byte by byte.

LRA keeps 1,000 bytes of a review in its configuration and 4K in its paper; both are in use. Half of
the reviews are longer than 1,000 bytes, and 3 % longer than 4,000.
"""

from functools import partial
from pathlib import Path

import numpy as np

from experiments.common.checks import share
from experiments.lra.tasks.cache import padded_split
from experiments.lra.tasks.imdb import CSV, FOLDER, csv_reviews, reviews
from experiments.lra.tasks.task import (
    Split,
    Task,
    best_constant,
    find,
    padded_length,
    source,
)

BYTE_VOCAB = 257  # 0 pads, byte b is b + 1
SIZES = (25_000, 25_000, 25_000)


def load(
    data_dir: Path,
    *,
    cache_dir: Path,
    seed: int = 0,
    max_length: int = 1000,
    held_out: float = 0.0,
    limit: int | None = None,
) -> Task:
    """The Text task, from `aclImdb`, or else from `IMDB Dataset.csv`, which has no official splits.

    Args:
        max_length: bytes kept of a review; the padded length is the next power of two.
        held_out: the share of train, drawn from `seed`, that becomes val. With 0 val is the test
            split, as in LRA, so the best checkpoint is chosen on the test split.
        limit: the first examples of each split only.
    """
    length = padded_length(max_length)
    share("held_out", held_out)
    path = find(data_dir, CSV) if find(data_dir, FOLDER) is None else None
    data = csv_reviews(path, cache_dir) if path else reviews(data_dir, cache_dir)
    whole = partial(padded_split, data, most=max_length, width=length, as_bytes=True)
    test = whole("test", limit=limit)
    if held_out:
        train, val = _divide(whole("train", limit=None), held_out, seed)
    else:
        train, val = whole("train", limit=limit), test
    splits = {"train": train.first(limit), "val": val.first(limit), "test": test}
    return Task(
        name="text",
        source=source("IMDB CSV" if path else "official", splits, SIZES),
        classes=2,
        vocab=BYTE_VOCAB,
        splits=splits,
        baselines={"majority": best_constant(train, test)},
    )


def _divide(split: Split, held_out: float, seed: int) -> tuple[Split, Split]:
    """Train and val, each in the original order."""
    n = len(split)
    order = np.random.default_rng([seed, n]).permutation(n)
    val = max(1, round(held_out * n))
    return split.take(np.sort(order[val:])), split.take(np.sort(order[:val]))
