"""Selectors of whole blocks against plain loops in float64."""

import numpy as np
import pytest
import torch

import masks
from sparseflash import select
from sparseflash.select.base import Candidates, Rule, choose_torch
from sparseflash.testing import make_qkv
from tests.sparseflash.select.oracle import block_selection, dense_of, pooled_scores

CASES = [  # n_q, n_k, heads, kv_heads, block_size
    (96, 96, 2, 2, (16, 16)),
    (130, 75, 4, 2, (32, 16)),
    (50, 201, 3, 1, (16, 48)),
    (7, 5, 2, 1, (16, 16)),
]
SEEING = [  # within, always
    (None, None),
    (masks.causal(align="bottom_right"), None),
    (masks.causal(), masks.local(0)),
    (masks.local(40), masks.causal() & masks.sliding(30)),
    (masks.random_blocks(0.5, block=16, per_head=True), masks.global_tokens(1)),
]


def agree(selection: select.Selection, expected: np.ndarray) -> None:
    blocks = selection.to_block_mask()
    assert np.array_equal(dense_of(blocks, *expected.shape[:2]), expected)
    assert blocks.nnz <= selection.max_blocks
    assert float(selection.density()) == pytest.approx(blocks.density)


@pytest.mark.parametrize("n_q, n_k, heads, kv_heads, block_size", CASES)
@pytest.mark.parametrize("number, pool", enumerate(("mean", "max", "bound")))
def test_pooled(n_q, n_k, heads, kv_heads, block_size, number, pool):
    for within, always in (SEEING[number], SEEING[(number + n_q) % 5]):
        check_pooled(n_q, n_k, heads, kv_heads, block_size, pool, within, always)


def check_pooled(n_q, n_k, heads, kv_heads, block_size, pool, within, always):
    q, k, _ = make_qkv(1, heads, n_q, n_k, 8, kv_heads=kv_heads, dtype=torch.float64, seed=n_q)
    scores = pooled_scores(q, k, block_size, pool)
    given = (n_q, n_k, block_size, within, always)
    for budget in (1, 3, 0.4, 1.0, 100):
        selector = select.top_k(budget, pool, block_size, within=within, always=always)
        agree(selector(q, k), block_selection(scores, *given, "count", budget))
    for threshold, low, high in ((0.5, 1, None), (0.9, 2, 4), (1.0, 1, None), (0.01, 1, 1)):
        bounds = {"min_blocks": low, "max_blocks": high, "within": within, "always": always}
        selector = select.mass(threshold, pool, block_size, **bounds)
        expected = block_selection(scores, *given, "mass", threshold, low, high)
        if threshold < 1:
            agree(selector(q, k), expected)
        else:  # the last blocks hold less than a rounding of the sum
            assert not (dense_of(selector(q, k), 1, heads) & ~expected).any()


def test_ties_go_to_the_first_and_odd_scores_stay_out():
    codes = torch.full((1, 1, 1, 6), -1, dtype=torch.int32)
    codes[..., 1] = -2
    for scores, count, taken in (
        ([1.0, 9.0, 1.0, 1.0, 0.0, 1.0], 3, [0, 2, 3]),
        ([float("nan"), 9.0, float("-inf"), 0.0, float("inf"), 1.0], 3, [3, 4, 5]),
        ([float("nan")] * 6, 2, [0, 2]),
    ):
        low = torch.tensor([[[count]]], dtype=torch.int32)
        candidates = Candidates(codes, codes.new_empty((0, 16, 1)), None, low, low, count)
        for rule in (Rule("count", count), Rule("mass", 1e-9), Rule("level", 1.0)):
            found = choose_torch(torch.tensor(scores)[None, None, None], candidates, rule, False)
            assert torch.nonzero(found.flatten() == -1).flatten().tolist() == taken


def test_block_mask_as_within_and_array_per_batch():
    q, k, _ = make_qkv(2, 2, 64, 64, 16)
    array = np.random.default_rng(0).random((2, 1, 64, 64)) < 0.2
    for within in (masks.mask_from(array), masks.BlockMask.from_dense(array, 16)):
        found = select.top_k(1.0, block_size=16, within=within)(q, k)
        assert (dense_of(found, 2, 2) == array).all()


@pytest.mark.parametrize(
    "make", [lambda: select.top_k(3, block_size=16), lambda: select.mass(0.5, block_size=16),
             lambda: select.moba(16, 3, 16), lambda: select.nsa(3, 16, 16)],
)  # fmt: skip
def test_autocast_changes_no_choice(make):
    q, k, _ = make_qkv(1, 2, 512, 512, 32, dtype=torch.bfloat16)
    plain = make()(q, k).to_block_mask()
    with torch.autocast("cpu", torch.bfloat16):
        assert make()(q, k).to_block_mask() == plain


def test_always_alone_may_differ_from_head_to_head():
    q, k, _ = make_qkv(1, 2, 64, 64, 16)
    always = masks.random_blocks(count=2, block=16, per_head=True)
    found = select.top_k(1, block_size=16, always=always)(q, k)
    assert np.array_equal(found.codes != -2, always.build(64, 64, 16, heads=2).layout() > 0)


def test_a_share_of_many_equal_blocks():
    """0.07 * 100 rounds to more than 7, and a sort that is not stable mixes as many blocks."""
    picked = select.top_k(0.07, block_size=16)(*torch.zeros(2, 1, 1, 1600, 16))
    assert torch.equal(picked.codes != -2, (torch.arange(100) < 7).expand_as(picked.codes))


Q, K, _ = make_qkv(2, 4, 64, 64, 16, kv_heads=2)
THREE_HEADS = masks.mask_from(np.ones((3, 64, 64), bool))


def top_1(within=None):
    return select.top_k(1, block_size=16, within=within)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: select.top_k(0), "k is 0"),
        (lambda: select.top_k(1.5), "k is 1.5"),
        (lambda: select.top_k(1, "median"), "pool is 'median'"),
        (lambda: select.top_k(1, within="causal"), "within is 'causal'"),
        (lambda: select.mass(1.5), "is 1.5: give a number in"),
        (lambda: select.nsa(2, within="causal"), "within is 'causal'"),
        (lambda: select.mass(0.5, min_blocks=3, max_blocks=2), "max_blocks is 2"),
        (lambda: select.moba(100, 2), "chunk is 100"),
        (lambda: select.nsa(2, first=2), "first . own is 3"),
        (lambda: top_1()(Q[0], K), "q has shape"),
        (lambda: top_1()(Q, K[..., :8]), "batch and head dim must be"),
        (lambda: top_1(THREE_HEADS)(Q, K), r"within has \(batch, heads\) \(1, 3\)"),
        (lambda: top_1(masks.causal().build(64))(Q, K), "pass the Mask it comes from"),
    ],
)
def test_bad_arguments_and_inputs(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "text",
    [
        "top_k(16)",
        "top_k(0.1, pool='bound', block_size=(64, 128), within=causal(), always=local(0))",
        "mass(0.9, block_size=64, max_blocks=32)",
        "moba(512, 3, union=True)",
        "nsa(16, first=1, own=2, capacity=1000)",
    ],
)
def test_selectors_print_as_the_call_that_makes_them(text):
    names = {"causal": masks.causal, "local": masks.local}
    assert repr(eval(text, vars(select) | names)) == text
