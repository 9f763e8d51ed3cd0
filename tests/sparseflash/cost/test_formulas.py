"""The formulas of the papers against the lecture's examples and against counts of the loops."""

import pytest

from sparseflash.cost import (
    Ceilings,
    Shape,
    attainable_tflops,
    cost,
    flash_accesses,
    flops,
    intensity,
    paper_tiles,
    ridge,
    score_bytes,
    standard_accesses,
    statistics_bytes,
    tile_bytes,
)

N, D = 4096, 128
# an A100 of 80 GB by its data sheet
A100 = Ceilings({"bfloat16": 312.0}, copy_tbs=2.0, exp2_tps=1.0, source="data sheet")


def test_products_4_8_10_12_and_14():
    unit = N * N * D
    assert flops(N, D) == 4 * unit == pytest.approx(8.59e9, rel=1e-3)
    assert flops(N, D, "backward", recompute=False) == 8 * unit
    assert flops(N, D, "backward") == 10 * unit
    assert flops(N, D, "both", recompute=False) == 12 * unit
    assert flops(N, D, "both") == 14 * unit


def test_products_are_those_of_a_call():
    shape = Shape(2, 3, 3, N, N, D, D, 2)
    for direction in ("forward", "backward"):
        assert cost(shape, direction=direction).flops == 2 * 3 * flops(N, D, direction)


def test_standard_attention_moves_the_scores_four_times():
    assert standard_accesses(N, D) == 4 * N * N + 4 * N * D == 69_206_016
    assert standard_accesses(N, D, "backward") == 7 * N * N + 8 * N * D
    assert standard_accesses(N, D, "both") == 11 * N * N + 12 * N * D


def test_128k_tokens_34_gb_of_scores_or_1_mb_of_statistics():
    assert score_bytes(131_072) == pytest.approx(34.36e9, rel=1e-4)
    assert statistics_bytes(131_072) == 2**20
    assert statistics_bytes(2 * 131_072) == 2 * statistics_bytes(131_072)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_flash_accesses_by_walking_the_loops(direction):
    n, d, sram = 96, 16, 1024
    rows, cols = paper_tiles(sram, d)
    assert (rows, cols) == (16, 16)
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


def test_flash_accesses_are_of_order_n2_d2_over_m():
    sram = 2**16
    assert flash_accesses(2 * N, D, sram) == pytest.approx(4 * flash_accesses(N, D, sram), rel=0.02)
    assert flash_accesses(N, D, 2 * sram) == pytest.approx(flash_accesses(N, D, sram) / 2, rel=0.04)
    assert 12 < flash_accesses(N, D, sram) / (N * N * D * D / sram) < 13
    assert flash_accesses(N, D, sram) < standard_accesses(N, D)
    both = [flash_accesses(N, D, sram, d) for d in ("forward", "backward", "both")]
    assert both[0] + both[1] == both[2]


def test_empty_tiles_move_nothing():
    full, none = (flash_accesses(N, D, 2**16, density=x) for x in (1.0, 0.0))
    assert none == 2 * N * D
    assert flash_accesses(N, D, 2**16, density=0.25) == none + (full - none) / 4


def test_tiles_fit_the_fast_memory_they_were_made_for():
    # 192 KB of an A100's multiprocessor in 2-byte elements
    assert paper_tiles(96 * 1024, 64) == (64, 384)
    assert paper_tiles(96 * 1024, 128) == (128, 192)
    assert paper_tiles(1000, 128) == (2, 2)  # rounded up
    assert tile_bytes(128, 128, 128) == 3 * 128 * 128 * 2 + 4 * 128 * (128 + 128 + 2)
    assert tile_bytes(128, 64, 64, itemsize=4) == 4 * (256 * 64 + 128 * (64 + 64 + 2))


def test_standard_attention_is_left_and_flash_attention_right_of_the_ridge():
    standard = intensity(flops(N, D), 2 * standard_accesses(N, D))
    assert standard == pytest.approx(62, rel=0.01) and standard < ridge(A100, "bfloat16") == 156
    assert attainable_tflops(standard, A100, "bfloat16") == pytest.approx(124, rel=0.01)
    call = cost(Shape(1, 1, 1, N, N, D, D, 2))
    flash = intensity(call.flops, call.hbm_bytes)
    assert flash == pytest.approx(2032, rel=0.01)
    assert attainable_tflops(flash, A100, "bfloat16") == 312


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: flops(N, D, "up"), "direction 'up': choose from forward, backward, both"),
        (lambda: standard_accesses(N, D, "up"), "direction 'up'"),
        (lambda: flash_accesses(N, D, 2**16, "up"), "direction 'up'"),
        (lambda: paper_tiles(511, 128), r"sram=511 .* give at least 4 \* head_dim = 512"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()
