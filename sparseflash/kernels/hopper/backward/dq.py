"""dQ in the pass over columns: its product, and its float32 sums in global memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from sparseflash.kernels.hopper.backward.feed import split_index
from sparseflash.kernels.hopper.common import accumulator


@gluon.constexpr_function
def _red_asm(pack):
    """PTX that adds `pack` numbers of a lane, 4 at a time, 512 bytes apart."""
    out = pack // 4
    reds = [
        f"red.relaxed.gpu.global.add.v4.f32 [${out}+{128 * i}], "
        f"{{{', '.join(f'${out + pack + i + k}' for k in range(4))}}};"
        for i in range(0, pack, 4)
    ]
    return " ".join(reds + [f"mov.u32 ${i}, 0;" for i in range(out)])


@gluon.constexpr_function
def _red_constraints(pack):
    return ",".join(["=r"] * (pack // 4) + ["l"] * pack + ["f"] * pack)


@gluon.jit
def _unknown(x):
    """x [int64], of which the compiler knows nothing: so it does not keep the terms of x in
    registers over a loop.
    """
    return gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x], gl.int64, is_pure=True, pack=1)


@gluon.jit
def _add_slabs(dq_ptr, row, dq, BLOCK_D: gl.constexpr, FIRST: gl.constexpr):
    """Add [64, WIDTH] of an accumulator to the columns FIRST.. of dQ; `row` is where all 64 rows
    begin, or in the layout of the accumulator's rows where the 16 of every warp do.
    """
    # All numbers of a lane go to one address and what is 512 bytes apart from it, so they are taken
    # in packs as large as the compiler can do; the address is an integer because
    # inline_asm_elementwise refuses to mix pointers and floats.
    PACK: gl.constexpr = min(32, dq.shape[1] // 2)
    LAYOUT: gl.constexpr = dq.type.layout
    r = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    c = gl.arange(0, dq.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    lane = (r % 8) * 64 + (c % 8) // 2 * 16 + c // (2 * PACK) * (PACK * 128) + FIRST * 64
    slab = dq_ptr.to(gl.int64) + row.to(gl.int64) * (BLOCK_D * 4)
    if row.type.is_block():
        at = slab[:, None] + lane
    else:
        at = _unknown(slab) + (lane + r // 16 * (64 * BLOCK_D))
    ASM: gl.constexpr = _red_asm(PACK)
    CONSTRAINTS: gl.constexpr = _red_constraints(PACK)
    gl.inline_asm_elementwise(ASM, CONSTRAINTS, [at, dq], gl.int8, is_pure=False, pack=PACK)


@gluon.jit
def start_columns(ds, k, I: gl.constexpr, WIDTH: gl.constexpr, COLUMNS: gl.constexpr):
    """Return the I-th WIDTH columns of dQ = dS K, as far as they are in use; ds [BLOCK_N, 64]."""
    FIRST: gl.constexpr = I * WIDTH
    IN_USE: gl.constexpr = min(WIDTH, COLUMNS - FIRST)
    zero = gl.zeros([64, IN_USE], gl.float32, accumulator(IN_USE))
    k = k.slice(FIRST, IN_USE, 1)
    return warpgroup_mma(ds.permute((1, 0)), k, zero, use_acc=False, is_async=True)


@gluon.jit
def start_dq(ds, k, CONSUMER: gl.constexpr, COLUMNS: gl.constexpr):
    """Start this consumer's part of dQ = dS K; ds [BLOCK_N, BLOCK_M] of all consumers,
    k [BLOCK_N, BLOCK_D].
    """
    BLOCK_N: gl.constexpr = ds.shape[0]
    BLOCK_M: gl.constexpr = ds.shape[1]
    BLOCK_D: gl.constexpr = k.shape[1]
    if BLOCK_M == BLOCK_N:  # every consumer takes 64 queries: [64, BLOCK_D]
        zero = gl.zeros([64, BLOCK_D], gl.float32, accumulator(BLOCK_D))
        ds = ds.slice(CONSUMER * 64, 64, 1).permute((1, 0))
        return warpgroup_mma(ds, k, zero, use_acc=False, is_async=True)
    else:  # or a part of the head dim
        return start_columns(ds, k, CONSUMER, BLOCK_D * BLOCK_M // BLOCK_N, COLUMNS)


@gluon.jit
def early_block(f, entry):
    """Return what `add_dq` takes of a list entry: its block, to be loaded long before it is used,
    or with several blocks the place of the entry.
    """
    if f.GATHER == 1:
        return gl.load(entry)
    else:
        return entry


@gluon.jit
def add_dq(f, dq, block, row0, CONSUMER: gl.constexpr):
    """Add this consumer's part of the dQ of a block, an `early_block`.

    row0: the first row of the group in dQ.
    """
    BY_QUERY: gl.constexpr = f.BLOCK_M == f.BLOCK_N
    FIRST_ROW: gl.constexpr = CONSUMER * 64 if BY_QUERY else 0
    FIRST_COL: gl.constexpr = 0 if BY_QUERY else CONSUMER * (f.BLOCK_D * f.BLOCK_M // f.BLOCK_N)
    add_part(f, dq, block, row0, FIRST_ROW, FIRST_COL)


@gluon.jit
def add_part(f, dq, block, row0, FIRST_ROW: gl.constexpr, FIRST_COL: gl.constexpr):
    """Add 64 queries of the dQ of a block, FIRST_ROW and following, to columns FIRST_COL and on."""
    BLOCK_Q: gl.constexpr = f.BLOCK_M // f.GATHER  # queries of a mask block
    if f.GATHER == 1:  # an entry counts the blocks of all heads of a group
        row = row0 + block * BLOCK_Q + FIRST_ROW
    else:
        row = gl.arange(0, 64, gl.SliceLayout(1, dq.type.layout)) + FIRST_ROW
        hg, block = split_index(f, gl.load(block + row // BLOCK_Q))
        row = row0 + hg * f.n_pad + block * BLOCK_Q + row % BLOCK_Q // 16 * 16
    _add_slabs(f.dq, row, dq, f.BLOCK_D, FIRST_COL)
