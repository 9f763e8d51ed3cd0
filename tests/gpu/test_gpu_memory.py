"""Memory on a GPU: how much is taken, and offsets beyond 32 bits."""

import gc
import time
from functools import partial

import pytest
import torch

import masks
import sparseflash
from experiments.bench.step import peak_extra_mib
from sparseflash.schedule.blocks import as_tensors, schedule_for
from sparseflash.testing import make_qkv, relative_error
from tests.gpu_calls import GPU, MASK, MIB, SAME_BITS, assert_equal, inputs, need_memory
from tests.op_cases import run

pytestmark = [*GPU, pytest.mark.usefixtures("empty_gpu")]


def allocated_at_last(limit):
    """Bytes, once they are at most `limit` or after 5 seconds: autograd's thread may let go of its
    last gradient after the call has returned.
    """
    gc.collect()
    deadline = time.monotonic() + 5
    while torch.cuda.memory_allocated() > limit and time.monotonic() < deadline:
        time.sleep(0.01)
    return torch.cuda.memory_allocated()


def schedule_bytes(schedule):
    return sum(t.nbytes for t in as_tensors(schedule)[0])


# ---- memory


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", [masks.local(256) | masks.butterfly(128), None])
def test_peak_memory_is_that_of_results_and_vectors_of_the_rows(mask, deterministic, backend):
    """Forward + backward allocate out, dq, dk, dv and five float32 vectors of the rows.

    The vectors: lse, its gradient, delta, lse in base 2, and one to spare for a temporary. Each
    allocation is rounded up to 512 bytes, and 4 MiB of slack are left: the scores would take 8 GiB
    a head in bfloat16, one more tensor like q 16 MiB.
    The gradients of the kernels for Hopper that need not be deterministic may sum dq in float32,
    in a work space of twice the bytes of q.
    """
    length, heads, head_dim = 2**16, 2, 64
    q, k, v = make_qkv(
        1, heads, length, length, head_dim, dtype=torch.bfloat16, device="cuda", requires_grad=True
    )
    dout = torch.randn_like(q)
    options = {"backend": backend, "deterministic": deterministic}

    def call():
        out, lse = sparseflash.attention(q, k, v, mask, return_lse=True, **options)
        torch.autograd.backward((out, lse), (dout, torch.ones_like(lse)))

    # load the kernels, and fill the caches, which may drop what earlier tests left there
    call()
    q.grad = k.grad = v.grad = None
    peak = MIB * peak_extra_mib(call, q.device)
    results = 4 * q.nbytes  # out, dq, dk, dv
    work_space = 2 * q.nbytes if backend == "hopper" and not deterministic else 0
    assert peak <= results + work_space + 5 * 4 * heads * length + 4 * MIB
    assert peak >= results  # the measurement sees what it should
    if mask is not None:
        schedule = schedule_for(mask, length, length, 1, heads, q.device)
        assert schedule_bytes(schedule) < 16 * MIB  # small beside the results


@pytest.mark.parametrize("mask", [masks.local(256) | masks.global_tokens(64), None])
def test_what_a_backend_keeps_of_a_mask_is_small(mask, backend):
    """After a first call the memory holds results, the schedule and the work lists: no dense mask,
    and no more than 1 KiB for each of the blocks.
    """
    length = 2**16 - 100  # no other test has this schedule in the cache
    qkv = make_qkv(1, 1, length, length, 64, dtype=torch.bfloat16, device="cuda")
    before = torch.cuda.memory_allocated()
    run(sparseflash.attention, qkv, mask, backend=backend)
    blocks = mask.build(length).nnz if mask is not None else length // 128
    limit = before + 1024 * blocks + 8 * MIB
    assert allocated_at_last(limit) <= limit


