"""Crops and larger blocks of block masks, against the dense array and against building anew."""

import random

import numpy as np
import pytest

import masks
from masks import BlockMask
from tests.masks.brute import check
from tests.masks.cases import BLOCKS, LENGTHS, composition

SMALL = (16, 32, 48, 64)


def random_blocks_mask(rng: random.Random, block_size: tuple[int, int]) -> BlockMask:
    """A mask with heads, batch and every kind of block, ragged or not."""
    n_q, n_k = rng.choice(LENGTHS), rng.choice(LENGTHS)
    data = np.random.default_rng(rng.randrange(1 << 30))
    shape = rng.choice([1, 2]), rng.choice([1, 3]), n_q, n_k
    whole = data.random((*shape[:2], -(-n_q // 16), -(-n_k // 16)))
    whole = whole.repeat(16, 2).repeat(16, 3)[:, :, :n_q, :n_k]
    holes = data.random(shape) < rng.choice([0, 0.001, 0.1])
    dense = (whole < rng.random()) & ~holes
    return BlockMask.from_dense(dense, block_size)


@pytest.mark.parametrize("seed", range(150))
def test_crop_of_anything(seed: int):
    rng = random.Random(seed)
    blocks = random_blocks_mask(rng, (rng.choice(BLOCKS), rng.choice(BLOCKS)))
    dense = blocks.to_dense()
    for _ in range(3):
        n_q, n_k = rng.randint(1, blocks.n_q), rng.randint(1, blocks.n_k)
        cut = blocks.crop(n_q, n_k)
        check(blocks, cut, dense[:, :, :n_q, :n_k])  # type: ignore[arg-type]
        assert cut == BlockMask.from_dense(dense[:, :, :n_q, :n_k], blocks.block_size)


@pytest.mark.parametrize("seed", range(150))
def test_coarsen_anything(seed: int):
    rng = random.Random(seed)
    size = rng.choice(SMALL), rng.choice(SMALL)
    blocks = random_blocks_mask(rng, size)
    larger = tuple(s * rng.randint(1, 256 // s) for s in size)
    coarse = blocks.coarsen(larger)  # type: ignore[arg-type]
    check(blocks, coarse, blocks.to_dense())  # type: ignore[arg-type]
    assert coarse.block_size == larger
    assert coarse == BlockMask.from_dense(blocks.to_dense(), larger)


@pytest.mark.parametrize("seed", range(60))
def test_the_same_as_building(seed: int):
    """Of compositions: smaller blocks joined."""
    rng = random.Random(seed)
    n_q, n_k, size = rng.choice(LENGTHS), rng.choice(LENGTHS), rng.choice(SMALL)
    mask = composition(rng, n_q, n_k, rng.randrange(3))
    blocks = mask.build(n_q, n_k, size)
    assert blocks.coarsen(size * 2) == mask.build(n_q, n_k, size * 2)


@pytest.mark.parametrize(
    "mask",
    [masks.causal(), masks.local(256) | masks.butterfly(128) | masks.global_tokens(64)],
    ids=str,
)
def test_a_million_tokens(mask: masks.Mask):
    blocks = mask.build(1 << 20)
    assert blocks.crop(777_777) == mask.build(777_777)
    assert blocks.coarsen(256) == mask.build(1 << 20, block_size=256)


def test_text():
    blocks = masks.local(3).build(100, block_size=32)
    assert blocks.crop(100) is blocks and blocks.coarsen(32) is blocks
    assert blocks.crop(50, 60).text == "(local(3))[:50, :60]"
    assert blocks.coarsen((64, 32)).text == "local(3)"
