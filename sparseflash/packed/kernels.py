"""Triton kernels that make the masks of packed sequences, with their launches.

Each launch has a counterpart of its name in plain torch, in spans.py and blocks.py. A span of a
token goes from a first token of the other side up to an end. Spans are int32 (spans, 2, batch *
tokens): firsts and ends, and those of one token are apart from each other.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.kernels.common.launch import launch
from sparseflash.packed.block_kernels import classify_blocks, fill_tiles, number_blocks

_TOKENS = 256  # of a program that makes spans
_ENTRIES = 128  # blocks of a line at a time
_LINES = 1024  # lines whose tiles are summed at a time


@triton.jit
def last_begin(Begins, token, count, FACTOR: tl.constexpr, STEPS: tl.constexpr):
    """Which of `count` ascending FACTOR * Begins is the last one up to the token; -1: none.

    Begins: a pointer for every token. STEPS: the bits of count.
    """
    low = tl.zeros_like(token)  # as many are up to the token, or more
    high = low + count  # no more are
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        ahead = low < high
        begin = tl.load(Begins + middle, mask=ahead, other=0).to(tl.int64) * FACTOR
        low = tl.where(ahead & (begin <= token), middle + 1, low)
        high = tl.where(ahead & (begin > token), middle, high)
    return low - 1


@triton.jit
def stretch(Offsets, b, token, documents, FACTOR: tl.constexpr, STEPS: tl.constexpr):
    """Find number, start and end of the document of a token; no tokens where it has none."""
    offsets = Offsets + b * (documents + 1)
    number = last_begin(offsets, token, documents + 1, FACTOR, STEPS)
    inside = number < documents
    number = tl.minimum(tl.maximum(number, 0), documents - 1)
    start = tl.load(offsets + number).to(tl.int64) * FACTOR
    stop = tl.load(offsets + number + 1).to(tl.int64) * FACTOR
    return number, start, tl.where(inside, stop, start)


@triton.jit
def within(first, stop, n):
    """Return a span cut to 0..n."""
    first = tl.minimum(tl.maximum(first, 0), n)
    stop = tl.minimum(tl.maximum(stop, 0), n)
    return first, tl.maximum(first, stop)


@triton.jit
def joined(before, end, first, stop):
    """Two spans apart from each other: what they share or where they touch, the later has all."""
    empty = first == stop
    join = (before < end) & (empty | (end >= first))
    stop = tl.where(join, tl.where(empty, end, tl.maximum(end, stop)), stop)
    return before, tl.where(join, before, end), tl.where(join, before, first), stop


@triton.jit
def store_span(Spans, number, place, total, first, stop, there):
    to = Spans + 2 * number * total.to(tl.int64) + place
    tl.store(to, first.to(tl.int32), mask=there)
    tl.store(to + total, stop.to(tl.int32), mask=there)


@triton.jit(do_not_specialize=("total", "n", "n_k", "documents", "left", "right", "length"))
def _document_spans(
    Offsets, OffsetsK, Lengths, Spans, total, n, n_k, documents, left, right, length, lengths_b,
    OWN: tl.constexpr, SHARED: tl.constexpr, PREFIX: tl.constexpr, STEPS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Write the spans of packed.documents. OWN: whether the keys have the offsets of the queries.

    PREFIX: of the first `length` tokens of a document, or of those that `Lengths` says ("each"), or
    of none ("").
    """
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)  # [SIZE]
    there = place < total
    own = tl.minimum(place, total - 1)
    b, token = own // n, own % n
    number, start, stop = stretch(Offsets, b, token, documents, 1, STEPS)
    keys = OffsetsK + b * (documents + 1)
    others = (number > 0) & (start < stop)
    last_root = token + 1
    if not OWN:  # the last query of a document has the position of its last key
        last_root = tl.zeros_like(token) + n_k
        last = tl.load(keys + number + 1).to(tl.int64)
        token += last - stop
        first_key = tl.load(keys + number).to(tl.int64)
        stop = tl.where(start < stop, last, first_key)
        start = first_key
    first, end = within(tl.maximum(start, token - left), tl.minimum(stop, token + right + 1), n_k)
    if PREFIX != "":
        early = start + length
        if PREFIX == "each":
            early = start + tl.load(Lengths + b * lengths_b + number)
        head, head_end = within(start, tl.minimum(stop, early), n_k)
    if SHARED:
        second = tl.load(keys + 1).to(tl.int64)
        zero = tl.zeros_like(token)
        root, root_end = within(zero, tl.where(others, tl.minimum(second, last_root), 0), n_k)
        if PREFIX != "":
            root, root_end, head, head_end = joined(root, root_end, head, head_end)
        else:
            root, root_end, first, end = joined(root, root_end, first, end)
        store_span(Spans, 0, place, total, root, root_end, there)
    SECOND: tl.constexpr = 1 if SHARED else 0
    if PREFIX != "":
        head, head_end, first, end = joined(head, head_end, first, end)
        store_span(Spans, SECOND, place, total, head, head_end, there)
        store_span(Spans, SECOND + 1, place, total, first, end, there)
    else:
        store_span(Spans, SECOND, place, total, first, end, there)


