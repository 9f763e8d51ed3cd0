"""Masks laid into documents, moved, rounded and reordered."""

import random
from itertools import pairwise

import numpy as np
import pytest

import masks
from masks.patterns.canvas import neighborhood
from masks.transforms import reorder
from masks.transforms.packed import packed
from masks.transforms.reorder import hilbert, morton
from masks.transforms.snap import snap
from tests.masks.helpers import BLOCKS, any_grid, brute_dense, check, check_window, composition
from tests.masks.oracles import BATCH, HEADS, VARIED
from tests.masks.oracles.canvas import SIZES, any_canvas, any_canvas_mask
from tests.masks.oracles.packed import any_reorder, order_of
from tests.notes import each_seed


def test_documents_of_several_lengths_look_different():
    """Their blocks lie alike, but the random blocks depend on the length."""
    mask = masks.random_blocks(0.4, block=16) >> packed([96, 192, 64, 160])
    assert np.array_equal(mask.build(512, block_size=32).to_dense(), brute_dense(mask, 512, 512))


@pytest.mark.parametrize(
    "mask",
    [
        masks.streaming(4, 20),
        masks.tri_shape(3, 10, 40),
        masks.dense() - masks.diagonals((0, -5, 7)),
        masks.heads(masks.strided(8), masks.keys_at((2, 50, 90)) & ~masks.local(3)),
        masks.where(lambda q, k: (q - k) % 5 < 2) | masks.last_rows(9),
        masks.causal(align="bottom_right") | masks.block_diagonal(7),
    ],
    ids=str,
)
def test_every_document_has_the_mask_of_its_length(mask: masks.Mask):
    lengths, expected = (60, 1, 33, 100, 7), np.zeros((mask.period, 201, 201), bool)
    for start, stop in pairwise(np.cumsum((0, *lengths)).tolist()):
        own = mask.build(stop - start, block_size=16).to_dense()[0]
        expected[:, start:stop, start:stop] = own
    for sizes in (16, (48, 32)):
        blocks = (mask >> packed(lengths)).build(201, block_size=sizes)
        assert np.array_equal(blocks.to_dense()[0], expected)
        cut = (mask >> packed(lengths)).build(150, 170, block_size=sizes)
        assert np.array_equal(cut.to_dense()[0], expected[:, :150, :170])


def test_batch_entries_do_not_mix():
    array = np.zeros((2, 1, 100, 100), bool)
    array[1] = True
    mask = masks.mask_from(array) >> packed([[100], [100]])
    assert np.array_equal(mask.build(100, block_size=16).to_dense(), array)


def test_snap_to_large_blocks_in_slabs(monkeypatch: pytest.MonkeyPatch):
    mask = masks.local(3) - masks.butterfly(24)
    expected = brute_dense(mask >> snap((50, 70)), 161, 161)
    monkeypatch.setattr("masks.transforms.snap.PAIRS_AT_ONCE", 300)
    assert np.array_equal((mask >> snap((50, 70))).build(161).to_dense(), expected)


def test_snap_to_blocks_of_as_many_tokens_as_a_word_has_bits():
    for how in ("inward", "outward"):
        mask = masks.butterfly(1, levels=9) >> snap((1, 100), how)
        assert np.array_equal(mask.build(63, 64).to_dense(), brute_dense(mask, 63, 64))


@each_seed(45)
def test_composition(seed: int):
    """Masks on a canvas and others, in another order on both sides, on one, or on none."""
    rng = random.Random(seed)
    n_q = n_k = rng.choice(SIZES)
    side = rng.choice(["both", "queries", "keys", "each", "none"])
    if side == "each":
        n_q = rng.choice(SIZES)
    canvas = any_canvas(rng, n_k)
    mask = composition(rng, n_q, n_k, rng.randrange(3))
    if n_q == n_k and rng.random() < 0.6:
        image = any_canvas_mask(rng, canvas)
        mask = rng.choice([image, mask | image, mask & image, mask - image, image - mask])
    if side == "each":
        mask = mask >> any_reorder(rng, canvas, "keys")
        mask = mask >> any_reorder(rng, any_canvas(rng, n_q), "queries")
    elif side != "none":
        mask = mask >> any_reorder(rng, canvas, side)
    if rng.random() < 0.3:
        mask |= composition(rng, n_q, n_k, 0)
    dense = brute_dense(mask, n_q, n_k)
    check(mask, mask.build(n_q, n_k, (rng.choice(BLOCKS), rng.choice(BLOCKS))), dense)
    check_window(mask, any_grid(rng, n_q, n_k), dense[0, 0])


