"""Retrieval: does one of two papers cite the other? Each is read alone, byte by byte.

Official data: `tsv_data/new_aan_pairs.{train,eval,test}.tsv` of the LRA release, pairs of papers of
the ACL anthology network (Radev et al., 2013).
"""

from functools import partial
from pathlib import Path

import numpy as np

from experiments.common.files import read_lines
from experiments.common.work import progress
from experiments.lra.tasks import task

FOLDER = "tsv_data"
NAMES = {"train": "train", "val": "eval", "test": "test"}
FILES = {split: f"new_aan_pairs.{name}.tsv" for split, name in NAMES.items()}
SIZES = (147_086, 18_090, 17_437)
LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}
COLUMNS = ("label", "id1", "id2", "text1", "text2")
CUT = 10_000  # bytes of a text that LRA keeps before it cuts to max_length


def load(
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
    paths, most = task.release_files(data_dir, FOLDER, FILES, stand_in), min(max_length, CUT)
    make = partial(read, most=most)
    data = task.cached_files(cache_dir, "retrieval", paths, make, max_length=most)
    splits = {}
    for name in task.SPLITS:
        labels = data[f"{name}_labels"][:limit]
        lengths = data[f"{name}_lengths"][: 2 * len(labels)]
        tokens = task.pad(data[name], lengths, max_length, length).reshape(-1, 2, length)
        # An empty text counts as one token of padding.
        splits[name] = task.Split(tokens, labels, np.maximum(lengths, 1).reshape(-1, 2))
    return task.Task(
        name="retrieval",
        source=task.source("official", splits, SIZES),
        classes=2,
        vocab=task.BYTE_VOCAB,
        splits=splits,
    )


def read(path: Path, most: int) -> tuple[list[bytes], list[int]]:
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
