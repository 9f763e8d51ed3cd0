"""Segments, documents, cells, trees of shared prefixes, and users of recommenders."""

import random

import numpy as np

import masks
from masks import Mask, hstu, prefix_tree
from tests.masks.oracles import BATCH, HEADS, leaf, oracle, varied


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    mask = masks.block_diffusion(rng.choice([1, 3, 4, 16, 24, 50, 1000]))
    n = max(n_q, n_k) + max(n_q, n_k) % 2  # it has two halves: a packed document of even length
    return mask if n == n_q == n_k else mask >> masks.packed((n,))


def any_lengths(rng: random.Random, n: int) -> list[int]:
    """Lengths that reach `n`, some of them 0."""
    longest, lengths = rng.choice([3, 20, 60, 200]), [rng.randrange(4)]
    while sum(lengths) < n:
        lengths.append(rng.randrange(longest + 1))
    return lengths


def ids_of(rows: list[list[int]]) -> np.ndarray:
    ids = [[i for i, length in enumerate(row) for _ in range(length)] for row in rows]
    shortest = min(map(len, ids))
    return np.array([row[:shortest] for row in ids])


def packs(rng: random.Random, rows: list[list[int]]) -> Mask:
    """`documents` or `shared_prefix` of a list of lengths for every batch entry."""
    lengths = rows if len(rows) > 1 else rows[0]
    if rng.random() < 0.5:
        return masks.documents(lengths)
    return masks.shared_prefix(rng.choice([0, 1, 20, 100]), lengths)


def pieces(rng: random.Random, shape: tuple[int, ...]) -> np.ndarray:
    """Ids in stretches of random lengths; an id comes again."""
    data = np.random.default_rng(rng.randrange(1 << 30))
    count = int(np.prod(shape))
    longest = rng.choice([3, 9, 40])
    return np.resize(data.integers(-1, 3, count).repeat(data.integers(1, longest, count)), shape)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    """Cross attention: the documents have other lengths among the keys."""
    q, k = any_lengths(rng, n_q), any_lengths(rng, n_k)
    count = max(len(q), len(k))
    return masks.documents(*[x + [0] * (count - len(x)) for x in (q, k)])


@oracle("documents", "documents_from_ids", "shared_prefix")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    """From the arguments of the call, which hold every number also where the text is a digest."""
    given, prefix = mask.arguments, mask.arguments.get("prefix", 0)
    if mask.kind == "documents_from_ids":
        ids, key_ids = (np.atleast_2d(given[name] or given["ids"]) for name in ("ids", "key_ids"))
    else:
        ids, key_ids = (
            ids_of([[prefix, *row] for row in nested(given.get(name) or given["lengths"])])
            for name in ("lengths", "key_lengths")
        )
    same = ids[:, None, :n_q, None] == key_ids[:, None, None, :n_k]
    return same | (np.arange(n_k) < prefix)


def nested(rows: tuple) -> tuple:
    """A row for every batch entry."""
    return rows if isinstance(rows[0], tuple) else (rows,)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    sizes = any_lengths(rng, max(n_q, n_k))
    every = range(len(sizes))
    return masks.cells(sizes, [rng.sample(every, rng.randrange(min(len(sizes), 4))) for _ in every])


@oracle("cells")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    sizes, neighbours = mask.arguments["sizes"], mask.arguments["neighbours"]
    cell = [number for number, size in enumerate(sizes) for _ in range(size)]
    dense = np.zeros((n_q, n_k), bool)
    for q, k in np.ndindex(n_q, n_k):
        dense[q, k] = cell[k] == cell[q] or cell[k] in neighbours[cell[q]]
    return dense


Walk = tuple[list[int], list[int]]  # enter and leave of the nodes


def any_walk(rng: random.Random, n: int) -> Walk:
    """Depth-first times of random trees of at least n tokens together."""
    enter: list[int] = []
    leave: list[int] = []
    longest, children = rng.choice([1, 4, 20, 90]), rng.choice([1, 2, 4])

    def walk(token: int, depth: int) -> int:
        """Adds a node that begins at `token`; the end of its subtree."""
        node = len(enter)
        enter.append(token)
        leave.append(0)
        token += rng.randint(1, longest)
        for _ in range(rng.randint(0, children) if depth < 6 else 0):
            token = walk(token, depth + 1)
        leave[node] = token
        return token

    end = 0
    while end < n:
        end = walk(end, 0)
    return enter, leave


@oracle("prefix_tree")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    """Every path from a root by itself: the tokens of a path, causal among themselves."""
    given = mask.arguments
    return np.stack(
        [
            paths(enter, leave, max(n_q, n_k))[None, :n_q, :n_k]
            for enter, leave in zip(nested(given["enter"]), nested(given["leave"]), strict=True)
        ]
    )


