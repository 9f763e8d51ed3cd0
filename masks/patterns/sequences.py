"""Sequences with a structure of their own: trees of shared prefixes, and histories of users."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from masks.algebra import Mask
from masks.checks import integer
from masks.leaves.leaf import ByLength, Leaf
from masks.leaves.lengths import batch_extent, flat, read_lengths, read_rows
from masks.predicate.table import table
from masks.predicate.where import Rule
from masks.registry import Example, canonical, pattern
from masks.runs import Grid, Ints

__all__ = ["hstu", "prefix_tree"]
SECTION = "Segments"  # of the gallery


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

    A node of m tokens, with d more below it, allows m(m + 1)/2 + m * d pairs.

    Args:
        enter: the first token of every node, ascending from 0; or one such list for every batch
            entry. A node may be a single token.
        leave: for every node, the token after the last one of all that continues it. The greatest
            is the number of tokens, and those after the length that is built are cut off.

    The text holds up to 64 numbers; more show as a digest, which `parse` cannot read.

    Raises:
        ValueError: the numbers are not those of a depth-first walk. At `build`, more tokens than
            the tree has.
    """
    enters, leaves = read_rows("enter", enter), read_rows("leave", leave)
    if (counts := [*map(len, enters)]) != (others := [*map(len, leaves)]):
        raise ValueError(f"enter has {counts} nodes and leave {others}: give every node both")
    stop = _stacked([_leave_by_token(*nodes) for nodes in zip(enters, leaves, strict=True)])
    last = _by_token(stop)
    mask = _covering("nodes", stop, lambda b, q, k: (k <= q) & (q < last(b, k)))
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

    A user of m tokens before the targets, c of them context, and t targets allows
    m(m + 1)/2 + cm - c(c + 1)/2 + t(m + 1) pairs without a window.

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
    first, stop = (_stacked(ends) for ends in zip(*spans, strict=True))
    counts = {count for row in last for count in row}
    shortest = counts.pop() if len(counts) == 1 else flat(last)
    low, high = _by_token(first), _by_token(stop)
    mask = _covering(
        "users", first, lambda b, q, k: ((low(b, q) <= k) & (k < high(b, q))) | (q == k)
    )
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


def _stacked(rows: Sequence[Ints]) -> Ints:
    """(batch entries, n) of numbers by token, where the shortest entry has n."""
    n = min(map(len, rows))
    return np.stack([row[:n] for row in rows])


def _by_token(numbers: Ints) -> Callable[[Any, Any], Any]:
    """Return the function (b, token) that looks up numbers (batch entries, n)."""
    n, entries = numbers.shape[1], table(numbers.ravel())
    return lambda b, token: entries[b * n + token]


def _covering(what: str, numbers: Ints, rule: Callable[..., Any]) -> Leaf:
    """Return the mask rule(b, q, k) for up to as many tokens as there are numbers of."""
    n, batch = numbers.shape[1], batch_extent(numbers)
    whole = Rule(partial(rule, 0)) if batch is None else Rule(rule, "bqk", batch=batch)

    def at(grid: Grid) -> Rule:
        if n < max(grid.n_q, grid.n_k):
            raise ValueError(
                f"the {what} have {n} tokens together, but n_q is {grid.n_q} and n_k {grid.n_k}: "
                "add one for the padding, or build for fewer tokens"
            )
        return whole

    return ByLength(at, batch=batch)
