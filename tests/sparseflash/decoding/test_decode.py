"""Decoding steps on a CPU, the Triton kernels in the interpreter, against float64."""

import math
from dataclasses import replace

import pytest
import torch

import masks
import sparseflash
from sparseflash import select
from sparseflash.cache import cache
from sparseflash.testing import assert_close, make_qkv, oracle
from tests.decode_cases import Step, random_step
from tests.notes import seeds

BACKENDS = ("cpu", "triton")
both = pytest.mark.parametrize("backend", BACKENDS)
LISTED = masks.local(50) & masks.causal() | masks.global_tokens(3)
TWICE = torch.tensor([37], dtype=torch.int32).expand(2)


def agree(step: Step, backend: str) -> None:
    found, expected = step.run(backend=backend), step.exact()
    for name, a, e in zip(("out", "lse"), found, expected, strict=True):
        assert a.shape == e.shape and a.dtype == torch.float32
        assert_close(a, e, name=name)
    assert torch.equal(found[1] == -math.inf, expected[1] == -math.inf)
    assert not found[0][found[1] == -math.inf].any()


@pytest.mark.parametrize("seed", seeds(15))
def test_random_steps(seed):
    agree(random_step(seed), "cpu")
    if seed % 7 == 0:  # the interpreter takes its time
        agree(random_step(seed), "triton")


GROUP = {"heads": 2, "kv_heads": 1}
STEPS = {
    "head dim 40": Step(1, 100, 40, (100, 37), LISTED, **GROUP),
    "head dim 80": Step(16, 100, 80, (100, 37), LISTED, **GROUP),
    "head dim 256": Step(1, 100, 256, (100, 37), LISTED, **GROUP),
    "more queries than it is made for": Step(40, 60, 32, (60, 9), LISTED, **GROUP, splits=2),
    # the lists of two query blocks are two, and each query takes its own
    **{f"at {n} of blocks of 16 x 32": Step(
        16, 96, 32, (n,), LISTED.build(96, block_size=(16, 32)), **GROUP, splits=2
    ) for n in (31, 32, 40)},
    "parts without keys": Step(1, 150, 32, (150, 0), heads=1, kv_heads=1, splits=160),
    "one part": Step(1, 150, 32, (150, 0), heads=1, kv_heads=1, splits=1),
    # more than are merged at once, 16 where v is so wide; the largest score is in the last one
    "40 parts": Step(1, 1100, 16, (1100,), None, 1, 1, 256, splits=40, scale=1.0, seed=26),
}  # fmt: skip


@both
@pytest.mark.parametrize("name", STEPS)
def test_steps(name, backend):
    agree(STEPS[name], backend)


@both
@pytest.mark.parametrize(
    "mask, layout",
    [(None, "heads first"), (masks.causal(), "tokens first"), (LISTED, "heads first")],
)
def test_pages_change_no_bit(layout, mask, backend):
    step = Step(3, 384, 32, (250, 1), mask, heads=2, kv_heads=1, layout=layout, splits=2)
    contiguous = step.run(backend=backend)
    for page in (16, 48, 128, 192):
        for a, b in zip(replace(step, page=page).run(backend=backend), contiguous, strict=True):
            assert torch.equal(a, b), page


@both
def test_lengths_grow_under_one_plan(backend):
    whole = Step(1, 200, 32, (200,), LISTED)
    q, k, v = whole.tensors()
    lengths = torch.zeros(1, dtype=torch.int32)
    for end in range(0, 201, 40):
        lengths.fill_(end)
        out = sparseflash.decode(q, k, v, LISTED, lengths=lengths, backend=backend)
        expected = Step(1, 200, 32, (end,), LISTED)
        allowed = expected.allowed()
        assert_close(out, oracle(q, k, v, allowed)[0], name=f"out at {end}")


