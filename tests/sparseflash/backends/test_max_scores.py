"""The largest logit of each query as an output, beside that of random problems: forms, callers."""

import pytest
import torch

import masks
import sparseflash
from sparseflash import select
from sparseflash.testing import logits, make_qkv, relative_error
from tests.op_cases import BACKENDS, MASK, small

backends = pytest.mark.parametrize("backend", BACKENDS)


def attend(*args, **options):
    return sparseflash.attention(*args, return_max_scores=True, **options)


def assert_right(maxima, q, k, mask=None):
    """Against float64."""
    dense = None if mask is None else mask.build(q.shape[2], k.shape[2]).to_dense()
    dense = dense if dense is None else torch.from_numpy(dense).to(q.device)
    wanted = logits(q, k, dense).amax(-1)
    limit = 1e-12 if maxima.dtype == torch.float64 else 1e-5
    assert relative_error(maxima, wanted) < limit and not maxima.requires_grad


@backends
def test_large_and_negative_logits(backend):
    """The first maximum is that of a key, not 0."""
    q, k, v = small()
    for factor in (100.0, -100.0):
        one = q.detach().abs() * factor
        maxima = attend(one, k.abs(), v, MASK, backend=backend)[1]
        assert_right(maxima, one, k.abs(), MASK)
        assert (maxima < 0).all() == (factor < 0)


@pytest.mark.parametrize("sink", [False, True])
def test_long_lists_on_the_cpu_go_chunk_by_chunk(sink, monkeypatch):
    monkeypatch.setattr("sparseflash.backends.cpu_blocks.BUFFER_NUMBERS", 1)
    q, k, v = small(200, requires_grad=False)
    blocks = masks.causal().build(200, block_size=16)
    given = torch.zeros(2) if sink else None
    maxima = attend(q, k.flip(2), v, blocks, sink=given, backend="cpu")[1]
    assert_right(maxima, q, k.flip(2), masks.causal())


@backends
def test_the_other_results_are_the_same_and_the_forms_are_as_documented(backend):
    q, k, v = small()
    options = {"backend": backend, "return_lse": True}
    out, lse = sparseflash.attention(q, k, v, MASK, **options)
    *others, maxima = attend(q, k, v, MASK, **options)
    two = attend(q, k, v, MASK, backend=backend)
    assert isinstance(two, tuple) and len(two) == 2 and torch.equal(two[1], maxima)
    assert torch.equal(others[0], out) and torch.equal(others[1], lse)
    wanted = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))
    got = torch.autograd.grad(others[0].square().sum() + others[1].sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("n, mask", [(40, None), (40, MASK), (256, masks.causal())])
@pytest.mark.parametrize("sink", [False, True])
def test_lengths(n, mask, sink):
    """By padding that is hidden, whose keys score very low, and by padding that is skipped."""
    q, k, v = small(n)
    own = torch.tensor([0.5, -1.0]) if sink else None
    given = {"lengths": [n - 17, 0], "sink": own, "backend": "cpu"}
    out, lse, maxima = attend(q, k, v, mask, **given, return_lse=True)
    assert_right(maxima[:1, :, : n - 17], q[:1, :, : n - 17], k[:1, :, : n - 17], mask)
    assert (maxima[:1, :, n - 17 :] == -torch.inf).all() and (maxima[1] == -torch.inf).all()
    assert torch.equal(maxima, attend(q, k, v, mask, **given)[1])
    plain = sparseflash.attention(q, k, v, mask, **given, return_lse=True)
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])


def test_lengths_of_keys_alone_beside_a_sink():
    q, k, v = make_qkv(2, 2, 9, 30, 8)
    maxima = attend(q, k, v, lengths=[30, 0], sink=torch.zeros(2))[1]
    assert_right(maxima[:1], q[:1], k[:1])
    assert (maxima[1] == -torch.inf).all()


@pytest.mark.parametrize("planned", [False, True])
def test_selections(planned):
    q, k, v = make_qkv(1, 2, 256, 256, 16)
    chosen = select.top_k(2, block_size=64)(q, k)
    dense = torch.from_numpy(chosen.to_block_mask().to_dense())
    mask = sparseflash.plan(chosen, q, k, v) if planned else chosen
    maxima = attend(q, k, v, mask)[1]
    assert relative_error(maxima, logits(q, k, dense).amax(-1)) < 1e-5


@pytest.mark.parametrize("function", [sparseflash.attention, sparseflash.explain])
def test_wrong_flags(function):
    with pytest.raises(ValueError, match="return_max_scores is 1; pass True or False"):
        function(*small(), return_max_scores=1)
