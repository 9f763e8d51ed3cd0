"""ListOps: the value, 0 to 9, of an expression of nested operators (Nangia and Bowman, 2018).

Official data: `listops-1000/basic_{train,val,test}.tsv` of the LRA release, 96,000, 2,000 and 2,000
rows. The parentheses of their binary form are dropped, as in all of the literature; 15 tokens are
left.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from experiments.common.files import read_lines
from experiments.common.work import processes, progress
from experiments.lra.tasks import task

FOLDER = "listops-1000"
SIZES = (96_000, 2_000, 2_000)
HEADER = b"Source\tTarget"
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
TOKENS = (*"0123456789", *OPERATORS, "]")  # ids 1 to 15; 0 pads
DIGIT, OPERATOR, CLOSE = 1, 11, 15  # the first id of each kind
MAX_DEPTH, MAX_CHILDREN = 10, 10
LEAF = 0.75  # the probability of a digit
SHORTEST, LONGEST = 501, 1999
CHUNK = 512  # trees of one random stream
ATTEMPTS = 14  # trees drawn for each one that is wanted: one of twelve is kept

Trees = tuple[np.ndarray, np.ndarray]  # ids uint8 (total,), end to end, and lengths int32 (n,)


def load(
    data_dir: Path,
    *,
    cache_dir: Path,
    seed: int = 0,
    generate: bool = False,
    examples: Iterable[int] = SIZES,
    max_length: int = 2000,
    limit: int | None = None,
) -> task.Task:
    """Return the ListOps task, read from `listops-1000`, or generated.

    Args:
        generate: draw the expressions instead of reading them, from `seed`.
        examples: how many are drawn for train, val and test. Expression i depends on `seed` alone.
        max_length: tokens kept of an expression; the padded length is the next power of two.
        limit: the first examples of each split only.
    """
    task.padded_length(max_length)  # refuses what is no length
    if generate:
        arrays = _generated(task.split_sizes(examples), seed, cache_dir)
    else:
        stand_in = "task.generate=true, which draws expressions of the same distribution"
        names = {split: f"basic_{split}.tsv" for split in task.SPLITS}
        paths = task.release_files(data_dir, FOLDER, names, stand_in)
        arrays = task.cached_files(cache_dir, "listops", paths, read)
    splits = task.padded_splits(arrays, max_length, limit, as_bytes=False)
    roots = splits["train"].tokens[:, 0], splits["test"].tokens[:, 0]
    return task.Task(
        name="listops",
        source=task.source("generated" if generate else "official", splits, SIZES),
        classes=10,
        vocab=1 + len(TOKENS),
        splits=splits,
        baselines={"root operator": task.best_constant(splits["train"], splits["test"], roots)},
    )


def _generated(sizes: tuple[int, int, int], seed: int, cache_dir: Path) -> task.Arrays:
    def make() -> task.Arrays:
        (flat, lengths), labels = generate(sum(sizes), seed)
        texts = [tree.tobytes() for tree in np.split(flat, np.cumsum(lengths)[:-1])]
        arrays, end = {}, 0
        for name, size in zip(task.SPLITS, sizes, strict=True):
            start, end = end, end + size
            arrays |= task.named(name, texts[start:end], labels[start:end])
        return arrays

    return task.cached(cache_dir, "listops-generated", {"examples": sizes, "seed": seed}, make)


# ---- the official files


# The id of every byte, where a token is one byte; 255 for all others.
SHORT = {name.encode(): b"abcd"[i : i + 1] for i, name in enumerate(OPERATORS)}  # one byte each
IDS = {token.encode(): DIGIT + i for i, token in enumerate(TOKENS)}
BYTES = {ord(SHORT.get(token, token)): i for token, i in IDS.items()}
TABLE = bytes(BYTES.get(byte, 255) for byte in range(256))


def read(path: Path) -> tuple[list[bytes], list[int]]:
    """Return the ids of a TSV file's expressions, and their labels.

    Raises:
        ValueError: a row has no expression or no digit. Names the file and the line.
    """
    texts, labels = [], []
    lines = read_lines(path, task.AGAIN)
    if next(lines, (1, b""))[1].strip() != HEADER:
        raise ValueError(f"{path}, line 1: not the header Source, Target, with a tab between")
    for number, line in progress(lines, None, f"reading {path.name}"):
        text, _, target = line.partition(b"\t")
        for name, byte in SHORT.items():
            text = text.replace(name, byte)
        ids = text.translate(TABLE, b"() ")
        if not ids or b"\xff" in ids or not re.fullmatch(rb"\d", target):
            shown, tokens = line[:60].decode("utf-8", "replace"), f"( ) {' '.join(TOKENS)}"
            raise ValueError(
                f"{path}, line {number}: {shown!r} is not an expression of {tokens}, then a tab "
                "and a digit"
            )
        texts.append(ids)
        labels.append(int(target))
    if not labels:
        raise ValueError(f"{path} has no rows")
    return texts, labels


# ---- trees
#
# They are drawn as in LRA (Nangia and Bowman, 2018; Tay et al., 2021). A node above depth 10 is an
# operator over 2 to 10 nodes with probability 1/4, and a digit otherwise. One tree of twelve has
# more than 500 and less than 2,000 tokens and is kept. Many trees are drawn at a time, depth by
# depth: first their branches, then the operators and digits of those that are kept.


def generate(n: int, seed: int, workers: int | None = None) -> tuple[Trees, np.ndarray]:
    """Return the first `n` trees of a seed, all different, and their values int64 (n,).

    Tree i depends only on (seed, i), not on n or the number of processes.
    """
    count = -(-n // CHUNK)
    workers = min(count // 4, workers or os.cpu_count() or 1)  # starting a process takes a second
    if workers <= 1:
        return _distinct(map(_chunk, [seed] * count, range(count)), n, seed)
    with processes(workers) as pool:
        return _distinct(pool.map(_chunk, [seed] * count, range(count)), n, seed)


def _distinct(
    chunks: Iterator[tuple[Trees, np.ndarray]], n: int, seed: int
) -> tuple[Trees, np.ndarray]:
    """One array of the chunks; a tree that came before is replaced by one of its own stream."""
    seen: set[bytes] = set()
    trees, values = [], []
    for (flat, lengths), labels in progress(chunks, -(-n // CHUNK), "ListOps, 512 trees each"):
        for tree, value in zip(np.split(flat, np.cumsum(lengths)[:-1]), labels, strict=True):
            stream = 0
            while (key := hashlib.blake2b(tree.tobytes(), digest_size=16).digest()) in seen:
                stream += 1
                (flat, lengths), labels = _draw(seed, len(trees), stream)
                tree, value = flat[: lengths[0]], labels[0]
            seen.add(key)
            trees.append(tree)
            values.append(value)
            if len(trees) == n:
                break
    lengths = np.array([len(tree) for tree in trees], np.int32)
    return (np.concatenate(trees), lengths), np.array(values, np.int64)


def _chunk(seed: int, chunk: int) -> tuple[Trees, np.ndarray]:
    return _draw(seed, chunk, 0, CHUNK)


def _draw(seed: int, index: int, stream: int, n: int = 1) -> tuple[Trees, np.ndarray]:
    # Only random() is used, because its stream is the same in all versions of NumPy.
    rng = np.random.default_rng([seed, index, stream])
    flats, sizes, found = [], [], 0
    while found < n:
        flat, lengths = draw_trees(rng, ATTEMPTS * n)
        keep = min(n - found, len(lengths))
        flats.append(flat[: lengths[:keep].sum()])
        sizes.append(lengths[:keep])
        found += keep
    trees = np.concatenate(flats), np.concatenate(sizes)
    return trees, evaluate(trees[0])


def draw_trees(rng: np.random.Generator, attempts: int) -> Trees:
    """Draws `attempts` trees and returns those with a length within the bounds."""
    tree = np.arange(attempts)  # of every node of a depth
    total = np.zeros(attempts, np.int64)
    depths = []
    for depth in range(1, MAX_DEPTH + 1):
        inner = rng.random(len(tree)) <= (1 - LEAF if depth < MAX_DEPTH else -1)
        children = np.where(inner, 2, 0)
        children[inner] += (rng.random(inner.sum()) * (MAX_CHILDREN - 1)).astype(np.int64)
        total += np.bincount(tree, np.where(inner, 2, 1), attempts).astype(np.int64)
        depths.append((tree, children))
        tree = np.repeat(tree, children)
    keep = (total >= SHORTEST) & (total <= LONGEST)
    flat = _spell(rng, [children[keep[tree]] for tree, children in depths])
    return flat, total[keep].astype(np.int32)


def _spell(rng: np.random.Generator, depths: list[np.ndarray]) -> np.ndarray:
    """Return the ids of trees, end to end, from the number of children of each node, depth by
    depth.
    """
    sizes = [np.ones(len(depths[-1]), np.int64)]  # tokens of the subtree of a node
    for children in reversed(depths[:-1]):
        size = np.ones(len(children), np.int64)
        inner = children > 0
        ends = np.cumsum(children[inner])
        sums = np.concatenate([[0], np.cumsum(sizes[-1])])
        size[inner] = 2 + sums[ends] - sums[ends - children[inner]]
        sizes.append(size)
    sizes.reverse()
    flat = np.zeros(sizes[0].sum(), np.uint8)
    start = np.cumsum(sizes[0]) - sizes[0]
    for children, size, below in zip(depths, sizes, [*sizes[1:], None], strict=True):
        inner = children > 0
        flat[start[~inner]] = DIGIT + (rng.random((~inner).sum()) * 10).astype(np.uint8)
        flat[start[inner]] = OPERATOR + (rng.random(inner.sum()) * len(OPERATORS)).astype(np.uint8)
        flat[start[inner] + size[inner] - 1] = CLOSE
        if below is not None:
            before = np.cumsum(below) - below
            first = np.cumsum(children[inner]) - children[inner]
            start = before + np.repeat(start[inner] + 1 - before[first], children[inner])
    return flat


# ---- values


def depth_of(flat: np.ndarray) -> np.ndarray:
    """Return the number of open operators at each token, including itself."""
    step = (flat >= OPERATOR).astype(np.int32) - 2 * (flat == CLOSE)
    return np.cumsum(step) + (flat == CLOSE)


def evaluate(flat: np.ndarray) -> np.ndarray:
    """Return the values of expressions that lie end to end, int64 (n,)."""
    depth = depth_of(flat)
    value = flat.astype(np.int16) - DIGIT
    inner = (flat >= OPERATOR) & (flat < CLOSE)
    owner = np.where(flat == CLOSE, 0, depth - inner)  # the depth at which a node is an argument
    by_owner = np.argsort(owner.astype(np.int16), kind="stable")
    bounds = np.searchsorted(owner[by_owner], np.arange(depth.max() + 2))
    nodes = [by_owner[a:b] for a, b in pairwise(bounds)]
    closes = np.flatnonzero(flat == CLOSE)
    for level in range(depth.max(), 0, -1):
        operators = nodes[level - 1][inner[nodes[level - 1]]]
        ends = closes[depth[closes] == level]
        first = np.searchsorted(nodes[level], operators)
        count = np.searchsorted(nodes[level], ends) - first
        value[operators] = _apply(flat[operators], value[nodes[level]], first, count)
    return value[inner & (depth == 1)].astype(np.int64)


def _apply(operator: np.ndarray, values: np.ndarray, first: np.ndarray, count: np.ndarray):
    """Each operator on its arguments: values[first : first + count]."""
    owner = np.repeat(np.arange(len(first), dtype=np.int32), count)
    order = np.sort(owner * 16 + values) & 15
    results = [
        order[first],
        order[first + count - 1],
        (order[first + (count - 1) // 2] + order[first + count // 2]) // 2,
        np.add.reduceat(values, first) % 10,
    ]
    return np.choose(operator - OPERATOR, results)
