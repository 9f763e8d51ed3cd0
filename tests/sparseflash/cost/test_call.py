"""Costs against counts by hand and by brute force, and the ideal times of a device."""

import numpy as np
import pytest
import torch

import masks
from sparseflash import ceilings as module
from sparseflash.cost import Ceilings, Shape, ceilings, cost, ideal, measure_ceilings

SHAPE = Shape(2, 4, 2, 384, 256, 64, 32, 2)
H200 = ceilings("NVIDIA H200")


def brute(shape, blocks):
    """Pairs, live rows of q and k, and loads by rows and columns, token by token."""
    dense = np.broadcast_to(
        blocks.layout() > 0, (shape.batch, shape.heads, blocks.rows, blocks.cols)
    )
    cells = dense.repeat(blocks.block_size[0], 2).repeat(blocks.block_size[1], 3)
    cells = cells[:, :, : shape.n_q, : shape.n_k]
    by_group = cells.reshape(shape.batch, shape.kv_heads, -1, shape.n_k)

    def loads(cells):
        starts = range(0, cells.shape[2], 128)
        return sum(cells[:, :, i : i + 128].any(2).sum() for i in starts)

    live = cells.any(3).sum(), by_group.any(2).sum()
    return cells.sum(), *live, loads(cells), loads(cells.swapaxes(2, 3))


def test_dense_by_hand():
    forward = cost(SHAPE)
    pairs = 2 * 4 * 384 * 256
    assert forward.pairs == forward.exp2 == pairs
    assert forward.flops == 2 * pairs * (64 + 32)
    q, out, kv = 2 * 4 * 384 * 64 * 2, 2 * 4 * 384 * (32 * 2 + 4), 2 * 2 * 256 * (64 + 32) * 2
    assert forward.hbm_bytes == q + kv + out
    # three tiles of 128 queries, each of which loads all keys and values of its head
    assert forward.l2_bytes == q + out + 2 * 4 * 3 * 256 * (64 + 32) * 2

    backward = cost(SHAPE, direction="backward")
    assert backward.flops == 2 * pairs * (3 * 64 + 2 * 32)  # S, dK, dQ; dP, dV
    assert backward.hbm_bytes == 2 * q + 2 * kv + 2 * 4 * 384 * (2 * 32 * 2 + 4)
    twice = cost(SHAPE, direction="backward", deterministic=True)
    assert twice.flops == 2 * pairs * (4 * 64 + 3 * 32) and twice.exp2 == 2 * pairs
    assert twice.hbm_bytes == backward.hbm_bytes


@pytest.mark.parametrize("block", [16, 64, 96, 128, 256, (64, 128), (256, 32)])
@pytest.mark.parametrize("mask", ["random:0.1", "local:40", "global:10", "none", "per_head"])
@pytest.mark.parametrize(("n_q", "n_k"), [(384, 256), (300, 257), (1, 100)])
def test_counts_agree_with_the_dense_mask(mask, block, n_q, n_k):
    shape = SHAPE._replace(n_q=n_q, n_k=n_k)
    if mask == "none":
        blocks = masks.BlockMask.from_dense(np.zeros((n_q, n_k), bool), block)
    elif mask == "per_head":
        dense = np.random.default_rng(0).random((2, 4, n_q, n_k)) < 0.0005
        blocks = masks.BlockMask.from_dense(dense, block)
    else:
        blocks = masks.parse(mask).build(n_q, n_k, block)
    pairs, live_q, live_k, row_loads, col_loads = brute(shape, blocks)
    forward = cost(shape, blocks)
    assert forward.pairs == pairs
    out = 2 * 4 * n_q * (32 * 2 + 4)
    assert forward.hbm_bytes == live_q * 128 + live_k * 192 + out
    assert forward.l2_bytes == live_q * 128 + row_loads * 192 + out
    backward = cost(shape, blocks, "backward")
    written = 2 * 4 * n_q * 128 + 2 * 2 * n_k * 192
    assert backward.hbm_bytes == live_q * (128 + 128 + 4) + live_k * 192 + written
    assert backward.l2_bytes == col_loads * (192 + 8 + 256) + live_k * 192 + written
    twice = cost(shape, blocks, "backward", deterministic=True)
    assert twice.l2_bytes - backward.l2_bytes == row_loads * 192 - col_loads * 256


def test_ideal_time_is_that_of_what_binds():
    rates = Ceilings({"bfloat16": 100.0}, copy_tbs=1.0, exp2_tps=1.0, source="")
    shape = Shape(1, 1, 1, 1024, 1024, 128, 128, 2)
    found = ideal(cost(shape), rates, "bfloat16")
    assert found.matmul_ms == pytest.approx(4 * 1024**2 * 128 / 100e12 * 1e3)
    assert found.exp2_ms == pytest.approx(1024**2 / 1e12 * 1e3)
    assert found.hbm_ms == pytest.approx((4 * 1024 * 256 + 4 * 1024) / 1e12 * 1e3)
    assert (found.ms, found.bound) == (found.matmul_ms, "matmul")
    assert ideal(cost(shape._replace(head_dim=16, v_dim=16)), rates, "bfloat16").bound == "exp2"
    nothing = masks.BlockMask.from_dense(np.zeros((1024, 1024), bool))
    assert ideal(cost(shape, nothing), rates, "bfloat16").bound == "hbm"


def test_the_h200_at_a_known_shape():
    """A dense forward at 16384 tokens: 4 B H N^2 D operations at 790 TFLOP/s."""
    found = ideal(cost(Shape(2, 16, 16, 16384, 16384, 128, 128, 2)), H200, "bfloat16")
    assert found.bound == "matmul" and found.ms == pytest.approx(5.568, rel=1e-3)
    # 128 operations a pair and head dim 32: the exponentials bind
    thin = ideal(cost(Shape(8, 2, 2, 16384, 16384, 32, 32, 2)), H200, "bfloat16")
    assert thin.bound == "exp2"


SHORT = masks.parse("local:40").build(256)
THREE_HEADS = masks.BlockMask.from_dense(np.ones((1, 3, 384, 256), bool))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: cost(SHAPE, SHORT), "256 x 256 tokens, the shape 384 x 256"),
        (lambda: cost(SHAPE, direction="up"), "direction 'up': choose from forward, backward"),
        (lambda: cost(SHAPE, THREE_HEADS), "3 heads, the shape 2 and 4"),
        (lambda: ceilings("My GPU"), r"'My GPU'.*measure_ceilings"),
        (lambda: ideal(cost(SHAPE), H200, "float32"), "float32.*measure_ceilings"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_device_can_be_measured():
    rates = measure_ceilings("cpu", ("float32",))
    assert rates.matmul_tflops["float32"] > 0 and rates.copy_tbs > 0 and rates.exp2_tps > 0
    assert measure_ceilings("cpu", ("float32",)) is rates
    # Any processor of this century makes 1e8 exponentials a second with one thread.
    assert rates.exp2_tps > 1e-4


def test_rates_are_those_of_calls_that_nothing_held_up(monkeypatch):
    """Threads that wait for one another make most calls, or all with several threads, slow."""
    clock, calls = [0.0], []

    def call():
        calls.append(torch.get_num_threads())
        stalls = calls[-1] > 1 or len(calls) % 10
        clock[0] += 0.02 if stalls else 1e-5

    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    before = torch.get_num_threads()
    assert module._seconds(call, torch.device("cpu")) == pytest.approx(1e-5)
    assert torch.get_num_threads() == before
