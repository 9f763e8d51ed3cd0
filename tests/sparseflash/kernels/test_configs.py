"""Which tiles the portable kernels take."""

import pytest
import torch

from sparseflash.kernels.configs import Family, tiles_for

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
