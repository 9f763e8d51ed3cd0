"""Crops and larger blocks of block masks, against the dense array and against building anew."""

import random

import pytest

import masks
from tests.masks.brute import check
from tests.masks.cases import BLOCKS, LENGTHS, any_blocks, composition


@pytest.mark.parametrize("seed", range(150))
def test_crop_and_coarsen_anything(seed: int):
    rng = random.Random(seed)
    blocks = any_blocks(rng)
    dense, mask = blocks.to_dense(), masks.dense()  # of which `check` says the name
    for _ in range(3):
        n_q, n_k = rng.randint(1, blocks.n_q), rng.randint(1, blocks.n_k)
        check(mask, blocks.crop(n_q, n_k), dense[:, :, :n_q, :n_k])
    block_q, block_k = (size * rng.randint(1, 256 // size) for size in blocks.block_size)
    coarse = blocks.coarsen((block_q, block_k))
    check(mask, coarse, dense)
    assert coarse.block_size == (block_q, block_k)


@pytest.mark.parametrize("seed", range(60))
def test_the_same_as_building(seed: int):
    """Of compositions: smaller blocks joined."""
    rng = random.Random(seed)
    n_q, n_k, size = rng.choice(LENGTHS), rng.choice(LENGTHS), rng.choice(BLOCKS)
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
