"""The kernels that merge the parts of split tiles, in Triton's interpreter, against float64."""

import pytest
import torch

from sparseflash.kernels.tl.merge_parts import backward_merge, merge_parts

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the kernels on it"
)

BATCH, HEADS, TILE, ROWS = 2, 3, 32, 16
SENTINEL = -7.0
# batch entries and heads with lists of their own, head dim of v, layout
CASES = [
    (1, 1, 16, "contiguous"),
    (1, HEADS, 13, "token major"),
    (BATCH, 1, 1, "padded"),
    (BATCH, HEADS, 24, "token major"),
]


def table(list_batch, list_heads, generator):
    """Tile, first slot and parts of the split tiles of each list; some lists have fewer."""
    rows = torch.tensor([[3, 0, 2, 0], [0, 2, 3, 0], [1, 5, 1, 0]], dtype=torch.int32)
    lists = []
    for i in range(list_batch * list_heads):
        order = torch.randperm(3, generator=generator)
        mine = rows[order].clone()
        if i % 2:
            mine[-1, 0] = -1  # a list with fewer split tiles
        lists.append(mine)
    return torch.stack(lists), 6  # slots of a head


def rows_of(merge, list_batch, list_heads, b, h):
    index = (b if list_batch > 1 else 0) * list_heads + (h if list_heads > 1 else 0)
    return [row.tolist() for row in merge[index] if row[0] >= 0]


def strided(shape, layout):
    """An output full of sentinels: heads before tokens, tokens before heads, or inside a buffer."""
    batch, heads, n, dim = shape
    if layout == "token major":
        return torch.full((batch, n, heads, dim), SENTINEL).transpose(1, 2)
    wider = torch.full((batch, heads, n, dim + 5), SENTINEL)
    return wider[..., :dim] if layout == "padded" else wider[..., :dim].contiguous()


@pytest.mark.parametrize("list_batch, list_heads, dim, layout", CASES)
def test_attention_over_parts_is_attention_over_all(list_batch, list_heads, dim, layout):
    generator = torch.Generator().manual_seed(dim)
    merge, n_parts = table(list_batch, list_heads, generator)
    n_q, block_dv = 4 * TILE - 9, max(16, 1 << (dim - 1).bit_length())
    part_out = torch.randn(BATCH * HEADS, n_parts, TILE, block_dv, generator=generator)
    part_lse = 3 * torch.randn(BATCH * HEADS, n_parts, TILE, generator=generator) + 40
    part_lse[torch.rand(part_lse.shape, generator=generator) < 0.3] = -torch.inf  # empty parts
    part_lse[:, :, 5] = -torch.inf  # a row with nothing to attend to
    part_out[part_lse == -torch.inf] = 0.0
    out = strided((BATCH, HEADS, n_q, dim), layout)
    lse = torch.full((BATCH, HEADS, n_q), SENTINEL)
    merge_parts[(merge.shape[1], BATCH * HEADS, TILE // ROWS)](
        part_out, part_lse, merge, out, lse, merge.shape[1], n_parts, list_batch, list_heads,
        HEADS, n_q, dim, *out.stride()[:3], BLOCK_M=TILE, BLOCK_DV=block_dv, ROWS=ROWS,
    )  # fmt: skip
    expected_out = torch.full((BATCH, HEADS, n_q, dim), SENTINEL, dtype=torch.float64)
    expected_lse = torch.full((BATCH, HEADS, n_q), SENTINEL, dtype=torch.float64)
    for b in range(BATCH):
        for h in range(HEADS):
            for tile, first, count, _ in rows_of(merge, list_batch, list_heads, b, h):
                rows = slice(tile * TILE, min((tile + 1) * TILE, n_q))
                parts = slice(first, first + count)
                lses = part_lse[b * HEADS + h, parts].double()
                whole = torch.logsumexp(lses, 0)
                weights = torch.exp(lses - whole).nan_to_num(0.0)  # -inf - -inf: nothing there
                values = (weights[..., None] * part_out[b * HEADS + h, parts].double()).sum(0)
                n = rows.stop - rows.start
                expected_out[b, h, rows] = values[:n, :dim]
                expected_lse[b, h, rows] = whole[:n]
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


def test_rows_with_nothing_to_attend_to_are_zeros():
    merge = torch.tensor([[[0, 0, 3, 0]]], dtype=torch.int32)
    part_out = torch.zeros(1, 3, TILE, 16)
    part_lse = torch.full((1, 3, TILE), -torch.inf)
    out, lse = torch.full((1, 1, TILE, 16), SENTINEL), torch.full((1, 1, TILE), SENTINEL)
    merge_parts[(1, 1, TILE // ROWS)](
        part_out, part_lse, merge, out, lse, 1, 3, 1, 1, 1, TILE, 16, *out.stride()[:3],
        BLOCK_M=TILE, BLOCK_DV=16, ROWS=ROWS,
    )  # fmt: skip
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_weights_do_not_overflow():
    merge = torch.tensor([[[0, 0, 2, 0]]], dtype=torch.int32)
    part_out = torch.stack([torch.full((TILE, 16), 1.0), torch.full((TILE, 16), 2.0)])[None]
    part_lse = torch.tensor([900.0, 900.0 + 2.0])[None, :, None].expand(1, 2, TILE).contiguous()
    out, lse = torch.empty(1, 1, TILE, 16), torch.empty(1, 1, TILE)
    merge_parts[(1, 1, TILE // ROWS)](
        part_out, part_lse, merge, out, lse, 1, 2, 1, 1, 1, TILE, 16, *out.stride()[:3],
        BLOCK_M=TILE, BLOCK_DV=16, ROWS=ROWS,
    )  # fmt: skip
    share = torch.sigmoid(torch.tensor(2.0, dtype=torch.float64))
    torch.testing.assert_close(out.double(), (1 + share).expand_as(out), rtol=1e-6, atol=0)
    assert torch.allclose(lse, torch.tensor(902.126928), rtol=1e-7, atol=1e-4)


@pytest.mark.parametrize("list_batch, list_heads, head_dim, layout", CASES)
def test_gradients_of_parts_are_summed(list_batch, list_heads, head_dim, layout):
    head_dim_v = 24
    generator = torch.Generator().manual_seed(head_dim)
    merge, n_parts = table(list_batch, list_heads, generator)
    n = 4 * TILE - 9
    widths = [max(16, 1 << (d - 1).bit_length()) for d in (head_dim, head_dim_v)]
    parts = torch.randn(BATCH * HEADS, n_parts, TILE, sum(widths), generator=generator)
    firsts = (0, widths[0])
    for dim, width, first in zip((head_dim, head_dim_v), widths, firsts, strict=True):
        out = strided((BATCH, HEADS, n, dim), layout)
        grid = (TILE // ROWS * merge.shape[1] * BATCH * HEADS,)
        backward_merge[grid](
            parts, merge, out, *out.stride()[:3], n, HEADS, n_parts, merge.shape[1],
            list_batch, list_heads, WIDTH=sum(widths), FIRST=first, HEAD_DIM=dim, BLOCK_D=width,
            TILE=TILE, ROWS=ROWS,
        )  # fmt: skip
        expected = torch.full((BATCH, HEADS, n, dim), SENTINEL, dtype=torch.float64)
        for b in range(BATCH):
            for h in range(HEADS):
                for tile, slot, count, _ in rows_of(merge, list_batch, list_heads, b, h):
                    rows = slice(tile * TILE, min((tile + 1) * TILE, n))
                    total = parts[b * HEADS + h, slot : slot + count].double().sum(0)
                    expected[b, h, rows] = total[: rows.stop - rows.start, first : first + dim]
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