@triton.jit(do_not_specialize=("total", "n", "documents", "size"))
def _diffusion_spans(
    Offsets, Spans, total, n, documents, size,
    INTERLEAVED: tl.constexpr, STEPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write the spans of packed.block_diffusion."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)  # [SIZE]
    there = place < total
    own = tl.minimum(place, total - 1)
    b, token = own // n, own % n
    half = n // 2
    if INTERLEAVED:
        _, start, stop = stretch(Offsets, b, token, documents, 2, STEPS)
        length, rank = (stop - start) // 2, token - start
        noisy = rank < length
        rank = tl.where(noisy, rank, rank - length)
        clean = start + length
    else:
        _, start, stop = stretch(Offsets, b, token % half, documents, 1, STEPS)
        length, rank = stop - start, token % half - start
        noisy = token < half
        clean = start + half
    rank = tl.where(length > 0, rank, 0)
    before = rank - rank % size
    after = tl.minimum(length, before + size)
    first, end = within(start + before, start + tl.where(noisy, after, before), n)
    other, other_end = within(clean, clean + tl.where(noisy, before, after), n)
    first, end, other, other_end = joined(first, end, other, other_end)
    store_span(Spans, 0, place, total, first, end, there)
    store_span(Spans, 1, place, total, other, other_end, there)


@triton.jit(do_not_specialize=("total", "n", "nodes"))
def _tree_spans(
    Enter, Leave, Spans, total, n, nodes, STEPS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Of every key of packed.prefix_tree, the queries that see it: from its own token on."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)  # [SIZE]
    there = place < total
    own = tl.minimum(place, total - 1)
    b, token = own // n, own % n
    node = tl.maximum(last_begin(Enter + b * nodes, token, nodes, 1, STEPS), 0)
    stop = tl.load(Leave + b * nodes + node).to(tl.int64)
    store_span(Spans, 0, place, total, token, tl.maximum(tl.minimum(stop, n), token), there)


def document_spans(
    offsets: Tensor, offsets_k: Tensor | None, n: int, n_k: int, left: int, right: int,
    shared: bool, length: int | None, lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """One launch."""
    own = offsets.contiguous()
    given = [own, *(own if t is None else t.contiguous() for t in (offsets_k, lengths))]
    kind = "each" if lengths is not None else "" if length is None else "number"
    each = 0 if lengths is None or len(lengths) == 1 else lengths.shape[1]
    count = offsets.shape[1]
    numbers = n_k, count - 1, left, right, length or 0, each
    options = {"OWN": offsets_k is None, "SHARED": shared, "PREFIX": kind}
    spans = 1 + shared + (kind != "")
    return _spans(_document_spans, given, spans, n, *numbers, STEPS=count.bit_length(), **options)


def diffusion_spans(offsets: Tensor, n: int, size: int, interleaved: bool) -> Tensor:
    """One launch."""
    count = offsets.shape[1]
    options = {"INTERLEAVED": interleaved, "STEPS": count.bit_length()}
    return _spans(_diffusion_spans, [offsets.contiguous()], 2, n, count - 1, size, **options)


def tree_spans(enter: Tensor, leave: Tensor, n: int) -> Tensor:
    """One launch."""
    given, nodes = [enter.contiguous(), leave.contiguous()], enter.shape[1]
    return _spans(_tree_spans, given, 1, n, nodes, STEPS=nodes.bit_length())


def _spans(
    kernel: Any, given: Sequence[Tensor], count: int, n: int, *numbers: int, **options: Any
) -> Tensor:
    """Return `count` spans of each of n tokens, made by `kernel`."""
    total, device = len(given[0]) * n, given[0].device
    made = torch.empty(count, 2, len(given[0]), n, dtype=torch.int32, device=device)
    launch(
        kernel, (-(-total // _TOKENS),), *given, made, total, n, *numbers,
        **options, SIZE=_TOKENS,
    )  # fmt: skip
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
