"""ListOps: the value, 0 to 9, of an expression of nested operators (Nangia and Bowman, 2018).

Official data: `listops-1000/basic_{train,val,test}.tsv` of the LRA release, 96,000, 2,000 and 2,000
rows. The parentheses of their binary form are dropped, as in all of the literature; 15 tokens are
left.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from experiments.common.files import read_lines
from experiments.common.progress import progress
from experiments.lra.tasks.cache import Arrays, cached, cached_files, named, padded_split
from experiments.lra.tasks.listops_trees import (
    DIGIT,
    OPERATORS,
    TOKENS,
    BadTree,
    evaluate,
    generate,
)
from experiments.lra.tasks.task import (
    AGAIN,
    SPLITS,
    Task,
    best_constant,
    padded_length,
    release_files,
    source,
    split_sizes,
)

FOLDER = "listops-1000"
SIZES = (96_000, 2_000, 2_000)
HEADER = b"Source\tTarget"
IDS = {token.encode(): DIGIT + i for i, token in enumerate(TOKENS)}
SHORT = {name.encode(): b"abcd"[i : i + 1] for i, name in enumerate(OPERATORS)}  # one byte each
BATCH = 1000  # rows evaluated at a time
NO_PARENTHESIS = bytes(byte for byte in range(256) if byte not in b"()")


def load(
    data_dir: Path,
    *,
    cache_dir: Path,
    seed: int = 0,
    generate: bool = False,
    examples: Iterable[int] = SIZES,
    max_length: int = 2000,
    limit: int | None = None,
    workers: int | None = None,
) -> Task:
    """The ListOps task, read from `listops-1000`, or generated.

    Args:
        generate: draw the expressions instead of reading them, from `seed`.
        examples: how many are drawn for train, val and test. Expression i depends on `seed` alone.
        max_length: tokens kept of an expression; the padded length is the next power of two.
        limit: the first examples of each split only.
        workers: processes that draw; None: one a core.
    """
    length = padded_length(max_length)
    if generate:
        arrays = _generated(split_sizes(examples), seed, cache_dir, workers)
    else:
        stand_in = "task.generate=true, which draws expressions of the same distribution"
        names = {split: f"basic_{split}.tsv" for split in SPLITS}
        paths = release_files(data_dir, FOLDER, names, stand_in)
        arrays = cached_files(cache_dir, "listops", paths, read)
    splits = {name: padded_split(arrays, name, max_length, length, limit) for name in SPLITS}
    train, test = splits["train"], splits["test"]
    return Task(
        name="listops",
        source=source("generated" if generate else "official", splits, SIZES),
        classes=10,
        vocab=1 + len(TOKENS),
        splits=splits,
        baselines={
            "majority": best_constant(train, test),
            "root operator": best_constant(train, test, (train.tokens[:, 0], test.tokens[:, 0])),
        },
    )


def _generated(
    sizes: tuple[int, int, int], seed: int, cache_dir: Path, workers: int | None
) -> Arrays:
    def make() -> Arrays:
        (flat, lengths), labels = generate(sum(sizes), seed, workers)
        arrays, start, first = {}, 0, 0
        for name, size in zip(SPLITS, sizes, strict=True):
            own = slice(start, start + size)
            last = first + int(lengths[own].sum())
            arrays |= named(name, flat[first:last], lengths[own], labels[own])
            start, first = start + size, last
        return arrays

    return cached(cache_dir, "listops-generated", {"examples": sizes, "seed": seed}, make)


# ---- the official files


# The id of every byte, where a token is one byte; 255 for all others.
BYTES = {ord(SHORT.get(token, token)): i for token, i in IDS.items()}
TABLE = bytes(BYTES.get(byte, 255) for byte in range(256))


def read(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ids of a TSV file's expressions, end to end, their lengths, and their checked labels.

    Raises:
        ValueError: a row is not an expression and its value. Names the file and the line.
    """
    flats, labels = [], []
    lines = read_lines(path, AGAIN)
    if next(lines, (1, b""))[1].strip() != HEADER:
        raise ValueError(f"{path}, line 1: not the header Source, Target, with a tab between")
    for number, line in progress(lines, None, f"reading {path.name}"):
        try:
            flat, label = _row(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        flats.append(flat)
        labels.append(label)
    if not labels:
        raise ValueError(f"{path} has no rows")
    for start in range(0, len(labels), BATCH):
        _check(path, start, flats[start : start + BATCH], labels[start : start + BATCH])
    lengths = np.array([len(flat) for flat in flats], np.int32)
    return np.frombuffer(b"".join(flats), np.uint8), lengths, np.array(labels, np.int64)


def _row(line: bytes) -> tuple[bytes, int]:
    """The token ids and the label of a line."""
    text, tab, target = line.partition(b"\t")
    if not tab or b"\t" in target:
        raise ValueError("not two columns with one tab between")
    if len(target) != 1 or not target.isdigit():
        raise ValueError(f"the label is {_shown(target)}, not a digit")
    short = text
    for name, byte in SHORT.items():
        if byte in text:
            raise ValueError(_unknown(text))
        short = short.replace(name, byte)
    if short[1::2].strip(b" "):  # every second byte must be a blank
        raise ValueError(_unknown(text))
    ids = short.translate(TABLE, b"() ")
    if not ids or b"\xff" in ids:
        raise ValueError(_unknown(text))
    parentheses = np.frombuffer(text.translate(None, NO_PARENTHESIS), np.uint8)
    depth = np.cumsum(np.where(parentheses == ord("("), 1, -1))
    if len(depth) and (depth.min() < 0 or depth[-1] != 0):
        raise ValueError(f"the parentheses of {_shown(text)} are not balanced")
    return ids, int(target)


def _unknown(text: bytes) -> str:
    """Says what is wrong with an expression that does not consist of tokens and blanks."""
    words = [word for word in text.split() if word not in (b"(", b")")]
    if not words:
        return "the expression is empty"
    odd = [word for word in words if word not in IDS]
    if odd:
        return f"{_shown(odd[0])} is not a token: they are ( ) {' '.join(TOKENS)}"
    return f"the tokens of {_shown(text)} are not one blank apart"


def _check(path: Path, start: int, flats: list[bytes], labels: list[int]) -> None:
    """Raises ValueError for the first row whose label is not its value."""
    lengths = np.array([len(flat) for flat in flats])
    try:
        values = evaluate(np.frombuffer(b"".join(flats), np.uint8), lengths)
    except BadTree as error:
        line = start + error.index + 2
        raise ValueError(
            f"{path}, line {line}: the brackets do not make one expression, "
            "or an operator has nothing to work on"
        ) from error
    wrong = np.flatnonzero(values != labels)
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(
            f"{path}, line {start + i + 2}: the label is {labels[i]}, but the value is {values[i]}"
        )


def _shown(text: bytes) -> str:
    return repr(text[:40].decode("utf-8", "replace") + ("..." if len(text) > 40 else ""))
