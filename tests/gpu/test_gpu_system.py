"""The whole on a GPU: memory, determinism, torch.compile, autocast, CUDA graphs, large offsets."""

import gc

import pytest
import torch

import masks
import sparseflash
from sparseflash.attention import _prepare
from sparseflash.dropout import keep_mask
from sparseflash.schedule import as_tensors, schedule_for
from sparseflash.testing import assert_close, make_qkv, oracle, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

MASK = (masks.local(100) | masks.butterfly(64)) & masks.causal()
MIB = 2**20
LOW = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def empty_gpu():
    """Start and end with the memory of earlier tests given back."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def need_memory(n_bytes):
    free, _ = torch.cuda.mem_get_info()
    if free < n_bytes:
        pytest.skip(f"needs {n_bytes / 2**30:.0f} GiB of free GPU memory, {free / 2**30:.0f} are")


def inputs(length=512, dtype=torch.bfloat16, head_dim=64, **options):
    options = {"kv_heads": 2, "requires_grad": True} | options
    return make_qkv(2, 4, length, length, head_dim, dtype=dtype, device="cuda", **options)


def run(function, qkv, *rest, **options):
    """Output and gradients, with a cotangent that is not constant."""
    qkv = [t.detach().requires_grad_() for t in qkv]
    out = function(*qkv, *rest, **options)
    weight = torch.linspace(-1, 2, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, qkv, weight)


def assert_equal(actual, expected):
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert torch.equal(a, e), f"{name} differs by {relative_error(a, e):.3g}"


# ---- memory


@pytest.mark.parametrize("mask", [masks.local(256) | masks.butterfly(128), None])
def test_peak_memory_is_that_of_results_and_vectors_of_the_rows(mask):
    """Forward + backward allocate out, dq, dk, dv, five float32 vectors of the rows, the schedule.

    The vectors: lse, its gradient, delta, lse in base 2, and one to spare for a temporary. Each
    allocation is rounded up to 512 bytes, and 4 MiB of slack are left: the scores would take 8 GiB
    a head in bfloat16, one more tensor like q 16 MiB.
    """
    length, heads, head_dim = 2**16, 2, 64
    small = make_qkv(1, heads, 1024, 1024, head_dim, dtype=torch.bfloat16, device="cuda")
    run(sparseflash.attention, small, mask, backend="triton")  # load the kernels

    q, k, v = make_qkv(
        1, heads, length, length, head_dim, dtype=torch.bfloat16, device="cuda", requires_grad=True
    )
    dout = torch.randn_like(q)
    schedule_bytes = 0
    if mask is not None:  # what stays, not what the expansion on the device takes for a moment
        schedule = schedule_for(mask, length, length, 1, heads, q.device)
        schedule_bytes = sum(t.nbytes for t in as_tensors(schedule)[0])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = sparseflash.attention(q, k, v, mask, backend="triton", return_lse=True)
    torch.autograd.backward((out, lse), (dout, torch.ones_like(lse)))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before

    results = sum(t.nbytes for t in (out, q.grad, k.grad, v.grad))
    assert peak <= results + 5 * lse.nbytes + 4 * MIB
    assert peak >= results  # the measurement sees what it should
    # the schedule itself is small beside the results, and building it takes no dense mask
    assert schedule_bytes < 16 * MIB


def test_peak_memory_of_building_the_schedule_follows_its_blocks():
    length = 2**16
    mask = masks.local(257) | masks.butterfly(128)  # no other test has this schedule in the cache
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    schedule = schedule_for(mask, length, length, 1, 1, "cuda:0")
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    n_blocks = schedule.rows.idx.numel()
    assert n_blocks < 0.1 * (length / schedule.block_q) * (length / schedule.block_k)
    kept = sum(t.nbytes for t in as_tensors(schedule)[0])
    # sorting holds a few int64 of every block (and its work space) for a moment
    assert peak <= kept + 256 * n_blocks + 4 * MIB


def test_memory_does_not_grow_from_call_to_call():
    qkv = inputs(2048)
    run(sparseflash.attention, qkv, MASK)
    gc.collect()  # what earlier tests left in cycles may be freed at any time
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        run(sparseflash.attention, qkv, MASK)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


# ---- determinism


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("mask", [None, MASK], ids=["dense", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_gradients_have_the_same_bits_in_every_run(dtype, mask, dropout_p):
    qkv = inputs(1000, dtype)
    options = {"dropout_p": dropout_p, "seed": 5, "deterministic": True}
    first = run(sparseflash.attention, qkv, mask, **options)
    for _ in range(4):
        assert_equal(run(sparseflash.attention, qkv, mask, **options), first)


def test_results_do_not_depend_on_the_stream():
    qkv = inputs(1000)
    expected = run(sparseflash.attention, qkv, MASK)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        actual = run(sparseflash.attention, qkv, MASK)
    torch.cuda.current_stream().wait_stream(stream)
    assert_equal(actual, expected)


# ---- torch.compile, opcheck


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(None, id="None"),
        pytest.param(MASK, id="Mask"),
        pytest.param(MASK.build(500, block_size=64), id="BlockMask"),
    ],
)
def test_compiled_attention_equals_eager(mask, fresh_dynamo):
    def function(q, k, v, mask):
        return sparseflash.attention(q, k, v, mask)

    compiled = torch.compile(function, fullgraph=True, backend="inductor")
    qkv = inputs(500)
    assert_equal(run(compiled, qkv, mask), run(function, qkv, mask))


def test_compiled_mask_built_inside_equals_eager(fresh_dynamo):
    def function(q, k, v):
        return sparseflash.attention(q, k, v, masks.local(64) & masks.causal())

    compiled = torch.compile(function, fullgraph=True, backend="inductor")
    for length in (300, 500):
        qkv = inputs(length)
        assert_equal(run(compiled, qkv), run(function, qkv))


def test_compiled_attention_amid_other_operations_is_as_exact_as_eager(fresh_dynamo):
    def function(q, k, v):
        return sparseflash.attention(q * 2, k.sin(), v + 1, MASK).relu()

    qkv = inputs(500, torch.float32)
    compiled = run(torch.compile(function, fullgraph=True, backend="inductor"), qkv)
    for name, a, e in zip(("out", "dq", "dk", "dv"), compiled, run(function, qkv), strict=True):
        assert relative_error(a, e) < 1e-5, name


def test_compiled_to_cuda_graphs_equals_eager(fresh_dynamo):
    compiled = torch.compile(sparseflash.attention, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(4):
            qkv = inputs(500, seed=seed, requires_grad=False)
            torch.compiler.cudagraph_mark_step_begin()
            actual = compiled(*qkv, MASK).clone()
            assert torch.equal(actual, sparseflash.attention(*qkv, MASK))


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("mask, dropout_p", [(None, 0.0), (MASK, 0.0), (MASK, 0.3)])
def test_opcheck_accepts_forward_and_backward(mask, dropout_p, token_major, backend):
    qkv = inputs(200, torch.float32, head_dim=16, requires_grad=False)
    if token_major:
        qkv = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv]
    seed = 3 if dropout_p else None
    arguments = (*_prepare(*qkv, mask, None, dropout_p, seed, backend), False, backend)
    with_gradient = [t.detach().requires_grad_() for t in arguments[:3]]
    torch.library.opcheck(torch.ops.sparseflash.forward.default, (*with_gradient, *arguments[3:]))
    out, lse = torch.ops.sparseflash.forward(*arguments)
    for dlse in (None, torch.ones_like(lse)):
        torch.library.opcheck(
            torch.ops.sparseflash.backward.default,
            (torch.ones_like(out), dlse, *arguments[:3], out, lse, *arguments[3:]),
        )


# ---- autocast


@pytest.mark.parametrize("dtype", LOW)
def test_autocast_computes_in_the_low_precision(dtype):
    qkv = inputs(500, torch.float32)
    with torch.autocast("cuda", dtype):
        out, lse = sparseflash.attention(*qkv, MASK, return_lse=True)
    low = [t.detach().to(dtype) for t in qkv]
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert torch.equal(out, sparseflash.attention(*low, MASK))
    dense = torch.from_numpy(MASK.build(500).to_dense()).cuda()
    assert relative_error(out, oracle(*low, dense)[0]) < 2 * torch.finfo(dtype).eps
    out.float().square().sum().backward()
    assert all(t.grad.dtype == torch.float32 and t.grad.isfinite().all() for t in qkv)


# ---- CUDA graphs


@pytest.mark.parametrize("mask", [None, MASK], ids=["dense", "sparse"])
def test_captured_forward_replays_on_new_inputs(mask):
    static = inputs(500, requires_grad=False)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):  # compile the kernels and copy the schedule before the capture
            sparseflash.attention(*static, mask)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out, lse = sparseflash.attention(*static, mask, return_lse=True)
    for seed in (1, 2):
        fresh = inputs(500, seed=seed, requires_grad=False)
        for old, new in zip(static, fresh, strict=True):
            old.copy_(new)
        out.zero_()
        graph.replay()
        expected = sparseflash.attention(*fresh, mask, return_lse=True)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_captured_dropout_follows_its_seed_tensor():
    static, seed = inputs(500, requires_grad=False), torch.tensor([1], device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            sparseflash.attention(*static, MASK, dropout_p=0.3, seed=seed)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = sparseflash.attention(*static, MASK, dropout_p=0.3, seed=seed)
    for value in (2, 2**40 + 3):
        seed.fill_(value)
        graph.replay()
        assert torch.equal(out, sparseflash.attention(*static, MASK, dropout_p=0.3, seed=value))


# ---- dropout


def test_triton_and_reference_drop_the_same_entries():
    # with equal scores and v the identity, out holds the probabilities themselves
    batch, heads, n_q, n_k, p = 2, 3, 500, 128, 0.3
    q = torch.zeros(batch, heads, n_q, n_k, device="cuda")
    k = torch.zeros(batch, heads, n_k, n_k, device="cuda")
    v = torch.eye(n_k, device="cuda").expand(batch, heads, n_k, n_k)
    for seed in (0, 7, 2**40 + 9):
        kept = [
            sparseflash.attention(q, k, v, dropout_p=p, seed=seed, backend=backend) > 0
            for backend in ("triton", "reference")
        ]
        assert torch.equal(*kept)
        expected = keep_mask(torch.tensor([seed], device="cuda"), batch, heads, n_q, n_k, p)
        assert torch.equal(kept[0], expected)


def test_dropout_gradients_of_triton_are_those_of_the_reference():
    qkv = inputs(500, torch.float32)
    options = {"dropout_p": 0.3, "seed": 11}
    actual, expected = (
        run(sparseflash.attention, qkv, MASK, backend=backend, **options)
        for backend in ("triton", "reference")
    )
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert relative_error(a, e) < 1e-5, name


def test_seed_none_is_drawn_from_the_generator_of_torch():
    def out():
        return sparseflash.attention(*inputs(), dropout_p=0.5)

    torch.manual_seed(4)
    first, second = out(), out()
    torch.manual_seed(4)
    assert torch.equal(first, out()) and torch.equal(second, out())
    assert not torch.equal(first, second)


# ---- offsets beyond 32 bits


@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
@pytest.mark.parametrize("mask", [masks.local(100), None], ids=["sparse", "dense"])
def test_offsets_past_32_bits_give_the_result_of_contiguous_tensors(mask, which):
    length, stride, dim = 70_000, 65_536, 64
    need_memory(2 * length * stride + 4 * 2**30)
    qkv = make_qkv(1, 1, length, length, dim, dtype=torch.bfloat16, device="cuda")
    # element strides: the last token starts at 4.6e9, past 2**32; the three views share a buffer
    buffer = torch.zeros(length, stride, dtype=torch.bfloat16, device="cuda")
    strided = []
    for i, t in enumerate(qkv):
        if which in ("all", "qkv"[i]):
            view = buffer[:, i * dim : (i + 1) * dim].view(1, 1, length, dim)
            view.copy_(t)
            assert view.stride(2) == stride and (length - 1) * stride > 2**32
            t = view
        strided.append(t)
    with torch.no_grad():
        actual = sparseflash.attention(*strided, mask, backend="triton", return_lse=True)
        expected = sparseflash.attention(*qkv, mask, backend="triton", return_lse=True)
    for name, a, e in zip(("out", "lse"), actual, expected, strict=True):
        error = relative_error(a[:, :, -5000:], e[:, :, -5000:])
        assert error < 1e-3, f"{name} of the last tokens: {error:.3g}"
        assert relative_error(a, e) < 1e-3, name


def test_gradients_past_32_bits_give_the_result_of_contiguous_tensors():
    length, stride, dim, mask = 70_000, 65_536, 64, masks.local(100)
    # the buffer, and dense results; out and gradients of a view of it are not as wide as it
    need_memory(2 * length * stride + 4 * 2**30)
    qkv = make_qkv(1, 1, length, length, dim, dtype=torch.bfloat16, device="cuda")
    buffer = torch.zeros(length, stride, dtype=torch.bfloat16, device="cuda")
    strided = []
    for i, t in enumerate(qkv):
        view = buffer[:, i * dim : (i + 1) * dim].view(1, 1, length, dim)
        view.copy_(t)
        strided.append(view)
    actual = run(sparseflash.attention, strided, mask, backend="triton")
    expected = run(sparseflash.attention, qkv, mask, backend="triton")
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert relative_error(a[:, :, -5000:], e[:, :, -5000:]) < 1e-2, name
        assert relative_error(a, e) < 1e-2, name


def test_heads_past_32_bits_of_elements():
    # a head stride past 2**31 elements: the second and third heads lie beyond 32 bits
    length, heads, dim = 512, 3, 64
    stride_h = 2**31 + 2**10
    need_memory(2 * heads * stride_h)
    buffer = torch.zeros(heads * stride_h, dtype=torch.bfloat16, device="cuda")
    q, k, v = make_qkv(1, heads, length, length, dim, dtype=torch.bfloat16, device="cuda")
    far = buffer.as_strided((1, heads, length, dim), (heads * stride_h, stride_h, dim, 1))
    far.copy_(q)
    actual = sparseflash.attention(far, k, v, MASK, backend="triton")
    expected = sparseflash.attention(q, k, v, MASK, backend="triton")
    assert relative_error(actual, expected) < 1e-3


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


def test_inputs_on_two_devices_are_refused():
    q, k, v = inputs(64)
    with pytest.raises(ValueError, match=r"v is .* on cpu; bring them to one dtype and device"):
        sparseflash.attention(q, k, v.cpu())
    with pytest.raises(ValueError, match=r"on cpu; pass one int64 element on cuda:0"):
        sparseflash.attention(q, k, v, dropout_p=0.1, seed=torch.tensor([1]))


def test_cpu_backend_refuses_cuda_tensors():
    with pytest.raises(ValueError, match="not on cuda:0"):
        sparseflash.attention(*inputs(64), backend="cpu")


def test_explain_chooses_triton_for_cuda_tensors():
    lines = sparseflash.explain(*inputs(64), MASK).splitlines()
    assert lines[0] == "triton: chosen" and "cuda:0" in lines[1]
    # float64 has no kernel: the reference takes it
    lines = sparseflash.explain(*inputs(64, torch.float64), MASK).splitlines()
    assert "float64" in lines[0] and lines[2] == "reference: chosen"


def test_mask_tensor_on_the_gpu_gives_the_same():
    qkv = inputs(300)
    array = torch.from_numpy(MASK.build(300).to_dense()[0, 0]).cuda()
    assert_equal(run(sparseflash.attention, qkv, array), run(sparseflash.attention, qkv, MASK))


def test_expanded_and_strided_cotangents_give_the_same():
    qkv, plain = inputs(300), inputs(300)
    sparseflash.attention(*qkv, MASK).sum().backward()
    out = sparseflash.attention(*plain, MASK)
    out.backward(torch.ones_like(out))
    for a, e in zip(qkv, plain, strict=True):
        assert torch.equal(a.grad, e.grad)


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
