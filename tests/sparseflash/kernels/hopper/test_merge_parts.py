"""The kernels that merge the parts of split tiles, in Triton's interpreter, against float64."""

import numpy as np
import pytest
import torch

from sparseflash.kernels.hopper.merge_parts import backward_merge, merge_parts
from tests.op_cases import INTERPRETED, token_major

pytestmark = INTERPRETED

BATCH, HEADS, TILE, ROWS = 2, 3, 48, 16  # the forward has tiles of 192 queries
SENTINEL = -7.0
# batch entries and heads with lists of their own, head dim of v, layout
CASES = [
    (1, 1, 16, "contiguous"),
    (1, HEADS, 13, "token major"),
    (BATCH, 1, 1, "padded"),
    (BATCH, HEADS, 24, "token major"),
]


def split_tiles(list_batch, list_heads, generator):
    """Tile, first slot and parts of the split tiles of each list; some lists have fewer."""
    rows = torch.tensor([[3, 0, 2, 0], [0, 2, 3, 0], [1, 5, 1, 0]], dtype=torch.int32)
    lists = []
    for i in range(list_batch * list_heads):
        mine = rows[torch.randperm(3, generator=generator)]
        if i % 2:
            mine[-1, 0] = -1  # a list with fewer split tiles
        lists.append(mine)
    return torch.stack(lists), 6  # slots of a head


def places(merge, list_batch, list_heads, n):
    """(b, h), tokens and slots of every split tile."""
    for b, h in np.ndindex(BATCH, HEADS):
        index = (b if list_batch > 1 else 0) * list_heads + (h if list_heads > 1 else 0)
        for tile, first, count, _ in merge[index].tolist():
            if tile >= 0:
                tokens = slice(tile * TILE, min((tile + 1) * TILE, n))
                yield (b, h, tokens), (b * HEADS + h, slice(first, first + count))


def strided(shape, layout):
    """An output full of sentinels: heads before tokens, tokens before heads, or inside a buffer."""
    *_, dim = shape
    if layout == "token major":
        return token_major(torch.full(shape, SENTINEL))
    wider = torch.full((*shape[:3], dim + 5), SENTINEL)
    return wider[..., :dim] if layout == "padded" else wider[..., :dim].contiguous()


def padded(dim):
    return max(16, 1 << (dim - 1).bit_length())