@both
@pytest.mark.parametrize("lengths", [torch.tensor([150, 1, 37, 2]).int()[::2], TWICE], ids=str)
def test_lengths_with_strides(lengths, backend):
    """The kernels read them one after the other."""
    q, k, v = Step(1, 150, 32, (150, 150)).tensors()
    found = sparseflash.decode(q, k, v, lengths=lengths, backend=backend)
    expected = sparseflash.decode(q, k, v, lengths=lengths.tolist(), backend=backend)
    assert torch.equal(found, expected)


@both
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_selections_for_each_step(heads, backend):
    """Of all heads, of the key heads, and of the query heads."""
    q, k, v = make_qkv(2, 8, 3, 192, 32, kv_heads=2)
    asking = q.unflatten(1, (heads, -1)).mean(2)
    picked = select.top_k(3, block_size=(16, 32))(asking, k if heads > 1 else k[:, :1])
    lengths = torch.tensor([192, 150])
    within = torch.arange(192) < lengths[:, None, None, None]
    allowed = torch.from_numpy(picked.to_block_mask().to_dense())
    allowed = allowed.repeat_interleave(8 // heads, 1) & within
    expected, lse = oracle(q, k, v, allowed)
    mask = picked if heads != 2 else picked | masks.local(5)  # partial blocks beside full ones
    if heads == 2:
        near = torch.from_numpy(masks.local(5).build(3, 192).to_dense())
        expected, lse = oracle(q, k, v, (allowed | near) & within)
    for given in (mask, mask.to_block_mask()):
        found = sparseflash.decode(
            q, k, v, given, lengths=lengths, return_lse=True, backend=backend
        )
        assert_close(found[0], expected, name="out")
        assert_close(found[1], lse, name="lse")


@both
def test_selections_of_one_form_are_told_apart(backend):
    q, k, v = make_qkv(1, 2, 1, 64, 16)
    for seed in range(2):
        picked = select.top_k(1, block_size=16)(q, make_qkv(1, 2, 1, 64, 16, seed=seed)[1])
        found = sparseflash.decode(q, k, v, picked, backend=backend)
        expected = oracle(q, k, v, torch.from_numpy(picked.to_block_mask().to_dense()))[0]
        assert_close(found, expected, name=f"out with seed {seed}")


@both
def test_queries_with_strides(backend):
    q, k, v = make_qkv(1, 2, 4, 64, 16)
    apart = q.mT.contiguous().mT
    found, expected = (sparseflash.decode(x, k, v, backend=backend) for x in (apart, q))
    assert torch.equal(found, expected)


@both
def test_other_layouts_have_steps_of_their_own(backend):
    """Launches are prepared once for a step: with or without lengths, for one stride of tables."""
    q, k, v = make_qkv(2, 2, 1, 32, 16)
    pages = torch.arange(8, dtype=torch.int32).view(2, 4)
    wide = torch.arange(16, dtype=torch.int32).view(2, 8)[:, :4].remainder(8)
    wide = torch.cat([wide, wide], 1)[:, :4]
    k_paged, v_paged = (x.transpose(1, 2).reshape(8, 8, 2, 16) for x in (k, v))
    calls = [
        (k, v, {}),
        (k, v, {"lengths": [32, 5]}),
        (k, v, {"splits": 2}),
        (k, v, {"splits": 3}),
        (k_paged, v_paged, {"block_table": pages}),
        (k_paged, v_paged, {"block_table": wide}),
        (k_paged, v_paged, {"block_table": wide[:, :3]}),
    ]
    for count, (keys, values, options) in enumerate(calls, 1):
        for _ in range(2):
            sparseflash.decode(q, keys, values, backend=backend, **options)
        assert sum(key[0] == "decode" for key in cache._entries) == count  # pyright: ignore


def test_as_attention_at_full_length():
    """The last rows of training, and a sink that joins afterwards, as the guide says."""
    q, k, v = make_qkv(2, 4, 96, 96, 32, kv_heads=2, dtype=torch.float64)
    mask = masks.butterfly(16) & masks.causal()
    sink = torch.arange(4.0, dtype=torch.float64)
    expected = sparseflash.attention(q, k, v, mask)
    with_sink = sparseflash.attention(q, k, v, mask, sink=sink)
    for n_q in (1, 4, 16):
        found, lse = sparseflash.decode(q[:, :, -n_q:], k, v, mask, return_lse=True)
        torch.testing.assert_close(found, expected[:, :, -n_q:])
        found = found * torch.sigmoid(lse - sink[:, None]).unsqueeze(-1)
        torch.testing.assert_close(found, with_sink[:, :, -n_q:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_on_a_cpu(dtype):
    step = Step(3, 150, 64, (150, 70), LISTED, dtype=dtype)
    q, k, v = (t.nan_to_num() for t in step.tensors())
    expected = step.exact()[0]
    own = sparseflash.attention(q, k, v, step.allowed(), backend="reference")
    assert_close(step.run(backend="cpu")[0], expected, own, name="out")


def test_float16_in_the_interpreter():
    step = Step(3, 150, 64, (150, 70), LISTED, dtype=torch.float16, splits=2)
    out, lse = step.run(backend="triton")
    assert (out - step.exact()[0]).abs().max() < 4e-3
    assert (lse - step.exact()[1]).abs().max() < 1e-3


# ---- what is refused


def small(**options):
    return make_qkv(2, 4, 1, 64, 32, kv_heads=2, **options)


def pages(n=4, dtype=torch.float32):
    return torch.zeros(n, 16, 2, 32, dtype=dtype)


TABLE = torch.zeros(2, 4, dtype=torch.int32)
PAGED = {"k": pages(), "v": pages(), "block_table": TABLE}
THREE = make_qkv(3, 4, 1, 64, 32, kv_heads=2)
PLAN_OF_3 = sparseflash.plan(select.top_k(1, block_size=16)(*THREE[:2]), *THREE, backend="cpu")


def test_gradients_are_refused():
    q, k, v = small()
    with pytest.raises(ValueError, match=r"k requires a gradient.*no_grad.*attention"):
        sparseflash.decode(q, k.requires_grad_(), v)
    slopes = sparseflash.score_rules.alibi(slopes=torch.ones(4, requires_grad=True))
    with pytest.raises(ValueError, match="slopes requires a gradient"):
        sparseflash.decode(q, k.detach(), v, score=slopes)
    with torch.no_grad():
        assert sparseflash.decode(q, k, v).shape == q.shape


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(2, 3, 1, 32)}, "q has 3 heads, k and v 2"),
        ({"k": torch.zeros(2, 2, 64, 32, dtype=torch.float64)}, "k is torch.float64"),
        ({"k": torch.zeros(2, 2, 32, 64).mT}, "not copied"),
        ({"lengths": [64]}, r"lengths is torch.int64 of shape \(1,\)"),
        ({"lengths": [64, 65]}, r"lengths holds 65; they must lie in 0\.\.64"),
        ({"splits": 0}, "splits is 0; pass an int between 1 and 256"),
        ({"backend": "hopper"}, "backend is 'hopper'; choose one of auto, triton, cpu"),
        ({"mask": torch.ones(1, 64, dtype=torch.bool)}, "mask is a Tensor.*from_dense"),
        ({"mask": masks.causal().build(32)}, "32 queries and 32 keys.*room for 64"),
        ({"mask": PLAN_OF_3}, "batch 3 and heads 4, q has 2 and 4"),
        ({"mask": masks.heads(*[masks.causal()] * 3).build(64, heads=3)}, "heads 3"),
        ({"block_table": TABLE}, r"with a block_table 64 heads, and q 4.*or no block_table for"),
        (PAGED | {"block_table": TABLE.long()}, r"block_table is torch.int64 of shape \(2, 4\)"),
        (PAGED | {"block_table": TABLE.expand(2, 4).T.contiguous().T}, "its columns side by side"),
        (PAGED | {"v": pages(5)}, r"v \(5, 16, 2, 32\); all but the head dim"),
        (PAGED | {"k": pages()[0]}, r"k has shape \(16, 2, 32\).*pages, page size, heads"),
    ],
)
def test_bad_inputs(change, message):
    q, k, v = small()
    arguments = {"q": q, "k": k, "v": v} | change
    with pytest.raises(ValueError, match=message):
        sparseflash.decode(**arguments)


