"""Bringing q, k and v into e4m3, on the CPU."""

import pytest
import torch

import masks
from sparseflash import fp8
from sparseflash.testing import make_qkv, relative_error


@pytest.mark.parametrize("n_k", [1, 15, 128, 300])
@pytest.mark.parametrize("head_dim", [16, 40])
def test_values_and_scales_stand_for_the_inputs(n_k, head_dim):
    q, k, v = make_qkv(2, 4, 200, n_k, head_dim, kv_heads=2)
    inputs = fp8.quantize(q, k, v)
    for actual, expected in zip(fp8.dequantize(inputs), (q, k, v), strict=True):
        assert actual.shape == expected.shape
        assert relative_error(actual, expected) < 0.03  # 2 ** -4 at most, rms less than half


def test_layout():
    q, k, v = make_qkv(1, 2, 130, 100, 40, kv_heads=1)
    inputs = fp8.quantize(q, k, v)
    assert inputs.q.shape == (1, 2, 130, 48)
    assert inputs.v.shape == (1, 1, 48, 112)
    assert inputs.q_scale.shape == (1, 2, 2)
    assert not inputs.v[..., 40:, :].float().any()
    # token 8 * half + 2 * quad + pair at place 4 * quad + 2 * half + pair
    order = [8 * half + 2 * quad + pair for quad in range(4) for half in (0, 1) for pair in (0, 1)]
    expected = (v[0, 0, :16, :40] / inputs.v_scale[0, 0, 0]).to(torch.float8_e4m3fn)[order]
    assert torch.equal(inputs.v[0, 0, :40, :16].mT.float(), expected.float())


def test_a_large_token_costs_only_its_block():
    q, k, v = make_qkv(1, 1, 1, 256, 32)
    k[:, :, 200] *= 1000
    _, actual, _ = fp8.dequantize(fp8.quantize(q, k, v))
    assert relative_error(actual[:, :, :128], k[:, :, :128]) < 0.03


def test_scale_of_p():
    """exp2 of it is 2 ** 8 times the scale of the block of v to the largest of its head."""
    q, k, v = make_qkv(1, 1, 1, 512, 32)
    v[:, :, 128:256] *= 1e-6  # far below: shares a larger scale
    v[:, :, 256:384] = 0
    inputs = fp8.quantize(q, k, v)
    shift = inputs.k_table[0, 0, :, 1]
    assert shift.max() == 8
    assert shift.min() >= 2
    ratio = inputs.v_scale / inputs.v_scale.amax()
    torch.testing.assert_close(shift.exp2(), 256 * ratio[0, 0])
    torch.testing.assert_close(inputs.out_scale * 256, inputs.v_scale.amax(-1))


def test_zeros_stay_zeros():
    inputs = fp8.quantize(*(torch.zeros(1, 1, 10, 16) for _ in range(3)))
    assert not any(x.any() for x in fp8.dequantize(inputs))
    assert inputs.k_table.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), "q has shape"),
        (lambda q, k, v: (q, k[..., :8], v), "batch and head dim must be those of q"),
        (lambda q, k, v: (q[:, :3], k, v), "must be a multiple"),
        (lambda q, k, v: (q.requires_grad_(), k, v), "asks for gradients"),
        (lambda q, k, v: (q, k.int(), v), "pass floats"),
    ],
)
def test_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        fp8.quantize(*change(*make_qkv(1, 4, 10, 10, 16, kv_heads=2)))


def test_says_why_it_cannot_run():
    inputs = fp8.quantize(*make_qkv(1, 1, 10, 10, 16))
    with pytest.raises(ValueError, match="CUDA"):
        fp8.attention(inputs, masks.causal())
