"""Terms of the softmax: every backend against the float64 oracle, gradients, transforms, errors."""

import random
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

import masks
import sparseflash
from sparseflash import Terms
from sparseflash.testing import make_qkv
from tests.attention_cases import DTYPES, LEARNED, Case, check, random_case
from tests.op_cases import BACKENDS, MASK, detached, small

TERMS = ("sink", "softcap", "slopes", "bias")
LENGTHS = {"triton": (1, 40), "cpu": (1, 63, 100, 257), "reference": (1, 63, 100)}
SINK = torch.tensor([0.5, -1.0])
SEEDS = {"triton": 6, "cpu": 12, "reference": 8}


@pytest.mark.parametrize(
    "backend, seed",
    [(name, seed) for name in BACKENDS for seed in range(200, 200 + SEEDS[name])],
)
def test_random_problem(backend, seed):
    """One term, or several: masks, grouped heads, ragged lengths, dropout, gradients of the LSE."""
    dtypes = (torch.float32,) if backend == "triton" else DTYPES
    case = random_case(seed, LENGTHS[backend], (8, 16, 40), dtypes)
    rng = random.Random(seed)
    terms = rng.sample(TERMS, rng.choice([1, len(TERMS)]))
    check(replace(case, terms=tuple(terms)), backend, "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_at_head_dim_256(backend):
    """Where the tiles of the portable backward are not square."""
    mask = masks.causal(align="bottom_right")
    check(Case(40, 70, 256, mask=mask, terms=("bias",), seed=30), backend, "cpu")


@pytest.mark.parametrize("term", TERMS)
def test_gradients_agree_with_differences(term):
    inputs = make_qkv(1, 2, 4, 5, 2, dtype=torch.float64)
    bias = torch.randn(2, 5, dtype=torch.float64)
    values = {"sink": SINK.double(), "softcap": 0.7, "slopes": SINK.double(), "bias": bias}
    given = {term: values[term]}
    learned = [name for name in given if name in LEARNED]

    def attend(q, k, v, *tensors, backend="reference"):
        terms = Terms(**given | dict(zip(learned, tensors, strict=True)))
        return sparseflash.attention(q, k, v, terms=terms, return_lse=True, backend=backend)

    tensors = detached([given[name] for name in learned])
    assert torch.autograd.gradcheck(attend, [*detached(inputs), *tensors])
    if tensors:  # alone, as beside frozen weights
        alone = partial(attend, *inputs, backend="cpu")
        assert torch.autograd.gradcheck(alone, tensors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_with_nothing_but_a_sink(backend):
    q, k, v = small()
    sink = SINK.clone().requires_grad_()
    nothing = masks.mask_from(torch.zeros(40, 40, dtype=torch.bool).numpy())
    out, lse = sparseflash.attention(
        q, k, v, nothing, terms=Terms(sink), return_lse=True, backend=backend
    )
    assert torch.equal(out, torch.zeros_like(out))
    torch.testing.assert_close(lse, sink[:, None].expand_as(lse))
    (out.sum() + lse.sum()).backward()
    assert not q.grad.any() and not k.grad.any() and not v.grad.any()
    torch.testing.assert_close(sink.grad, torch.full((2,), 80.0))  # one for every query


@pytest.mark.parametrize("backend", BACKENDS)
def test_terms_may_have_strides(backend):
    table = torch.linspace(-1, 1, 14).view(2, 7)
    terms = Terms(table[:, 0], None, table[:, 6], table[:, 1:6])
    together = Terms(*(t if t is None else t.contiguous() for t in terms))
    found, expected = (
        sparseflash.attention(*small(), terms=given, backend=backend) for given in (terms, together)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_of_minus_infinity_is_none(backend):
    q, k, v = (t.requires_grad_() for t in make_qkv(1, 2, 20, 20, 8))
    sink = torch.full((2,), -torch.inf, requires_grad=True)
    mask = masks.causal(align="bottom_right") & masks.mask_from(
        (torch.arange(20) > 0)[:, None].expand(20, 20).numpy()
    )
    options = {"return_lse": True, "backend": backend}
    out, lse = sparseflash.attention(q, k, v, mask, terms=Terms(sink), **options)
    expected = sparseflash.attention(q, k, v, mask, **options)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    (out.sum() + lse[:, :, 1:].sum()).backward()
    assert not sink.grad.any() and q.grad.isfinite().all()


def test_compiled_and_mapped_calls_agree():
    q, k, v = small()
    sink, bias = SINK.clone().requires_grad_(), torch.randn(2, 7).requires_grad_()

    def step(q, k, v, sink, bias):
        terms = Terms(sink, softcap=2.0, slopes=SINK.abs(), bias=bias)
        out = sparseflash.attention(q, k, v, MASK, terms=terms, backend="cpu")
        return out.square().sum()

    inputs = q, k, v, sink, bias
    expected = torch.autograd.grad(step(*inputs), inputs)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    functional = torch.func.grad(step, argnums=(0, 1, 2, 3, 4))
    sinks = torch.stack([sink, sink + 1]).detach()
    mapped = torch.vmap(functional, (None, None, None, 0, None))(
        *detached(inputs[:3]), sinks, bias.detach()
    )
    for result in (
        torch.autograd.grad(compiled(*inputs), inputs),
        functional(*detached(inputs)),
        [t[0] for t in mapped],
    ):
        for got, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(got, wanted)


def test_padding_keeps_the_sink():
    q, k, v = small()
    lengths = torch.tensor([40, 23])
    out, lse = sparseflash.attention(q, k, v, lengths=lengths, terms=Terms(SINK), return_lse=True)
    wanted = sparseflash.attention(
        q[1:, :, :23], k[1:, :, :23], v[1:, :, :23], terms=Terms(SINK), return_lse=True
    )
    torch.testing.assert_close(out[1:, :, :23], wanted[0])
    torch.testing.assert_close(lse[1:, :, :23], wanted[1])


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.local(20)])
def test_padding_is_skipped_with_terms_of_the_scores(mask):
    """A cap, or a steep slope, would bring hidden keys back."""
    q, k, v = (torch.randn(2, 2, 256, 8) for _ in range(3))
    bias = torch.randn(2, 9)
    terms = Terms(sink=SINK, softcap=1.5, slopes=torch.tensor([300.0, 0.1]), bias=bias)
    options = {"terms": terms, "return_lse": True, "backend": "cpu"}
    out, lse = sparseflash.attention(q, k, v, mask, lengths=[256, 130], **options)
    short = (t[1:, :, :130] for t in (q, k, v))
    wanted = sparseflash.attention(*short, mask, **options)
    torch.testing.assert_close(out[1:, :, :130], wanted[0])
    torch.testing.assert_close(lse[1:, :, :130], wanted[1])
    assert not out[1:, :, 130:].any() and torch.all(lse[1:, :, 130:] == -torch.inf)


@pytest.mark.parametrize("n, mask", [(40, None), (256, torch.ones(256, 256, dtype=torch.bool))])
def test_padding_that_cannot_be_skipped(n, mask):
    qkv = make_qkv(1, 2, n, n, 8)
    several = Terms(softcap=2.0), Terms(slopes=SINK.abs()), Terms(bias=torch.ones(2, 3))
    for function, terms in product((sparseflash.attention, sparseflash.explain), several):
        with pytest.raises(ValueError, match=f"lengths with .*terms.softcap.* N_q {n}"):
            function(*qkv, mask, lengths=[9], terms=terms)


@pytest.mark.parametrize(
    "terms, message",
    [
        ({"sink": SINK}, "terms is a dict; pass sparseflash.Terms"),
        (Terms([0.5, 1.0]), "terms.sink is list; pass a tensor of floating-point numbers"),
        (Terms(torch.ones(2, dtype=torch.int64)), "terms.sink is torch.int64; pass a tensor"),
        (Terms(torch.ones(3)), r"terms.sink has shape \(3,\); it must be \(2,\)"),
        (Terms(torch.ones(2, device="meta")), "terms.sink is on meta, q on cpu"),
        (Terms(softcap=0.0), "terms.softcap is 0.0; pass a positive finite number or None"),
        (Terms(softcap=SINK), "terms.softcap is tensor.*; pass a positive finite number"),
        (Terms(slopes=torch.ones(2, requires_grad=True)), "and has none; pass slopes.detach"),
        (Terms(bias=[0.5]), "terms.bias is list; pass a tensor of floating-point numbers"),
        (Terms(bias=torch.ones(2, 4)), r"terms.bias has shape \(2, 4\); it must be .H_q, 2 R"),
        (Terms(bias=torch.ones(3, 5)), r"terms.bias has shape \(3, 5\); it must be \(2, 5\)"),
    ],
)
def test_wrong_terms(terms, message):
    q, k, v = small()
    for function in (sparseflash.attention, sparseflash.explain):
        with pytest.raises(ValueError, match=message):
            function(q, k, v, terms=terms)
