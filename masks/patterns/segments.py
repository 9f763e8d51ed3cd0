"""Segments of equal length, trees of shared prefixes, and histories of users."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from masks.algebra import Mask
from masks.checks import flag, integer
from masks.leaves.leaf import ByLength, Leaf
from masks.leaves.lengths import batch_extent, flat, read_lengths, read_rows
from masks.patterns.bands import causal
from masks.predicate.table import table
from masks.predicate.where import Rule
from masks.registry import Example, canonical, pattern
from masks.runs import Grid, Ints

__all__ = ["block_causal", "block_diagonal", "block_diffusion", "hstu", "longnet", "prefix_tree"]
SECTION = "Segments"  # of the gallery


@pattern(
    "block_diagonal(48)", "chunks that see themselves", "(N // s)*s**2 + (N % s)**2", "", {"s": 48}
)
def block_diagonal(size: int, offset: int = 0) -> Mask:
    """Token blocks that see themselves only: (q + offset) // size == (k + offset) // size.

    This is "local attention" in Long Range Arena (arXiv 2011.04006; there size is 50), and windows
    that do not overlap elsewhere; two of them, the second with offset size // 2, make the shifted
    windows of Swin (arXiv 2103.14030) in one dimension. With `& causal()` a block is causal inside.

    Args:
        size: tokens of a token block, >= 1.
        offset: tokens that the first token block is short of, 0 <= offset < size.
    """
    size = integer("size", size, min=1)
    offset = integer("offset", offset, min=0, max=size - 1)
    return Rule(lambda q, k: (q + offset) // size == (k + offset) // size)


@pattern(
    "block_causal(32)",
    "chunks that see themselves and those before",
    "N*(N + s)/2",
    "2503.09573",
    {"s": 32},
)
def block_causal(size: int) -> Mask:
    """Token blocks that see themselves and all before them: k // size <= q // size.

    This is the mask of block diffusion (arXiv 2503.09573) in one stream, as it samples; it trains
    with `block_diffusion`. The same as `block_diagonal(size) | causal()`, which is its text. With
    blocks of `size` tokens, n(n+1)/2 of n x n are allowed, all of them full.
    """
    return block_diagonal(size) | causal()


@pattern(
    "block_diffusion(16)",
    "training of block diffusion: the noisy sequence, and the clean one after it",
    "N/2*(N/2 + s)",
    "2503.09573",
    {"s": 16},
)
def block_diffusion(size: int) -> Mask:
    """Return the training mask of block diffusion (BD3-LM, arXiv 2503.09573).

    The sequence has two halves: a noisy copy, and the clean tokens after it. Both are cut into
    token blocks of `size`, the last of which may be shorter. A noisy block sees itself, and the
    clean blocks strictly before it. The clean half is block-causal, and never sees the noisy one.
    So one pass trains every block. `block_causal` is the mask for one stream.

    Args:
        size: tokens of a token block, >= 1.

    Raises:
        ValueError: at `build`, an odd length, or other queries than keys.
    """
    size = integer("size", size, min=1)

    def at(grid: Grid) -> Rule:
        if grid.n_q != grid.n_k or grid.n_q % 2:
            raise ValueError(
                f"n_q is {grid.n_q} and n_k {grid.n_k}, but block_diffusion({size}) has two halves,"
                " noisy and clean: give one even number for both"
            )
        half = grid.n_q // 2

        def rule(q: Any, k: Any) -> Any:
            q_block, k_block = q % half // size, k % half // size
            own = ((q < half) == (k < half)) & (q_block == k_block)
            return own | ((k >= half) & (k_block < q_block))

        return Rule(rule)

    return ByLength(at)


@pattern(
    "longnet(64, 4)", "every 4th token of a segment", "N*w/r**2", "2307.02486", {"w": 64, "r": 4}
)
def longnet(segment: int, ratio: int, offset: int = 0, *, per_head: bool = False) -> Mask:
    """Every `ratio`-th token of a segment sees the others of its segment that are chosen with it.

    Key k is allowed for query q when q // segment == k // segment and both q % segment and
    k % segment leave the remainder `offset` modulo `ratio`. So n * segment / ratio**2 pairs of
    n x n are allowed where ratio divides segment and segment divides n, and one head alone leaves
    1 - 1/ratio of the queries with nothing to see.

    The paper runs several (segment, ratio) and adds the outputs weighted by their softmax sums. A
    union of masks is not quite that: the paper counts a pair twice that two of them allow.

    Args:
        segment: tokens of a segment, >= 1.
        ratio: dilation, >= 1; 1 gives `block_diagonal(segment)`.
        offset: 0 <= offset < ratio.
        per_head: head h has offset (offset + h) % ratio instead, so that `ratio` heads cover every
            query; `build` takes heads=ratio unless it is given a multiple of that.
    """
    segment, ratio = integer("segment", segment, min=1), integer("ratio", ratio, min=1)
    offset = integer("offset", offset, min=0, max=ratio - 1)

    def rule(h: Any, q: Any, k: Any) -> Any:
        chosen = (offset + h) % ratio
        both = (q % segment % ratio == chosen) & (k % segment % ratio == chosen)
        return (q // segment == k // segment) & both

    if flag("per_head", per_head) and ratio > 1:
        return Rule(rule, "hqk", ratio)
    return Rule(lambda q, k: rule(0, q, k))


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
    mask = _by_token("nodes", [stop], lambda q, k, last: (k <= q) & (q < last(k)))
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

    def rule(q: Any, k: Any, low: Callable[[Any], Any], high: Callable[[Any], Any]) -> Any:
        return ((low(q) <= k) & (k < high(q))) | (q == k)

    mask = _by_token("users", [first, stop], rule)
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


def _by_token(what: str, numbers: list[Ints], rule: Callable[..., Any]) -> Leaf:
    """Return the mask of rule(q, k, *lookups) for numbers (batch entries, n) by token."""
    n, batch = numbers[0].shape[1], batch_extent(numbers[0])

    tables: list[Any] = []  # made at the first build, since torch.compile traces this function

    def fn(b: Any, q: Any, k: Any) -> Any:
        look = [partial(lambda entries, i: entries[b * n + i], entries) for entries in tables]
        return rule(q, k, *look)

    whole = Rule(partial(fn, 0)) if batch is None else Rule(fn, "bqk", batch=batch)

    def at(grid: Grid) -> Rule:
        if n < max(grid.n_q, grid.n_k):
            raise ValueError(
                f"the {what} have {n} tokens together, but n_q is {grid.n_q} and n_k {grid.n_k}: "
                "add one for the padding, or build for fewer tokens"
            )
        tables[:] = tables or [table(entries.ravel()) for entries in numbers]
        return whole

    return ByLength(at, batch=batch)
