"""FlopCounterMode counts the computed blocks."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

import masks
from sparseflash import attention, plan, select
from sparseflash.testing import make_qkv

B, H, N, D, DV = 2, 4, 512, 16, 8
WINDOW = masks.local(128) >> masks.snap(128)


def counted(mask, *, backward: bool) -> int:
    qkv = make_qkv(B, H, N, N, D, kv_heads=2, v_head_dim=DV, requires_grad=True)
    if isinstance(mask, select.Selector):
        mask = mask(*qkv[:2])
    elif mask == "plan":
        mask = plan(WINDOW, *qkv, backend="cpu")
    out = attention(*qkv, mask, backend="cpu")  # a forward that it does not see
    with FlopCounterMode(display=False) as counter:
        out = out if backward else attention(*qkv, mask, backend="cpu")
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "mask, blocks",
    [
        (None, 16),
        (WINDOW, 10),
        (WINDOW.build(N), 10),
        ("plan", 10),
        (masks.heads(WINDOW, masks.dense()), 13),
        (select.top_k(2, block_size=128), 8),
    ],
)
def test_flops_are_those_of_the_computed_blocks(mask, blocks):
    pairs = 2 * B * H * blocks * 128 * 128
    assert counted(mask, backward=False) == pairs * (D + DV)
    assert counted(mask, backward=True) == pairs * (3 * D + 2 * DV)
