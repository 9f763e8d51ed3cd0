"""What comes before and after the passes of a backward, in Triton's interpreter."""

import pytest
import torch

from sparseflash.kernels.hopper.prepare import backward_finish, backward_start
from sparseflash.kernels.portable.backward_prepare import backward_prepare
from sparseflash.testing import make_qkv
from tests.op_cases import INTERPRETED

pytestmark = INTERPRETED

BATCH, HEADS, N, N_PAD = 2, 3, 70, 128
SINK = torch.tensor([90.0, -1.5, -torch.inf])  # e^90 is beyond float32


def rows(dim, with_dlse):
    """out, dout, lse with empty rows, dlse; their strides; delta in float64, 0 for empty rows."""
    out, dout, _ = make_qkv(BATCH, HEADS, N, N, dim)
    generator = torch.Generator().manual_seed(dim)
    lse = 5 * torch.randn(BATCH, HEADS, N, generator=generator)
    lse[:, :, ::9] = -torch.inf
    dlse, strides = None, (0, 0, 0)
    delta = (out.double() * dout.double()).sum(-1)
    if with_dlse:
        dlse = torch.randn(BATCH, N, HEADS, generator=generator).transpose(1, 2)
        strides = dlse.stride()
        delta -= dlse.double()
        dlse[lse == -torch.inf] = torch.nan  # nobody may look at it
    strides = *out.stride()[:3], *dout.stride()[:3], *strides
    return (out, dout, lse, dlse), strides, delta.masked_fill(lse == -torch.inf, 0.0)


def with_sink(lse):
    """The same LSE with the sinks, but for its empty rows, which only a sink of -inf has."""
    return torch.logaddexp(lse, SINK[:, None]).masked_fill(lse == -torch.inf, -torch.inf)


def base_2(lse):
    """The LSE in base 2, in float64; +inf for an empty row."""
    log2 = lse.double() / torch.log(torch.tensor(2.0, dtype=torch.float64))
    return log2.masked_fill(lse == -torch.inf, torch.inf)


def sink_gradient(lse, delta):
    """(H,) in float64."""
    p = (SINK.double()[:, None] - lse.double()).exp().masked_fill(lse == -torch.inf, 0.0)
    return -(p * delta).sum((0, 2))


def prepared(kernel, inputs, strides, dim, sink=None, sums=None, dq_sum=None):
    """delta or, for the passes for Hopper, its negative, and the LSE in base 2; and counters."""
    n, n_tiles = (N, 2) if kernel is backward_prepare else (N_PAD, N_PAD // 64)
    of_rows = torch.empty(2, BATCH, HEADS, n).unbind()
    counters = torch.full((2,), 7, dtype=torch.int32)
    options = {"HEAD_DIM": dim, "BLOCK_D": 16, "BLOCK_M": 64, "LSE_GRAD": inputs[3] is not None}
    if kernel is backward_prepare:
        args = *of_rows, sink, sums, *strides, N, n_tiles, HEADS
    else:
        args = *of_rows, counters, dq_sum, sink, sums, *strides, N, N_PAD, HEADS
        options |= {"DQ_BLOCK_D": 32, "CLEAR": dq_sum is not None}
    kernel[(BATCH * HEADS * n_tiles,)](*inputs, *args, **options)
    return *of_rows, counters


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("dim", [16, 13])
def test_delta_and_the_lse_in_base_2(dim, with_dlse):
    inputs, strides, expected = rows(dim, with_dlse)
    delta, lse_log2, _ = prepared(backward_prepare, inputs, strides, dim)
    torch.testing.assert_close(delta.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse_log2.double(), base_2(inputs[2]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("keys, value", [(5, 2.0), (500, 2.0), (70, torch.nan)])
def test_what_bounds_the_gradients_of_tables(keys, value):
    """Not those of empty rows, nor values that are not finite."""
    (out, dout, lse, dlse), strides, _ = rows(13, True)
    v, seen = make_qkv(BATCH, HEADS, N, keys, 13, kv_heads=1)[2], lse != -torch.inf
    v[0, 0, 1], v[1, 0, 2], dout[~seen] = torch.nan, -torch.inf, torch.nan
    dout[1, 2, N - 1, 0] = value
    found = torch.zeros(3, dtype=torch.int32)
    backward_prepare[(2 * BATCH * HEADS,)](
        out, dout, lse, dlse, *torch.empty(2, BATCH, HEADS, N), None, None, *strides, N, 2, HEADS,
        HEAD_DIM=13, BLOCK_D=16, BLOCK_M=64, LSE_GRAD=True, V=v, Largest=found,
        v_strides=v.stride()[:3], n_k=keys, group=HEADS, share=0.125,
    )  # fmt: skip
    delta = (out * dout).sum(-1) - dlse
    wanted = [x.abs().max() for x in (dout[seen], v[v.isfinite()], delta[seen] / 8)]
    torch.testing.assert_close(
        found.view(torch.float32), torch.stack(wanted), rtol=1e-5, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_what_the_hopper_passes_need_of_every_query(with_dlse, clear):
    inputs, strides, delta = rows(13, with_dlse)
    dq_sum = torch.empty(BATCH, HEADS, N_PAD, 32) if clear else None
    given = backward_start, inputs, strides, 13
    neg_delta, lse_log2, counters = prepared(*given, dq_sum=dq_sum)
    assert (neg_delta[:, :, N:] == 0).all() and (lse_log2[:, :, N:] == torch.inf).all()
    torch.testing.assert_close(neg_delta[:, :, :N].double(), -delta, rtol=1e-5, atol=1e-5)
    own = lse_log2[:, :, :N].double()
    torch.testing.assert_close(own, base_2(inputs[2]), rtol=1e-6, atol=1e-6)
    assert dq_sum is None or (dq_sum == 0).all()
    assert counters.tolist() == [0, 0]


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("kernel", [backward_prepare, backward_start])
def test_the_gradient_of_the_sink_by_tiles(kernel, with_dlse):
    """Its own place for every tile: nothing has to be cleared, and the sum has one order."""
    (out, dout, lse, dlse), strides, delta = rows(16, with_dlse)
    lse, sums = with_sink(lse), torch.full((BATCH, HEADS, N_PAD // 64), torch.nan)
    prepared(kernel, (out, dout, lse, dlse), strides, 16, SINK, sums)
    expected = sink_gradient(lse, delta)
    assert expected[:2].abs().min() > 0.01 and expected[2] == 0
    torch.testing.assert_close(sums.sum((0, 2)).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [64, 40])
def test_dq_comes_out_of_the_order_of_the_registers(dim):
    width, scale = 64, 0.25
    dq, _, _ = make_qkv(BATCH, HEADS, N_PAD, N_PAD, width)
    # slab of 16 rows, half of it, row in 8; 8 columns, column pair, column in the pair
    slabs = dq.view(BATCH * HEADS, N_PAD // 16, 2, 8, width // 8, 4, 2)
    dq_sum = slabs.permute(0, 1, 4, 3, 5, 2, 6).contiguous()
    result = torch.empty(BATCH, N, HEADS, dim).transpose(1, 2)
    backward_finish[(BATCH * HEADS * N_PAD // 64,)](
        dq_sum, result, *result.stride()[:3], N, N_PAD, HEADS, scale,
        HEAD_DIM=dim, BLOCK_D=width, BLOCK_M=64,
    )  # fmt: skip
    torch.testing.assert_close(result, dq[:, :, :N, :dim] * scale, rtol=0, atol=0)
