"""The whole on a GPU: determinism, streams, torch.compile, autocast, CUDA graphs, devices."""

import pytest
import torch

import masks
import sparseflash
from sparseflash.backends.registry import NAMES
from sparseflash.cache import cache
from sparseflash.problem import Options
from sparseflash.testing import assert_close, make_qkv, oracle
from tests.gpu_calls import EPS, GPU, LOW, MASK, SAME_BITS, assert_equal, captured, inputs, pairwise
from tests.op_cases import run

pytestmark = GPU

# ---- determinism


def assert_repeats(qkv, mask, **options):
    first = run(sparseflash.attention, qkv, mask, **SAME_BITS, **options)
    for _ in range(6):
        assert_equal(run(sparseflash.attention, qkv, mask, **SAME_BITS, **options), first)


@pairwise(dtype=[torch.float32, *LOW], mask=[None, MASK], dropout_p=[0.0, 0.2])
def test_gradients_have_the_same_bits_in_every_run(dtype, mask, dropout_p, backend):
    if backend == "hopper" and dtype == torch.float32:
        pytest.skip("float32 has no kernels there")
    qkv = inputs(1000, dtype)
    assert_repeats(qkv, mask, dropout_p=dropout_p, seed=5, backend=backend)


@pytest.mark.parametrize("length", [100, 128 * 40])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_parts_of_long_rows_are_summed_in_one_order(head_dim, length, backend):
    mask = masks.local(100) | masks.global_tokens(64)
    qkv = make_qkv(1, 2, length, 128 * 60, head_dim, dtype=torch.bfloat16, device="cuda")
    assert_repeats(qkv, mask, backend=backend)