def test_the_kernels_say_why_not():
    q, k, v = small(dtype=torch.float64)
    with pytest.raises(ValueError, match=r"'triton' cannot decode.*float64"):
        sparseflash.decode(q, k, v, backend="triton")
    assert sparseflash.decode(q, k, v).dtype == torch.float64


# ---- compilers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck(dtype):
    (q, k, v), options = Step(2, 64, 32, (64, 30), page=16, dtype=dtype).arguments()
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    starts = torch.tensor([3, 0], dtype=torch.int32)
    bounds = options["lengths"], starts, options["block_table"]
    rest = *bounds, LISTED.key, None, None, None, 2, "cpu", "", ()
    torch.library.opcheck(torch.ops.sparseflash.decode.default, (q, k, v, *rest))


@pytest.mark.parametrize("mask", [None, LISTED, LISTED.build(64)], ids=str)
def test_it_compiles_into_one_graph(mask, fresh_dynamo):
    def call(q, k, v, lengths):
        return sparseflash.decode(q, k, v, mask, lengths=lengths, return_lse=True, backend="cpu")

    compiled = torch.compile(call, fullgraph=True, dynamic=False, backend="aot_eager")
    step = Step(2, 64, 32, (64, 30), mask)
    (q, k, v), options = step.arguments()
    for lengths in (options["lengths"], options["lengths"].flip(0)):
        for a, b in zip(compiled(q, k, v, lengths), call(q, k, v, lengths), strict=True):
            assert torch.equal(a, b) or a.isnan().any()


