"""Which tiles the kernels take, and what those for Hopper multiply and hold."""

import itertools

import torch

from sparseflash.backends.hopper import forward, tma
from sparseflash.kernels.hopper import configs as hopper
from sparseflash.kernels.portable.configs import Family, tiles_for

FAMILIES: tuple[Family, ...] = ("ampere", "hopper", "blackwell", "geforce", "cdna")
KERNELS = "forward", "backward_kv", "backward_q", "backward_tables"


def test_every_family_has_tiles_that_divide_the_blocks():
    dims = 4, 32, 48, 64, 100, 128, 192, 256
    scores = (False, ""), (True, ""), (True, "plain"), (True, "tables"), (True, "paired")
    for family, kernel, head_dim in itertools.product(FAMILIES, KERNELS, dims):
        for dtype, padded, (partial, score), block in itertools.product(
            (torch.bfloat16, torch.float32), (False, True), scores, (16, 48, 64, 128)
        ):
            found = tiles_for(
                kernel, head_dim, dtype, family=family, padded=padded, partial=partial, score=score,
                keys_per_query=100.0, block_q=block, block_k=block,
            )  # fmt: skip
            told = family, kernel, head_dim, dtype, block, found
            assert block % found.block_m == 0 == block % found.block_n, told
            assert found.num_warps in (4, 8) and found.num_stages >= 1, told


def test_columns_that_the_kernels_for_hopper_multiply_and_copy():
    """Tiles lie in shared memory in panels of 64 columns, or of 32 where these are copied."""
    for head_dim in range(1, 257):
        width, columns = hopper.padded(head_dim), hopper.columns_in_use(head_dim)
        assert head_dim <= columns <= width
        panel = tma.panel(width, columns)
        copied = -(-columns // panel) * panel
        assert columns <= copied <= min(width, columns + 31)
        assert panel in (width, 64, 32) and width % panel == 0


def test_registers_and_shared_memory_of_the_forward_for_hopper():
    dims = (32, 32), (64, 64), (48, 40), (64, 128), (256, 8), (96, 72), (128, 80), (128, 128)
    for (dim, dim_v), block_q, tall in itertools.product(dims, (64, 128), (False, True)):
        tiles = hopper.forward_tiles(dim, dim_v, block_q, 4096, tall=tall)
        found = forward._registers(tiles)
        own, feed = found["REGISTERS"], found["FEED_REGISTERS"]
        assert own % 8 == feed % 8 == found["maxnreg"] % 8 == 0 and feed >= 24, tiles
        assert 128 * tiles.programs * (own * tiles.consumers + feed) <= 65536, tiles
        assert own * tiles.consumers + feed <= found["maxnreg"] * (tiles.consumers + 1), tiles
        places = tiles.consumers * 64 * max(tiles.width, tiles.width_v) * (1 if tiles.drain else 2)
        rings = tiles.minor * (tiles.k_stages * tiles.width + tiles.v_stages * tiles.width_v)
        assert 2 * (places + rings) <= 227 * 1024 // tiles.programs - 1024, tiles


def test_two_heads_of_hopper_share_what_would_be_a_tile_of_one():
    for dims in ((32, 32), (64, 128), (128, 64), (256, 256)):
        for block_q in (16, 48, 64, 192):
            shared = hopper.forward_tiles(*dims, block_q, 4096, twins=3)
            assert (shared.heads, shared.major) == (2, 64)
            assert shared._replace(heads=1) == hopper.forward_tiles(*dims, 128, 4096)
