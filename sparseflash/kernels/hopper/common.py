"""Device functions of the Hopper kernels that are not tied to a pipeline: work, bits, dropout."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LN2 = gl.constexpr(0.6931471805599453)
# a published item: the words of its record
RECORD = gl.constexpr(16)
TILE = gl.constexpr(0)
BEGIN = gl.constexpr(1)
N = gl.constexpr(2)
N_PARTIAL = gl.constexpr(3)
PART = gl.constexpr(4)
BATCH = gl.constexpr(5)
HEAD = gl.constexpr(6)
FIRST_BIT = gl.constexpr(7)
FIRST_IDX = gl.constexpr(8)
BH = gl.constexpr(9)
WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
WARPGROUP = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


# ------------------------------------------------------------------ work
@gluon.jit
def read(record, slot, FIELD: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.max(record.index(slot * RECORD + FIELD).load(LAYOUT), 0)  # of one: no shuffle


@gluon.jit
def write(record, slot, FIELD: gl.constexpr, value):
    record.index(slot * RECORD + FIELD).store(gl.full([1], 0, gl.int32, WARP) + value)


@gluon.constexpr_function
def _claim_asm():
    return (
        "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;"
        " mov.b32 $0, 0; @first atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;"
        " shfl.sync.idx.b32 $0, $0, 0, 31, -1; }"
    )


@gluon.jit
def claim(counter_ptr):
    """Counts on in global memory; all lanes of the one warp that calls this get what it was before.

    `gl.atomic_add` would hand it out through shared memory of its own, for which Triton takes that
    of barriers that no partition uses.
    """
    at = counter_ptr.to(gl.int64)
    ASM: gl.constexpr = _claim_asm()
    return gl.inline_asm_elementwise(ASM, "=r,l", [at], gl.int32, is_pure=False, pack=1)


@gluon.jit
def locate(w, n_items, n_long, n_bh, heads, group, list_batch, list_heads):
    """Batch x head, and row of the items (int64), of work number w.

    The `group` heads that share keys run an item one after the other, so that its keys come from
    memory once.
    """
    is_long = w < n_long * n_bh
    rest = w - n_long * n_bh
    others = gl.maximum(n_items - n_long, 1) * group
    bh = gl.where(is_long, w % n_bh, rest // others * group + rest % group)
    item = gl.where(is_long, w // n_bh, n_long + rest % others // group)
    b = gl.where(list_batch > 1, bh // heads, 0)
    h = gl.where(list_heads > 1, bh % heads, 0)
    return bh, (b * list_heads + h).to(gl.int64) * n_items + item


# ------------------------------------------------------------------ masks
@gluon.constexpr_function
def bit_layout(minor):
    """The accumulator layout of 64 x minor as (row, 8 columns, pair of them, one of the pair)."""
    groups = [[0, 1 << i, 0, 0] for i in range((minor // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [8, 0, 0, 0], *groups],
        [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [[16, 0, 0, 0], [32, 0, 0, 0]], [], [64, minor // 8, 4, 2],
    )  # fmt: skip


@gluon.constexpr_function
def tree_layout(minor):
    """The same as (row, 32 columns, 8 of them, pair of these, one of the pair)."""
    outer = [[0, 1 << i, 0, 0, 0] for i in range((minor // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [8, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], *outer],
        [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]],
        [[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]], [], [64, minor // 32, 4, 4, 2],
    )  # fmt: skip


@gluon.jit
def bit_words(bits_ptr, tile, on, W: gl.constexpr, MAJOR: gl.constexpr, LAYOUT: gl.constexpr):
    """The words of the 64 rows of warpgroup W of a bit tile; all ones where not `on`."""
    WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))
    r = gl.arange(0, 64, gl.SliceLayout(1, WORDS))[:, None]
    c = gl.arange(0, 4, gl.SliceLayout(0, WORDS))[None, :]
    p = bits_ptr + tile.to(gl.int64) * (MAJOR * 4) + (W * 64 + r) * 4 + c
    return gl.load(p, mask=(r >= 0) & on, other=-1)


@gluon.jit
def where_allowed(x, words, other, LAYOUT: gl.constexpr):
    """x (64, MINOR) where the bits allow it, else `other`.

    Which bit a value has is a compile-time constant of its register.
    """
    w = words.expand_dims(1).expand_dims(3)
    GROUP: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    PAIR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    group = gl.arange(0, x.shape[1] // 8, GROUP).expand_dims(0).expand_dims(2).expand_dims(3)
    pair = gl.arange(0, 2, PAIR).expand_dims(0).expand_dims(1).expand_dims(2)
    bit = (w >> (group * 2 + pair)) & 1
    keep = gl.convert_layout(bit.reshape(x.shape), x.type.layout, assert_trivial=True)
    return gl.where(keep != 0, x, other)


# ------------------------------------------------------------------ sparseflash/dropout.py
@gluon.jit
def mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@gluon.jit
def head_keys(seed_ptr, head):
    """Where the rows and the columns of a batch x head begin."""
    seed = gl.load(seed_ptr)
    low = seed.to(gl.uint32)
    high = (seed >> 32).to(gl.uint32)
    key = mix(mix(low) ^ high ^ (head.to(gl.uint32) * 0x9E3779B9))
    return key, mix(key + 0x85EBCA6B)


@gluon.jit
def row_key(q_token, row_head):
    x = q_token.to(gl.uint32) * 0x9E3779B1 + row_head
    return x ^ (x >> 16)


@gluon.jit
def column_key(k_token, column_head):
    x = k_token.to(gl.uint32) * 0x85EBCA77 + column_head
    return x ^ (x >> 16)


@gluon.jit
def keeps(row_keys, column_keys, threshold):
    """Which probabilities dropout keeps; the keys broadcast to the shape of the tile."""
    x = row_keys ^ column_keys
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x >= threshold.to(gl.uint32)


@gluon.jit
def piece_tokens(entry, COLUMNS: gl.constexpr, PIECE: gl.constexpr, LAYOUT: gl.constexpr):
    """(piece number, token in it) of the columns of a list entry, `entry` pointing to its first."""
    column = gl.arange(0, COLUMNS, LAYOUT)
    if PIECE == COLUMNS:
        return gl.load(entry), column
    else:
        return gl.load(entry + column // PIECE), column % PIECE


# ------------------------------------------------------------------ named barriers
@gluon.constexpr_function
def _barrier_asm(kind, number, threads):
    return f"bar.{kind} {number}, {threads}; mov.b32 $0, $1;"


@gluon.jit
def named_sync(NUMBER: gl.constexpr, THREADS: gl.constexpr, token):
    """Meet the other warpgroup at a hardware barrier; `token` keeps the order of the calls."""
    ASM: gl.constexpr = _barrier_asm("sync", NUMBER, THREADS)
    return gl.inline_asm_elementwise(ASM, "=r,r", [token], gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_arrive(NUMBER: gl.constexpr, THREADS: gl.constexpr, token):
    ASM: gl.constexpr = _barrier_asm("arrive", NUMBER, THREADS)
    return gl.inline_asm_elementwise(ASM, "=r,r", [token], gl.int32, is_pure=False, pack=1)
