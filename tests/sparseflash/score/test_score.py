"""Score functions: results and gradients against autograd, and the reach of reads."""

import random

import pytest
import torch

import masks
import sparseflash
from sparseflash.score.rule import rule_of
from tests.sparseflash.score.cases import CASES, check, tables_of


def assert_near(x, y, limit):
    same = x == y
    x, y = (t.double().masked_fill(same, 0.0).detach() for t in (x, y))
    assert (x - y).norm() <= limit * max(1.0, float(y.norm()))


@pytest.mark.parametrize("name", CASES)
def test_reach_of_the_reads(name):
    case = CASES[name]
    bound = sparseflash.score(case.fn)(**tables_of(case, (2, 2, 5, 5)))
    assert sorted(read.reach for read in rule_of(bound.key()).reads) == sorted(case.reach)


MASKS = (None, masks.causal(), masks.local(9), masks.where(lambda q, k: (q + 3 * k) % 5 < 2),
         masks.heads(masks.local(20), masks.causal()))  # fmt: skip


@pytest.mark.parametrize("seed", range(80))
def test_random_calls_on_the_cpu(seed):
    """Each rule, with masks, grouped heads, ragged lengths, dropout and sinks."""
    rng = random.Random(seed)
    sizes = rng.choice((1, 2)), 4, rng.choice((1, 17, 64, 150)), rng.choice((31, 64, 150))
    exact = rng.random() < 0.5
    check(
        list(CASES.values())[seed % len(CASES)], sizes, rng.choice(MASKS), ("reference", "cpu"),
        kv_heads=rng.choice((1, 2, 4)),
        dtype=torch.float64 if exact else torch.float32, seed=seed, sink=rng.random() < 0.3,
        tables=rng.choice((torch.float64, torch.float32)), limit=1e-12 if exact else 2e-5,
        dropout_p=rng.choice((0.0, 0.0, 0.3)), return_max_scores=rng.random() < 0.5,
    )  # fmt: skip
