"""Sequences packed as the tree of their prefixes."""

import torch
from torch import Tensor

import masks
from masks.checks import block_sizes, integer
from sparseflash.checks import readable
from sparseflash.dynamic.selection import Selection
from sparseflash.packed.blocks import from_spans, touching
from sparseflash.packed.offsets import check_integers
from sparseflash.packed.spans import tree_spans


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
