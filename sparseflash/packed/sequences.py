"""Masks of packed sequences, made from tensors of offsets: documents, block diffusion, trees."""

from typing import Any

import torch
from torch import Tensor

import masks
from masks.checks import block_sizes, flag, integer
from sparseflash.checks import readable
from sparseflash.dynamic.selection import Selection
from sparseflash.packed.blocks import from_spans, touching
from sparseflash.packed.spans import (
    check_integers,
    check_offsets,
    diffusion_spans,
    document_spans,
    tree_spans,
)


@torch.no_grad()
def documents(
    cu_seqlens: Tensor,
    n: int,
    *,
    cu_seqlens_k: Tensor | None = None,
    n_k: int | None = None,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    prefix: int | Tensor | None = None,
    shared: bool = False,
    block_size: int | tuple[int, int] = 128,
) -> Selection:
    """Documents packed one after another into n tokens, which do not see each other.

    With the lengths of the documents this is `masks.documents(lengths)`, and the options join it to
    further masks. Tokens after the last document are padding: they see nothing, and nobody sees
    them.

    Args:
        cu_seqlens: int32 or int64 (M + 1,), where each of M documents begins and the last one ends:
            [0, 3, 8] means lengths 3 and 5. Or (B, M + 1), a packing for every batch entry. A
            document may have no tokens, so `pad` gives every step the same shape.
        n: tokens of q and k, or of q alone.
        cu_seqlens_k: likewise, where the keys of each document begin, if there are more or fewer of
            them than queries, as with new tokens and a cache. The last query of a document then has
            the position of its last key, as in flash_attn.
        n_k: tokens of k, with cu_seqlens_k; n by default.
        causal: a query sees keys up to itself: `& masks.causal()`.
        window: (left, right), or one number for both: `& masks.local(left, right)`.
        prefix: tokens at the beginning of every document that all of it sees, whatever `causal` and
            `window` say (prefix-LM, or sinks beside a window). One number, or int (M,) or (B, M).
        shared: the first document is seen by all that follow, as in `masks.shared_prefix`. `window`
            does not limit that.
        block_size: tokens, one size or (block_q, block_k).

    Raises:
        ValueError: arguments of a wrong type, shape or range, and on a CPU values of `cu_seqlens`
            that do not ascend from 0 to at most n, or of `prefix` below 0. Those on a GPU are not
            read.
    """
    block_size = block_sizes(block_size)
    n, causal, shared = integer("n", n, min=0), flag("causal", causal), flag("shared", shared)
    offsets, offsets_k = check_offsets("cu_seqlens", cu_seqlens, n), None
    if n_k is not None and cu_seqlens_k is None:
        raise ValueError(f"n_k is {n_k}, and cu_seqlens_k None: give both")
    n_k = n if n_k is None else integer("n_k", n_k, min=0)
    if cu_seqlens_k is not None:
        offsets_k = check_offsets("cu_seqlens_k", cu_seqlens_k, n_k)
        if (offsets_k.shape, offsets_k.device) != (offsets.shape, offsets.device):
            raise ValueError(
                f"cu_seqlens_k has shape {tuple(cu_seqlens_k.shape)} on {offsets_k.device},"
                f" cu_seqlens {tuple(cu_seqlens.shape)} on {offsets.device}: give equal ones"
            )
    most_tokens = max(n, n_k)
    left, right = _sides(window, most_tokens)
    right = 0 if causal else right
    length = None if prefix is None else _prefix(prefix, offsets)
    lengths = None
    if isinstance(length, Tensor):  # beyond n_k, its sum with a start may pass the end of int32
        length, lengths = None, length.clamp(max=n_k)
    elif length is not None:
        length = min(length, n_k)
    spans = document_spans(offsets, offsets_k, n, n_k, left, right, shared, length, lengths)
    block_q, block_k = block_size
    rows, cols = -(-n // block_q), -(-n_k // block_k)
    diagonal = -(-block_q // block_k) + 1  # the most key blocks that block_q tokens in a row lie in
    # A row of blocks within one document has partial blocks where a span begins or ends in it. In
    # one with several documents all blocks of the first and of the last one may be partial. Each
    # document is the first or last of one such row. With other keys it may be both, of two rows.
    cross = offsets_k is not None
    limited = left < most_tokens
    ahead = prefix is not None or not causal
    edges = 2 + diagonal * (1 + limited + ahead) + limited + shared + (prefix is not None)
    room = rows * edges + (1 + (ahead or cross)) * (cols + 2 * rows) + (1 + cross) * shared * cols
    most = rows * cols if ahead or cross else touching(n, block_size)
    if not (shared or cross) and prefix is None:
        most = min(most, rows * (-(-(left + right + block_q - 1) // block_k) + 1))
    batch = len(offsets)
    return from_spans(spans, block_size, batch * min(room, most), batch * most, n_k=n_k)


def _sides(window: Any, n: int) -> tuple[int, int]:
    """Tokens to the left and to the right that a query sees; n for all."""
    sides = (n, n) if window is None else window
    if not isinstance(sides, tuple | list):
        sides = (sides, sides)
    if len(sides) != 2:
        raise ValueError(f"window is {window!r}: give one number, or (left, right)")
    left, right = (min(integer("window", side, min=0), n) for side in sides)
    return left, right


def _prefix(prefix: int | Tensor, offsets: Tensor) -> int | Tensor:
    if not isinstance(prefix, Tensor):
        return integer("prefix", prefix, min=0)
    rows, count = check_integers("prefix", prefix), offsets.shape[1] - 1
    if rows.device != offsets.device:
        raise ValueError(
            f"prefix is on {rows.device}, cu_seqlens on {offsets.device}: give both on one device"
        )
    if rows.shape[1] != count or len(rows) not in (1, len(offsets)):
        raise ValueError(
            f"prefix has shape {tuple(prefix.shape)}, and cu_seqlens {count} documents in"
            f" {len(offsets)} rows: give one number for each"
        )
    if rows.numel() and readable(rows) and rows.min() < 0:
        raise ValueError(f"prefix holds {int(rows.min())}: give integers >= 0")
    return rows


@torch.no_grad()
def block_diffusion(
    cu_seqlens: Tensor,
    n: int,
    size: int,
    *,
    interleaved: bool = False,
    block_size: int | tuple[int, int] = 128,
) -> Selection:
    """Return the training mask of block diffusion (arXiv 2503.09573) over packed documents.

    Every document is there twice, as a noisy and as a clean copy, and is cut into token blocks of
    `size` from its first token on. A noisy block sees itself, and the clean blocks of its document
    strictly before it. A clean block sees the clean blocks of its document up to itself. With one
    document of n / 2 tokens this is `masks.block_diffusion(size)`.

    Args:
        cu_seqlens: int32 or int64 (M + 1,), where each of M documents begins in one copy, and where
            the last one ends, at most at n / 2. Or (B, M + 1), a packing for every batch entry.
        n: tokens of q and k, both copies together; an even number.
        size: tokens of a token block, >= 1.
        interleaved: the noisy and the clean copy of a document follow one another, and then comes
            the next document: `masks.block_diffusion(size) >> masks.packed(lengths)`, the lengths
            of both copies together. Otherwise tokens 0 to n / 2 - 1 are the noisy copies, and the
            clean ones begin at n / 2.
        block_size: tokens, one size or (block_q, block_k).

    Raises:
        ValueError: arguments of a wrong type, shape or range, and values of `cu_seqlens` on a CPU
            that do not ascend from 0 to at most n / 2. Those on a GPU are not read.
    """
    block_q, block_k = block_size = block_sizes(block_size)
    n, size = integer("n", n, min=2), integer("size", size, min=1)
    interleaved = flag("interleaved", interleaved)
    if n % 2:
        raise ValueError(f"n is {n}: give an even number, for a noisy and a clean copy")
    half = n // 2
    offsets = check_offsets("cu_seqlens", cu_seqlens, half)
    size = min(size, half)
    spans = diffusion_spans(offsets, n, size, interleaved)
    rows, cols = -(-n // block_q), -(-n // block_k)
    # A row of blocks within one token block has partial blocks where its two spans begin and end.
    # One with several has them also near its tokens, in both copies. Where a copy of a document
    # ends in a row, all that the copy sees may be partial.
    near = (block_q + 2 * size) // block_k + 2
    several = min(rows, 2 * (half // size + offsets.shape[1]))
    room = 4 * rows + 3 * near * several + 2 * (cols + 2 * rows) + cols
    seen = sum(min(_clean_keys(row, block_size, half) + 2 * near + 2, cols) for row in range(rows))
    most = rows * cols if interleaved else min(seen, rows * cols)
    batch = len(offsets)
    return from_spans(spans, block_size, batch * min(room, most), batch * most)


def _clean_keys(row: int, block_size: tuple[int, int], half: int) -> int:
    """Blocks of clean keys before the last token of a row of blocks; both copies lie in halves."""
    block_q, block_k = block_size
    first, last = row * block_q, min((row + 1) * block_q, 2 * half) - 1
    place = half - 1 if first < half <= last else last % half
    return place // block_k + 1


@torch.no_grad()
def prefix_tree(
    enter: Tensor, leave: Tensor, n: int, *, block_size: int | tuple[int, int] = 128
) -> Selection:
    """Sequences packed as the tree of their prefixes: a token sees its ancestors and itself.

    This is `masks.prefix_tree(enter, leave)`, from the times of a depth-first walk. Tokens after
    the last node are padding: they see nothing, and nobody sees them.

    Args:
        enter: int32 or int64 (M,), the first token of each of M nodes, ascending from 0. Or (B, M),
            a tree for every batch entry. Of nodes that enter at one token the last one has it, and
            the others have none. So `pad`, which repeats the last node, gives every step the same
            shape.
        leave: likewise, for every node the token after the last one of all that continues it.
        n: tokens of q and k.
        block_size: tokens, one size or (block_q, block_k).

    Raises:
        ValueError: arguments of a wrong type, shape or range, and on a CPU times that are not those
            of a depth-first walk, or more than n tokens. Values on a GPU are not read.
    """
    block_q, block_k = block_size = block_sizes(block_size)
    n = integer("n", n, min=1)
    enters, leaves = check_integers("enter", enter), check_integers("leave", leave)
    if enters.shape != leaves.shape or enters.device != leaves.device:
        shapes = f"{tuple(enter.shape)} on {enter.device}, leave {tuple(leave.shape)}"
        raise ValueError(f"enter is {shapes} on {leave.device}: give both for every node")
    if readable(enters) and readable(leaves):
        _check_walk(enters, leaves, n)
    batch, nodes = enters.shape
    spans = tree_spans(enters, leaves, n)
    cols = -(-n // block_k)
    # Down a column of blocks, the keys end at as many places as nodes lie in it. Each end may cut
    # one block, and the blocks after it are alike. Before the ends comes the diagonal.
    room = 2 * (nodes + cols) + cols * (-(-block_k // block_q) + 2)
    most = touching(n, block_size)
    return from_spans(spans, block_size, batch * min(room, most), batch * most, columns=True)


def _check_walk(enters: Tensor, leaves: Tensor, n: int) -> None:
    """Raise ValueError for times of no depth-first walk of at most n tokens."""
    for enter, leave in zip(enters.tolist(), leaves.tolist(), strict=True):
        if max(leave) > n:
            raise ValueError(f"leave goes to {max(leave)}, but n is {n}: give the tokens of q")
        walk = dict(zip(enter, leave, strict=True))  # without nodes that have no tokens
        masks.prefix_tree(list(walk), list(walk.values()))
