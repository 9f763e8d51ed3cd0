"""MoBA and NSA against a loop over queries in float64."""

from functools import partial

import numpy as np
import pytest
import torch

import masks
import sparseflash
from sparseflash import select
from sparseflash.select import tokens
from sparseflash.testing import make_qkv, oracle, relative_error
from tests.sparseflash.select.oracle import by_token, dense, dense_of, turning, whole_blocks

CASES = [  # n, heads, kv_heads, chunk, k
    (64, 2, 2, 16, 2),
    (75, 4, 2, 32, 2),
    (130, 2, 1, 32, 3),
    (97, 2, 2, 64, 1),
    (20, 4, 1, 32, 5),
]


@pytest.mark.parametrize("n, heads, kv_heads, chunk, k", CASES)
def test_moba(n, heads, kv_heads, chunk, k, monkeypatch):
    q, key, _ = make_qkv(2, heads, n, n, 16, kv_heads=kv_heads, seed=n)
    exact = by_token(q, key, chunk, k, nsa=False)
    seen = dense(masks.causal(), n, n, heads)
    for block_size in ((16, 16), (32, 16), (16, 32)):
        if any(chunk % size for size in block_size):
            continue
        whole = whole_blocks(exact, block_size) & seen
        found = select.moba(chunk, k, block_size)(q, key)
        assert np.array_equal(dense_of(found, 2, heads), exact)
        union = select.moba(chunk, k, block_size, union=True)(q, key)
        assert np.array_equal(dense_of(union, 2, heads), whole)
        roomy = select.moba(chunk, k, block_size, capacity=10**6)(q, key)
        assert np.array_equal(dense_of(roomy, 2, heads), exact)
        tight = dense_of(select.moba(chunk, k, block_size, capacity=3)(q, key), 2, heads)
        assert not (exact & ~tight).any() and not (tight & ~whole).any()
    inside = masks.local(25) | masks.random_blocks(0.3, block=16, per_head=True)
    found = select.moba(chunk, k, 16, within=inside)(q, key)
    assert np.array_equal(dense_of(found, 2, heads), exact & dense(inside, n, n, heads))
    monkeypatch.setattr(tokens, "SCORES_AT_ONCE", 1)  # one chunk of queries at a time
    assert np.array_equal(dense_of(select.moba(chunk, k, 16)(q, key), 2, heads), exact)


@pytest.mark.parametrize("n, heads, kv_heads, chunk, k", CASES)
@pytest.mark.parametrize("first, own", [(0, 1), (1, 2)])
def test_nsa(n, heads, kv_heads, chunk, k, first, own):
    q, key, _ = make_qkv(2, heads, n, n, 16, kv_heads=kv_heads, seed=n)
    k += first + own - 1
    exact = by_token(q, key, chunk, k, nsa=True, first=first, own=own)
    options = {"block": chunk, "first": first, "own": own}
    for block_q in (16, 48):
        found = select.nsa(k, block_q=block_q, **options)(q, key)
        assert np.array_equal(dense_of(found, 2, heads), exact)
    union = select.nsa(k, block_q=32, union=True, **options)(q, key)
    whole = whole_blocks(exact, (32, chunk)) & dense(masks.causal(), n, n, heads)
    assert np.array_equal(dense_of(union, 2, heads), whole)
    inside = masks.random_blocks(0.5, block=16, per_head=True)
    found = select.nsa(k, block_q=16, within=inside, **options)(q, key)
    assert np.array_equal(dense_of(found, 2, heads), exact & dense(inside, n, n, heads))


@pytest.mark.parametrize("union", [False, True])
@pytest.mark.parametrize(
    "make", [partial(select.moba, 32), partial(select.nsa, block_q=16, block=32)]
)
def test_every_batch_entry_and_head_has_its_own_pairs(make, union):
    """`within` has a mask for each of 2 entries and 4 heads, of which 2 pick together in NSA."""
    n, heads = 96, 4
    q, key, _ = make_qkv(2, heads, n, n, 16, kv_heads=2, seed=3)
    options = {"k": 2, "union": union} | ({} if make.func is select.nsa else {"block_size": 16})
    free = dense_of(make(**options)(q, key), 2, heads)
    for extents in ((2, 1), (1, heads), (2, heads)):
        pairs = np.random.default_rng(4).random((*extents, n, n)) < 0.5
        found = make(within=masks.mask_from(pairs), **options)(q, key)
        assert np.array_equal(dense_of(found, 2, heads), free & pairs)
    for extents in ((3, 1), (1, 2)):  # 2 heads are those of k: a mask has those of q
        other = masks.mask_from(np.ones((*extents, n, n), bool))
        with pytest.raises(ValueError, match=rf"within has \(batch, heads\) \({extents[0]}, "):
            make(within=other, **options)(q, key)


def test_importance_counts_a_block_from_its_last_token_on():
    found = dense_of(select.nsa(2, block=16, block_q=16)(*turning()), 1, 2)[0, 0, 32:, ::16]
    assert found.tolist() == [[True, False, True]] * 15 + [[False, True, True]]


@pytest.mark.parametrize("make", [
    lambda **options: select.moba(32, 2, 16, **options),
    lambda **options: select.nsa(3, 32, 16, first=1, own=1, **options),
], ids=["moba", "nsa"])  # fmt: skip
@pytest.mark.parametrize("n_q, n_k", [(1, 100), (37, 100), (100, 130), (70, 50)])
def test_the_last_query_stands_at_the_last_key(make, n_q, n_k):
    """Where a prompt is processed in parts, the picks are those of the whole."""
    q, k, v = make_qkv(2, 4, n_q, n_k, 16, kv_heads=2, requires_grad=True)
    made = make()
    options = {"first": 1} if made.nsa else {}
    exact = by_token(q.detach(), k.detach(), 32, made.k, nsa=made.nsa, **options)
    whole = whole_blocks(exact, (16, 16 if not made.nsa else 32))
    assert np.array_equal(dense_of(made(q, k), 2, 4), exact)
    limits = dense(masks.causal(align="bottom_right"), n_q, n_k, 4)
    assert np.array_equal(dense_of(make(union=True)(q, k), 2, 4), whole & limits)
    if n_q <= n_k:
        start = n_k - n_q
        before = torch.randn(2, 4, start, 16)
        all_rows = dense_of(made(torch.cat([before, q.detach()], 2), k), 2, 4)
        assert np.array_equal(all_rows[:, :, start:], exact)
    wanted, _ = oracle(q, k, v, torch.from_numpy(exact))
    gradients = torch.autograd.grad(wanted.sum(), (q, k, v))
    for mask in (made(q, k), made.picks(q, k)):
        out = sparseflash.attention(q, k, v, mask, backend="cpu")
        assert relative_error(out, wanted) < 1e-5
        for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), gradients, strict=True):
            assert relative_error(a, b) < 1e-4
