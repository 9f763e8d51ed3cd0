"""The forms that a call takes: head dims of v, masks of every kind, dropout and its seed."""

import numpy as np
import pytest
import torch

import masks
import sparseflash
from sparseflash import schedule
from sparseflash.dropout import keep_mask
from sparseflash.testing import assert_close, oracle, relative_error
from tests.op_cases import BACKENDS, MASK, assert_same, run, small

# ---- v with a head dim of its own


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("v_head_dim", [1, 4, 20])
@pytest.mark.parametrize("backend", BACKENDS)
def test_head_dim_of_v_may_differ(backend, v_head_dim, token_major):
    qkv = small(v_head_dim=v_head_dim)
    if token_major:
        qkv = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in qkv]
    dense = torch.from_numpy(MASK.build(40).to_dense())
    actual = run(lambda *a: sparseflash.attention(*a, MASK, backend=backend), qkv)
    assert actual[0].shape == (2, 2, 40, v_head_dim)
    expected = run(lambda *a: oracle(*a, dense)[0], [t.double() for t in qkv])
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert_close(a, e, name=name)


def test_scale_follows_the_head_dim_of_q():
    q, k, v = small(v_head_dim=20)
    assert torch.equal(
        sparseflash.attention(q, k, v), sparseflash.attention(q, k, v, scale=8**-0.5)
    )


# ---- the forms of a mask


def forms_of(mask):
    array = mask.build(40).to_dense()[0, 0]
    yield "Mask", mask
    yield "BlockMask", mask.build(40)
    yield "numpy array", array
    yield "torch tensor", torch.from_numpy(array)
    yield "tensor with batch and heads", torch.from_numpy(array).expand(2, 2, 40, 40)
    yield "strided array", np.asfortranarray(array)
    yield "mask_from", masks.mask_from(array)
    yield "parsed text", masks.parse(str(mask))


@pytest.mark.parametrize("form", range(8))
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_form_of_a_mask_gives_the_same(form, backend):
    name, given = list(forms_of(MASK))[form]

    def function(q, k, v, mask):
        return sparseflash.attention(q, k, v, mask, backend=backend)

    error = [
        relative_error(a, e)
        for a, e in zip(run(function, small(), given), run(function, small(), MASK), strict=True)
    ]
    assert max(error) < 1e-6, name


def test_block_size_of_a_block_mask_does_not_change_the_result():
    for size in (16, (32, 48), (256, 16)):
        expected = run(sparseflash.attention, small(), MASK)
        assert_same(run(sparseflash.attention, small(), MASK.build(40, block_size=size)), expected)


def test_mask_per_head_and_per_batch_reaches_its_slice():
    array = np.random.default_rng(0).random((2, 2, 40, 40)) < 0.5
    q, k, v = small()
    whole = sparseflash.attention(q, k, v, array)
    for b in range(2):
        for h in range(2):
            one = (q[b : b + 1, h : h + 1], k[b : b + 1], v[b : b + 1])
            alone = sparseflash.attention(*one, array[b, h])
            assert relative_error(whole[b, h], alone[0, 0]) < 1e-6


@pytest.mark.parametrize("form", range(8))
def test_second_call_does_not_rebuild_the_schedule(form, monkeypatch):
    built = []
    to_device = schedule.to_device
    monkeypatch.setattr(schedule, "to_device", lambda *a: built.append(1) or to_device(*a))
    _, mask = list(forms_of(MASK))[form]
    for _ in range(2):
        sparseflash.attention(*small(), mask)
    assert len(built) == 1
    sparseflash.attention(*small(33), MASK)
    assert len(built) == 2


# ---- dropout


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_keeps_the_share_that_it_should(backend):
    # with equal scores and v the identity, out holds the probabilities themselves
    batch, heads, n_q, n_k, p = 1, 4, 256, 64, 0.3
    q, k = torch.zeros(batch, heads, n_q, n_k), torch.zeros(batch, heads, n_k, n_k)
    v = torch.eye(n_k).expand(batch, heads, n_k, n_k)
    out = sparseflash.attention(q, k, v, dropout_p=p, seed=11, backend=backend)
    kept = out > 0
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * deviation
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (n_k * (1 - p))))
    assert torch.equal(kept, keep_mask(torch.tensor([11]), batch, heads, n_q, n_k, p))


def test_dropout_is_the_same_on_every_backend():
    results = [
        run(
            lambda *a, b=backend: sparseflash.attention(
                *a, MASK, dropout_p=0.4, seed=2**40 + 7, backend=b
            ),
            small(),
        )
        for backend in BACKENDS
    ]
    for result in results[1:]:
        assert_same(result, results[0], 1e-5)


def test_seed_may_be_int_or_tensor():
    def out(seed):
        return sparseflash.attention(*small(), dropout_p=0.5, seed=seed)

    for seed in (torch.tensor(9), torch.tensor([9]), torch.tensor([[9]])):
        assert torch.equal(out(9), out(seed))
    assert not torch.equal(out(9), out(10))
    assert not torch.equal(out(9), out(9 + 2**40))


def test_seed_none_is_drawn_from_the_generator_of_torch():
    def out():
        return sparseflash.attention(*small(), dropout_p=0.5)

    torch.manual_seed(4)
    first, second = out(), out()
    torch.manual_seed(4)
    assert torch.equal(first, out()) and torch.equal(second, out())
    assert not torch.equal(first, second)


def test_call_without_dropout_leaves_the_generator_alone():
    before = torch.get_rng_state()
    sparseflash.attention(*small(), MASK)
    assert torch.equal(before, torch.get_rng_state())
