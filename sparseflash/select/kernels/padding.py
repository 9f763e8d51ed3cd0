"""The Triton kernel that cuts a mask at the ends of the sequences of a batch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.kernels.device import on
from sparseflash.kernels.launch import launch
from sparseflash.select.kernels.common import EMPTY

_CELLS = 1024  # codes of a program
_ROWS = 32  # rows of bits of a program


def cut_blocks(
    codes: Tensor, tiles: Tensor, column: Tensor, place: Tensor, prefix: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """`lengths.cut_torch` in one launch, given the tensors of `lengths.Blocks`."""
    lengths = lengths.contiguous()
    batch, (n_blocks, slots) = len(lengths), column.shape
    heads, (known, block, words) = codes.shape[1], tiles.shape
    known -= 1
    device, size = lengths.device, heads * n_blocks * n_blocks
    out = torch.empty(batch, heads, n_blocks, n_blocks, dtype=torch.int32, device=device)
    bits = torch.empty(known + batch * slots, block, words, dtype=torch.int32, device=device)
    programs = batch * -(-size // _CELLS)
    with on(device):
        launch(
            _cut, (programs + len(bits) * (block // _ROWS),),
            lengths, codes, place, tiles, column, prefix,
            out, bits, size, n_blocks, slots, known, programs,
            BLOCK=block, WORDS=words, CELLS=_CELLS, ROWS=_ROWS,
        )  # fmt: skip
    return out, bits


@triton.jit(do_not_specialize=("size", "n_blocks", "slots", "known", "programs"))
def _cut(
    Lengths, Codes, Place, Tiles, Column, Prefix, OutCodes, OutBits,
    size, n_blocks, slots, known, programs,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, CELLS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Make codes in the first programs, `size` for every sequence, and bits in the others."""
    pid = tl.program_id(0)
    if pid < programs:
        steps = tl.cdiv(size, CELLS)
        b = pid // steps
        cell = pid % steps * CELLS + tl.arange(0, CELLS)  # [CELLS]
        length = tl.load(Lengths + b)
        row, col = cell // n_blocks % n_blocks, cell % n_blocks
        code = tl.load(Codes + cell, mask=cell < size, other=EMPTY)
        place = tl.load(Place + cell, mask=cell < size, other=EMPTY)
        cut = tl.maximum(place + known + b * slots, EMPTY)
        code = tl.where(length - col * BLOCK >= BLOCK, code, cut)
        code = tl.where((length > row * BLOCK) & (length > col * BLOCK), code, EMPTY)
        tl.store(OutCodes + b.to(tl.int64) * size + cell, code, mask=cell < size)
    else:
        line = (pid - programs).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
        tile, query = line // BLOCK, line % BLOCK
        word = tl.arange(0, WORDS)[None, :]  # [1, WORDS]
        new = tile >= known
        made = tl.where(new, tile - known, 0)
        last = tl.load(Lengths + made // slots)
        last = tl.minimum(last, n_blocks * BLOCK) - 1
        last = tl.maximum(tl.where(last < 0, last + n_blocks * BLOCK, last), 0)  # unused, not wild
        own = tl.load(Column + last // BLOCK * slots + made % slots)
        source = tl.where(new, own, tile)
        bits = tl.load(Tiles + (source * BLOCK + query) * WORDS + word)
        seen = tl.load(Prefix + last % BLOCK * WORDS + word)
        tl.store(OutBits + line * WORDS + word, tl.where(new, bits & seen, bits))
