"""Sequences packed one after the other: documents, trees of shared prefixes, histories of users."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from masks.algebra import Mask
from masks.checks import integer
from masks.leaves.leaf import ByLength, Leaf
from masks.predicate.table import table
from masks.predicate.where import Rule
from masks.registry import Example, canonical, pattern, plain
from masks.runs import Grid, Ints

__all__ = [
    "documents",
    "documents_from_ids",
    "documents_from_offsets",
    "hstu",
    "prefix_tree",
    "shared_prefix",
]
SECTION = "Segments"  # of the gallery

Rows = tuple[tuple[int, ...], ...]  # numbers for every batch entry
FAR = 1 << 40  # more than the tokens of a sequence


@pattern("documents((60, 100, 96))", "a packed batch", "60**2 + 100**2 + 96**2", digest=True)
def documents(lengths: Any, key_lengths: Any = None) -> Mask:
    """Documents that follow one another and see themselves only: id[q] == id[k].

    With `& causal()` it is the mask of packed causal training (arXiv 2107.02027 packs like this).

    Args:
        lengths: tokens of every document, >= 0, as a list, array or tensor; or one such list for
            every batch entry, and the mask then has their number as `batch`. Their sum must be at
            least the length that is built; tokens after it are cut off.
        key_lengths: the same for the keys, where they are others (cross attention of packed
            sequences, like the two `cu_seqlens` of FlashAttention's varlen functions).

    The text holds up to 64 numbers, here and below; more show as a digest, which `parse` cannot
    read.
    """
    rows, key_rows = read_both(lengths, key_lengths)
    make = lambda: [_numbers(rows), _numbers(key_rows)]  # noqa: E731
    mask = by_token("documents", len(rows), make, lambda q, k, of, key_of: of(q) == key_of(k))
    other = None if key_rows == rows else flat(key_rows)
    return canonical(mask, lengths=flat(rows), key_lengths=other)


@pattern(
    "documents_from_offsets((0, 60, 160, 256))",
    "the same from `cu_seqlens`",
    "60**2 + 100**2 + 96**2",
)
def documents_from_offsets(offsets: Any, key_offsets: Any = None) -> Mask:
    """`documents` from the token where each begins, and the end: [0, 3, 8] means lengths 3 and 5.

    These are the `cu_seqlens` of FlashAttention's varlen functions: ascending from 0.
    """
    key_lengths = None if key_offsets is None else _differences("key_offsets", key_offsets)
    return documents(_differences("offsets", offsets), key_lengths)


@pattern(
    "documents_from_ids((0,) * 60 + (1,) * 100 + (0,) * 96)",
    "the same from a number for every token; a document may have several pieces",
    "156**2 + 100**2",
    digest=True,
)
def documents_from_ids(ids: ArrayLike, key_ids: ArrayLike | None = None) -> Mask:
    """`documents` from the number of every token's document: key k is allowed when id[q] == id[k].

    Args:
        ids: integers, (n,), or (batch, n). They need not be sorted: a document may have several
            pieces.
        key_ids: the same for the keys, where they are others.
    """
    rows = _read_ids("ids", ids)
    key_rows = rows if key_ids is None else _read_ids("key_ids", key_ids)
    if len(rows) != len(key_rows):
        raise ValueError(f"ids has {len(rows)} rows and key_ids {len(key_rows)}: give as many")
    first, key_first = ([_changes(row) for row in side] for side in (rows, key_rows))
    in_order = True
    for row, at, key_row, key_at in zip(rows, first, key_rows, key_first, strict=True):
        in_order &= np.array_equal(row[at], key_row[key_at]) and len(np.unique(row)) == len(at)
    if in_order:
        lengths, key_lengths = (
            [np.diff(at, append=side.shape[1]).tolist() for at in starts]
            for side, starts in ((rows, first), (key_rows, key_first))
        )
        return documents(lengths, None if key_ids is None else key_lengths)
    make = lambda: [rows, key_rows]  # noqa: E731
    mask = by_token("ids", len(rows), make, lambda q, k, of, key_of: of(q) == key_of(k))
    other = None if key_ids is None else flat(key_rows.tolist())
    return canonical(mask, ids=flat(rows.tolist()), key_ids=other)


def _changes(row: NDArray[np.integer]) -> Ints:
    """Return where the stretches of equal numbers begin."""
    return np.flatnonzero(np.append(True, row[1:] != row[:-1]))


@pattern("shared_prefix(32, (100, 124))", "several continuations of one prompt", digest=True)
def shared_prefix(prefix: int, lengths: Any) -> Mask:
    """Return a prefix that all see, and documents after it that see the prefix and themselves.

    The prefix sees itself only. With `& causal()` it is one prompt with several continuations, as
    in attention-gym's `generate_shared_prefix_mask_mod` and Hydragen (arXiv 2402.05099).

    Args:
        prefix: its tokens, >= 0.
        lengths: tokens of the documents, as for `documents`; with the prefix, at least the
            length that is built.
    """
    prefix = integer("prefix", prefix, min=0)
    rows = read_lengths("lengths", lengths)
    make = lambda: [_numbers([(prefix, *row) for row in rows])]  # noqa: E731
    rule = lambda q, k, of: (of(q) == of(k)) | (k < prefix)  # noqa: E731
    mask = by_token("documents", len(rows), make, rule)
    return canonical(mask, lengths=flat(rows))


@pattern(
    "prefix_tree((0, 48, 80, 128, 176), (256, 176, 128, 176, 256))",
    "rollouts that share prefixes, every token once",
    "N*(N + 1)/2 - 48**2 - 128*80",
    "verl#6401",
    digest=True,
)
def prefix_tree(enter: Any, leave: Any) -> Mask:
    """Sequences packed as the tree of their prefixes: a token sees its ancestors and itself.

    The nodes of the tree are stretches of tokens. They come in the order of a depth-first walk: a
    node, then all that continues it. Key k is allowed for query q when k <= q < leave, where
    `leave` is that of k's node. So a path from the root is causal, and sees no other branch. Tree
    training and rollouts that branch use it (verl#6401, TRL#7328, AReaL#804). Several roots are
    trees packed one after another. `shared_prefix(prefix, lengths) & causal()` is the tree of one
    prompt and its answers.

    Args:
        enter: the first token of every node, ascending from 0; or one such list for every batch
            entry. A node may be a single token.
        leave: for every node, the token after the last one of all that continues it. The greatest
            is the number of tokens, and those after the length that is built are cut off.

    Raises:
        ValueError: the numbers are not those of a depth-first walk. At `build`, more tokens than
            the tree has.
    """
    enters, leaves = read_rows("enter", enter), read_rows("leave", leave)
    if (counts := [*map(len, enters)]) != (others := [*map(len, leaves)]):
        raise ValueError(f"enter has {counts} nodes and leave {others}: give every node both")
    stop = [_stacked([_leave_by_token(*nodes) for nodes in zip(enters, leaves, strict=True)])]
    rule = lambda q, k, last: (k <= q) & (q < last(k))  # noqa: E731
    mask = by_token("nodes", len(enters), lambda: stop, rule)
    return canonical(mask, enter=flat(enters), leave=flat(leaves))


def _leave_by_token(enter: tuple[int, ...], leave: tuple[int, ...]) -> Ints:
    """`leave` of the node of every token; ValueError where the nodes are not those of a walk."""
    if enter[:1] != (0,) or any(b <= a for a, b in pairwise(enter)):
        raise ValueError(f"enter must ascend from 0, not go {enter[:8]}: sort the nodes by it")
    around: list[int] = []  # where the nodes end that hold the next one
    following = (*enter[1:], max(leave))
    for number, (start, stop, end) in enumerate(zip(enter, leave, following, strict=True)):
        while around and around[-1] <= start:
            around.pop()
        problem = f"before {end}, where its own tokens end" if stop < end else ""
        if around and stop > around[-1]:
            problem = f"after {around[-1]}, where the node around it ends"
        if problem:
            raise ValueError(
                f"node {number} enters at {start} and leaves at {stop}, {problem}: give the times "
                "of a depth-first walk"
            )
        around.append(stop)
    return np.repeat(leave, np.diff([*enter, max(leave)]))


@pattern(
    "hstu(256, targets=32, context=16)",
    "a user of a recommender: context, history, and candidates that do not see each other",
    "m*(m + 1)/2 + c*m - c*(c + 1)/2 + t*(m + 1)",
    "2402.17152",
    {"m": 224, "c": 16, "t": 32},
    also=(
        Example(
            "hstu((96, 160), targets=(16, 40), context=8, window=32)",
            "two users, each with a window",
            "",
            "2402.17152",
        ),
    ),
    digest=True,
)
def hstu(
    lengths: Any, targets: Any = 0, *, context: int = 0, window: int | None = None, full: int = 0
) -> Mask:
    """Users of a generative recommender, packed: context, then history, then targets (candidates).

    This is the mask of HSTU (arXiv 2402.17152), as its library generative-recommenders defines it.
    Users do not see each other. A context token sees all context and history. A history token sees
    the context, and the history up to itself. A target sees context, history and itself.

    With a window, history and targets see as many places before themselves. All of the context has
    the place of its last token, and all of the targets have the place of the first one.

    Args:
        lengths: tokens of every user, as for `documents`.
        targets: the last tokens of a user (`num_targets`), one number or one for every user.
        context: the first tokens of every user (`contextual_seq_len`).
        window: places before a token that it sees, >= 1 (`max_attn_len`); by default all.
        full: tokens of the history before the targets that the window does not limit
            (`min_full_attn_seq_len`); beyond 0 it does not limit the targets either.

    Raises:
        ValueError: a user is shorter than context and targets. At `build`, more tokens than the
            users have.
    """
    rows, last = read_lengths("lengths", lengths), read_rows("targets", targets)
    if [*map(len, last)] == [1]:
        last = tuple(last[0] * len(row) for row in rows)
    if [*map(len, last)] != [*map(len, rows)]:
        raise ValueError(f"targets is {targets!r}: give one number, or one for every user")
    context, full = integer("context", context, min=0), integer("full", full, min=0)
    window = None if window is None else integer("window", window, min=1)
    if full and window is None:
        raise ValueError(f"full is {full} and window None: give the window too")
    spans = [_spans(*users, context, window, full) for users in zip(rows, last, strict=True)]
    ends = [_stacked(numbers) for numbers in zip(*spans, strict=True)]
    counts = {count for row in last for count in row}
    shortest = counts.pop() if len(counts) == 1 else flat(last)

    def rule(q: Any, k: Any, low: Callable[[Any], Any], high: Callable[[Any], Any]) -> Any:
        return ((low(q) <= k) & (k < high(q))) | (q == k)

    mask = by_token("users", len(rows), lambda: ends, rule)
    return canonical(mask, lengths=flat(rows), targets=shortest)


def _spans(
    lengths: tuple[int, ...], targets: tuple[int, ...], context: int, window: int | None, full: int
) -> tuple[Ints, Ints]:
    """(first, stop): the keys that every token sees beside itself."""
    for user, (length, count) in enumerate(zip(lengths, targets, strict=True)):
        if length < context + count:
            raise ValueError(
                f"user {user} has {length} tokens, but context is {context} and targets {count}: "
                "give no more than there are"
            )
    end = np.repeat(np.cumsum(lengths), lengths)
    start, target = end - np.repeat(lengths, lengths), end - np.repeat(targets, lengths)
    token, first = np.arange(len(end)), start
    if window is not None:
        place = np.minimum(token, target)
        near = place - (start + max(context - 1, 0)) <= window
        near |= (full > 0) & (place >= target - full)
        first = np.where(near, start, place - window)
    return first, np.where(token < start + context, target, np.minimum(token + 1, target))


def _differences(name: str, offsets: Any) -> list[list[int]]:
    rows = []
    for row in read_lengths(name, offsets):
        if row[0] != 0 or any(b < a for a, b in pairwise(row)):
            raise ValueError(f"{name} must ascend from 0, not go {row[:8]}: give cumulative sums")
        rows.append([b - a for a, b in pairwise(row)])
    return rows


def _read_ids(name: str, ids: ArrayLike) -> NDArray[np.integer]:
    data = np.asarray(ids)
    if data.dtype.kind not in "iu" or data.ndim not in (1, 2) or data.size == 0:
        raise ValueError(
            f"{name} are {data.dtype} of shape {data.shape}: give integers (n,) or (batch, n)"
        )
    return np.atleast_2d(data)


def read_rows(name: str, numbers: Any) -> Rows:
    """Integers >= 0 given as one, several, or several for every batch entry."""
    nested = plain(numbers)
    if not isinstance(nested, tuple):
        nested = (nested,)
    if not any(isinstance(entry, tuple) for entry in nested):
        nested = (nested,)
    if not all(isinstance(entry, tuple) for entry in nested):
        raise ValueError(f"{name} mixes numbers and lists: give one list, or one per batch entry")
    return tuple(
        tuple(integer(f"a number in {name}", n, min=0, max=FAR) for n in entry) for entry in nested
    )


def read_lengths(name: str, lengths: Any) -> Rows:
    """Lengths of documents, given in the same ways; every batch entry has a token."""
    rows = read_rows(name, lengths)
    for row in rows:
        if not 0 < sum(row) < FAR:
            raise ValueError(f"{name} has {sum(row)} tokens in a row: give 1 to {FAR - 1}")
    return rows


def read_both(lengths: Any, key_lengths: Any) -> tuple[Rows, Rows]:
    """Lengths of documents among queries and keys, the same where `key_lengths` is None."""
    rows = read_lengths("lengths", lengths)
    key_rows = rows if key_lengths is None else read_lengths("key_lengths", key_lengths)
    counts, key_counts = ([len(row) for row in side] for side in (rows, key_rows))
    if counts != key_counts:
        raise ValueError(
            f"lengths has {counts} documents and key_lengths {key_counts}: give every document "
            "both, 0 where it has no keys"
        )
    return rows, key_rows


def flat(rows: Sequence[Sequence[int]]) -> Sequence[Any]:
    """Return the numbers of the only batch entry, or of all of them."""
    return rows[0] if len(rows) == 1 else rows


def _stacked(rows: Sequence[Ints]) -> Ints:
    """(batch entries, n) of numbers by token, where the shortest entry has n."""
    n = min(map(len, rows))
    return np.stack([row[:n] for row in rows])


def _numbers(rows: Sequence[Sequence[int]]) -> Ints:
    """(batch entries, n), which of the documents of these lengths a token belongs to."""
    return _stacked([np.repeat(np.arange(len(row)), row) for row in rows])


def by_token(
    what: str, entries: int, make: Callable[[], Sequence[Any]], rule: Callable[..., Any]
) -> Leaf:
    """Return the mask of rule(q, k, *lookups) for numbers by token.

    Args:
        what: has the tokens, in words.
        make: returns the arrays (batch entries, n) of the numbers, those of queries first, and
            those of keys last. It is called at the first build, since torch.compile traces this.
    """
    batch = None if entries == 1 else entries
    tables: list[tuple[Any, int]] = []

    def fn(b: Any, q: Any, k: Any) -> Any:
        look = [partial(lambda entries, n, i: entries[b * n + i], *both) for both in tables]
        return rule(q, k, *look)

    whole = Rule(partial(fn, 0)) if batch is None else Rule(fn, "bqk", batch=batch)

    def at(grid: Grid) -> Rule:
        tables[:] = tables or [(table(x.ravel()), x.shape[1]) for x in make()]
        cover(what, grid, tables[0][1], tables[-1][1])
        return whole

    return ByLength(at, batch=batch)


def cover(what: str, grid: Grid, n_q: int, n_k: int) -> None:
    """Raise ValueError where a mask is given for fewer tokens than those of the grid."""
    for name, have, n in (("n_q", n_q, grid.n_q), ("n_k", n_k, grid.n_k)):
        if have < n:
            raise ValueError(
                f"the {what} have {have} tokens together, but {name} is {n}: add one for the "
                "padding, or build for fewer tokens"
            )