def paths(enter: tuple[int, ...], leave: tuple[int, ...], n: int) -> np.ndarray:
    dense = np.zeros((max(n, max(leave)),) * 2, bool)
    ends = [*enter[1:], max(leave)]
    for node in range(len(enter)):
        if node + 1 < len(enter) and enter[node + 1] < leave[node]:
            continue  # the longer paths through its children hold its own
        above = [i for i in range(node + 1) if enter[i] <= enter[node] < leave[i]]
        path = [token for i in above for token in range(enter[i], ends[i])]
        dense[np.ix_(path, path)] |= np.tri(len(path), dtype=bool)
    return dense


def any_users(rng: random.Random, n: int, batch: int) -> Mask:
    """Users of at least n tokens together, in every batch entry."""
    context, most = rng.choice([0, 0, 1, 3, 20]), rng.choice([0, 1, 5, 40])
    targets = [[rng.randint(0, most) for _ in any_lengths(rng, n)] for _ in range(batch)]
    histories = [any_lengths(rng, n) for _ in range(batch)]
    pairs = [list(zip(*entry, strict=False)) for entry in zip(histories, targets, strict=True)]
    lengths = [[context + history + last for history, last in entry] for entry in pairs]
    missing = [max(n - sum(row), 0) + context for row in lengths]  # a user without targets
    return hstu(
        [[*row, more] for row, more in zip(lengths, missing, strict=True)],
        [[*(last for _, last in entry), 0] for entry in pairs],
        context=context,
        **rng.choice([{}, {"window": rng.randint(1, 60), "full": rng.choice([0, 0, 1, 9])}]),
    )


leaf(
    lambda rng, n_q, n_k: masks.block_diagonal(
        size := rng.choice([1, 3, 16, 17, 32, 50, 64, 1000]), rng.randrange(size)
    ),
    lambda rng, n_q, n_k: masks.block_causal(rng.choice([1, 5, 16, 24, 70])),
    lambda rng, n_q, n_k: masks.longnet(
        rng.choice([1, 7, 16, 24, 64, 100]),
        ratio := rng.choice([1, 2, 3, 4, 8, 30]),
        rng.randrange(ratio),
    ),
    lambda rng, n_q, n_k: packs(rng, [any_lengths(rng, max(n_q, n_k))]),
    lambda rng, n_q, n_k: masks.documents_from_ids(
        pieces(rng, (max(n_q, n_k),)), rng.choice([None, pieces(rng, (n_k,))])
    ),
    lambda rng, n_q, n_k: prefix_tree(*any_walk(rng, max(n_q, n_k))),
    lambda rng, n_q, n_k: any_users(rng, max(n_q, n_k), 1),
)
varied(
    lambda rng, n_q, n_k: masks.longnet(
        rng.choice([5, 16, 50, 64]), ratio := rng.choice([2, HEADS]), rng.randrange(ratio),
        per_head=True,
    ),
    lambda rng, n_q, n_k: packs(rng, [any_lengths(rng, max(n_q, n_k)) for _ in range(BATCH)]),
    lambda rng, n_q, n_k: masks.documents_from_ids(pieces(rng, (BATCH, max(n_q, n_k)))),
    lambda rng, n_q, n_k: prefix_tree(
        *zip(*[any_walk(rng, max(n_q, n_k)) for _ in range(BATCH)], strict=True)
    ),
    lambda rng, n_q, n_k: any_users(rng, max(n_q, n_k), BATCH),
)  # fmt: skip


@oracle("hstu")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    given = mask.arguments
    rows = nested(given["lengths"])
    last = given["targets"]
    last = [[last] * len(row) for row in rows] if isinstance(last, int) else nested(last)
    batch = []
    for lengths, targets in zip(rows, last, strict=True):
        dense = np.zeros((sum(lengths),) * 2, bool)
        begin = 0
        for length, count in zip(lengths, targets, strict=True):
            user = slice(begin, begin + length)
            dense[user, user] = one_user(length, count, given)
            begin += length
        batch.append(dense[None, :n_q, :n_k])
    return np.stack(batch)


def one_user(length: int, targets: int, given: dict) -> np.ndarray:
    """From the ids of the library: 0 for context, one and the same for targets."""
    context, window, full = given["context"], given["window"], given["full"]
    end = length - targets - max(context - 1, 0)  # the id of the targets
    ids = np.array([min(max(i - max(context - 1, 0), 0), end) for i in range(length)])
    of_query, of_key = ids[:, None], ids[None, :]
    distance = of_query - of_key
    near = distance <= (length if window is None else window)
    unlimited = (full > 0) & (of_query >= end - full)
    dense = np.eye(length, dtype=bool) | ((distance > 0) & (near | unlimited))
    return dense | ((context > 0) & (of_query == 0) & (of_key < end))
