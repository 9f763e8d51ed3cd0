"""Masks laid into documents, moved, rounded: laws, text, errors, a million tokens."""

import pickle
import random

import numpy as np
import pytest

import masks
from masks import Mask
from masks.patterns.documents import documents
from masks.transforms.packed import packed
from masks.transforms.shift import shift
from masks.transforms.snap import snap
from tests.masks.brute import brute_dense
from tests.masks.build_time import LONG, assert_builds_within
from tests.masks.cases import BLOCKS, composition


def dense(mask: Mask, n_q: int, n_k: int | None = None) -> np.ndarray:
    return mask.build(n_q, n_k, 16).to_dense()[0, 0]


def test_packed_counts_from_the_start_of_a_document():
    lengths = [40, 3, 90]
    result = dense(masks.global_tokens(2) >> packed(lengths), 133)
    start = 0
    for n in lengths:
        inside = result[start : start + n, start : start + n]
        assert np.array_equal(inside, dense(masks.global_tokens(2), n))
        start += n
    assert result.sum() == sum(n * n - (n - 2) ** 2 for n in lengths)


def test_bands_are_the_same_in_documents():
    """What depends on distances only need not be packed."""
    lengths = [100, 17, 0, 250]
    for mask in (masks.causal(), masks.local(30), masks.sliding(5), masks.dense()):
        assert (mask >> packed(lengths)).build(367) == (mask & documents(lengths)).build(367)
    bottom_right = masks.causal(align="bottom_right") >> packed([3, 5], [4, 9])
    rows = dense(bottom_right, 8, 13).sum(1).tolist()
    assert rows == [2, 3, 4, 5, 6, 7, 8, 9]


def test_documents_of_several_lengths_look_different():
    """Their blocks lie alike, but the random blocks depend on the length."""
    mask = masks.random_blocks(0.4, block=16) >> packed([96, 192, 64, 160])
    assert np.array_equal(mask.build(512, block_size=32).to_dense(), brute_dense(mask, 512, 512))


def test_batch_entries_do_not_mix():
    array = np.zeros((2, 1, 100, 100), bool)
    array[1] = True
    mask = masks.mask_from(array) >> packed([[100], [100]])
    assert np.array_equal(mask.build(100, block_size=16).to_dense(), array)


def test_one_document_is_the_mask_itself():
    mask = masks.butterfly(16) | masks.local(3, align="bottom_right")
    assert (mask >> packed(300)).build(300) == mask.build(300)
    assert (mask >> shift(0)).build(300) == mask.build(300)


@pytest.mark.parametrize(("q", "k"), [(8, 8), (-8, 0), (100, -30), (0, 64)])
def test_shift(q: int, k: int):
    mask = masks.local(20, 5, align="bottom_right") | masks.global_tokens(3)
    moved, inner = dense(mask >> shift(q, k), 130, 200), dense(mask, 130 - q, 200 - k)
    for i, j in np.ndindex(130, 200):
        expected = i >= q and j >= k and inner[i - q, j - k]
        assert moved[i, j] == expected, (i, j)


def test_shift_beyond_the_end():
    assert not dense(masks.dense() >> shift(200), 100).any()
    assert not dense(masks.dense() >> shift(0, 100), 100).any()
    assert dense(~(masks.dense() >> shift(100)), 100).all()


@pytest.mark.parametrize("seed", range(40))
def test_snap_encloses(seed: int):
    rng = random.Random(seed)
    n_q, n_k = rng.choice([50, 97, 128]), rng.choice([64, 130])
    size = rng.choice([1, 9, 16, 48]), rng.choice([7, 16, 32])
    mask = composition(rng, n_q, n_k, 2)
    block_size = rng.choice(BLOCKS), rng.choice(BLOCKS)
    outer, middle, inner = (
        m.build(n_q, n_k, block_size).to_dense()
        for m in (mask >> snap(size), mask, mask >> snap(size, "inward"))
    )
    assert (inner <= middle).all() and (middle <= outer).all()
    for cells in (mask >> snap(size), mask >> snap(size, "inward")):
        assert (
            brute_dense(cells >> snap(size), n_q, n_k).sum()
            == cells.build(n_q, n_k).to_dense().sum()
        )


def test_snap_to_the_blocks_of_the_grid_has_no_tiles():
    mask = masks.causal() & masks.local(300)
    blocks = (mask >> snap(128)).build(1000)
    assert len(blocks.bits) == 0 and blocks.nnz == mask.build(1000).nnz
    inward = (mask >> snap(128, "inward")).build(1000)
    assert inward.nnz == (mask.build(1000).layout() == 2).sum()


def test_snap_to_large_blocks_in_slabs(monkeypatch: pytest.MonkeyPatch):
    mask = masks.local(3) - masks.butterfly(24)
    expected = brute_dense(mask >> snap((50, 70)), 161, 161)
    monkeypatch.setattr("masks.transforms.snap.PAIRS_AT_ONCE", 300)
    assert np.array_equal((mask >> snap((50, 70))).build(161).to_dense(), expected)


def test_text():
    for step in (packed((3, 5)), packed(((3, 5), (8,))), packed((3, 5), (4, 0)), shift(3, -4)):
        mask = (masks.causal() | masks.local(3)) >> step
        assert mask.spelled and masks.parse(str(mask)) == mask
        assert pickle.loads(pickle.dumps(mask)) == mask
    for step in (shift(5), snap(64), snap((64, 16), "inward")):
        mask = masks.causal() >> step >> packed((9, 9)) | masks.dense()
        assert masks.parse(str(mask)) == mask
    assert str(masks.causal() >> packed((3, 5))) == "causal() >> packed((3, 5))"
    assert str(masks.causal() >> snap(64, "inward")) == "causal() >> snap(64, how='inward')"
    assert not (masks.causal() >> packed([3] * 65)).spelled


def test_attributes():
    rows = masks.random_blocks(0.5, per_head=True) >> packed([[30, 40], [10, 60]])
    assert rows.batch == 2 and rows.per_head
    assert rows.build(70, heads=3).layout().shape == (2, 3, 1, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: packed([-1]), "lengths is -1"),
        (lambda: packed([3, 4], [7]), "documents and key_lengths"),
        (lambda: (masks.causal() >> packed([5])).build(6), "5 tokens together, but n_q is 6"),
        (lambda: shift(1.5), "q is 1.5"),
        (lambda: shift(1, "a"), "k is 'a'"),
        (lambda: snap(0), "block is 0: give an integer >= 1"),
        (lambda: snap((1, 2, 3)), r"block is \(1, 2, 3\)"),
        (lambda: snap(16, "up"), "how is 'up': choose one of 'outward', 'inward'"),
    ],
)
def test_errors(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_million_tokens():
    lengths = 1 + np.random.default_rng(0).exponential(1999, 1000)
    lengths = lengths.astype(int).tolist()
    for mask, milliseconds in (
        (masks.causal() >> packed(lengths), 300),
        (masks.causal() >> shift(1000), 30),
        (masks.causal() >> snap(128), 30),
    ):
        assert_builds_within(mask, milliseconds)
    expected = documents(lengths) & masks.causal()
    assert (masks.causal() >> packed(lengths)).build(LONG) == expected.build(LONG)
    assert len((masks.causal() >> snap(128)).build(LONG).bits) == 0
