"""The Triton kernels of the selectors against their plain torch."""

import pytest
import torch
import torch.nn.functional as F

import masks
from sparseflash import select
from sparseflash.dynamic.selection import heads_of, static_selection
from sparseflash.select import tokens
from sparseflash.select.base import Rule, candidates_of, choose_torch
from sparseflash.select.blocks import pool_torch

kernels = pytest.importorskip("sparseflash.select.kernels")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("n, dim, block", [(1, 24, 48), (100, 24, 128), (100, 32, 48)])
def test_pool(n, dim, block):
    for x in (normal(1, 2, n, dim), normal(2, n, 1, dim).transpose(1, 2), normal(1, 1, dim, n).mT):
        for kinds in (["mean"], ["max", "min"], ["min", "negative", "mean", "max", "positive"]):
            (found,) = kernels.pool_blocks((x, block, kinds))
            expected = pool_torch(x, block, kinds)
            assert found.dtype == torch.float32 and torch.allclose(found, expected, atol=1e-6)


def test_pool_of_two_tensors_and_in_parts():
    q, k = normal(2, 3, 70, 24), normal(2, 1, 50, 24, seed=1)
    found = kernels.pool_blocks((q, 16, ["max"]), (k, 32, ["mean", "min"]))
    expected = pool_torch(q, 16, ["max"]), pool_torch(k, 32, ["mean", "min"])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    (parts,) = kernels.pool_blocks((k, 32, ("high", "middle", "low")))
    assert parts.dtype == torch.bfloat16
    (three,) = kernels.pool_blocks((k, 32, ["mean", "max", "min"]))  # summed in the same order
    assert torch.equal(parts.double().unflatten(-1, (3, 24)).sum(-2).float(), three[..., :24])


PICKS = [  # n, heads, kv_heads, dim, selector
    (100, 2, 1, 24, select.moba(32, 2, 16)),
    (200, 1, 1, 16, select.moba(16, 3, 16)),
    (40, 1, 1, 16, select.moba(16, 9, 16)),
    (100, 4, 2, 24, select.nsa(3, 16, 48)),
    (150, 2, 2, 16, select.nsa(4, 16, 32, first=1, own=2)),
    (192, 4, 1, 16, select.nsa(3, 16, 32)),  # tiles that end with a chunk
]


@pytest.mark.parametrize(
    "n, heads, kv_heads, dim, selector, kind",
    [
        *((*picks, "normal") for picks in PICKS),
        *((*PICKS[i], "ties") for i in (0, 3)),
        (*PICKS[0], "odd"),
    ],
)
def test_pick(n, heads, kv_heads, dim, selector, kind, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **options: empty(*a, **options).fill_(3))
    monkeypatch.setattr(kernels, "NARROW", 4)  # a launch for the first queries, one for more
    q, k = normal(2, heads, n, dim), normal(2, kv_heads, n, dim, seed=1)
    if kind == "ties":
        # products without rounding, so that what is equal on paper is so in floats
        q, k = F.one_hot(q.argmax(-1), dim).float(), k.round()
        k[:, :, 16:80] = k[:, :, :16].repeat(1, 1, 4, 1)[:, :, : n - 16]
        q[:, :, 20:30] = 0
    if kind == "odd":
        k[:, :, 3], k[:, :, 20], k[:, :, 34:39] = float("nan"), float("inf"), float("-inf")
    others = [(q[:, :, 37:], k), (q, k[:, :, : n - 21])] if kind == "normal" else []
    for queries, keys in [(q, k), *others]:
        padded = queries.shape[2] + -queries.shape[2] % selector.block_size[0]
        expected = tokens.pick_torch(selector, queries, keys, padded)
        sizes = (selector.chunk, selector.k, selector.first, selector.own, padded)
        found = kernels.pick_chunks(queries, keys, *sizes, nsa=selector.nsa)
        assert found.dtype == torch.int16 and torch.equal(found, expected)


PER_HEAD = masks.random_blocks(0.5, block=16, per_head=True)
BY_ENTRY = masks.documents(((10, 40, 100), (150,)))  # 2 batch entries


@pytest.mark.parametrize("within", [None, PER_HEAD, BY_ENTRY, PER_HEAD & BY_ENTRY])
def test_union(within):
    words = (normal(2, 2, 8, 5) > 1).to(torch.int16) << 3  # 8 groups of 16, 5 chunks of 32
    mask = masks.causal() if within is None else within
    heads = heads_of(mask, 4)
    codes = static_selection(mask, 120, 150, (32, 16), heads, torch.device(DEVICE)).codes
    found = kernels.union_of_picks(words, codes, 4, 2, 2)
    assert torch.equal(found, tokens.union_torch(words, codes, 4, 2, 2))


RULES = [Rule("count", 1), Rule("count", 5), Rule("share", 0.4), Rule("mass", 0.3)]
RULES += [Rule("mass", 0.95, 2, 6), Rule("level", 0.15), Rule("level", 0.9, 1, 3)]
SEEING = [  # within, always
    (None, None),
    (PER_HEAD, masks.causal() & masks.sliding(40)),
    (PER_HEAD, BY_ENTRY),
    (BY_ENTRY, PER_HEAD),
    (masks.sliding(20, align="bottom_right"), None),
]


@pytest.mark.parametrize("number, rule", enumerate(RULES))
def test_choose(number, rule):
    for seeing in (SEEING[number % 5], SEEING[(number + 2) % 5]):
        keep = candidates_of(rule, *seeing, 20, 100, (16, 16), 2, torch.device(DEVICE))
        scores = normal(2, 2, 2, 7, seed=100)
        calls = (scores, False), (scores.round(), True), (1e30 * scores, False)
        for given, probabilities in calls:
            found = kernels.choose_blocks(given, keep, rule, probabilities)
            expected = choose_torch(given, keep, rule, probabilities)
            assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_choose_keeps_odd_scores_out_and_takes_bytes():
    rule = Rule("count", 2)
    keep = candidates_of(rule, masks.causal(), None, 64, 64, (16, 16), 1, torch.device(DEVICE))
    keep = keep._replace(codes=keep.codes.clamp(max=-1).to(torch.int8))
    scores = normal(1, 1, 4, 4)
    scores[..., 1], scores[..., 2], scores[..., 0] = float("nan"), float("inf"), float("-inf")
    found = kernels.choose_blocks(scores, keep, rule, False)
    assert found.dtype == torch.int8 and torch.equal(found, choose_torch(scores, keep, rule, False))
    assert found[0, 0, 3].tolist() == [-2, -2, -1, -1]