def test_calls_on_several_streams_at_once_do_not_disturb_each_other(backend):
    options = SAME_BITS | {"backend": backend}
    problems = [inputs(1500 + 100 * i, seed=i) for i in range(4)]
    expected = [run(sparseflash.attention, qkv, MASK, **options) for qkv in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    actual = []
    for _ in range(5):
        for stream, qkv in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                actual.append(run(sparseflash.attention, qkv, MASK, **options))
    torch.cuda.synchronize()
    for i, results in enumerate(actual):
        assert_equal(results, expected[i % len(problems)])


# ---- torch.compile, opcheck


@pytest.mark.parametrize(
    "mask", [None, MASK, MASK.build(500, block_size=64)], ids=["None", "Mask", "BlockMask"]
)
def test_compiled_attention_equals_eager(mask, fresh_dynamo):
    def function(q, k, v, mask):
        return sparseflash.attention(q, k, v, mask, deterministic=True)

    compiled = torch.compile(function, fullgraph=True)
    qkv = inputs(500)
    assert_equal(run(compiled, qkv, mask), run(function, qkv, mask))


@pytest.mark.parametrize("mask", [None, MASK], ids=["dense", "sparse"])
def test_a_compiled_layer_equals_the_eager_one(mask, fresh_dynamo):
    torch.manual_seed(0)
    layer = sparseflash.BlockSparseAttention(64, 2, mask=mask).cuda()
    x = torch.randn(4, 1024, 64, device="cuda", requires_grad=True)
    results = []
    for call in (layer, torch.compile(layer, fullgraph=True)):
        with torch.autocast("cuda", torch.bfloat16):
            out = call(x)
        weight = torch.linspace(-1, 2, out.numel(), device="cuda").view(out.shape)
        loss = (out.float() * weight).sum()
        results.append((out, *torch.autograd.grad(loss, (x, *layer.parameters()))))
    for theirs, ours in zip(*results, strict=True):
        assert (ours - theirs).float().norm() < 2 * EPS * theirs.float().norm()


def test_compiled_to_cuda_graphs_equals_eager(fresh_dynamo):
    compiled = torch.compile(sparseflash.attention, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(4):
            qkv = inputs(500, seed=seed, requires_grad=False)
            torch.compiler.cudagraph_mark_step_begin()
            actual = compiled(*qkv, MASK).clone()
            assert torch.equal(actual, sparseflash.attention(*qkv, MASK))


@pairwise(
    **{"mask, dropout_p": [(None, 0.0), (MASK, 0.0), (MASK, 0.3)]},
    token_major=[False, True],
    backend=["triton", "hopper", "reference"],
)
def test_opcheck_accepts_forward_and_backward(mask, dropout_p, token_major, backend):
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    qkv = inputs(200, dtype, head_dim=16, requires_grad=False)
    if token_major:
        qkv = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv]
    seed = torch.tensor([3], device="cuda") if dropout_p else None
    arguments = (
        *qkv, "" if mask is None else mask.key, None, None, seed, None, None,
        *Options(None, dropout_p, False, backend),
    )  # fmt: skip
    with_gradient = [t.detach().requires_grad_() for t in qkv]
    forward = torch.ops.sparseflash.forward
    torch.library.opcheck(forward.default, (*with_gradient, *arguments[3:]))
    out, lse, _ = forward(*arguments)
    for dlse in (None, torch.ones_like(lse)):
        torch.library.opcheck(
            torch.ops.sparseflash.backward.default,
            (torch.ones_like(out), dlse, *arguments[:3], out, lse, *arguments[3:]),
        )


# ---- CUDA graphs


LONG_ROWS = masks.local(100) | masks.global_tokens(64)  # some are computed in parts


@pytest.mark.parametrize(
    "mask, length",
    [(None, 500), (MASK, 500), (LONG_ROWS, 5000)],
    ids=["dense", "sparse", "long rows"],
)
def test_captured_forward_and_backward_replay_on_new_inputs(mask, length, backend):
    static = inputs(length)
    options = SAME_BITS | {"backend": backend}
    graph, results = captured(lambda: run(sparseflash.attention, static, mask, **options))
    for seed in (1, 2, 3):
        fresh = inputs(length, seed=seed)
        for old, new in zip(static, fresh, strict=True):
            old.detach().copy_(new.detach())
        for t in results:
            t.zero_()
        graph.replay()
        assert_equal(results, run(sparseflash.attention, fresh, mask, **options))


def test_replays_beside_eager_calls_do_not_disturb_each_other(backend):
    """A graph replayed on one stream while the same kernels run on another."""
    options = SAME_BITS | {"backend": backend}
    static, other = inputs(3000), inputs(3000, seed=1)
    graph, results = captured(lambda: run(sparseflash.attention, static, MASK, **options))
    expected = run(sparseflash.attention, static, MASK, **options)
    expected_other = run(sparseflash.attention, other, MASK, **options)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    found = []
    for _ in range(10):
        with torch.cuda.stream(side):
            graph.replay()
        found.append(run(sparseflash.attention, other, MASK, **options))
    torch.cuda.synchronize()
    assert_equal(results, expected)
    for again in found:
        assert_equal(again, expected_other)


def churn(count=8):
    """Calls whose masks drive the others out of the cache, and garbage where their lists were."""
    for seed in range(count):
        mask = masks.random_blocks(0.3, seed=seed)
        sparseflash.attention(*inputs(1000), mask)
    return [torch.full((2**18,), 2**30, dtype=torch.int32, device="cuda") for _ in range(64)]


@pytest.mark.parametrize("how", ["captured", "on another stream"])
def test_lists_outlive_the_cache(how, monkeypatch, backend):
    """As long as a graph that was captured with them, or a stream that is not done."""
    monkeypatch.setattr(cache, "max_entries", 2)
    static, options = inputs(1000), SAME_BITS | {"backend": backend}

    def call():
        return run(sparseflash.attention, static, MASK, **options)

    expected = call()
    if how == "captured":
        graph, found = captured(call)
        garbage = churn()
        for t in found:
            t.zero_()
        graph.replay()
    else:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2**28)  # a tenth of a second or more
            found = call()
        garbage = churn()
    torch.cuda.synchronize()
    assert_equal(found, expected)
    del garbage