@each_seed(15)
def test_heads_and_batch(seed: int):
    rng = random.Random(seed)
    n = rng.choice(SIZES)
    canvas = any_canvas(rng, n)
    inner = rng.choice(VARIED)(rng, n, n) | any_canvas_mask(rng, canvas)
    mask = inner >> any_reorder(rng, canvas, "both")
    blocks = mask.build(n, block_size=rng.choice(BLOCKS), heads=HEADS)
    assert blocks.batch in (1, BATCH) and blocks.heads in (1, HEADS)
    check(mask, blocks, brute_dense(mask, n, n, blocks.batch, blocks.heads))


def test_in_chunks(monkeypatch: pytest.MonkeyPatch):
    """The chunks that bound the memory do not show in the result."""
    inner = neighborhood((20, 30), 7) | masks.local(40) - masks.butterfly(8)
    whole = (inner >> hilbert((20, 30))).build(600, block_size=16)
    monkeypatch.setattr(reorder, "CELLS_AT_ONCE", 300)
    assert ((inner & masks.dense()) >> hilbert((20, 30))).build(600, block_size=16) == whole


@each_seed(20)
def test_orders(seed: int):
    """By sorting, token by token; and the inverse undoes the order."""
    rng = random.Random(seed)
    n = rng.choice(SIZES)
    transform = any_reorder(rng, any_canvas(rng, n), "both")
    order, inverse = transform.order(n), transform.inverse(n)  # type: ignore[attr-defined]
    assert order.tolist() == order_of(transform)  # type: ignore[arg-type]
    assert order.dtype == inverse.dtype == np.int64 and not order.flags.writeable
    assert sorted(order.tolist()) == list(range(n))
    assert np.array_equal(order[inverse], np.arange(n))


@pytest.mark.parametrize("height", [*range(1, 10), 17, 32, 45, 100])
def test_hilbert_visits_neighbours(height: int):
    for width in (*range(1, 18), 31, 32, 99):
        y, x = np.divmod(hilbert((height, width)).order(height * width), width)
        assert np.array_equal(np.sort(y * width + x), np.arange(height * width))
        assert (abs(np.diff(y)) + abs(np.diff(x)) == 1).all()


@pytest.mark.parametrize("make", [hilbert, morton])
def test_aligned_squares_are_consecutive(make):
    y, x = np.divmod(make((64, 64)).order(64 * 64), 64)
    for side in (2, 4, 8, 16, 32):
        square = (y // side * 64 + x // side).reshape(-1, side * side)
        assert (square == square[:, :1]).all()


def test_golden_orders():
    assert hilbert((4, 4)).order(16).tolist() == (
        [0, 1, 5, 4, 8, 12, 13, 9, 10, 14, 15, 11, 7, 6, 2, 3]
    )
    assert hilbert((5, 5)).order(25).tolist() == (
        [0, 1, 6, 5, 10, 15, 20, 21, 16, 11, 12, 17, 22, 23, 24, 19, 18, 13, 14, 9, 8, 7, 2, 3, 4]
    )


def test_heads_of_unions_in_another_order():
    """A union repeats from where all of its parts do."""
    n, order = 346, np.arange(346)[::-1]
    mask = masks.heads(masks.strided(5) | masks.keys_at((32,)), masks.causal())
    dense = mask.build(n, block_size=16).to_dense()[:, :, order][..., order]
    found = (mask >> masks.permuted(order)).build(n, block_size=16)
    assert found == masks.BlockMask.from_dense(dense, 16)
