"""Which tiles the kernels take, and what those for Hopper multiply."""

import pytest
import torch

from sparseflash.kernels.configs import Family, tiles_for
from sparseflash.kernels.hopper import configs as hopper

USUAL = {
    "padded": False,
    "partial": False,
    "keys_per_query": 9999.0,
    "block_q": 256,
    "block_k": 256,
}
FAMILIES: tuple[Family, ...] = ("ampere", "hopper", "blackwell", "geforce", "cdna")


def tiles(
    kernel="forward", head_dim=128, family: Family = "hopper", dtype=torch.bfloat16, **changes
):
    return tiles_for(kernel, head_dim, dtype, family=family, **(USUAL | changes))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", ["forward", "backward_kv", "backward_q", "backward_bias"])
@pytest.mark.parametrize("head_dim", [4, 32, 48, 64, 100, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_family_has_tiles_that_divide_the_blocks(dtype, head_dim, kernel, family):
    for padded in (False, True):
        for partial, terms in ((False, ""), (True, ""), (True, "capped"), (True, "biased")):
            for block in (16, 48, 64, 128):
                found = tiles(
                    kernel, head_dim, family, dtype, padded=padded, partial=partial, terms=terms,
                    keys_per_query=100.0, block_q=block, block_k=block,
                )  # fmt: skip
                assert block % found.block_m == 0 == block % found.block_n
                assert found.num_warps in (4, 8) and found.num_stages >= 1


def test_a_row_for_a_kind_comes_before_the_row_of_its_kernel():
    assert tiles()[:2] == (64, 128) and tiles(partial=True)[:2] == (128, 64)
    assert tiles(head_dim=64)[:2] == (128, 128)
    assert tiles(head_dim=64, keys_per_query=100.0)[:2] == (64, 128)
    assert tiles(head_dim=100, padded=True, partial=True)[:2] == (64, 32)
    for partial in (False, True):
        found = tiles("backward_q", 64, partial=partial, terms="capped")
        assert found[:2] == (64, 64) and found.max_registers == 168
        assert (tiles("backward_q", 64, partial=partial, terms="biased") == found) == partial
    assert tiles(terms="capped") == tiles(terms="biased") == tiles()
    assert tiles(partial=True, family="ampere") == tiles(family="ampere")


def test_a_family_overrides_single_rows_of_another():
    for kernel, head_dim in (("backward_kv", 64), ("backward_q", 64)):
        assert tiles(kernel, head_dim, "geforce") != tiles(kernel, head_dim, "ampere")
    assert tiles(family="geforce") == tiles(family="ampere")
    assert tiles(family="blackwell") == tiles() != tiles(family="ampere")
    assert tiles("backward_kv", 256, "blackwell") != tiles("backward_kv", 256)
    for family, warps in (("hopper", 4), ("blackwell", 8), ("geforce", 8)):
        assert tiles(head_dim=72, family=family, padded=True, partial=True).num_warps == warps


def test_columns_that_the_kernels_for_hopper_multiply():
    table = {8: 32, 32: 32, 40: 64, 64: 64, 65: 80, 80: 80, 88: 96, 96: 96, 97: 128, 128: 128}
    table |= {129: 192, 192: 192, 193: 256}
    for head_dim, columns in table.items():
        assert hopper.columns_in_use(head_dim) == columns <= hopper.padded(head_dim)
    assert all(head_dim <= hopper.columns_in_use(head_dim) for head_dim in range(1, 257))
    wide, narrow = (hopper.cols_tiles(width, 128, with_dq=True) for width in (256, 128))
    assert [wide.columns(d) for d in (8, 96, 128, 136, 192, 200)] == [128, 128, 128, 192, 192, 256]
    single = hopper.cols_tiles(128, 64, with_dq=True, joined=False)
    small = hopper.cols_tiles(64, 128, with_dq=True)
    for hoists, most in ((False, 80), (True, 64)):
        for columns in (32, 64, 80, 96, 128):
            kept = columns <= most
            assert hopper.keeps_kv(narrow, columns, hoists=hoists) == kept
            assert hopper.keeps_kv(small, min(columns, 64), hoists=hoists)
            for tiles in (wide, single, hopper.cols_tiles(64, 64, with_dq=True)):
                assert not hopper.keeps_kv(tiles, columns, hoists=hoists)
    for tiles in (narrow, single, hopper.rows_tiles(128, 128)):
        assert [tiles.columns(d) for d in (32, 64, 80, 96, 128)] == [32, 64, 80, 96, 128]


@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (128, 128), (64, 128), (128, 64), (256, 256)])
@pytest.mark.parametrize("block_q", [16, 32, 48, 64, 96, 192])
def test_two_heads_of_hopper_share_what_would_be_a_tile_of_one(block_q, dims):
    shared = hopper.forward_tiles(*dims, block_q, 4096, twins=3)
    assert (shared.heads, shared.major) == (2, 64)
    assert shared._replace(heads=1) == hopper.forward_tiles(*dims, 128, 4096)


def test_heads_of_hopper_share_tiles_that_fill_its_multiprocessors():
    for tokens, twins, heads in (
        (4096, 3, 2),
        (4096, 2, 1),
        (64, 132, 2),
        (64, 131, 1),
        (1, 200, 2),
    ):
        assert hopper.forward_tiles(128, 128, 64, tokens, twins).heads == heads
        whole = hopper.forward_tiles(128, 128, 128, tokens, twins)
        assert whole.heads == (heads if tokens <= 64 else 1)
    assert hopper.forward_tiles(128, 128, 64, 4096, 2) == hopper.forward_tiles(128, 128, 64, 4096)


@pytest.mark.parametrize(
    "n_bh, group, together",
    [(16, 1, 4), (6, 1, 3), (7, 1, 1), (1, 1, 1), (16, 2, 4), (6, 2, 2), (32, 8, 8), (12, 3, 3)],
)
def test_few_causal_tiles_run_heads_side_by_side(n_bh, group, together):
    few = {"partial": True, "group": group}
    assert hopper.side_by_side(10, n_bh, 132, **few) == together
    assert hopper.side_by_side(10_000, n_bh, 132, **few) == group
    assert hopper.side_by_side(10, n_bh, 132, partial=False, group=group) == group
