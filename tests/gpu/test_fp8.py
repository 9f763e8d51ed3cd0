"""The fp8 forward against the float64 oracle of the dequantised and of the original inputs."""

import pytest
import torch

import masks
from sparseflash import fp8
from sparseflash.select import top_k
from sparseflash.testing import make_qkv, oracle, relative_error
from tests.gpu_calls import HOPPER

pytestmark = HOPPER

P_ERROR = 0.03  # of the rounding of P to e4m3
ERROR = 0.06  # of that of q, k and v, on normal inputs
LSE_ERROR = 0.02


def check(n_q, n_k, head_dim, mask=None, *, heads=2, kv_heads=2, batch=1, dim_v=None, block=None):
    q, k, v = make_qkv(batch, heads, n_q, n_k, head_dim, kv_heads=kv_heads, device="cuda")
    if dim_v is not None:
        v = make_qkv(batch, heads, n_q, n_k, dim_v, kv_heads=kv_heads, device="cuda")[2]
    compare(q, k, v, mask, block)


def compare(q, k, v, mask=None, block=None, error=ERROR):
    dense = None
    if mask is not None:
        blocks = mask.build(q.shape[2], k.shape[2], block or 128, heads=q.shape[1])
        dense = torch.from_numpy(blocks.to_dense()).cuda()
        mask = blocks if block else mask
    inputs = fp8.quantize(q, k, v)
    out, lse = fp8.attention(inputs, mask, return_lse=True)
    expected, expected_lse = oracle(*fp8.dequantize(inputs), dense)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, expected) < P_ERROR
    assert relative_error(expected, oracle(q, k, v, dense)[0]) < error
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    some = expected_lse.isfinite()
    if some.any():
        assert (lse.double() - expected_lse)[some].abs().max() < LSE_ERROR
    assert not out[~some].any()


@pytest.mark.parametrize("head_dim", [16, 40, 64, 128])
@pytest.mark.parametrize("length", [1, 100, 128, 1000, 4097])
def test_dense(length, head_dim):
    check(length, length, head_dim)


@pytest.mark.parametrize("block", [None, 64, (64, 32), (256, 128)])
def test_structured_mask_at_ragged_length(block):
    mask = masks.local(150) | masks.butterfly(128) | masks.global_tokens(40)
    check(2000, 2000, 64, mask, block=block)


def test_grouped_heads_and_another_head_dim_of_v():
    mask = masks.random_blocks(0.2, block=128, per_head=True)
    check(700, 900, 64, mask, heads=6, kv_heads=2, batch=2, dim_v=40)


def test_queries_with_nothing_to_attend_to():
    check(3000, 3000, 64, masks.random_blocks(0.04, block=128))


@pytest.mark.parametrize(("n_q", "n_k"), [(100, 30000), (128, 65536)])
def test_split_rows(n_q, n_k):
    check(n_q, n_k, 128)


def test_long_rows_among_short_ones():
    check(8192, 8192, 64, masks.local(64) | masks.global_tokens(5), heads=1, kv_heads=1)


def test_scales_of_blocks():
    """Blocks of very different size each keep their precision."""
    q, k, v = make_qkv(1, 2, 1024, 1024, 128, device="cuda")
    size = torch.logspace(-3, 2, 1024, device="cuda")[:, None]
    compare(q, k, v * size, masks.local(64), error=0.08)


def test_the_sum_of_many_keys_has_no_bias():
    """Equal keys and values: wgmma alone would lose 1 % at this length."""
    q, k, v = make_qkv(1, 1, 128, 32768, 64, device="cuda")
    inputs = fp8.quantize(q, torch.zeros_like(k), torch.ones_like(v))
    assert (fp8.attention(inputs).float() - 1).abs().max() < 2e-3


def test_selection():
    q, k, v = make_qkv(1, 2, 1024, 1024, 64, device="cuda")
    chosen = top_k(3, within=masks.causal())(q, k)
    inputs = fp8.quantize(q, k, v)
    dense = torch.from_numpy(chosen.to_block_mask().to_dense()).cuda()
    expected = oracle(*fp8.dequantize(inputs), dense)[0]
    assert relative_error(fp8.attention(inputs, chosen), expected) < P_ERROR


def test_same_bits_from_run_to_run_and_in_a_graph():
    q, k, v = make_qkv(1, 4, 2000, 2000, 64, device="cuda")
    inputs, mask = fp8.quantize(q, k, v), masks.causal()
    first = fp8.attention(inputs, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fp8.attention(inputs, mask)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, first)


def test_head_dim_too_large():
    inputs = fp8.quantize(*make_qkv(1, 1, 10, 10, 160, device="cuda"))
    with pytest.raises(ValueError, match="up to 128"):
        fp8.attention(inputs)
