"""Documents and block-diagonal masks: counts, ways to give them, errors, a million tokens."""

import pickle

import numpy as np
import pytest

import masks
from masks import Mask
from masks.patterns.documents import (
    documents,
    documents_from_ids,
    documents_from_offsets,
    shared_prefix,
)
from masks.patterns.segments import block_causal, block_diagonal
from tests.masks.build_time import LONG, assert_builds_within


def pairs(mask: Mask, n_q: int, n_k: int | None = None) -> int:
    return int(mask.build(n_q, n_k, 16).to_dense().sum())


def test_counts_of_blocks():
    assert block_diagonal(128).build(16 * 128).nnz == 16
    assert block_causal(128).build(16 * 128).nnz == 16 * 17 // 2
    assert block_causal(128).build(16 * 128).layout().max() == 2  # all of them full
    assert len(block_causal(128).build(16 * 128).bits) == 0
    blocks = documents([3 * 64, 5 * 64]).build(8 * 64, block_size=64)
    assert blocks.nnz == 9 + 25 and len(blocks.bits) == 0
    assert (documents([3 * 64, 5 * 64]) & masks.causal()).build(512, block_size=64).nnz == 6 + 15


def test_counts_of_pairs():
    lengths = [5, 0, 70, 1, 100]
    n = sum(lengths)
    assert pairs(documents(lengths), n) == sum(x * x for x in lengths)
    assert pairs(documents(lengths) & masks.causal(), n) == sum(x * (x + 1) // 2 for x in lengths)
    prefix = shared_prefix(30, lengths)
    assert pairs(prefix, n + 30) == 30 * (n + 30) + sum(x * x for x in lengths)
    q, k = [4, 9, 0, 30], [50, 0, 7, 3]
    assert pairs(documents(q, k), sum(q), sum(k)) == sum(a * b for a, b in zip(q, k, strict=True))
    assert pairs(block_diagonal(50), 120) == 50 * 50 * 2 + 20 * 20
    assert pairs(block_diagonal(50, 20), 120) == 30 * 30 + 50 * 50 + 40 * 40


def test_block_causal_is_what_it_says():
    q, k = np.arange(100)[:, None], np.arange(140)
    dense = block_causal(24).build(100, 140, 32).to_dense()[0, 0]
    assert np.array_equal(dense, k // 24 <= q // 24)


@pytest.mark.parametrize("as_array", [list, tuple, np.array])
def test_ways_to_give_documents(as_array):
    mask = documents((3, 5, 8))
    assert documents(as_array([3, 5, 8])) == mask
    assert documents_from_offsets(as_array([0, 3, 8, 16])) == mask
    assert documents_from_ids(as_array([7] * 3 + [9] * 5 + [2] * 8)) == mask
    cross = documents((3, 5, 8), key_lengths=(1, 0, 4))
    assert documents_from_offsets(as_array([0, 3, 8, 16]), as_array([0, 1, 1, 5])) == cross
    assert documents(16) == documents([16]) == documents([[16]])
    rows = documents(as_array([[3, 5], [8, 0]]))
    assert rows.batch == 2 and rows == documents_from_offsets([[0, 3, 8], [0, 8, 8]])


def test_tensors():
    torch = pytest.importorskip("torch")
    assert documents(torch.tensor([3, 5])) == documents((3, 5))
    assert documents_from_ids(torch.tensor([0, 0, 1])) == documents((2, 1))


@pytest.mark.parametrize("n_q", [1, 90, 200])
@pytest.mark.parametrize("piece", [5, 24])  # many in a block, and blocks with one cut
def test_a_document_in_pieces(n_q: int, piece: int):
    ids = np.random.default_rng(n_q).integers(0, 4, 40).repeat(piece)[:200]
    dense = documents_from_ids(ids).build(n_q, 200, (16, 32)).to_dense()[0, 0]
    assert np.array_equal(dense, ids[:n_q, None] == ids)
    key_ids = np.roll(ids, 17)
    dense = documents_from_ids(ids, key_ids).build(n_q, 150, 32).to_dense()[0, 0]
    assert np.array_equal(dense, ids[:n_q, None] == key_ids[:150])


def test_batch():
    blocks = documents([[30, 40], [10, 60, 5]]).build(70, block_size=16)
    assert blocks.batch == 2
    for row, dense in zip(([30, 40], [10, 60]), blocks.to_dense(), strict=True):
        assert np.array_equal(dense[0], documents(row).build(70, block_size=16).to_dense()[0, 0])
    both = documents([[30, 40], [10, 60]]) & masks.mask_from(np.ones((2, 3, 70, 70), bool))
    assert both.build(70).layout().shape == (2, 3, 1, 1)
    with pytest.raises(ValueError, match="batch extents 2 and 3 do not combine"):
        documents([[3], [3]]) | documents([[1], [2], [3]])


def test_shorter_lengths_crop():
    mask = shared_prefix(10, [50, 60, 70])
    whole = mask.build(190, block_size=16).to_dense()
    assert np.array_equal(mask.build(77, 130, 16).to_dense(), whole[:, :, :77, :130])


def test_text():
    for mask in (
        documents((3, 5)),
        documents(((3, 5), (8,))),
        documents((3, 5), (4, 0)),
        shared_prefix(4, (3, 5)),
        block_diagonal(50, 7),
        block_causal(16) - documents([9]),
        documents_from_ids([0, 1, 0]),
    ):
        assert mask.spelled and masks.parse(str(mask)) == mask
        assert pickle.loads(pickle.dumps(mask)) == mask
    assert str(documents((3, 5), (4, 0))) == "documents((3, 5), key_lengths=(4, 0))"
    assert str(block_causal(16)) == "block_diagonal(16) | causal()"
    assert masks.parse("block_diagonal:50:7") == block_diagonal(50, 7)


def test_long_lists_have_a_digest():
    assert documents([3] * 64).spelled
    mask = documents([3] * 65)
    assert not mask.spelled and len(str(mask)) < 100
    assert mask == documents((3,) * 65) != documents([3] * 64 + [4])
    again = pickle.loads(pickle.dumps(mask | masks.causal()))
    assert again == mask | masks.causal() and again.build(100) == (mask | masks.causal()).build(100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: documents([3, -1]), "lengths is -1: give an integer >= 0"),
        (lambda: documents([2.5]), "lengths is 2.5: give an integer"),
        (lambda: documents([]), "lengths has 0 tokens in a row"),
        (lambda: documents([[3], []]), "lengths has 0 tokens in a row"),
        (lambda: documents([3, [4]]), "lengths mixes numbers and lists"),
        (lambda: documents("3"), "lengths is '3'"),
        (lambda: documents([3, 4], [7]), r"lengths has \[2\] documents and key_lengths \[1\]"),
        (lambda: documents([3, 4]).build(8), "have 7 tokens together, but n_q is 8"),
        (lambda: documents([9], [4]).build(9, 5), "have 4 tokens together, but n_k is 5"),
        (lambda: documents([[9], [4]]).build(9), "have 4 tokens together, but n_q is 9"),
        (lambda: documents([[9], [4]]).build(3, batch=3), "batch is 3"),
        (lambda: documents_from_offsets([0, 5, 3]), "offsets must ascend from 0"),
        (lambda: documents_from_offsets([1, 5]), "offsets must ascend from 0"),
        (lambda: documents_from_ids([0.5]), "ids are float64"),
        (lambda: documents_from_ids([[[1]]]), r"shape \(1, 1, 1\)"),
        (lambda: documents_from_ids([[1], [2]], [1]), "ids has 2 rows and key_ids 1"),
        (lambda: documents_from_ids(np.arange(40000) % 4).build(9), "sort the tokens by id"),
        (lambda: shared_prefix(-1, [3]), "prefix is -1"),
        (lambda: block_diagonal(0), "size is 0: give an integer >= 1"),
        (lambda: block_diagonal(5, 5), "offset is 5: give an integer <= 4"),
    ],
)
def test_errors(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def random_lengths(mean: int) -> list[int]:
    lengths = 1 + np.random.default_rng(0).exponential(mean - 1, 2 * LONG // mean)
    return lengths.astype(int).tolist()


@pytest.mark.parametrize(
    ("mask", "milliseconds", "tiles"),
    [
        (documents(random_lengths(2000)) & masks.causal(), 100, 1000),
        (shared_prefix(1000, random_lengths(2000)) & masks.causal(), 100, 1000),
        (block_diagonal(2048), 10, 0),
        (block_diagonal(2000) & masks.causal(), 30, 32),
        (block_causal(32), 30, 1),
    ],
    ids=["documents", "shared_prefix", "block_diagonal", "causal", "block_causal"],
)
def test_a_million_tokens(mask: Mask, milliseconds: float, tiles: int):
    assert_builds_within(mask, milliseconds, tiles)


def test_blocks_that_differ_in_one_cut_only():
    """The first document that both sides have begins at another token of the query block."""
    lengths = [16, 8, 16, 16, 16, 16, 8, 48]
    ids = np.repeat(np.arange(8), lengths)
    dense = documents(lengths).build(144, block_size=(48, 16)).to_dense()[0, 0]
    assert np.array_equal(dense, ids[:, None] == ids)


def test_many_documents_in_a_block():
    mask = documents([1, 2, 3, 0, 4, 5] * 20)
    ids = np.repeat(np.arange(120), [1, 2, 3, 0, 4, 5] * 20)
    dense = mask.build(290, 300, (16, 48)).to_dense()[0, 0]
    assert np.array_equal(dense, ids[:290, None] == ids)
