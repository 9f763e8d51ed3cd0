"""The largest logit of each query on a GPU, against float64."""

from dataclasses import replace

import pytest
import torch

import masks
import sparseflash
from sparseflash import Terms, select
from sparseflash.testing import logits, relative_error
from tests.attention_cases import LOW, Case, check
from tests.gpu.test_terms import HOLE, NONE, PARTS, parts
from tests.gpu_calls import GPU, MASK, captured, inputs, pairwise

pytestmark = GPU


def attend(*args, **options):
    return sparseflash.attention(*args, return_max_scores=True, **options)


def wanted(q, k, mask, **options):
    dense = torch.from_numpy(mask.build(q.shape[2], k.shape[2]).to_dense()).to(q.device)
    return logits(q.detach(), k.detach(), dense, **options).amax(-1)


@pairwise(
    {
        "name": PARTS,
        "head_dim": [64, 128, 256],
        "terms": [(), ("sink",)],
    }
)
def test_rows_in_parts(name, head_dim, terms, backend):
    """The kernel that merges the parts takes the largest of theirs."""
    options = {"dtype": torch.bfloat16, "terms": terms, "max_scores": True}
    case = replace(PARTS[name], head_dim=head_dim, **options)
    assert parts(case, "cuda") > 0  # the case is about them
    check(case, backend, "cuda")


@pairwise(
    {
        "mask": [HOLE, masks.heads(HOLE, NONE), NONE],
        "head_dim, width": [(32, 32), (128, 128), (64, 128), (192, 128)],
        "block": [(128, 128), (64, 64), (16, 32)],
        "terms": [(), ("sink",)],
    }
)
def test_rows_with_nothing(mask, head_dim, width, block, terms, backend):
    """In whole tiles of them, and beside rows that attend to something."""
    options = {"mask": mask, "block_size": block, "terms": terms, "max_scores": True}
    check(Case(1000, 1000, head_dim, torch.float16, v_head_dim=width, **options), backend, "cuda")


@pairwise(
    {
        "mask": [None, masks.causal(align="bottom_right")],
        "dropout_p": [0.0, 0.3],
        "n_q, n_k": [(1000, 1000), (1, 700), (130, 2000)],
        "dtype": LOW,
    }
)
def test_grouped_heads_dropout_and_other_lengths(mask, dropout_p, n_q, n_k, dtype, backend):
    options = {"batch": 2, "heads": 6, "kv_heads": 2, "mask": mask, "dropout_p": dropout_p}
    check(Case(n_q, n_k, 64, dtype, max_scores=True, **options), backend, "cuda")


@pytest.mark.parametrize("mask", [None, MASK])
def test_large_and_negative_logits(mask, backend):
    """The first maximum is that of a key, not 0."""
    q, k, v = inputs(requires_grad=False)
    for factor in (100.0, -100.0):
        one, keys = q.abs() * factor, k.abs()
        maxima = attend(one, keys, v, mask, backend=backend)[1]
        assert (
            relative_error(maxima, wanted(one, keys, masks.dense() if mask is None else mask))
            < 1e-5
        )
        assert (maxima < 0).all() == (factor < 0)


def test_cuda_graphs(backend):
    q, k, v = inputs(requires_grad=False)
    graph, (_, maxima) = captured(lambda: attend(q, k, v, MASK, backend=backend))
    for factor in (-1.0, 3.0):
        q.mul_(factor)
        graph.replay()
        assert relative_error(maxima, wanted(q, k, MASK)) < 1e-5


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled(backend):
    q, k, v = inputs()
    compiled = torch.compile(
        lambda q, k, v: attend(q, k, v, MASK, return_lse=True, backend=backend), fullgraph=True
    )
    out, lse, maxima = compiled(q, k, v)
    assert relative_error(maxima, wanted(q, k, MASK)) < 1e-5 and not maxima.requires_grad
    found = torch.autograd.grad(out.float().sum() + lse.sum(), (q, k, v))
    out, lse = sparseflash.attention(q, k, v, MASK, return_lse=True, backend=backend)
    same = torch.autograd.grad(out.float().sum() + lse.sum(), (q, k, v))
    assert all(relative_error(a, b) < 1e-2 for a, b in zip(found, same, strict=True))


@pytest.mark.parametrize("n", [300, 2048])
def test_lengths(n, backend):
    q, k, v = inputs(n, requires_grad=False)
    lengths = torch.tensor([n - 77, 0], device="cuda")
    terms = Terms(torch.zeros(4, device="cuda"))
    maxima = attend(q, k, v, masks.causal(), lengths=lengths, terms=terms, backend=backend)[1]
    q, k = q[:1, :, : n - 77], k[:1, :, : n - 77]
    assert relative_error(maxima[:1, :, : n - 77], wanted(q, k, masks.causal())) < 1e-5
    assert (maxima[:1, :, n - 77 :] == -torch.inf).all() and (maxima[1] == -torch.inf).all()


@pytest.mark.parametrize("block", [64, 128])
def test_selections(block, backend):
    if backend == "hopper" and block < 128:
        pytest.skip("selections on hopper have blocks of 128 keys")
    q, k, v = inputs(2048, requires_grad=False)
    chosen = select.top_k(3, block_size=block)(q, k)
    dense = torch.from_numpy(chosen.to_block_mask().to_dense()).cuda()
    for mask in (chosen, sparseflash.plan(chosen, q, k, v, backend=backend)):
        maxima = attend(q, k, v, mask, backend=backend)[1]
        assert relative_error(maxima, logits(q, k, dense).amax(-1)) < 1e-5
