"""Work of the persistent kernels: which tile is next, and the record that tells the warps so.

The scheduler, one warp, claims items from a counter in global memory. It publishes each in a ring
of records in shared memory, one field to a word. A record with tile -1 ends the program.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseflash.kernels.hopper.common import WARP

# words of a record; the first five are also those of an item of the lists
RECORD = gl.constexpr(16)  # how many
TILE = gl.constexpr(0)  # the tile that stays: of queries (forward, rows) or of keys (columns)
BEGIN = gl.constexpr(1)  # its first entry in the lists
N_ENTRIES = gl.constexpr(2)
N_PARTIAL = gl.constexpr(3)  # of them, the first ones
PART = gl.constexpr(4)  # slot of a part of a split tile; -1: the tile is whole
BATCH = gl.constexpr(5)
HEAD = gl.constexpr(6)
FIRST_BIT = gl.constexpr(7)  # bit tile of the first entry
FIRST_IDX = gl.constexpr(8)  # block of the first entry
BATCH_HEAD = gl.constexpr(9)


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.jit
def wait_record(record_full, t):
    """Wait until record t is published; its slot in the ring."""
    SLOTS: gl.constexpr = record_full.shape[0]
    LOG2: gl.constexpr = _log2(SLOTS)
    mbarrier.wait(record_full.index(t & (SLOTS - 1)), (t >> LOG2) & 1)


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
    """Count on in global memory; all lanes of the calling warp get what it was before.

    `gl.atomic_add` would hand it out through shared memory of its own, for which Triton takes that
    of barriers that no partition uses.
    """
    at = counter_ptr.to(gl.int64)
    ASM: gl.constexpr = _claim_asm()
    return gl.inline_asm_elementwise(ASM, "=r,l", [at], gl.int32, is_pure=False, pack=1)


@gluon.jit
def locate(f, w, heads, together):
    """Batch x head, and pointer to the item, of work number w.

    So many heads `together` run an item one after the other, then all of them the next one.
    """
    is_long = w < f.n_long * f.n_bh
    rest = w - f.n_long * f.n_bh
    others = gl.maximum(f.n_items - f.n_long, 1) * together
    bh = gl.where(is_long, w % f.n_bh, rest // others * together + rest % together)
    item = gl.where(is_long, w // f.n_bh, f.n_long + rest % others // together)
    b = gl.where(f.list_batch > 1, bh // heads, 0)
    h = gl.where(f.list_heads > 1, bh % heads, 0)
    row = (b * f.list_heads + h).to(gl.int64) * f.n_items + item
    return bh, f.items + row * 8
