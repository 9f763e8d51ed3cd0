"""Two warpgroups that meet at a named barrier, and nothing else.

Each writes its half of a buffer, meets the other, reads the other's half, and meets it again. They
are partitions of a warp-specialised kernel: every one has code of its own, so the barrier stands at
two addresses, and 256 threads of the block take part. `backward_cols` meets like that.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.kernels.hopper.common import WARPGROUP, fields

VARIANTS = {
    "aligned": {"FORM": "bar.sync", "THREADS": 256},
    "unaligned": {"FORM": "barrier.sync", "THREADS": 256},
    "short": {"FORM": "barrier.sync", "THREADS": 128},  # wrong: each passes alone
}


@fields
class Swap:
    halves: gl.shared_memory_descriptor  # int32 [2, 128]
    out: gl.tensor  # int32 (2, rounds, 128): what each found
    rounds: gl.tensor
    FORM: gl.constexpr
    THREADS: gl.constexpr


@gluon.constexpr_function
def _asm(form, threads):
    return f"{form} 9, {threads}; mov.b32 $0, $1;"


@gluon.jit
def _meet(f, token):
    ASM: gl.constexpr = _asm(f.FORM, f.THREADS)
    return gl.inline_asm_elementwise(ASM, "=r,r", [token], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _partner(f, ME: gl.constexpr):
    lane = gl.arange(0, 128, WARPGROUP)
    token = f.rounds
    for t in range(f.rounds):
        f.halves.index(ME).store(256 * t + 128 * ME + lane)
        token = _meet(f, token)
        found = f.halves.index(1 - ME).load(WARPGROUP)
        token = _meet(f, token)
        gl.store(f.out + (ME * f.rounds + t) * 128 + lane, found)


@gluon.jit
def _idle(f):
    """A warp that does not take part."""


@gluon.jit(do_not_specialize=["rounds"])
def swap_halves(
    out_ptr, rounds, FORM: gl.constexpr, THREADS: gl.constexpr, num_warps: gl.constexpr
):
    gl.static_assert(num_warps == 4)
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    halves = gl.allocate_shared_memory(gl.int32, [2, 128], LAYOUT)
    f = Swap(halves=halves, out=out_ptr, rounds=rounds, FORM=FORM, THREADS=THREADS)
    gl.warp_specialize([(_partner, (f, 0)), (_partner, (f, 1)), (_idle, (f,))], [4, 1], [24, 24])


def run(variant: str, rounds: int = 64) -> bool:
    """Whether each found what the other wrote."""
    out = torch.full((2, rounds, 128), -1, dtype=torch.int32, device="cuda")
    swap_halves[(1,)](out, rounds, **VARIANTS[variant], num_warps=4)
    t = torch.arange(rounds, dtype=torch.int32, device="cuda")[:, None]
    lane = torch.arange(128, dtype=torch.int32, device="cuda")
    return torch.equal(out, torch.stack((256 * t + 128 + lane, 256 * t + lane)))
