"""Random data in the sizes of the tasks of the Long Range Arena."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from experiments.lra.tasks.task import SPLITS, Split, Task, padded_length

SWEEP = "sweep"  # the task of rows that differ only in their length
BATCHES = 4  # of random examples


@dataclass(frozen=True)
class Shape:
    """The input that a task gives to the model."""

    vocab: int
    classes: int
    max_length: int  # unless the configuration of the task says otherwise
    pair: bool = False
    grid: bool = False
    lengths: tuple[int, ...] | None = None  # quantiles 0, 1/16, .. 1; None: no padding
    joined: tuple[int, ...] = (1,)  # how many texts of these lengths make a sequence


# Tokens of ListOps trees as its generator accepts them, and bytes of IMDB's training reviews. The
# longest review has 13,704; 5000 instead gives the right share (3 %) above 4096.
LISTOPS = (
    *(501, 547, 598, 650, 708, 771, 834, 901, 968),
    *(1050, 1130, 1225, 1330, 1443, 1578, 1754, 1998),
)
IMDB = (
    *(52, 393, 581, 656, 702, 753, 816, 890, 979),
    *(1082, 1217, 1386, 1614, 1920, 2369, 3166, 5000),
)
SHAPES = {
    "listops": Shape(17, 10, 2000, lengths=LISTOPS),
    "text": Shape(257, 2, 1000, lengths=IMDB),
    # papers are longer than the 4000 bytes that are read of them
    "retrieval": Shape(257, 2, 4000, pair=True, lengths=(4000, 4000)),
    "imdb_same_movie": Shape(257, 2, 4000, pair=True, lengths=IMDB, joined=(3, 4)),
    "image": Shape(256, 10, 1024, grid=True),
    **{f"pathfinder{n}": Shape(256, 2, n * n, grid=True) for n in (32, 64, 128, 256)},
}


@lru_cache(maxsize=1)  # the attentions of one task share its data
def random_task(name: str, length: int | None, batch: int) -> Task:
    """Return random tokens in sequences as long as the task's, with random labels.

    length: of the sweep, or the longest sequence of a task. None takes the task's own.
    """
    shape = SHAPES.get(name) or Shape(257, 2, 0)
    longest = length or shape.max_length
    length = longest if name == SWEEP else padded_length(longest)
    n, draw = BATCHES * batch, np.random.default_rng(0)
    rows = (n, 2) if shape.pair else (n,)
    kind = np.uint8 if shape.vocab <= 256 else np.int16
    tokens = draw.integers(0 if shape.grid else 1, shape.vocab, (*rows, length)).astype(kind)
    lengths = None
    if shape.lengths is not None:
        lengths = random_lengths(shape, rows, longest, draw)
        tokens[np.arange(length) >= lengths[..., None]] = 0
    split = Split(tokens, draw.integers(0, shape.classes, n), lengths)
    side = round(length**0.5)
    return Task(
        name=name,
        source="random",
        classes=shape.classes,
        vocab=shape.vocab,
        splits=dict.fromkeys(SPLITS, split),
        grid=(side, side) if shape.grid else None,
    )


def random_lengths(
    shape: Shape, rows: tuple[int, ...], longest: int, draw: np.random.Generator
) -> np.ndarray:
    """Return int32 lengths of shape `rows`, distributed as the task's and cut to `longest`."""
    assert shape.lengths is not None
    parts = draw.choice(shape.joined, rows)
    levels = draw.random((max(shape.joined), *rows))
    texts = np.interp(levels, np.linspace(0, 1, len(shape.lengths)), shape.lengths)
    number = np.arange(max(shape.joined)).reshape(-1, *[1] * len(rows))
    found = np.where(number < parts, texts, 0).sum(0)
    return np.clip(np.rint(found), 1, longest).astype(np.int32)