def test_peak_memory_of_building_the_schedule_follows_its_blocks():
    length = 2**16
    mask = masks.local(257) | masks.butterfly(128)  # no other test has this schedule in the cache
    made = []
    build = partial(schedule_for, mask, length, length, 1, 1, "cuda:0")
    peak = MIB * peak_extra_mib(lambda: made.append(build()), torch.device("cuda"))
    (schedule,) = made
    n_blocks = schedule.rows.idx.numel()
    assert n_blocks < 0.1 * (length / schedule.block_q) * (length / schedule.block_k)
    # sorting holds a few int64 of every block (and its work space) for a moment
    assert peak <= schedule_bytes(schedule) + 256 * n_blocks + 4 * MIB


@pytest.mark.parametrize("options", [{}, SAME_BITS], ids=["default", "deterministic"])
def test_memory_does_not_grow_from_call_to_call(options, backend):
    qkv = inputs(2048)
    options = options | {"backend": backend}
    run(sparseflash.attention, qkv, MASK, **options)
    gc.collect()  # what earlier tests left in cycles may be freed at any time
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        run(sparseflash.attention, qkv, MASK, **options)
    assert allocated_at_last(before) <= before


# ---- offsets beyond 32 bits


def contiguous_and_strided(which="qkv"):
    """q, k and v, and the same where those of `which` have their last token past 2**32 elements.

    The three views share a buffer.
    """
    length, stride, dim = 70_000, 65_536, 64
    # the buffer, and dense results; out and gradients of a view of it are not as wide as it
    need_memory(2 * length * stride + 4 * 2**30)
    qkv = make_qkv(1, 1, length, length, dim, dtype=torch.bfloat16, device="cuda")
    buffer = torch.zeros(length, stride, dtype=torch.bfloat16, device="cuda")
    strided = list(qkv)
    for i in range(3):
        if "qkv"[i] in which:
            strided[i] = buffer[:, i * dim : (i + 1) * dim].view(1, 1, length, dim).copy_(qkv[i])
            assert strided[i].stride(2) == stride and (length - 1) * stride > 2**32
    return qkv, strided


@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("mask", [masks.local(100), None], ids=["sparse", "dense"])
def test_offsets_past_32_bits_give_the_result_of_contiguous_tensors(mask, which, backend):
    qkv, strided = contiguous_and_strided(which)
    with torch.no_grad():
        actual = sparseflash.attention(*strided, mask, backend=backend, return_lse=True)
        expected = sparseflash.attention(*qkv, mask, backend=backend, return_lse=True)
    for name, a, e in zip(("out", "lse"), actual, expected, strict=True):
        for which, t in (("strided", a), ("contiguous", e)):
            wrong = (~t.isfinite()).nonzero()
            assert not len(wrong), f"{name}, {which}: {len(wrong)} not finite, from {wrong[0]}"
        error = relative_error(a[:, :, -5000:], e[:, :, -5000:])
        assert error < 1e-3, f"{name} of the last tokens: {error:.3g}"
        assert relative_error(a, e) < 1e-3, name


@pytest.mark.parametrize("options", [{}, SAME_BITS], ids=["default", "deterministic"])
def test_gradients_past_32_bits_give_the_result_of_contiguous_tensors(options, backend):
    qkv, strided = contiguous_and_strided()
    actual, expected = (
        run(sparseflash.attention, given, masks.local(100), backend=backend, **options)
        for given in (strided, qkv)
    )
    assert_equal(actual, expected, 1e-2)
    assert_equal(*([t[:, :, -5000:] for t in found] for found in (actual, expected)), 1e-2)


def test_heads_past_32_bits_of_elements(backend):
    # a head stride past 2**31 elements: the second and third heads lie beyond 32 bits
    length, heads, dim = 512, 3, 64
    stride_h = 2**31 + 2**10
    need_memory(2 * heads * stride_h)
    buffer = torch.zeros(heads * stride_h, dtype=torch.bfloat16, device="cuda")
    q, k, v = make_qkv(1, heads, length, length, dim, dtype=torch.bfloat16, device="cuda")
    far = buffer.as_strided((1, heads, length, dim), (heads * stride_h, stride_h, dim, 1))
    far.copy_(q)
    actual = sparseflash.attention(far, k, v, MASK, backend=backend)
    expected = sparseflash.attention(q, k, v, MASK, backend=backend)
    assert relative_error(actual, expected) < 1e-3
