"""Key lengths: attention over the keys within them, whichever way padding is left out."""

from itertools import product

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import masks
import sparseflash
from sparseflash import select
from sparseflash.cache import cache
from sparseflash.dynamic.lengths import (
    BLOCK,
    attend_within,
    blocks_of,
    check_lengths,
    cut_torch,
    skip_padding,
)
from sparseflash.problem import Problem
from sparseflash.testing import make_qkv

H, N = 3, 512
LENGTHS = [0, 1, 2, 127, 128, 129, 255, 256, 257, 300, 383, 384, 385, 511, 512, 70]
MASKS = {
    "dense": None,
    "causal": masks.causal(),
    "whole blocks": masks.butterfly(128) | masks.local(128) >> masks.snap(128),
    "partial blocks": masks.local(100) | masks.global_tokens(5),
    "small blocks": masks.butterfly(64),
    "many tiles": masks.random_blocks(0.3, block=16) & masks.causal(),
    "per head": masks.heads(masks.local(9), masks.dense(), masks.dilated(200, 3)),
    "empty columns": masks.diagonals((-300,)),
    "blocks of 64": (masks.butterfly(64) | masks.local(70)).build(N, block_size=64),
    "blocks of 32": masks.heads(masks.local(9), masks.dense(), masks.dilated(200, 3)).build(
        N, block_size=32, heads=H
    ),
}


