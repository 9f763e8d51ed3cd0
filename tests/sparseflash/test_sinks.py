"""Sinks: every backend against the float64 oracle, gradients, transforms, errors."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import masks
import sparseflash
from sparseflash import score_rules
from sparseflash.testing import make_qkv
from tests.attention_cases import DTYPES, check, random_case
from tests.notes import seeds
from tests.op_cases import BACKENDS, MASK, detached, small

LENGTHS = {"triton": (1, 40), "cpu": (1, 63, 100, 257), "reference": (1, 63, 100)}
SINK = torch.tensor([0.5, -1.0])
SEEDS = {"triton": 4, "cpu": 8, "reference": 4}


@pytest.mark.parametrize(
    "backend, seed", [(name, seed) for name in BACKENDS for seed in seeds(SEEDS[name], 200)]
)
def test_random_problem(backend, seed):
    """Masks, grouped heads, ragged lengths, dropout, gradients of the LSE; with a cap in some."""
    dtypes = (torch.float32,) if backend == "triton" else DTYPES
    case = random_case(seed, LENGTHS[backend], (8, 16, 40), dtypes)
    check(replace(case, sink=True, softcap=1.5 * (seed % 3 == 0)), backend, "cpu")


def test_gradients_agree_with_differences():
    inputs = make_qkv(1, 2, 4, 5, 2, dtype=torch.float64)

    def attend(q, k, v, sink, backend="reference"):
        return sparseflash.attention(q, k, v, sink=sink, return_lse=True, backend=backend)

    assert torch.autograd.gradcheck(attend, detached([*inputs, SINK.double()]))
    alone = partial(attend, *inputs, backend="cpu")  # as beside frozen weights
    assert torch.autograd.gradcheck(alone, detached([SINK.double()]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_with_nothing_but_a_sink(backend):
    q, k, v = small()
    sink = SINK.clone().requires_grad_()
    nothing = masks.mask_from(torch.zeros(40, 40, dtype=torch.bool).numpy())
    out, lse = sparseflash.attention(q, k, v, nothing, sink=sink, return_lse=True, backend=backend)
    assert torch.equal(out, torch.zeros_like(out))
    torch.testing.assert_close(lse, sink[:, None].expand_as(lse))
    (out.sum() + lse.sum()).backward()
    assert not q.grad.any() and not k.grad.any() and not v.grad.any()
    torch.testing.assert_close(sink.grad, torch.full((2,), 80.0))  # one for every query


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_and_tables_may_have_strides(backend):
    table = torch.linspace(-1, 1, 14).view(2, 7)
    found, expected = (
        sparseflash.attention(
            *small(), sink=form(table[:, 0]), backend=backend,
            score=score_rules.relative(2)(bias=form(table[:, 1:6])),
        )
        for form in (lambda t: t, torch.Tensor.contiguous)
    )  # fmt: skip
    assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_of_minus_infinity_is_none(backend):
    q, k, v = (t.requires_grad_() for t in make_qkv(1, 2, 20, 20, 8))
    sink = torch.full((2,), -torch.inf, requires_grad=True)
    mask = masks.causal(align="bottom_right") & masks.mask_from(
        (torch.arange(20) > 0)[:, None].expand(20, 20).numpy()
    )
    options = {"return_lse": True, "backend": backend}
    out, lse = sparseflash.attention(q, k, v, mask, sink=sink, **options)
    expected = sparseflash.attention(q, k, v, mask, **options)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    (out.sum() + lse[:, :, 1:].sum()).backward()
    assert not sink.grad.any() and q.grad.isfinite().all()


def test_compiled_and_mapped_calls_agree(fresh_dynamo):
    """Of a sink, a score and maxima."""
    q, k, v = small()
    sink, bias = SINK.clone().requires_grad_(), torch.randn(2, 7).requires_grad_()
    near = score_rules.relative(3)

    def step(q, k, v, sink, bias):
        score = near(bias=bias)
        options = {"return_lse": True, "return_max_scores": True, "backend": "cpu"}
        out, lse, maxima = sparseflash.attention(q, k, v, MASK, sink=sink, score=score, **options)
        return out.square().sum() + lse.sum(), maxima

    inputs = q, k, v, sink, bias
    loss, largest = step(*inputs)
    expected = torch.autograd.grad(loss, inputs)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    functional = torch.func.grad(step, argnums=(0, 1, 2, 3, 4), has_aux=True)
    stacked = [torch.stack([t, t + 1]).detach() for t in inputs[:4]]
    mapped = torch.vmap(functional, (0, 0, 0, 0, None))(*stacked, bias.detach())
    loss, maxima = compiled(*inputs)
    for result, found in (
        (torch.autograd.grad(loss, inputs), maxima),
        functional(*detached(inputs)),
        [[t[0] for t in mapped[0]], mapped[1][0]],
    ):
        assert torch.equal(found, largest) and not found.requires_grad
        for got, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(got, wanted)


def test_padding_keeps_the_sink():
    q, k, v = small()
    lengths = torch.tensor([40, 23])
    out, lse = sparseflash.attention(q, k, v, lengths=lengths, sink=SINK, return_lse=True)
    wanted = sparseflash.attention(
        q[1:, :, :23], k[1:, :, :23], v[1:, :, :23], sink=SINK, return_lse=True
    )
    torch.testing.assert_close(out[1:, :, :23], wanted[0])
    torch.testing.assert_close(lse[1:, :, :23], wanted[1])


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.local(20)])
def test_padding_is_skipped_with_scores(mask):
    """A cap, or a steep slope, would bring hidden keys back."""
    q, k, v = (torch.randn(2, 2, 256, 8) for _ in range(3))
    rule = sparseflash.score(lambda s, h, q, k, m: 1.5 * np.tanh(s / 1.5) - m[h] * abs(q - k))
    score = rule(m=torch.tensor([300.0, 0.1]))
    options = {"sink": SINK, "score": score, "return_lse": True, "backend": "cpu"}
    out, lse = sparseflash.attention(q, k, v, mask, lengths=[256, 130], **options)
    short = (t[1:, :, :130] for t in (q, k, v))
    wanted = sparseflash.attention(*short, mask, **options)
    torch.testing.assert_close(out[1:, :, :130], wanted[0])
    torch.testing.assert_close(lse[1:, :, :130], wanted[1])
    assert not out[1:, :, 130:].any() and torch.all(lse[1:, :, 130:] == -torch.inf)


@pytest.mark.parametrize("n, mask", [(40, None), (256, torch.ones(256, 256, dtype=torch.bool))])
def test_padding_that_cannot_be_skipped(n, mask):
    for function in (sparseflash.attention, sparseflash.explain):
        with pytest.raises(ValueError, match=f"{n} queries .* beside a score"):
            function(*make_qkv(1, 2, n, n, 8), mask, lengths=[9], score=score_rules.softcap(2.0))


@pytest.mark.parametrize(
    "sink, message",
    [
        ([0.5, 1.0], "sink is list; pass a tensor of floating-point numbers"),
        (torch.ones(2, dtype=torch.int64), "sink is torch.int64; pass a tensor"),
        (torch.ones(3), r"sink has shape \(3,\); it must be \(2,\)"),
        (torch.ones(2, device="meta"), "sink is on meta, q on cpu"),
    ],
)
def test_wrong_sinks(sink, message):
    for function in (sparseflash.attention, sparseflash.explain):
        with pytest.raises(ValueError, match=message):
            function(*small(), sink=sink)
