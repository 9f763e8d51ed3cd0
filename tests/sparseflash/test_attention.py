"""The forms that a call takes: head dims of v, masks of every kind, dropout and its seed."""

import numpy as np
import pytest
import torch

import masks
import sparseflash
from sparseflash import packed
from sparseflash.dropout import keep_mask, key_table
from sparseflash.schedule import blocks as schedule
from sparseflash.testing import assert_close
from tests.op_cases import BACKENDS, MASK, assert_same, exact, run, small, token_major

ARRAY = MASK.build(40).to_dense()[0, 0]
FORMS = {
    "Mask": MASK,
    "BlockMask": MASK.build(40),
    "blocks of 16": MASK.build(40, block_size=16),
    "blocks of 32 x 48": MASK.build(40, block_size=(32, 48)),
    "blocks of 256 x 16": MASK.build(40, block_size=(256, 16)),
    "numpy array": ARRAY,
    "torch tensor": torch.from_numpy(ARRAY),
    "tensor with batch and heads": torch.from_numpy(ARRAY).expand(2, 2, 40, 40),
    "strided array": np.asfortranarray(ARRAY),
    "mask_from": masks.mask_from(ARRAY),
    "parsed text": masks.parse(str(MASK)),
}


@pytest.mark.parametrize("v_head_dim, layout", [(1, torch.Tensor.contiguous), (20, token_major)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_head_dim_of_v_may_differ(backend, v_head_dim, layout):
    qkv = [layout(t) for t in small(v_head_dim=v_head_dim)]
    actual = run(lambda *a: sparseflash.attention(*a, MASK, backend=backend), qkv)
    assert actual[0].shape == (2, 2, 40, v_head_dim)
    expected = run(lambda *a: exact(*a)[0], [t.double() for t in qkv])
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert_close(a, e, name=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_form_of_a_mask_gives_the_same(backend):
    def function(q, k, v, mask):
        return sparseflash.attention(q, k, v, mask, backend=backend)

    expected = run(function, small(), MASK)
    for name, given in FORMS.items():
        if backend != "triton" or "blocks of" in name:
            assert_same(run(function, small(), given), expected)


def test_second_call_does_not_rebuild_the_schedule(monkeypatch):
    built, to_device = [], schedule.to_device
    monkeypatch.setattr(schedule, "to_device", lambda *a: built.append(1) or to_device(*a))
    for name, mask in FORMS.items():
        sparseflash.clear_cache()
        built.clear()
        for _ in range(2):
            sparseflash.attention(*small(), mask, backend="cpu")
        assert len(built) == 1, name
    sparseflash.attention(*small(33), MASK, backend="cpu")
    assert len(built) == 2


# ---- dropout


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_keeps_what_it_should(backend):
    # with equal scores and v the identity, out holds the probabilities themselves
    batch, heads, n_q, n_k, p = 1, 4, 256, 64, 0.3
    q, k = torch.zeros(batch, heads, n_q, n_k), torch.zeros(batch, heads, n_k, n_k)
    v = torch.eye(n_k).expand(batch, heads, n_k, n_k)
    out = sparseflash.attention(q, k, v, dropout_p=p, seed=11, backend=backend)
    kept = out > 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (n_k * (1 - p))))
    assert torch.equal(kept, keep_mask(torch.tensor([11]), batch, heads, n_q, n_k, p))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block", [16, 64])
def test_some_heads_and_tokens_drop_what_they_drop_in_the_whole(backend, block):
    n, d, p, seed = 256, 64, 0.3, torch.tensor([2**40 + 9])
    whole = keep_mask(seed, 2, 3, n, n, p)
    heads, rows, cols = torch.tensor([[2, 4], [5, 0]]), [48, 240, 0], [[192, 0, 32, 64]]
    cols = torch.tensor([*cols, [16, 224, 208, 128]]).unsqueeze(1)  # other keys in each entry
    table = key_table(seed, heads, torch.tensor(rows), cols)
    q, k, v = torch.zeros(2, 2, 40, d), torch.zeros(2, 1, d, d), torch.eye(d).expand(2, 1, d, d)
    v = v.contiguous().requires_grad_()
    mask = masks.dense().build(40, d, block_size=block)
    out = sparseflash.attention(q, k, v, mask, dropout_p=p, seed=table, backend=backend)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    (dv,) = torch.autograd.grad(out, v, dout)
    sixteen = torch.arange(16)
    for b in range(2):
        row = (torch.tensor(rows)[:, None] + sixteen).flatten()[:40]
        col = (cols[b, 0][:, None] + sixteen).flatten()
        kept = torch.stack([whole.flatten(0, 1)[h][row][:, col] for h in heads[b]])
        assert torch.equal(out[b] > 0, kept)
        exact = (kept.mT.float() @ dout[b]).sum(0) / (d * (1 - p))
        torch.testing.assert_close(dv[b, 0], exact, rtol=1e-4, atol=1e-4)


def dropped(seed=None):
    return sparseflash.attention(*small(), dropout_p=0.5, seed=seed)


def test_seed_may_be_int_or_tensor():
    for seed in (torch.tensor(9), torch.tensor([9]), torch.tensor([[9]])):
        assert torch.equal(dropped(9), dropped(seed))
    assert not torch.equal(dropped(9), dropped(10))
    assert not torch.equal(dropped(9), dropped(9 + 2**40))


def test_seed_none_is_drawn_from_the_generator_of_torch():
    torch.manual_seed(4)
    first, second = dropped(), dropped()
    torch.manual_seed(4)
    assert torch.equal(first, dropped()) and torch.equal(second, dropped())
    assert not torch.equal(first, second)


def test_call_without_dropout_leaves_the_generator_alone():
    before = torch.get_rng_state()
    sparseflash.attention(*small(), MASK)
    assert torch.equal(before, torch.get_rng_state())


def test_the_default_device_is_not_asked():
    offsets, leave = torch.tensor([0, 7, 30]), torch.tensor([40, 30, 40])
    bias = torch.randn(2, 19, requires_grad=True)
    clipped = sparseflash.score(lambda s, h, q, k, bias: s + bias[h, np.clip(q - k, -9, 9) + 9])
    q, k, v = small(requires_grad=False)

    def results():
        score = {"score": clipped(bias=bias)}
        yield sparseflash.attention(q, k, v, packed.documents(offsets, 40))
        yield sparseflash.attention(q, k, v, packed.prefix_tree(offsets, leave, 40))
        for backend in BACKENDS:
            out = sparseflash.attention(q, k, v, MASK, **score, backend=backend)
            yield from torch.autograd.grad(out.sum(), bias)
        with torch.no_grad():
            yield sparseflash.decode(q[:, :, :3], k, v, MASK, **score, backend="cpu")

    with torch.device("meta"):
        found = [*results()]
    assert all(map(torch.equal, found, results()))