def skipped(mask, lengths, n=N):
    cpu = torch.device("cpu")
    return skip_padding(blocks_of(mask, n, H, cpu), torch.tensor(lengths, dtype=torch.int32))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_blocks_are_those_of_the_mask_and_of_the_real_tokens(mask):
    for selection in (skipped(mask, LENGTHS), skipped(mask, [N - 1] * 4)):
        assert int((selection.codes != -2).sum()) <= selection.max_blocks
        assert int(selection.codes.max()) < len(selection.bits)
    found = skipped(mask, LENGTHS).to_block_mask()
    token, ends = np.arange(N), np.array(LENGTHS)[:, None, None, None]
    block = found.block_size[0]
    real = (token[:, None] // block * block < ends) & (token < ends)
    allowed = masks.dense() if mask is None else mask
    if isinstance(allowed, masks.Mask):
        allowed = allowed.build(N, heads=H if allowed.per_head else None)
    assert block == allowed.block_size[0]
    assert (found.to_dense() == (real & allowed.to_dense())).all()
    if allowed.heads == 1 and block == BLOCK:  # which `&` refuses to widen
        assert found == (skipped(None, LENGTHS) & allowed).to_block_mask()


@pytest.mark.parametrize("name", ["dense", "partial blocks", "per head", "blocks of 64"])
def test_the_kernel_cuts_as_plain_torch_does(name):
    kernels = pytest.importorskip("sparseflash.dynamic.kernels")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    blocks = blocks_of(MASKS[name], N, H, device)
    given = [1, 129, 384, 511, N + 1, -3]
    given = torch.tensor(given, dtype=torch.int32, device=device)
    made = kernels.cut_blocks(blocks, given), cut_torch(blocks, given)
    for found, expected in zip(*made, strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_lengths_out_of_range_are_clamped_where_nobody_reads_them():
    found = skipped(MASKS["partial blocks"], [N + 1, 10 * N, -3])
    expected = skipped(MASKS["partial blocks"], [N, N, 0])
    assert found.to_block_mask() == expected.to_block_mask()


# ---- attention

FEW = [256, 0, 129, 1, 70]


def leaves(n_q=256, n_k=256, heads=4, kv_heads=2, dtype=torch.float64):
    tensors = make_qkv(len(FEW), heads, n_q, n_k, 16, kv_heads=kv_heads, dtype=dtype)
    return [t.requires_grad_() for t in tensors]


def exact(q, k, v, mask, lengths, starts=(0,), **options):
    """Attention of the reference backend under one boolean array for every sequence."""
    n_q, n_k = q.shape[2], k.shape[2]
    lengths, starts = (np.array(x)[:, None, None, None] for x in (lengths, starts))
    allowed = (np.arange(n_k) >= starts) & (np.arange(n_k) < lengths)
    if n_q == n_k:
        allowed = allowed & allowed.transpose(0, 1, 3, 2)
    if mask is not None:
        heads = q.shape[1] if mask.per_head else None
        allowed = allowed & mask.build(n_q, n_k, heads=heads).to_dense()
    allowed = np.ascontiguousarray(np.broadcast_to(allowed, (*allowed.shape[:2], n_q, n_k)))
    return sparseflash.attention(q, k, v, allowed, backend="reference", **options)


def agree(found, expected, tensors):
    """Of two calls: out, LSE and the gradients of both."""
    for a, b in zip(*(_with_gradients(*call, tensors) for call in (found, expected)), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def _with_gradients(out, lse, tensors):
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    loss = (out * weight).sum() + (lse.to(out.dtype) * weight[..., 0]).sum()
    return [out, lse, *torch.autograd.grad(loss, tensors)]


def within(how, q, k, v, mask, lengths=FEW, **options):
    return attend_within(sparseflash.attention, q, k, v, mask, lengths, how, **options)


both_ways = pytest.mark.parametrize("how", ["hide", "skip"])


@pytest.fixture(params=["torch", "kernel"])
def rows(request, monkeypatch):
    """What replaces the rows of padding: plain torch, or the kernel of eager calls on GPUs."""
    if request.param == "kernel":
        pytest.importorskip("sparseflash.dynamic.kernels")
        if torch.cuda.is_available():
            pytest.skip("the kernel is compiled, these tensors are on the CPU")
        monkeypatch.setattr("sparseflash.dynamic.lengths._by_kernels", lambda *tensors: True)


@both_ways
@pytest.mark.parametrize(
    "mask",
    [
        None,
        masks.causal(),
        masks.local(100) | masks.global_tokens(5),
        masks.heads(masks.local(9), masks.dense(), masks.dilated(70, 3), masks.causal()),
        masks.diagonals((-60,)),  # some queries see padding alone
    ],
)
def test_attention_and_gradients(mask, how, rows):
    tensors, options = leaves(), {"return_lse": True, "scale": 0.3}
    out, lse = within(how, *tensors, mask, **options)
    expected = exact(*tensors, mask, FEW, **options)
    assert torch.equal(lse == -torch.inf, expected[1] == -torch.inf)
    agree((out, lse), expected, tensors)
    for b, end in enumerate(FEW):
        assert not out[b, :, end:].any()


def test_the_public_call_takes_either_way():
    options = {"backend": "cpu", "dropout_p": 0.3, "seed": 5, "deterministic": True}
    for n, how in ((1024, "skip"), (896, "hide")):
        q, k, v = (t.detach() for t in leaves(n, n, 1, 1, torch.float32))
        given = (q, k, v, masks.local(50))
        out = sparseflash.attention(*given, lengths=FEW, **options)
        assert torch.equal(out, within(how, *given, **options))
        assert not torch.equal(out, within(how, *given, **options | {"dropout_p": 0.0}))
    problems = [key for key in cache._entries if isinstance(key, Problem)]
    assert sum(problem.options.deterministic for problem in problems) == len(problems) > 0


def test_with_other_extents_they_count_keys(rows):
    for n_k, mask in product((100, 1024), (None, masks.causal(align="bottom_right"))):
        tensors, ends = leaves(n_q=40, n_k=n_k), [n_k, 0, 99, 1, 70]
        found = sparseflash.attention(*tensors, mask, lengths=ends, return_lse=True)
        agree(found, exact(*tensors, mask, ends, return_lse=True), tensors)


def test_every_form_of_mask():
    tensors = leaves(96, 96)
    ends = torch.tensor([96, 0, 50, 33, 2])
    mask = masks.local(20) | masks.global_tokens(3)
    expected = exact(*tensors, mask, ends.tolist())
    array = mask.build(96).to_dense()[0, 0]
    q, k, v = tensors
    picked = select.top_k(1.0, block_size=16, within=mask)(q, k)
    plan = sparseflash.plan(picked, q, k, v)
    for form in (mask.build(96, block_size=32), array, torch.from_numpy(array), picked, plan):
        torch.testing.assert_close(sparseflash.attention(q, k, v, form, lengths=ends), expected)


def test_every_batch_entry_keeps_its_own_mask():
    """Skipping has the blocks of one mask only, so padding is hidden."""
    tensors, ends = leaves(1024, 1024, 2, 1), [1024, 0, 1000, 1, 700]
    mask = masks.documents([[1024 - 100 * b, 100 * b] for b in range(1, 6)])
    found = sparseflash.attention(*tensors, mask, lengths=ends, return_lse=True)
    agree(found, exact(*tensors, mask, ends, return_lse=True), tensors)
    layer = sparseflash.BlockSparseAttention(16, 2, mask=mask)
    capped = sparseflash.score_rules.softcap(2.0)
    for remedy, call in {
        "pass the lengths": lambda: layer.plan(ends, 1024),
        "take padding=hide": lambda: within("skip", *tensors, mask, ends),
        "with 96 queries": lambda: within("skip", *leaves(96, 96), None, [96, 1, 1, 1, 1]),
        "score": lambda: sparseflash.attention(*tensors, mask, lengths=ends, score=capped),
    }.items():
        with pytest.raises(ValueError, match=f"the same for every batch entry.*{remedy}"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@both_ways
def test_lower_precision(how, dtype):
    qkv = [t.detach().to(dtype) for t in leaves()]
    out = within(how, *qkv, masks.local(60), scale=0.001, backend="cpu")
    expected = exact(*(t.double() for t in qkv), masks.local(60), FEW, scale=0.001)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    assert (out - expected).abs().max() < tolerance * expected.abs().max()


def test_hidden_padding_may_hold_anything(rows):
    """As by a mask in which it sees nothing and is not seen: also its gradients are 0."""
    tensors = leaves()
    padding = (torch.arange(256) >= torch.tensor(FEW)[:, None])[:, None, :, None]
    expected = _with_gradients(*within("hide", *tensors, None, return_lse=True), tensors)
    for odd in (float("nan"), float("inf")):
        filled = [t.detach().masked_fill(padding, odd).requires_grad_() for t in tensors]
        found = _with_gradients(*within("hide", *filled, None, return_lse=True), filled)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@both_ways
def test_no_value_is_read_from_a_device(how):
    qkv = leaves()
    within(how, *qkv, None)  # fills the caches
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        *fakes, ends = (mode.from_tensor(t) for t in (*qkv, torch.tensor(FEW)))
        within(how, *fakes, None, ends).sum().backward()


@pytest.mark.parametrize("n", [96, 1024])
def test_it_compiles_into_one_graph(n, fresh_dynamo):
    q, k, v = leaves(n, n, 2, 1, torch.float32)
    ends = torch.tensor(FEW).clamp(max=n)
    mask = masks.local(30)

    def call(q, k, v, ends):
        return sparseflash.attention(q, k, v, mask, lengths=ends, backend="cpu")

    compiled = torch.compile(call, fullgraph=True, dynamic=False, backend="aot_eager")
    for given in (ends, ends.flip(0)):
        found, expected = compiled(q, k, v, given), call(q, k, v, given)
        torch.testing.assert_close(found, expected)
        gradients = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (found, expected))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [96, 1024])  # padding is hidden, and skipped
def test_vmap_takes_the_lengths_of_each_entry(n):
    q, k, v = make_qkv(1, H, n, n, 16, dtype=torch.float64)
    ends = torch.tensor([[n], [0], [70]])

    def call(lengths):
        return sparseflash.attention(q, k, v, MASKS["causal"], lengths=lengths, backend="cpu")

    torch.testing.assert_close(torch.vmap(call)(ends), torch.stack([call(end) for end in ends]))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 2], r"int64 of shape \(2,\); pass int32 or int64 of shape \(5,\)"),
        (torch.ones(5), "float32 of shape"),
        (torch.ones(5, 1).int(), r"of shape \(5, 1\)"),
        ([1, 2, 3, 4, 97], "lengths holds 97; they must lie in 0..96, the keys"),
        ([True] * 5, "pass a tensor or a list of integers"),
    ],
)
def test_errors(lengths, message):
    q, k, v = leaves(96, 96)
    with pytest.raises(ValueError, match=message):
        sparseflash.attention(q, k, v, lengths=lengths)


