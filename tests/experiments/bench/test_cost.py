"""Costs against counts by hand and by brute force, ideal times, and the formulas of the papers."""

from itertools import product

import numpy as np
import pytest

import masks
from experiments.bench.cost import (
    CEILINGS,
    Ceilings,
    Shape,
    cost,
    flash_accesses,
    flops,
    ideal,
    measure_ceilings,
    standard_accesses,
)  # fmt: skip

N, D = 4096, 128
SHAPE = Shape(2, 4, 2, 384, 256, 64, 32, 2)


def brute(shape, blocks):
    """Pairs, and live rows of q and k, token by token."""
    dense = np.broadcast_to(
        blocks.layout() > 0, (shape.batch, shape.heads, blocks.rows, blocks.cols)
    )
    cells = dense.repeat(blocks.block_size[0], 2).repeat(blocks.block_size[1], 3)
    cells = cells[:, :, : shape.n_q, : shape.n_k]
    by_group = cells.reshape(shape.batch, shape.kv_heads, -1, shape.n_k)
    return cells.sum(), cells.any(3).sum(), by_group.any(2).sum()


def test_counts_agree_with_the_dense_mask():
    kinds = "random:0.1", "local:40", "global:10", "none", "per_head"
    for mask, block in product(kinds, (16, 96, 128, 256, (64, 128))):
        check_counts(mask, block, 300, 257)
    for mask, block in zip((*kinds, "dense"), (64, 96, 128, 256, (256, 32), 64), strict=True):
        check_counts(mask, block, 384, 256)
        check_counts(mask, block, 1, 100)


def check_counts(mask, block, n_q, n_k):
    shape = SHAPE._replace(n_q=n_q, n_k=n_k)
    if mask == "none":
        blocks = masks.BlockMask.from_dense(np.zeros((n_q, n_k), bool), block)
    elif mask == "per_head":
        dense = np.random.default_rng(0).random((2, 4, n_q, n_k)) < 0.0005
        blocks = masks.BlockMask.from_dense(dense, block)
    else:
        blocks = masks.parse(mask).build(n_q, n_k, block)
    pairs, live_q, live_k = brute(shape, blocks)
    blocks = None if mask == "dense" else blocks
    forward = cost(shape, blocks)
    assert forward.pairs == forward.exp2 == pairs
    assert forward.flops == 2 * pairs * (64 + 32)
    out = 2 * 4 * n_q * (32 * 2 + 4)
    assert forward.hbm_bytes == live_q * 128 + live_k * 192 + out
    backward = cost(shape, blocks, "backward")
    written = 2 * 4 * n_q * 128 + 2 * 2 * n_k * 192
    assert backward.flops == 2 * pairs * (3 * 64 + 2 * 32)  # S, dK, dQ; dP, dV
    assert backward.hbm_bytes == live_q * (128 + 128 + 4) + live_k * 192 + written


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


def test_what_does_not_fit_is_refused_with_the_remedy():
    short = masks.parse("local:40").build(256)
    three_heads = masks.BlockMask.from_dense(np.ones((1, 3, 384, 256), bool))
    for call, message in (
        (lambda: cost(SHAPE, short), "n_q=256, the shape 384"),
        (lambda: cost(SHAPE, direction="up"), "direction='up': choose from forward, backward"),
        (lambda: cost(SHAPE, three_heads), "heads=3, the shape 4"),
        (lambda: ideal(cost(SHAPE), CEILINGS["NVIDIA H200"], "float32"), "float32.*measure_ceil"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_device_can_be_measured():
    rates = measure_ceilings("cpu", ("float32",))
    assert min(rates.matmul_tflops["float32"], rates.copy_tbs, rates.exp2_tps) > 0


# ---- the formulas of the papers


def test_products_4_8_10_12_and_14_are_those_of_a_call():
    unit = N * N * D
    counts = {("forward", True): 4, ("backward", False): 8, ("backward", True): 10}
    counts |= {("both", False): 12, ("both", True): 14}
    for (direction, recompute), count in counts.items():
        assert flops(N, D, direction, recompute=recompute) == count * unit
    shape = Shape(2, 3, 3, N, N, D, D, 2)
    for direction in ("forward", "backward"):
        assert cost(shape, direction=direction).flops == 2 * 3 * flops(N, D, direction)


def test_standard_attention_moves_the_scores_four_times():
    assert standard_accesses(N, D) == 4 * N * N + 4 * N * D == 69_206_016
    assert standard_accesses(N, D, "backward") == 7 * N * N + 8 * N * D
    assert standard_accesses(N, D, "both") == 11 * N * N + 12 * N * D


def test_flash_accesses_by_walking_the_loops():
    n, d, sram, rows, cols = 96, 16, 1024, 16, 16
    for direction in ("forward", "backward"):
        moved = 0
        for _ in range(0, n, cols):
            moved += 2 * cols * d  # k, v
            for _ in range(0, n, rows):
                if direction == "forward":
                    moved += 2 * rows * d + 2 * rows  # q, out, maximum and sum
                    moved += rows * d + 2 * rows
                else:
                    moved += 4 * rows * d + 2 * rows  # q, out, dout, dq, maximum and sum
                    moved += rows * d
            moved += 2 * cols * d if direction == "backward" else 0  # dk, dv
        assert flash_accesses(n, d, sram, direction) == moved
