"""Against FlexAttention: `create_block_mask` with formulas written from the definitions alone."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import masks
from masks import interop
from tests.masks.helpers import rows

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

LENGTHS = ((512, 512), (300, 450), (150, 500))
SQUARE = ((512, 512), (450, 450))
LONG = 4096
CANVAS, LONG_CANVAS = (18, 20), (64, 64)

# A mask, and the formula of its definition; n_q, n_k and `canvas` are known.
CASES = """
dense()  =>  (q >= 0) | (k >= 0)
causal()  =>  q >= k
local(100, 30)  =>  (q - k <= 100) & (k - q <= 30)
sliding(128)  =>  (q - k >= 0) & (q - k < 128)
(sliding(60) | global_tokens(20)) & causal()  =>  ((q - k < 60) | (k < 20) | (q < 20)) & (q >= k)
butterfly(64) - local(10)  =>  zero_or_power_of_two((q // 64) ^ (k // 64)) & ~(abs(q - k) <= 10)
dilated(90, 4)  =>  (abs(q - k) <= 90) & ((q - k) % 4 == 0)
power_of_two() & causal()  =>  (q >= k) & zero_or_power_of_two(q - k)
diagonals((7, -40))  =>  (q - k == 7) | (k - q == 40)
strided(48)  =>  (q >= k) & ((q - k < 48) | ((q - k) % 48 == 0))
fixed(48, 5)  =>  (q >= k) & ((q // 48 == k // 48) | (k % 48 >= 43))
sinks(37)  =>  k < 37
global_rows(70)  =>  q < 70
last_rows(70)  =>  q >= n_q - 70
global_at((3, 77, 200))  =>  one_of(q, 3, 77, 200) | one_of(k, 3, 77, 200)
prefix_lm(75)  =>  (k < 75) | (q >= k)
streaming(4, 90)  =>  (q >= k) & ((k < 4) | (q - k < 90))
vertical_slash((0, 50, 51, 260), (0, 1, 2, 130))
    =>  (q >= k) & (one_of(k, 0, 50, 51, 260) | one_of(q - k, 0, 1, 2, 130))
block_diagonal(50)  =>  q // 50 == k // 50
block_causal(50)  =>  q // 50 >= k // 50
longnet(120, 3, 1)  =>  (q // 120 == k // 120) & (q % 120 % 3 == 1) & (k % 120 % 3 == 1)
longformer(65, global_tokens=(0, 9))  =>  (abs(q - k) <= 32) | one_of(q, 0, 9) | one_of(k, 0, 9)
documents(cuts(n_q)) & causal()  =>  (number(q, cuts(n_q)) == number(k, cuts(n_q))) & (q >= k)
shared_prefix(40, cuts(n_q - 40))
    =>  (k < 40) | (number(q - 40, cuts(n_q - 40)) == number(k - 40, cuts(n_q - 40))) & (q >= 40)
neighborhood(canvas, 7)  =>  window(row, q, k, 7) & window(col, q, k, 7)
neighborhood(canvas, 4)  =>  window(row, q, k, 4) & window(col, q, k, 4)
neighborhood(canvas, 3, dilation=4)  =>  window(row, q, k, 3, 4) & window(col, q, k, 3, 4)
local_2d(canvas, 3)  =>  (abs(row(q) - row(k)) <= 3) & (abs(col(q) - col(k)) <= 3)
axial(canvas)  =>  (row(q) == row(k)) | (col(q) == col(k))
sliding_tiles(canvas, 2, 3)  =>  window(row, q, k, 3, tile=2) & window(col, q, k, 3, tile=2)
"""
# Windows as others count them: sliding_window_overlay(64) of transformers, causal and
# bidirectional; generate_sliding_window(64) of attention-gym; and FlashAttention's window_size=
# (70, 20) and causal, with both ends included and the last query at the last key.
CASES += """sliding(64)  =>  (k > q - 64) & (k <= q)
local(64)  =>  abs(q - k) <= 64
sliding(64 + 1)  =>  (q >= k) & (q - k <= 64)
local(70, 20, align='bottom_right')  =>  (k >= q + n_k - n_q - 70) & (k <= q + n_k - n_q + 20)
causal(align='bottom_right')  =>  k <= q + n_k - n_q
"""


def zero_or_power_of_two(x):
    return x & (x - 1) == 0


def one_of(x, *numbers: int):
    return sum((x == number for number in numbers[1:]), x == numbers[0]) > 0


def cuts(n: int) -> tuple[int, ...]:
    """Lengths of documents: some in one block, some over several, one of them a single token."""
    lengths = [1, 31, 32, 100, 7, 161]
    while sum(lengths) < n:
        lengths.append(90 + len(lengths))
    lengths[-1] -= sum(lengths) - n
    return tuple(lengths)


@lru_cache
def numbers(lengths: tuple[int, ...]):
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def number(token, lengths: tuple[int, ...]):
    """The document of a token; any before the first one."""
    return numbers(lengths)[token.clamp(min=0)]


def on_canvas(canvas: tuple[int, int]) -> dict[str, Any]:
    """Places on an image, and windows that are moved inwards at its borders."""

    def row(x):
        return x // canvas[1]

    def col(x):
        return x % canvas[1]

    def window(axis, q, k, size: int, dilation: int = 1, tile: int = 1):
        """Whether k is among the `size` tokens (of q's residue class), or tiles, around q."""
        x, y, extent = axis(q) // tile, axis(k) // tile, canvas[axis is col] // tile
        rest = x % dilation
        count = (extent - rest + dilation - 1) // dilation
        start = torch.minimum((x // dilation - size // 2).clamp(min=0), count - size)
        inside = (y // dilation >= start) & (y // dilation < start + size)
        return inside & (y % dilation == rest)

    return {"canvas": canvas, "row": row, "col": col, "window": window}


def both(text: str, formula: str, n_q: int, n_k: int, block_size: tuple[int, int]):
    """Our block mask and theirs."""
    names = {**globals(), **on_canvas(LONG_CANVAS if n_q == LONG else CANVAS)}
    names |= {"n_q": n_q, "n_k": n_k}
    mask = eval(text, {**vars(masks), **names})
    rule = eval(f"lambda b, h, q, k: {formula}", names)
    options = {"device": "cpu", "BLOCK_SIZE": block_size}
    theirs = flex.create_block_mask(rule, None, None, n_q, n_k, **options)
    return mask.build(n_q, n_k, block_size), theirs


def check_kinds(ours: masks.BlockMask, theirs: Any) -> None:
    """The same blocks are empty, partial and full, but at ragged ends, where theirs are partial."""
    expected, layout = ours.layout()[0, 0], np.zeros((ours.rows, ours.cols), np.uint8)
    for code, counts, columns in (
        (1, theirs.kv_num_blocks, theirs.kv_indices),
        (2, theirs.full_kv_num_blocks, theirs.full_kv_indices),
    ):
        for row, count in enumerate(counts[0, 0].tolist()):
            layout[row, columns[0, 0, row, :count].tolist()] = code
    ragged = np.zeros(expected.shape, bool)
    ragged[-1] |= ours.n_q % ours.block_size[0] != 0
    ragged[:, -1] |= ours.n_k % ours.block_size[1] != 0
    expected[ragged & (expected == 2)] = 1
    assert np.array_equal(expected, layout)


@pytest.mark.parametrize(("text", "formula"), rows(CASES))
def test_the_same_mask(text: str, formula: str):
    lengths = SQUARE if "cuts" in text else LENGTHS
    if "canvas" in text:
        lengths = ((CANVAS[0] * CANVAS[1],) * 2,)
    for (n_q, n_k), block_size in zip(lengths, ((64, 64), (128, 32), (32, 48)), strict=False):
        ours, theirs = both(text, formula, n_q, n_k, block_size)
        check_kinds(ours, theirs)
        tokens = flex.create_mask(theirs.mask_mod, None, None, n_q, n_k, device="cpu")
        assert np.array_equal(ours.to_dense(), tokens.numpy())
    assert interop.from_flex(theirs) == ours


@pytest.mark.parametrize(("text", "formula"), rows(CASES))
def test_the_same_long_mask(text: str, formula: str):
    check_kinds(*both(text, formula, LONG, LONG, (128, 128)))
