"""Launches of the Triton kernels that make the tile lists of a selection."""

import torch
from torch import Tensor

from sparseflash.kernels.device import on
from sparseflash.kernels.launch import launch
from sparseflash.kernels.tl.tile_lists import cut_bits, cut_lists
from sparseflash.schedule import Schedule
from sparseflash.tiles.tile_spec import SPARE, TileSpec

_SIZE = 256  # entries at a time
_LINES = 64  # rows of bits of a program


def cut_schedule(schedule: Schedule, spec: TileSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`dynamic.cut_torch` in two kernels: one for the lists, one for the bits."""
    block_major, block_minor = spec.block_sizes(schedule)
    n_major, n_minor = spec.tokens
    majors, minors = block_major // spec.major, block_minor // spec.minor
    side = schedule.rows if spec.by_rows else schedule.cols
    per_head = spec.group > 1 and schedule.heads > 1
    n_rows, n_entries = -(-n_major // block_major), len(side.idx)
    slices = len(side.mid) // n_rows // (spec.group if per_head else 1)
    capacity = n_entries * (1 if per_head else spec.group)
    total = capacity * majors * minors + SPARE
    device, integers = side.ptr.device, {"dtype": torch.int32, "device": side.ptr.device}
    items = torch.empty(slices, spec.n_tiles, 8, **integers)
    idx, bit = torch.empty(total, 1, **integers), torch.empty(total, **integers)
    n_lists = slices * n_rows
    parts = max(1, min(8, -(-n_minor // block_minor) // (4 * _SIZE)))
    with on(device):
        launch(
            cut_lists, (n_lists * parts + -(-total // _SIZE),), *side, items, idx, bit,
            n_lists, n_rows, spec.n_tiles, -(-n_minor // spec.minor), capacity, n_lists * parts,
            MAJORS=majors, MINORS=minors, GROUP=spec.group, PER_HEAD=per_head, PARTS=parts,
            SIZE=_SIZE, SPARE=SPARE,
        )  # fmt: skip
        if not schedule.n_partial:
            return items, idx, bit, torch.zeros(1, spec.major, 4, **integers)
        source = schedule.bits.contiguous()
        tiles, block_q, words = source.shape
        bits = torch.empty(tiles * majors * minors, spec.major, 4, **integers)
        n_lines = len(bits) * spec.major
        launch(
            cut_bits, (-(-n_lines // _LINES),),
            source, bits, n_lines, BY_ROWS=spec.by_rows, BLOCK_Q=block_q, WORDS=words,
            MAJOR=spec.major, MINOR=spec.minor, MAJORS=majors, MINORS=minors, SIZE=_LINES,
        )  # fmt: skip
    return items, idx, bit, bits
