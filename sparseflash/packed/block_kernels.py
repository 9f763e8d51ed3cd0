"""Triton kernels that turn the spans of tokens into block codes and bit tiles.

Spans are those of packed/kernels.py. The blocks of `own` tokens are lines; along a line the
entries are the blocks of the other side. Lines are rows of a mask, or columns (COLUMNS), where
equal partial blocks that follow one another share a tile.
"""

import triton
import triton.language as tl

STEP = tl.constexpr(16)  # tokens at a time


@triton.jit
def load_span(Line, number, token, left, total):
    """First and end of these tokens of a line; an empty span ends before all others begin."""
    at = Line + 2 * number * total.to(tl.int64) + token
    first = tl.load(at, mask=token < left, other=0)
    stop = tl.load(at + total, mask=token < left, other=0)
    return first, tl.where(first < stop, stop, -1)


@triton.jit
def count_tokens(
    Line, left, total, entry, n_other,
    SPANS: tl.constexpr, BLOCK_OWN: tl.constexpr, BLOCK_OTHER: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """How many tokens of a line touch each of these blocks, and how many fill it. [SIZE] each"""
    begin = entry[None, :] * BLOCK_OTHER
    end = tl.minimum(begin + BLOCK_OTHER, n_other)  # [1, SIZE]
    touched = tl.zeros([STEP, SIZE], tl.int32)
    filled = tl.zeros([STEP, SIZE], tl.int32)
    for step in range(0, BLOCK_OWN, STEP):
        token = step + tl.arange(0, STEP)[:, None]
        for number in tl.static_range(SPANS):
            first, stop = load_span(Line, number, token, left, total)  # [STEP, 1]
            touched += ((first < end) & (stop > begin)).to(tl.int32)
            filled += ((first <= begin) & (stop >= end)).to(tl.int32)
    return tl.sum(touched, 0), tl.sum(filled, 0)


@triton.jit(do_not_specialize=("n_own", "n_other", "lines", "entries", "total"))
def classify_blocks(
    Spans, Codes, Count, n_own, n_other, lines, entries, total,
    COLUMNS: tl.constexpr, SPANS: tl.constexpr, BLOCK_OWN: tl.constexpr,
    BLOCK_OTHER: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Codes of one line: -2 empty, -1 full, 1 a new tile, 0 the tile before; and its new tiles."""
    line = tl.program_id(0).to(tl.int64)
    b, own = line // lines, line % lines
    left = tl.minimum(n_own - own * BLOCK_OWN, BLOCK_OWN)  # tokens that exist
    at = Spans + b * n_own + own * BLOCK_OWN
    lowest = tl.zeros([STEP], tl.int32) + n_other
    highest = tl.zeros([STEP], tl.int32)
    for step in range(0, BLOCK_OWN, STEP):
        token = step + tl.arange(0, STEP)  # [STEP]
        for number in tl.static_range(SPANS):
            first, stop = load_span(at, number, token, left, total)
            lowest = tl.minimum(lowest, tl.where(stop < 0, n_other, first))
            highest = tl.maximum(highest, stop)
    lowest, highest = tl.min(lowest, 0), tl.max(highest, 0)  # nothing is touched elsewhere
    found = tl.zeros([SIZE], tl.int32)
    for start in range(0, entries, SIZE):
        entry = start + tl.arange(0, SIZE)  # [SIZE]
        code = tl.full([SIZE], -2, tl.int32)
        if (start * BLOCK_OTHER < highest) & ((start + SIZE) * BLOCK_OTHER > lowest):
            touched, filled = count_tokens(
                at, left, total, entry, n_other, SPANS, BLOCK_OWN, BLOCK_OTHER, SIZE
            )
            full = filled == left
            code = tl.where(touched > 0, tl.where(full, -1, 1), -2)
            if COLUMNS:
                touched_up, filled_up = count_tokens(
                    at, left, total, entry - 1, n_other, SPANS, BLOCK_OWN, BLOCK_OTHER, SIZE
                )
                # no key begins or ends in the two, and as many are seen
                same = (touched == filled) & (touched_up == filled_up) & (touched == touched_up)
                code = tl.where((code == 1) & same & (entry > 0), 0, code)
            found += ((code == 1) & (entry < entries)).to(tl.int32)
        if COLUMNS:
            to = Codes + (b * entries + entry) * lines + own
        else:
            to = Codes + line * entries + entry
        tl.store(to, code, mask=entry < entries)
    tl.store(Count + line, tl.sum(found, 0))


@triton.jit(do_not_specialize=("lines", "entries", "all_lines", "room"))
def number_blocks(
    Count, Codes, Cell, Total, Fits, lines, entries, all_lines, room,
    COLUMNS: tl.constexpr, SIZE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Give the tiles of one line numbers after those of the lines before it, and note their blocks.

    A block whose tile has no room is taken whole.
    """
    line = tl.program_id(0).to(tl.int64)
    b, own = line // lines, line % lines
    before = tl.zeros([LINES], tl.int32)
    every = tl.zeros([LINES], tl.int32)
    for start in range(0, all_lines, LINES):
        i = start + tl.arange(0, LINES)  # [LINES]
        count = tl.load(Count + i, mask=i < all_lines, other=0)
        before += tl.where(i < line, count, 0)
        every += count
    if line == 0:
        total = tl.sum(every, 0)
        tl.store(Total, total)
        tl.store(Fits, (total <= room).to(tl.uint8))
    last = tl.sum(before, 0) - 1
    for start in range(0, entries, SIZE):
        entry = start + tl.arange(0, SIZE)  # [SIZE]
        if COLUMNS:
            at = Codes + (b * entries + entry) * lines + own
        else:
            at = Codes + line * entries + entry
        code = tl.load(at, mask=entry < entries, other=-2)
        new = (code == 1).to(tl.int32)
        number = last + tl.cumsum(new, 0)
        last += tl.sum(new, 0)
        numbered = tl.where(number < room, number, -1)
        tl.store(at, numbered, mask=(entry < entries) & (code >= 0))
        tl.store(Cell + number, line * entries + entry, mask=(code == 1) & (number < room))


@triton.jit(do_not_specialize=("n_own", "n_other", "lines", "entries", "total", "last"))
def fill_tiles(
    Spans, Cell, Total, Bits, n_own, n_other, lines, entries, total, last,
    COLUMNS: tl.constexpr, SPANS: tl.constexpr, BLOCK_OWN: tl.constexpr,
    BLOCK_OTHER: tl.constexpr, WORDS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the bits of one tile; those that no block has are as if of the last block, `last`.

    TOKENS: queries at a time, which divide the block.
    """
    tile = tl.program_id(0).to(tl.int64)
    used = tile < tl.load(Total)
    cell = tl.where(used, tl.load(Cell + tile, mask=used, other=0), last)
    line, entry = cell // entries, cell % entries
    b, own = line // lines, line % lines
    left = tl.minimum(n_own - own * BLOCK_OWN, BLOCK_OWN)
    at = Spans + b * n_own + own * BLOCK_OWN
    if COLUMNS:
        for word in tl.static_range(WORDS):
            key = tl.arange(0, 32)[None, :]  # [1, 32]
            token = 32 * word + key
            for step in range(0, BLOCK_OTHER, TOKENS):
                query = step + tl.arange(0, TOKENS)  # [TOKENS]
                other = (entry * BLOCK_OTHER + query)[:, None]
                seen = tl.zeros([TOKENS, 32], tl.int32)
                for number in tl.static_range(SPANS):
                    first, stop = load_span(at, number, token, left, total)  # [1, 32]
                    seen |= ((first <= other) & (other < stop)).to(tl.int32)
                bits = tl.sum(seen << key, 1)
                tl.store(Bits + (tile * BLOCK_OTHER + query) * WORDS + word, bits)
    else:
        WIDTH: tl.constexpr = triton.next_power_of_2(WORDS)
        word = tl.arange(0, WIDTH)[None, :]  # [1, WIDTH]
        width = tl.minimum(tl.maximum(BLOCK_OTHER - 32 * word, 0), 32)
        begin = entry * BLOCK_OTHER + 32 * word
        one = tl.full([1, 1], 1, tl.int64)
        for step in range(0, BLOCK_OWN, TOKENS):
            query = step + tl.arange(0, TOKENS)[:, None]  # [TOKENS, 1]
            bits = tl.zeros([TOKENS, WIDTH], tl.int64)
            for number in tl.static_range(SPANS):
                first, stop = load_span(at, number, query, left, total)
                low = tl.minimum(tl.maximum(first - begin, 0), width)
                high = tl.minimum(tl.maximum(stop - begin, low), width)
                bits |= (one << high) - (one << low)
            to = Bits + (tile * BLOCK_OWN + query) * WORDS + word
            tl.store(to, bits.to(tl.int32), mask=tl.broadcast_to(word < WORDS, bits.shape))
