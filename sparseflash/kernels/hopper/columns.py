"""Products over, or for, the columns of a padded head dim that are in use.

Tensors have powers of two as extents. So 96 of 128 columns are two products, of 64 and of 32
columns, and 192 of 256 are 128 and 64. A product that reduces over the head dim adds both up. One
whose columns are the head dim has a tuple of sums: a tensor for each product.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from sparseflash.kernels.hopper.common import accumulator
from sparseflash.kernels.hopper.masking import bit_layout, words_layout


@gluon.constexpr_function
def first_columns(columns):
    """Of the first product: the largest power of two."""
    return 1 << (columns.bit_length() - 1)


@gluon.constexpr_function
def products(columns):
    """How many there are: what a wait counts."""
    return columns.bit_count()


@gluon.jit
def _in_use(a, COLUMNS: gl.constexpr):
    """Return what each product takes of a [rows, BLOCK_D] in shared memory."""
    FIRST: gl.constexpr = first_columns(COLUMNS)
    if COLUMNS == FIRST:
        return (a.slice(0, FIRST, 1),)
    else:
        return a.slice(0, FIRST, 1), a.slice(FIRST, COLUMNS - FIRST, 1)


@gluon.jit
def in_registers(a, COLUMNS: gl.constexpr, SCORES: gl.constexpr):
    """Load a [64, BLOCK_D] from shared memory, for `start_scores_of` with layout SCORES."""
    return [x.load(gl.DotOperandLayout(0, SCORES, 2)) for x in _in_use(a, COLUMNS)]


@gluon.jit
def start_scores(a, b, start, COLUMNS: gl.constexpr, ADD: gl.constexpr):
    """Start a b^T, with ADD added to start; a and b [rows, BLOCK_D] in shared memory."""
    return start_scores_of(_in_use(a, COLUMNS), b, start, ADD)


@gluon.jit
def start_scores_of(parts, b, start, ADD: gl.constexpr):
    """`start_scores` of an operand that is `in_registers`, which saves the reads of it: products of
    64 columns take 128 bytes of shared memory a cycle otherwise, which is all that there are.
    """
    FIRST: gl.constexpr = parts[0].shape[1]
    b_t = b.slice(0, FIRST, 1).permute((1, 0))
    s = warpgroup_mma(parts[0], b_t, start, use_acc=ADD, is_async=True)
    if len(parts) == 2:
        b_t = b.slice(FIRST, parts[1].shape[1], 1).permute((1, 0))
        s = warpgroup_mma(parts[1], b_t, s, is_async=True)
    return s


@gluon.jit
def no_sums(COLUMNS: gl.constexpr):
    """Zeros of 64 rows."""
    FIRST: gl.constexpr = first_columns(COLUMNS)
    REST: gl.constexpr = COLUMNS - FIRST
    first = gl.zeros([64, FIRST], gl.float32, accumulator(FIRST))
    if REST == 0:
        return (first,)
    else:
        return first, gl.zeros([64, REST], gl.float32, accumulator(REST))


@gluon.jit
def _start_sum(a, b, x, add, FIRST: gl.constexpr):
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, x.type.layout, 2)
    a = gl.convert_layout(a, OPERAND, assert_trivial=True)
    b = b.slice(FIRST, x.shape[1], 1)
    return warpgroup_mma(a, b, x, use_acc=add, is_async=True)


@gluon.jit
def start_sums(a, b, sums, add=True):
    """Start a b, with add added to sums; a [64, rows] in registers, b [rows, BLOCK_D]."""
    first = _start_sum(a, b, sums[0], add, 0)
    if len(sums) == 1:
        return (first,)
    else:
        return first, _start_sum(a, b, sums[1], add, sums[0].shape[1])


@gluon.jit
def wait_sums(sums, LATER: gl.constexpr):
    """Wait for sums, but not for the LATER products that began after theirs."""
    if len(sums) == 1:
        return (warpgroup_mma_wait(LATER, deps=sums),)
    else:
        return warpgroup_mma_wait(LATER, deps=sums)


@gluon.jit
def scaled(sums, factor):
    return [x * factor for x in sums]


@gluon.jit
def scaled_rows(sums, factor):
    """Each row by its factor [64]."""
    return [x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None] for x in sums]


@gluon.constexpr_function
def _rescale_asm(pack):
    products = [f"mul.f32 ${i}, ${i}, ${2 * pack + i};" for i in range(pack)]
    skip = f"setp.ne.s32 some, ${3 * pack}, 0; @!some bra.uni DONE;"
    return " ".join(["{ .reg .pred some;", skip, *products, "DONE: }"])


@gluon.constexpr_function
def _rescale_constraints(pack):
    tied = [str(i) for i in range(pack)]  # to the results: a jump leaves x as it is
    return ",".join(["=f"] * pack + tied + ["f"] * pack + ["r"] * pack)


@gluon.jit
def _rescaled(x, factor, some):
    C: gl.constexpr = x.shape[1]
    LANES: gl.constexpr = bit_layout(C)
    WORDS: gl.constexpr = words_layout(C)
    ASM: gl.constexpr = _rescale_asm(C // 2)  # all numbers of a lane, so that it jumps once
    CONSTRAINTS: gl.constexpr = _rescale_constraints(C // 2)
    y = gl.convert_layout(x.reshape([64, C // 8, 4, 2]), LANES, assert_trivial=True)
    factor = gl.convert_layout(factor, WORDS, assert_trivial=True).expand_dims(1).expand_dims(3)
    some = gl.convert_layout(some, WORDS, assert_trivial=True).expand_dims(1).expand_dims(3)
    y = gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [y, factor.broadcast_to(y.shape), some.broadcast_to(y.shape)],
        gl.float32, is_pure=True, pack=C // 2,
    )  # fmt: skip
    return gl.convert_layout(y.reshape([64, C]), x.type.layout, assert_trivial=True)


@gluon.jit
def rescaled_rows(sums, factor, some):
    """`scaled_rows` by factors [64, 4], one for each of the four lanes that share a row, for warps
    where `some` is not 0. The others jump over the multiplications: see `some_rescaled`.

    In PTX, as an `if` of Gluon is one of all warps, which takes a reduction in shared memory.
    """
    return [_rescaled(x, factor, some) for x in sums]


@gluon.jit
def store_shared(place, sums):
    """Round into the columns in use of place [64, BLOCK_D]: TMA copies no others out."""
    for i in gl.static_range(len(sums)):
        to = place.slice(i * sums[0].shape[1], sums[i].shape[1], 1)
        to.store(sums[i].to(place.dtype))


@gluon.jit
def _store_sum(ptr, first, x, stride):
    r = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    c = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(ptr + first + r * stride + c, x)


@gluon.jit
def store_part(ptr, first, sums, stride):
    """Store row-major in global memory from ptr + first on, for the sum over parts of a tile."""
    for i in gl.static_range(len(sums)):
        _store_sum(ptr, first + i * sums[0].shape[1], sums[i], stride)
