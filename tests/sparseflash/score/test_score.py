"""Score functions: results and gradients against autograd, semantics, errors."""

import random

import pytest
import torch

import masks
import sparseflash
from sparseflash.score.rule import rule_of
from sparseflash.testing import make_qkv
from tests.sparseflash.score.cases import CASES, oracle, tables_of


def check(case, backend, sizes, mask=None, kv_heads=None, dtype=torch.float64, tables=torch.float64,
          limit=1e-12, **options):  # fmt: skip
    """Compare a call and all its gradients with the oracle."""
    b, h, n, m = sizes
    q, k, v = make_qkv(b, h, n, m, 8, kv_heads=kv_heads, dtype=dtype, requires_grad=True)
    score = sparseflash.score(case.fn)
    given = tables_of(case, sizes, tables)
    sink = options.pop("sink", None)
    found = sparseflash.attention(
        q, k, v, mask, score=score(**given), backend=backend, sink=sink, return_lse=True,
        return_max_scores=True, **options,
    )  # fmt: skip
    allowed = None
    if mask is not None:
        built = mask.build(n, m, 16, heads=h if mask.per_head else None)
        allowed = torch.from_numpy(built.to_dense())
    wanted = oracle(
        q, k, v, allowed, case.fn, (*score.places, *score.names), given, sink,
        **{name: options[name] for name in ("dropout_p", "seed") if name in options},
    )  # fmt: skip
    inputs = [t for t in (q, k, v, sink, *given.values()) if t is not None and t.requires_grad]
    weights = [torch.randn(t.shape, dtype=torch.float64) for t in wanted[:2]]
    for x, y in zip(found, wanted, strict=True):
        assert_near(x, y, limit)
    grads = [
        torch.autograd.grad(
            sum(
                (w * x.double().masked_fill(x.isinf(), 0)).sum()
                for w, x in zip(weights, xs, strict=False)
            ),
            inputs,
        )
        for xs in (found, wanted)
    ]
    for t, x, y in zip(inputs, *grads, strict=True):
        assert x.dtype == t.dtype
        assert_near(x, y, limit)


def assert_near(x, y, limit):
    same = x == y
    x, y = (t.double().masked_fill(same, 0.0).detach() for t in (x, y))
    assert (x - y).norm() <= limit * max(1.0, float(y.norm()))


@pytest.mark.parametrize("name", CASES)
def test_derivatives_are_those_of_autograd(name):
    check(CASES[name], "reference", (2, 4, 20, 20), masks.local(6), kv_heads=2)
    check(CASES[name], "reference", (1, 2, 11, 23))


@pytest.mark.parametrize("name", CASES)
def test_reach_of_the_reads(name):
    case = CASES[name]
    bound = sparseflash.score(case.fn)(**tables_of(case, (2, 2, 5, 5)))
    assert sorted(read.reach for read in rule_of(bound.key()).reads) == sorted(case.reach)


MASKS = (None, masks.causal(), masks.local(9), masks.where(lambda q, k: (q + 3 * k) % 5 < 2),
         masks.heads(masks.local(20), masks.causal()))  # fmt: skip
FUZZED = 80


@pytest.mark.parametrize("seed", range(FUZZED))
def test_random_calls_on_the_cpu(seed):
    """Rules, masks, grouped heads, ragged lengths, dropout and sinks."""
    rng = random.Random(seed)
    sizes = rng.choice((1, 2)), 4, rng.choice((1, 17, 64, 150)), rng.choice((31, 64, 150))
    options = {"dropout_p": 0.3, "seed": 5} if rng.random() < 0.3 else {}
    if rng.random() < 0.3:
        options["sink"] = torch.randn(4, dtype=torch.float64).requires_grad_()
    exact = rng.random() < 0.5
    check(
        CASES[rng.choice(list(CASES))], "cpu", sizes, rng.choice(MASKS), rng.choice((1, 2, 4)),
        torch.float64 if exact else torch.float32, rng.choice((torch.float64, torch.float32)),
        1e-12 if exact else 2e-5, **options,
    )  # fmt: skip