def test_captured_default_gradients_are_those_of_eager_calls(backend):
    """What sums by atomics starts from zero in every replay."""
    static = inputs(1000)
    graph, results = captured(lambda: run(sparseflash.attention, static, MASK, backend=backend))
    expected = run(sparseflash.attention, static, MASK, backend=backend)
    for _ in range(5):
        graph.replay()
        assert_equal(results, expected, EPS)


def test_captured_dropout_follows_its_seed_tensor(backend):
    static, seed = inputs(500, requires_grad=False), torch.tensor([1], device="cuda")
    options = {"dropout_p": 0.3, "backend": backend}
    with torch.no_grad():
        graph, out = captured(lambda: sparseflash.attention(*static, MASK, seed=seed, **options))
    for value in (2, 2**40 + 3):
        seed.fill_(value)
        graph.replay()
        assert torch.equal(out, sparseflash.attention(*static, MASK, seed=value, **options))


# ---- devices


def test_second_device_computes_there():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    first = inputs(500, torch.float32)
    second = [t.detach().to("cuda:1").requires_grad_() for t in first]
    assert torch.cuda.current_device() == 0
    results = run(sparseflash.attention, second, MASK)
    assert all(t.device == torch.device("cuda:1") for t in results)
    assert_equal([t.to("cuda:0") for t in results], run(sparseflash.attention, first, MASK))


def test_explain_chooses_the_fastest_for_cuda_tensors():
    def answer(*args):
        text = sparseflash.explain(*args).partition("backward:")[0]
        return dict(line.strip().split(": ", 1) for line in text.splitlines()[1:])

    low, high = answer(*inputs(64), MASK), answer(*inputs(64, torch.float32), MASK)
    assert list(low) == list(NAMES) and "cuda:0" in low["cpu"]
    if torch.cuda.get_device_capability() == (9, 0):
        assert low["hopper"] == "chosen" and "could run" in low["triton"]
        assert "float32" in high["hopper"] and high["triton"] == "chosen"
    else:
        assert "9.0" in low["hopper"] and low["triton"] == "chosen"
    # float64 has no kernel: the reference takes it
    double = answer(*inputs(64, torch.float64), MASK)
    assert "float64" in double["hopper"] and "float64" in double["triton"]
    assert double["reference"] == "chosen"


def test_expanded_and_strided_cotangents_give_the_same(backend):
    """The gradient of a sum is one expanded element; others come as transposes or with a gap."""
    options = SAME_BITS | {"backend": backend}
    plain = inputs(300)
    out = sparseflash.attention(*plain, MASK, **options)
    out.backward(torch.ones_like(out))
    one = torch.ones((), device="cuda", dtype=out.dtype)
    wide = torch.ones(*out.shape[:3], 2 * out.shape[3] + 1, device="cuda", dtype=out.dtype)
    cotangents = [
        one.expand(out.shape),
        torch.ones_like(out).mT.contiguous().mT,
        torch.ones_like(out).transpose(1, 2).contiguous().transpose(1, 2),
        wide[..., 1 : out.shape[3] + 1],
    ]
    for cotangent in cotangents:
        qkv = inputs(300)
        sparseflash.attention(*qkv, MASK, **options).backward(cotangent)
        for a, e in zip(qkv, plain, strict=True):
            assert torch.equal(a.grad, e.grad), cotangent.stride()


def test_float32_is_exact_although_tf32_is_allowed():
    qkv = inputs(500, torch.float32, requires_grad=False)
    dense = torch.from_numpy(MASK.build(500).to_dense()).cuda()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        out = sparseflash.attention(*qkv, MASK, backend="triton")
    finally:
        torch.set_float32_matmul_precision(before)
    assert_close(out, oracle(*qkv, dense)[0], name="out")
