"""Launches of the Triton kernels that make the masks of packed sequences.

Each has a counterpart of its name in plain torch, in spans.py and blocks.py.
"""

import torch
from torch import Tensor

from sparseflash.kernels.common.device import on
from sparseflash.kernels.common.launch import launch
from sparseflash.packed import span_kernels as kernels
from sparseflash.packed.block_kernels import classify_blocks, fill_tiles, number_blocks

_TOKENS = 256  # of a program that makes spans
_ENTRIES = 128  # blocks of a line at a time
_LINES = 1024  # lines whose tiles are summed at a time


def document_spans(
    offsets: Tensor, offsets_k: Tensor | None, n: int, n_k: int, left: int, right: int,
    shared: bool, length: int | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """One launch."""
    own = offsets_k is None
    offsets_k = offsets.contiguous() if offsets_k is None else offsets_k.contiguous()
    offsets, kind = offsets.contiguous(), "" if length is None else "number"
    if lengths is not None:
        lengths, kind = lengths.contiguous(), "each"
    batch, count = offsets.shape
    made = _spans(offsets, 1 + shared + (kind != ""), n)
    with on(offsets.device):
        launch(
            kernels.document_spans, _grid(batch * n, _TOKENS),
            offsets, offsets_k, offsets if lengths is None else lengths, made, batch * n, n, n_k,
            count - 1, left, right, length or 0,
            0 if lengths is None or len(lengths) == 1 else lengths.shape[1],
            OWN=own, SHARED=shared, PREFIX=kind, STEPS=count.bit_length(), SIZE=_TOKENS,
        )  # fmt: skip
    return made


def diffusion_spans(offsets: Tensor, n: int, size: int, interleaved: bool) -> Tensor:
    """One launch."""
    offsets = offsets.contiguous()
    batch, count = offsets.shape
    made = _spans(offsets, 2, n)
    with on(offsets.device):
        launch(
            kernels.diffusion_spans, _grid(batch * n, _TOKENS),
            offsets, made, batch * n, n, count - 1, size,
            INTERLEAVED=interleaved, STEPS=count.bit_length(), SIZE=_TOKENS,
        )  # fmt: skip
    return made


def tree_spans(enter: Tensor, leave: Tensor, n: int) -> Tensor:
    """One launch."""
    enter, leave = enter.contiguous(), leave.contiguous()
    batch, nodes = enter.shape
    made = _spans(enter, 1, n)
    with on(enter.device):
        launch(
            kernels.tree_spans,
            _grid(batch * n, _TOKENS),
            enter,
            leave,
            made,
            batch * n,
            n,
            nodes,
            STEPS=nodes.bit_length(),
            SIZE=_TOKENS,
        )
    return made


def span_blocks(
    spans: Tensor, n_other: int, block_q: int, block_k: int, room: int, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Three launches: classify, number, fill."""
    spans = spans.contiguous()
    count, _, batch, n_own = spans.shape
    block_own, block_other = (block_k, block_q) if columns else (block_q, block_k)
    lines, entries = -(-n_own // block_own), -(-n_other // block_other)
    rows, cols = (entries, lines) if columns else (lines, entries)
    all_lines, words, device = batch * lines, -(-block_k // 32), spans.device
    integers = {"dtype": torch.int32, "device": device}
    codes = torch.empty(batch, 1, rows, cols, **integers)
    bits = torch.empty(room, block_q, words, **integers)
    found, total = torch.empty(all_lines, **integers), torch.empty((), **integers)
    cell = torch.empty(room, dtype=torch.int64, device=device)
    fits = torch.empty((), dtype=torch.bool, device=device)
    sizes = {
        "COLUMNS": columns, "SPANS": count, "BLOCK_OWN": block_own, "BLOCK_OTHER": block_other,
    }  # fmt: skip
    with on(device):
        launch(
            classify_blocks, (all_lines,),
            spans, codes, found, n_own, n_other, lines, entries, batch * n_own,
            **sizes, SIZE=_ENTRIES,
        )  # fmt: skip
        launch(
            number_blocks, (all_lines,),
            found, codes, cell, total, fits.view(torch.uint8), lines, entries, all_lines, room,
            COLUMNS=columns, SIZE=_ENTRIES, LINES=_LINES,
        )  # fmt: skip
        launch(
            fill_tiles, (room,),
            spans, cell, total, bits, n_own, n_other, lines, entries, batch * n_own,
            all_lines * entries - 1, **sizes, WORDS=words,
            TOKENS=block_q & -block_q if not columns else min(block_q & -block_q, 32),
        )  # fmt: skip
    return codes, bits, fits


def _spans(like: Tensor, count: int, n: int) -> Tensor:
    return torch.empty(count, 2, len(like), n, dtype=torch.int32, device=like.device)


def _grid(total: int, size: int) -> tuple[int]:
    return (-(-total // size),)
