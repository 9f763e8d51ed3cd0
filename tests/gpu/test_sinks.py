"""Sinks, soft-capping and the largest logits on a GPU, against the float64 oracle."""

import math
from dataclasses import replace

import pytest
import torch

import masks
import sparseflash
from sparseflash import score_rules
from sparseflash.backends.hopper.forward import forward_spec, forward_tiles_for
from sparseflash.schedule.tile_lists import tile_lists
from tests.attention_cases import (
    DTYPES,
    GPU_LENGTHS,
    LOW,
    Case,
    check,
    draw,
    random_case,
    schedule_of,
)
from tests.gpu_calls import GPU, MASK, SAME_BITS, captured, inputs, pairwise
from tests.problems import problem_of
from tests.sparseflash.backends.test_max_scores import assert_right, attend
from tests.sparseflash.score import test_triton

pytestmark = GPU

GLOBAL = masks.local(100) | masks.global_tokens(64)
HOLE = masks.documents([400, 400, 200]) & ~masks.local(0) & ~masks.global_tokens(300)
NONE = masks.causal() & ~masks.causal()
# the sinks are about as large as the LSE of a long row: to count one twice must show
PARTS = {
    "long rows": Case(8100, 8111, 64, heads=1, kv_heads=1, mask=GLOBAL, sink_mean=9.0),
    "few queries": Case(100, 65500, 64, mask=masks.dense(), sink_mean=11.0),
    "some heads": Case(
        4000, 4000, 64, batch=2, heads=4, kv_heads=2, sink_mean=8.0,
        mask=masks.heads(masks.local(50), GLOBAL, masks.butterfly(64), GLOBAL),
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(300, 320))
def test_random_problem(seed, backend):
    dtypes = LOW if backend == "hopper" else DTYPES
    case = random_case(seed, GPU_LENGTHS, (16, 40, 64, 128), dtypes)
    check(replace(case, sink=True), backend, "cuda")


@pairwise(
    name=PARTS,
    head_dim=[64, 128, 256],
    sink=[False, True],
    max_scores=[False, True],
    deterministic=[False, True],
)
def test_rows_in_parts(name, head_dim, sink, max_scores, deterministic, backend):
    """The kernel that merges the parts adds the sink, and takes the largest of their maxima."""
    options = {"sink": sink, "max_scores": max_scores, "deterministic": deterministic}
    case = replace(PARTS[name], head_dim=head_dim, dtype=torch.bfloat16, **options)
    assert parts(case, "cuda") > 0  # the case is about them
    check(case, backend, "cuda")


def parts(case: Case, device: str) -> int:
    """In how many parts the forward of hopper takes split rows, on a GPU with 132 processors."""
    problem, schedule = problem_of(*draw(case, device)[0]), schedule_of(case, device)
    tiles = forward_tiles_for(problem, schedule.facts, 132, schedule)
    spec = forward_spec(problem, tiles, 132)
    return tile_lists(schedule, spec, device).n_parts


@pairwise(
    **{"head_dim, width": [(32, 32), (128, 128), (64, 128), (192, 128)]},
    mask=[HOLE, masks.heads(HOLE, NONE), NONE],
    block=[(128, 128), (64, 64), (16, 32)],
    sink=[False, True],
    max_scores=[False, True],
)
def test_rows_with_nothing(mask, head_dim, width, block, sink, max_scores, backend):
    """In whole tiles of them, and beside rows that attend to something."""
    options = {"mask": mask, "block_size": block, "sink": sink, "max_scores": max_scores}
    check(Case(1000, 1000, head_dim, torch.float16, v_head_dim=width, **options), backend, "cuda")


@pytest.mark.parametrize("name", ["some heads", None])
def test_each_call_has_its_own_sink(name, backend):
    """Launches are repeated with the addresses of the call: with a sink, another one, or none."""
    case = PARTS[name] if name else Case(700, 700, 128, heads=4, mask=MASK)
    q, k, v = (t.bfloat16().requires_grad_() for t in draw(case, "cuda")[0])
    sinks = torch.randn(3, 5, device="cuda") + math.log(case.n_k)
    options = {"return_lse": True, "backend": backend} | SAME_BITS
    plain, plain_lse = sparseflash.attention(q, k, v, case.mask, **options)
    for sink in (sinks[0, :4], None, sinks[1, :4], sinks[2, 1:], sinks[0, :4], None):
        if sink is None:
            out, lse = sparseflash.attention(q, k, v, case.mask, **options)
            assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
            continue
        sink = sink.detach().requires_grad_()
        out, lse = sparseflash.attention(q, k, v, case.mask, sink=sink, **options)
        total = torch.logaddexp(plain_lse, sink[:, None])
        share = (plain_lse - total).exp().unsqueeze(-1)
        torch.testing.assert_close(lse, total)
        torch.testing.assert_close(out.float(), plain.float() * share, rtol=2e-2, atol=1e-4)
        (dsink,) = torch.autograd.grad(out.float().sum() + lse.sum(), sink)
        p = (sink[:, None] - total).exp()
        wanted = -(p * ((out.float()).sum(-1) - 1)).sum((0, 2))
        torch.testing.assert_close(dsink, wanted, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("length", [512, 2000])
def test_the_gradient_of_a_sink_is_the_same_bits_every_time(length, backend):
    qkv = inputs(length)
    sink = torch.randn(4, device="cuda", requires_grad=True)
    options = {"sink": sink, "backend": backend} | SAME_BITS
    first, *others = (
        torch.autograd.grad(sparseflash.attention(*qkv, MASK, **options).square().sum(), sink)[0]
        for _ in range(4)
    )
    assert first.any() and all(torch.equal(first, other) for other in others)


@pairwise(largest=test_triton.LARGEST, cap=test_triton.CAPS, fast=[False, True])
def test_capped_scores(largest, cap, fast):
    test_triton.check_cap(largest, cap, fast, "cuda")


@pytest.mark.parametrize("fast", [False, True])
def test_capped_scores_that_are_not_finite(fast):
    test_triton.check_cap_of_what_is_not_finite(fast, "cuda")


@pairwise(
    softcap=[0.5, 20.0, 50.0, 51.0, 1000.0],
    mask=[None, masks.causal(), HOLE],
    head_dim=[64, 128],
    dtype=DTYPES,
)
def test_softcap_at_every_size_of_scores(softcap, mask, head_dim, dtype):
    """Scores about sqrt(head_dim): beyond the cap, on both sides of the polynomial, far below the
    cap; with and without running maxima.
    """
    options = {"mask": mask, "softcap": softcap, "scale": 1.0}
    case = Case(1000, 1000, head_dim, dtype, heads=4, kv_heads=2, seed=31, **options)
    check(case, "triton", "cuda")
    check(replace(case, sink=True, scale=None), "triton", "cuda")


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("softcap", [20.0, 50.0, 1000.0])
def test_softcap_of_scores_of_both_kinds(softcap, dtype):
    """Some heads and some keys have large scores: the form differs from thread to thread."""
    q, k, v = (t.to(dtype) for t in draw(Case(1000, 1000, 64, heads=4), "cuda")[0])
    k[:, :, 300:330] *= 8
    q[:, 2] *= 4
    inputs = [t.requires_grad_() for t in (q, k, v)]
    exact = [t.detach().float().requires_grad_() for t in inputs]
    score = score_rules.softcap(softcap)
    out = sparseflash.attention(*inputs, MASK, score=score, backend="triton")
    wanted = sparseflash.attention(*exact, MASK, score=score, backend="reference")
    dout = torch.randn_like(out)
    pairs = zip(
        (out, *torch.autograd.grad(out, inputs, dout)),
        (wanted, *torch.autograd.grad(wanted, exact, dout.float())),
        strict=True,
    )
    for got, want in pairs:
        error = (got.float() - want).norm() / want.norm()
        assert error < 8 * torch.finfo(dtype).eps, error


# the largest logit of each query


@pairwise(
    **{"n_q, n_k": [(1000, 1000), (1, 700), (130, 2000)]},
    mask=[None, masks.causal(align="bottom_right")],
    dropout_p=[0.0, 0.3],
    dtype=LOW,
)
def test_maxima_grouped_heads_dropout_and_other_lengths(mask, dropout_p, n_q, n_k, dtype, backend):
    options = {"batch": 2, "heads": 6, "kv_heads": 2, "mask": mask, "dropout_p": dropout_p}
    check(Case(n_q, n_k, 64, dtype, max_scores=True, **options), backend, "cuda")


def test_maxima_cuda_graphs(backend):
    q, k, v = inputs(requires_grad=False)
    graph, (_, maxima) = captured(lambda: attend(q, k, v, MASK, backend=backend))
    for factor in (-1.0, 3.0):
        q.mul_(factor)
        graph.replay()
        assert_right(maxima, q, k, MASK)
