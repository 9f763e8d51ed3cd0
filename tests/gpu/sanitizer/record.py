"""The record of the Hopper kernels and its two barriers, and nothing else.

One warp writes a record of a few words, a warpgroup reads it. `full` orders the write before the
read, `empty` the read before the next write but one. It is the protocol of
sparseflash/kernels/hopper/work.py, with its functions.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseflash.kernels.hopper.common import WARPGROUP, fields, new_barriers
from sparseflash.kernels.hopper.work import BEGIN, RECORD, TILE, read, wait_record, write

VARIANTS = {
    "right": {"EARLY": False, "RELAY": False},  # columns and rows
    "relayed": {"EARLY": False, "RELAY": True},  # forward: `empty` comes by way of another warp
    "early": {"EARLY": True, "RELAY": False},  # wrong: writes before it waits for `empty`
}


@fields
class Exchange:
    record: gl.shared_memory_descriptor  # [2 * RECORD, 1]
    full: gl.shared_memory_descriptor
    seen: gl.shared_memory_descriptor  # RELAY: the reader has it; otherwise `empty`
    empty: gl.shared_memory_descriptor
    out: gl.tensor  # int32 (rounds, 2): what the reader found
    rounds: gl.tensor
    EARLY: gl.constexpr
    RELAY: gl.constexpr


@gluon.jit
def _write(f, slot, t):
    write(f.record, slot, TILE, t)
    write(f.record, slot, BEGIN, 3 * t)


@gluon.jit
def _writer(f):
    for t in range(f.rounds):
        slot = t & 1
        if f.EARLY:
            _write(f, slot, t)
        mbarrier.wait(f.empty.index(slot), ((t >> 1) & 1) ^ 1)
        if not f.EARLY:
            _write(f, slot, t)
        mbarrier.arrive(f.full.index(slot), count=1)


@gluon.jit
def _reader(f):
    for t in range(f.rounds):
        slot = t & 1
        wait_record(f.full, t)
        tile = read(f.record, slot, TILE, WARPGROUP)
        begin = read(f.record, slot, BEGIN, WARPGROUP)
        mbarrier.arrive(f.seen.index(slot), count=1)
        gl.store(f.out + 2 * t, tile)
        gl.store(f.out + 2 * t + 1, begin)


@gluon.jit
def _relay(f):
    for t in range(f.rounds):
        slot = t & 1
        mbarrier.wait(f.seen.index(slot), (t >> 1) & 1)
        mbarrier.arrive(f.empty.index(slot), count=1)


@gluon.jit(do_not_specialize=["rounds"])
def exchange_records(
    out_ptr, rounds, EARLY: gl.constexpr, RELAY: gl.constexpr, num_warps: gl.constexpr
):
    gl.static_assert(num_warps == 4)
    record = gl.allocate_shared_memory(gl.int32, [2 * RECORD, 1], mbarrier.MBarrierLayout())
    full = new_barriers(2)
    empty = new_barriers(2)
    seen = empty
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    if RELAY:
        seen = new_barriers(2)
        for i in gl.static_range(2):
            mbarrier.init(seen.index(i), count=1)
    f = Exchange(
        record=record, full=full, seen=seen, empty=empty, out=out_ptr, rounds=rounds, EARLY=EARLY,
        RELAY=RELAY,
    )  # fmt: skip
    if RELAY:
        gl.warp_specialize([(_reader, (f,)), (_writer, (f,)), (_relay, (f,))], [1, 1], [24, 24])
    else:
        gl.warp_specialize([(_reader, (f,)), (_writer, (f,))], [1], [24])


def run(variant: str, rounds: int = 64) -> bool:
    """Whether the reader found every record as it was written."""
    out = torch.full((rounds, 2), -1, dtype=torch.int32, device="cuda")
    exchange_records[(1,)](out, rounds, **VARIANTS[variant], num_warps=4)
    t = torch.arange(rounds, dtype=torch.int32, device="cuda")
    return torch.equal(out, torch.stack((t, 3 * t), 1))