def test_a_subclass_of_tensors_has_the_same_result():
    q, k, v = small()
    for mask in (None, LISTED, select.top_k(1, block_size=16)(q, k)):
        wanted = sparseflash.decode(q, k, v, mask, backend="cpu")
        found = sparseflash.decode(q.as_subclass(Named), k, v, mask, backend="cpu")
        assert torch.equal(found, wanted)


class Named(torch.Tensor):
    pass


@both
def test_scores_are_those_of_the_last_rows(backend):
    """Of rules that read tables in every way, for heads that share keys, and pages."""
    rules = sparseflash.score_rules
    tables = {"bias": torch.randn(4, 41), "gate": torch.rand(200), "t": torch.rand(4)}
    mixed = sparseflash.score(
        lambda s, h, q, k, n_q, n_k, bias, gate, t: (
            torch.tanh(s * t[h]) * gate[q] - bias[h, k - q + n_q - n_k + 20] + t[h]
        )
    )
    q, k, v = make_qkv(2, 4, 200, 200, 32, kv_heads=2)
    lengths = torch.tensor([200, 77], dtype=torch.int32)
    for mask in (masks.causal(), LISTED):
        for score in (rules.softcap(2.0)(), rules.alibi(slopes=tables["t"]), mixed(**tables)):
            last = torch.stack([q[b, :, n - 3 : n] for b, n in enumerate(lengths)])
            out = sparseflash.decode(
                last, k, v, mask, lengths=lengths, score=score, backend=backend, splits=2
            )
            for b, n in enumerate(lengths):
                x = [t[b : b + 1, :, :n] for t in (q, k, v)]
                wanted = sparseflash.attention(*x, mask, score=score, backend="reference")
                assert_close(out[b : b + 1], wanted[:, :, -3:], name="out")