def test_a_scale_whose_inverse_float16_does_not_hold():
    wide, ends = [t.detach().float() for t in leaves(96, 96)], [96, 0, 50, 33, 2]
    half = [t.half() for t in wide]
    for scale, function in product((1e-5, 1e9), (sparseflash.attention, sparseflash.explain)):
        with pytest.raises(ValueError, match=f"scale is {scale}; .* between 1.5e-05 and 1.6e[+]04"):
            function(*half, lengths=ends, scale=scale)
    found = sparseflash.attention(*wide, lengths=ends, scale=1e-5)
    torch.testing.assert_close(found, exact(*wide, None, ends, scale=1e-5))


def test_every_form_of_lengths():
    q, k, v = make_qkv(2, 2, 40, 40, 8)
    expected, numbers = sparseflash.attention(q, k, v, lengths=[40, 7]), np.array([40, 7])
    strided = torch.tensor([[40, 0], [7, 0]], dtype=torch.int32)[:, 0]
    for lengths in (numbers, list(numbers), (40, 7), strided, strided.long()):
        assert check_lengths(lengths, 2, 40, q.device).is_contiguous()  # for kernels
        assert torch.equal(sparseflash.attention(q, k, v, lengths=lengths), expected)


# ---- starts


@both_ways
@pytest.mark.parametrize("seed", range(4))
def test_starts(how, seed, rows):
    """Keys and values outside may be anything."""
    rng, n = np.random.default_rng(seed), 256
    lengths = None if seed == 1 else rng.integers(0, n + 1, len(FEW)).tolist()
    starts = [int(rng.integers(0, n + 1)) for _ in FEW[:-2]] + [0, 130]
    mask = list(MASKS.values())[seed % len(MASKS)]
    q, k, v = leaves()
    ends = [n] * len(FEW) if lengths is None else lengths
    token = torch.arange(n)
    outside = (token < torch.tensor(starts)[:, None]) | (token >= torch.tensor(ends)[:, None])
    with torch.no_grad():
        for t in (k, v):
            t.masked_fill_(outside[:, None, :, None], 0.0)
    found = within(how, q, k, v, mask, lengths, starts=starts, return_lse=True)
    expected = exact(q, k, v, mask, ends, starts, return_lse=True)
    agree(found, expected, (q, k, v))
    with torch.no_grad():
        for t in (k, v):
            t.masked_fill_(outside[:, None, :, None], float("nan"))
        if how == "hide":
            out, lse = within(how, q, k, v, mask, lengths, starts=starts, return_lse=True)
            torch.testing.assert_close((out, lse), tuple(t.detach() for t in found))