def merged(part_out, part_lse, merge, out, list_batch=1, list_heads=1, sink=None, part_max=None):
    """out with the parts merged into it, the LSE, and the maxima where those of parts are given."""
    batch, heads, n_q, dim = out.shape
    lse, n_split = torch.full((batch, heads, n_q), SENTINEL), merge.shape[1]
    maxima = None if part_max is None else torch.full_like(lse, SENTINEL)
    pack = heads if list_batch > 1 else 1  # heads whose rows lie side by side in a part

    def packed(part):
        return part.unflatten(0, (-1, pack)).transpose(1, 2).reshape(part.shape)

    merge_parts[(n_split, batch * heads, TILE // ROWS)](
        packed(part_out), packed(part_lse), merge, out, lse, sink,
        None if part_max is None else packed(part_max), maxima, n_split, part_out.shape[1],
        list_batch, list_heads, heads, n_q, dim, *out.stride()[:3], BLOCK_M=TILE,
        BLOCK_DV=part_out.shape[3], ROWS=ROWS, PACK=pack,
    )  # fmt: skip
    return (out, lse) if maxima is None else (out, lse, maxima)


@pytest.mark.parametrize("list_batch, list_heads, dim, layout", CASES)
def test_attention_over_parts_is_attention_over_all(list_batch, list_heads, dim, layout):
    generator = torch.Generator().manual_seed(dim)
    merge, n_parts = split_tiles(list_batch, list_heads, generator)
    shape = (BATCH, HEADS, 4 * TILE - 9, dim)
    part_out = torch.randn(BATCH * HEADS, n_parts, TILE, padded(dim), generator=generator)
    part_lse = 3 * torch.randn(BATCH * HEADS, n_parts, TILE, generator=generator) + 40
    part_lse[torch.rand(part_lse.shape, generator=generator) < 0.3] = -torch.inf  # empty parts
    part_lse[:, :, 5] = -torch.inf  # a row with nothing to attend to
    part_out[part_lse == -torch.inf] = 0.0
    sink = torch.tensor([38.0, 42.5, -torch.inf]) if list_heads > 1 else None  # beside LSE about 40
    out = strided(shape, layout)
    out, lse = merged(part_out, part_lse, merge, out, list_batch, list_heads, sink)
    expected_out = torch.full(shape, SENTINEL, dtype=torch.float64)
    expected_lse = torch.full(shape[:3], SENTINEL, dtype=torch.float64)
    for place, parts in places(merge, list_batch, list_heads, shape[2]):
        n = place[2].stop - place[2].start
        lses = part_lse[parts].double()
        whole = torch.logsumexp(lses, 0)
        if sink is not None:  # counted once, however many parts there are
            whole = torch.logaddexp(whole, sink[place[1]].double())
        weights = torch.exp(lses - whole).nan_to_num(0.0)  # -inf - -inf: nothing there
        values = (weights[..., None] * part_out[parts].double()).sum(0)
        expected_out[place], expected_lse[place] = values[:n, :dim], whole[:n]
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("list_batch, list_heads, dim, layout", CASES[1::2])
def test_the_maxima_of_parts(list_batch, list_heads, dim, layout):
    """Those of the keys: a sink, however large, is none of them."""
    generator = torch.Generator().manual_seed(dim)
    merge, n_parts = split_tiles(list_batch, list_heads, generator)
    shape = (BATCH, HEADS, 4 * TILE - 9, dim)
    part_max = torch.randn(BATCH * HEADS, n_parts, TILE, generator=generator)
    part_max[torch.rand(part_max.shape, generator=generator) < 0.3] = -torch.inf
    part_max[:, :, 5] = -torch.inf
    part_out, out = torch.zeros(*part_max.shape, padded(dim)), strided(shape, layout)
    lists = merge, out, list_batch, list_heads
    *_, maxima = merged(part_out, part_max + 1, *lists, torch.full((HEADS,), 9.0), part_max)
    expected = torch.full(shape[:3], SENTINEL)
    for place, parts in places(merge, list_batch, list_heads, shape[2]):
        expected[place] = part_max[parts].amax(0)[: place[2].stop - place[2].start]
    assert torch.equal(maxima, expected)


def test_weights_do_not_overflow():
    merge = torch.tensor([[[0, 0, 2, 0]]], dtype=torch.int32)
    part_out = torch.stack([torch.full((TILE, 16), 1.0), torch.full((TILE, 16), 2.0)])[None]
    part_lse = torch.tensor([900.0, 900.0 + 2.0])[None, :, None].expand(1, 2, TILE).contiguous()
    out, lse = merged(part_out, part_lse, merge, torch.empty(1, 1, TILE, 16))
    share = torch.sigmoid(torch.tensor(2.0, dtype=torch.float64))
    torch.testing.assert_close(out.double(), (1 + share).expand_as(out), rtol=1e-6, atol=0)
    assert torch.allclose(lse, torch.tensor(902.126928), rtol=1e-7, atol=1e-4)


@pytest.mark.parametrize("list_batch, list_heads, head_dim, layout", CASES[1:3])
def test_gradients_of_parts_are_summed(list_batch, list_heads, head_dim, layout):
    head_dim_v, n = 24, 4 * TILE - 9
    generator = torch.Generator().manual_seed(head_dim)
    merge, n_parts = split_tiles(list_batch, list_heads, generator)
    width, width_v = padded(head_dim), padded(head_dim_v)
    parts = torch.randn(BATCH * HEADS, n_parts, TILE, width + width_v, generator=generator)
    grid = (TILE // ROWS * merge.shape[1] * BATCH * HEADS,)
    for dim, block_d, first in ((head_dim, width, 0), (head_dim_v, width_v, width)):
        out = strided((BATCH, HEADS, n, dim), layout)
        backward_merge[grid](
            parts, merge, out, *out.stride()[:3], n, HEADS, n_parts, merge.shape[1],
            list_batch, list_heads, WIDTH=width + width_v, FIRST=first, HEAD_DIM=dim,
            BLOCK_D=block_d, TILE=TILE, ROWS=ROWS,
        )  # fmt: skip
        expected = torch.full(out.shape, SENTINEL, dtype=torch.float64)
        for place, slots in places(merge, list_batch, list_heads, n):
            total = parts[slots].double().sum(0)
            expected[place] = total[: place[2].stop - place[2].start, first : first + dim]
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
