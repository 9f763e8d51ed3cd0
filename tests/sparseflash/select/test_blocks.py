"""Selectors of whole blocks against plain loops in float64."""

import numpy as np
import pytest
import torch

import masks
from sparseflash import select
from sparseflash.select.rules import Candidates, Rule, choose_torch
from sparseflash.testing import make_qkv
from tests.sparseflash.select.oracle import (
    block_selection,
    dense,
    dense_of,
    pooled_scores,
    spans,
)

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


@pytest.mark.parametrize("number", range(4))
def test_antidiagonal(number):
    for stride, shift in ((1, 0), (16, 1), (16, 3)):
        check_antidiagonal(*CASES[number], stride, *SEEING[(number + shift) % 4])


def check_antidiagonal(n_q, n_k, heads, kv_heads, block_size, stride, within, always):
    q, k, _ = make_qkv(2, heads, n_q, n_k, 24, kv_heads=kv_heads, dtype=torch.float64, seed=n_q)
    fine = max(stride, 16)
    inside = dense(within, n_q, n_k, heads)
    rows, cols = spans(n_q, block_size[0]), spans(n_k, block_size[1])
    scores = np.zeros((2, heads, len(rows), len(cols)))
    for b, h in np.ndindex(2, heads):
        matrix = (q[b, h] @ k[b, h // (heads // kv_heads)].T * 24**-0.5 / stride).numpy()
        # queries x + s and keys y + stride - 1 - s, those that exist
        padded = np.pad(matrix, ((0, -n_q % stride), (0, -n_k % stride)))[:, ::-1]
        for x in range(0, n_q, stride):
            weights = {}
            for y in range(0, n_k, stride):
                near = inside[h, x // fine * fine :, y // fine * fine :][:fine, :fine]
                if near.any():
                    square = padded[x : x + stride, padded.shape[1] - y - stride :][:, :stride]
                    weights[y] = np.exp(square.trace())
            for y, weight in weights.items():
                cell = x // block_size[0], y // block_size[1]
                scores[b, h][cell] += weight / sum(weights.values())
    for threshold in (0.3, 0.8):
        selector = select.antidiagonal(stride, threshold, block_size, within=within, always=always)
        given = (n_q, n_k, block_size, within, always, "mass", threshold)
        agree(selector(q, k), block_selection(scores, *given, probabilities=True))


@pytest.mark.parametrize("n_q, n_k, heads, kv_heads, block_size", CASES)
def test_gate(n_q, n_k, heads, kv_heads, block_size):
    q, k, _ = make_qkv(2, heads, n_q, n_k, 24, kv_heads=kv_heads, dtype=torch.float64, seed=n_q)
    torch.manual_seed(0)
    gate = select.Gate(heads, 24, kv_heads, 8, block_size, q_pool=("mean",), k_pool=("max", "min"))
    gate = gate.double()
    rows, cols = spans(n_q, block_size[0]), spans(n_k, block_size[1])
    scores = np.zeros((2, heads, len(rows), len(cols)))
    for b, h, i, j in np.ndindex(scores.shape):
        group = h // (heads // kv_heads)
        queries, keys = q[b, h, rows[i]].mean(0), k[b, group, cols[j]]
        keys = torch.cat([keys.amax(0), keys.amin(0)])
        score = (queries @ gate.q_weight[h]) @ (keys @ gate.k_weight[group]) * 8**-0.5
        scores[b, h, i, j] = score.item()
    within, always = masks.causal(), masks.local(0)
    given = (n_q, n_k, block_size, within, always)
    seen = {"within": within, "always": always}
    agree(select.gate(gate, 2, **seen)(q, k), block_selection(scores, *given, "count", 2))
    agree(select.gate(gate, mass=0.7, **seen)(q, k), block_selection(scores, *given, "mass", 0.7))
    expected = block_selection(scores, *given, "level", 0.2, 1, 3)
    agree(select.gate(gate, threshold=0.2, max_blocks=3, **seen)(q, k), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_map(causal):
    q, k, _ = make_qkv(1, 4, 75, 75, 16, kv_heads=2, dtype=torch.float64)
    target = select.attention_map(q, k, 32, causal=causal)
    scores = q @ k.repeat_interleave(2, 1).mT / 4
    if causal:
        scores = scores.masked_fill(torch.ones(75, 75).triu(1).bool(), -torch.inf)
    p = scores.softmax(-1)
    for i, row in enumerate(spans(75, 32)):
        best = torch.stack([p[:, :, row, col].amax((2, 3)) for col in spans(75, 32)], -1)
        assert torch.allclose(target[:, :, i], best / best.sum(-1, keepdim=True), atol=1e-12)


def test_attention_map_takes_a_scale():
    q, k = (torch.randn(1, 2, 64, 8, dtype=torch.float64) for _ in range(2))
    found = select.attention_map(q, k, 16, scale=2.0)
    torch.testing.assert_close(found, select.attention_map(q * 2.0 * 8**0.5, k, 16))


def test_distillation_loss_is_zero_at_the_target_only():
    target = torch.tensor([[0.2, 0.8, 0.0], [0.5, 0.25, 0.25]])[None, None]
    candidates = target > 0
    assert select.distillation_loss(target.clamp(min=1e-9).log(), target, candidates) < 1e-6
    uniform = (0.2 * np.log(0.4) + 0.8 * np.log(1.6), 0.5 * np.log(1.5) + 0.5 * np.log(0.75))
    loss = select.distillation_loss(torch.zeros(1, 1, 2, 3), target, candidates)
    assert loss.item() == pytest.approx(np.mean(uniform), abs=1e-6)


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
GATE = select.Gate(1, 8)
NAN = float("nan")
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
        (lambda: select.mass(0.5, min_blocks=3, max_blocks=2), "max_blocks is 2"),
        (lambda: select.antidiagonal(12), "stride is 12"),
        (lambda: select.gate(GATE), "give one of them"),
        (lambda: select.gate(select.Gate, 1), "module is <class .*: give a Gate"),
        (lambda: select.Gate(1, 8, q_pool=("sum",)), "q_pool is"),
        (lambda: select.Gate(4, 8, 3), "kv_heads is 3; it must divide heads, 4"),
        (lambda: GATE(Q[..., :8], K[..., :8]), "q has 4 heads and head dim 8, the gate is for 1"),
        (lambda: select.attention_map(Q, K, 16, causal="no"), "causal is 'no': give True or False"),
        (lambda: select.attention_map(Q, K, 16, scale=NAN), "scale is nan; it must be positive"),
        (lambda: select.distillation_loss(Q, K), r"shape \(2, 4, 64, 16\), target \(2, 2, 64, 16"),
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
        "antidiagonal(8, 0.8, within=causal())",
        "gate(Gate, 4)",
    ],
)
def test_selectors_print_as_the_call_that_makes_them(text):
    names = {"causal": masks.causal, "local": masks.local, "Gate": GATE}
    assert repr(eval(text, vars(select) | names)) == text