def test_starts_of_keys_alone_and_with_a_score():
    q, k, v = leaves(n_q=40)
    starts = [256, 0, 100, 3, 255]
    found = sparseflash.attention(q, k, v, starts=starts, return_lse=True)
    agree(found, exact(q, k, v, None, [256] * 5, starts, return_lse=True), (q, k, v))
    q, k, v = leaves()
    given = {"score": sparseflash.score_rules.alibi(slopes=torch.rand(4, dtype=torch.float64))}
    found = sparseflash.attention(q, k, v, lengths=FEW, starts=starts, return_lse=True, **given)
    expected = exact(q, k, v, None, FEW, starts, return_lse=True, **given)
    agree(found, expected, (q, k, v))


def test_starts_in_a_layer_and_compiled(fresh_dynamo):
    layer = sparseflash.BlockSparseAttention(32, 4, mask=masks.causal(), backend="cpu")
    x, starts = torch.randn(2, 40, 32), torch.tensor([0, 17])
    out = layer(x, starts=starts)
    torch.testing.assert_close(out[1, 17:], layer(x[1:, 17:])[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[:1], layer(x[:1]), rtol=1e-4, atol=1e-5)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, starts=starts), out, rtol=1e-4, atol=1e-5)


def test_bad_starts():
    q, k, v = leaves()
    with pytest.raises(ValueError, match="starts holds 257"):
        sparseflash.attention(q, k, v, starts=[0, 0, 0, 0, 257])
    with pytest.raises(ValueError, match="starts holds -1"):
        sparseflash.decode(*(t.detach() for t in (q, k, v)), starts=[0, 0, 0, 0, -1])
