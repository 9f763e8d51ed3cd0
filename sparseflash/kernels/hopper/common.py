"""What all Hopper kernels share: named fields, layouts, and waiting at barriers."""

from typing import dataclass_transform

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import base_value

from sparseflash.kernels.hopper.gluon import aggregate


# ------------------------------------------------------------------ named fields
@gluon.constexpr_function
def _set_fields(self, **values):
    for name, value in values.items():
        if isinstance(value, tl.tuple):  # arguments of 1 are plain numbers there
            value = tl.tuple([v if isinstance(v, base_value) else gl.constexpr(v) for v in value])
        setattr(self, name, value if isinstance(value, base_value) else gl.constexpr(value))


@dataclass_transform(kw_only_default=True)
def fields(cls):
    """Make a class of annotated fields one that kernels build, by keyword, and pass on.

    A field is a value of the kernel or, as `gl.constexpr`, one that the compiler knows. Fields are
    read-only. Keywords are a must: Triton's cache of binaries does not see the order of fields.
    """
    cls.__init__ = _set_fields
    return aggregate(cls)


# ------------------------------------------------------------------ layouts
WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
WARPGROUP = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.constexpr_function
def accumulator(columns):
    """Layout of (64, columns) float32 in the registers of a warpgroup, as wgmma has it."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def shared_layout(rows, columns, dtype):
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


# ------------------------------------------------------------------ rings of shared memory
@gluon.jit
def new_barriers(STAGES: gl.constexpr):
    """Barriers for a ring of STAGES places, still to be initialised."""
    return gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())


@gluon.jit
def wait_full(full, n, pred=True):
    """Wait until the n-th thing that goes through a ring is in its place, n % STAGES."""
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1, pred=pred)


@gluon.jit
def wait_empty(empty, n):
    """Wait until the place of the n-th thing is free: at once for the first STAGES of them."""
    STAGES: gl.constexpr = empty.shape[0]
    mbarrier.wait(empty.index(n % STAGES), ((n // STAGES) & 1) ^ 1)


@gluon.jit
def arrive(barriers, n):
    """One arrival at the barrier of the n-th thing that goes through a ring."""
    STAGES: gl.constexpr = barriers.shape[0]
    mbarrier.arrive(barriers.index(n % STAGES), count=1)


# ------------------------------------------------------------------ named barriers
@gluon.constexpr_function
def _barrier_asm(instruction, number, threads):
    return f"{instruction} {number}, {threads}; mov.b32 $0, $1;"


@gluon.jit
def meet(token):
    """Both consumers wait here for each other; `token` keeps the order of the calls.

    Each runs its own copy of the instruction, which `bar.sync`, the aligned form, does not allow.
    """
    ASM: gl.constexpr = _barrier_asm("barrier.sync", 9, 256)
    return gl.inline_asm_elementwise(ASM, "=r,r", [token], gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_sync(NUMBER: gl.constexpr, token):
    """Wait at a hardware barrier until another consumer has arrived there."""
    ASM: gl.constexpr = _barrier_asm("bar.sync", NUMBER, 256)
    return gl.inline_asm_elementwise(ASM, "=r,r", [token], gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_arrive(NUMBER: gl.constexpr, token):
    """Let another consumer pass the barrier, without waiting."""
    ASM: gl.constexpr = _barrier_asm("bar.arrive", NUMBER, 256)
    return gl.inline_asm_elementwise(ASM, "=r,r", [token], gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_turn(token, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Wait for this consumer's turn: they start their products one after the other, so that the
    softmax of one runs under the products of the other.
    """
    if CONSUMERS > 1:
        return named_sync(9 + CONSUMER, token)
    else:
        return token


@gluon.jit
def pass_turn(token, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Give the turn to the next consumer."""
    if CONSUMERS > 1:
        return named_arrive(9 + (CONSUMER + 1) % CONSUMERS, token)
    else:
        return token
