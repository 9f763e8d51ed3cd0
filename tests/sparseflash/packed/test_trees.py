"""Prefix trees made from tensors: the blocks of the static mask, few tiles, and clear errors."""

import random
import re

import numpy as np
import pytest
import torch

import masks
from sparseflash import packed
from tests.masks.oracles.segments import any_walk
from tests.packing_cases import BLOCKS, as_tensor, assert_same_blocks


@pytest.mark.parametrize("seed", range(2))
def test_blocks_of_the_static_mask(seed):
    rng, draw = np.random.default_rng(seed), random.Random(seed)
    for _ in range(80):
        enter, leave = any_walk(draw, draw.randrange(1, 200))
        if max(leave) > 1000:  # takes long
            continue
        if max(leave) < 40:  # ends on the edges of blocks
            enter, leave = ([16 * n for n in times] for times in (enter, leave))
        end, block_size = max(leave), BLOCKS[rng.integers(len(BLOCKS))]
        n = end + int(rng.integers(3)) * 20  # padding
        dense = np.zeros((n, n), bool)
        dense[:end, :end] = masks.prefix_tree(enter, leave).build(end).to_dense()[0, 0]
        expected = masks.BlockMask.from_dense(dense, block_size)
        nodes = len(enter) + int(rng.integers(3))
        times = (packed.pad(as_tensor(rng, each)[: len(each)], nodes) for each in (enter, leave))
        assert_same_blocks(packed.prefix_tree(*times, n, block_size=block_size), expected)


def test_a_deep_tree_cuts_more_blocks_than_its_diagonal():
    """Nodes in one column of blocks end in a row of blocks each."""
    n, depth = 1024, 60
    ends = [n, *(n - 16 * i - 1 for i in range(1, depth))]
    turns = ends[:0:-1]  # the tokens between two ends are nodes of their own
    enter = torch.tensor([*range(depth), *turns])
    leave = torch.tensor([*ends, *turns[1:], n])
    found = packed.prefix_tree(enter, leave, n, block_size=(16, 128))
    expected = masks.prefix_tree(enter.tolist(), leave.tolist()).build(n, n, (16, 128))
    assert_same_blocks(found, expected)


def test_blocks_below_one_another_share_tiles():
    """A short root is in a partial block of every row: one tile but for the last rows."""
    answers = list(range(40, 4096, 1000))
    enter, leave = [0, *answers], [4096, *answers[1:], 4096]
    found = packed.prefix_tree(torch.tensor(enter), torch.tensor(leave), 4096, block_size=64)
    below = found.codes[0, 0, 20:60, 0]
    assert (below >= 0).all() and len(below.unique()) == 1
    assert found.codes.max() < 2 * (64 + len(enter)) < len(found.bits) < 400


def test_too_many_tiles_together_are_refused():
    nodes = torch.arange(4096)
    found = packed.prefix_tree(nodes, nodes + 1, 4096, block_size=16)
    with pytest.raises(ValueError, match="join static masks before, or take larger blocks"):
        _ = found & masks.strided(37)


def test_nodes_without_tokens():
    times = [[0, 10, 10, 30, 64], [64, 10, 30, 64, 64]]
    found = packed.prefix_tree(*map(torch.tensor, times), 64, block_size=16)
    expected = masks.prefix_tree((0, 10, 30), (64, 30, 64)).build(64, 64, 16)
    assert_same_blocks(found, expected)


ENTER, LEAVE = torch.tensor([0, 10, 30]), torch.tensor([64, 30, 64])
REFUSED = {
    "shapes": ((ENTER[:2], LEAVE, 64), "enter is (2,) on cpu, leave (3,) on cpu: give both for"),
    "beyond": ((ENTER, LEAVE, 63), "leave goes to 64, but n is 63: give the tokens of q"),
    "descends": ((ENTER.flip(0), LEAVE, 64), "enter must ascend from 0, not go (30, 10, 0)"),
    "no walk": ((ENTER, LEAVE.flip(0) - 1, 64), "node 1 enters at 10 and leaves at 29, before 30"),
    "an entry": (
        (torch.stack([ENTER, ENTER]), torch.stack([LEAVE, LEAVE.flip(0) - 1]), 64),
        "node 1 enters at 10 and leaves at 29, before 30",
    ),
}


@pytest.mark.parametrize("given, message", REFUSED.values(), ids=REFUSED)
def test_refused(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        packed.prefix_tree(*given)
