"""The backward of the Hopper backend: which of its two forms a call takes.

One pass over the columns of the mask gives dK and dV, and adds up dQ by float32 reductions, whose
order changes from run to run. Two passes without atomics, over columns and rows, take seven matrix
products instead of five. See docs/hopper.md.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash.backends import hopper_passes as passes
from sparseflash.backends import triton as fallback
from sparseflash.kernels.hopper.configs import BackwardTiles, cols_tiles, padded, rows_tiles
from sparseflash.schedule import Cache, Schedule, as_tensors
from sparseflash.tiles.lists import expressible, granularity
from sparseflash.tiles.tile_lists import TileLists

_PAD = 128  # rows of the buffers with a number for every query come in multiples of this
_FEW_KEYS = 512  # up to so many for a query, clearing and converting dQ costs more than it saves


class Form(NamedTuple):
    one_pass: bool
    cols: BackwardTiles
    rows: BackwardTiles
    n_pad: int  # queries, with those that only the buffers have


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    schedule: Schedule | None, scale: float, dropout_p: float, seed: Tensor | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv like q, k, v; bit-equal from run to run if `deterministic`."""
    fits = passes.fits_tma(dout)
    layout = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), out.stride(), dout.stride(),
        None if dlse is None else (dlse.stride(), dlse.dtype), q.dtype, q.device, fits,
    )  # fmt: skip
    memo = _memo(schedule, (layout, scale, dropout_p, deterministic))
    if not memo:
        memo["form"] = _form(q, k, v, schedule, dropout_p, deterministic)
    form: Form | None = memo["form"]
    if form is None:
        return fallback.backward(
            dout, dlse, q, k, v, out, lse, schedule, scale, dropout_p, seed, deterministic
        )
    if not fits:
        dout = passes.like(dout).copy_(dout)
    rows = *q.shape[:2], form.n_pad
    start, delta = torch.empty(2, *rows, dtype=torch.float32, device=q.device).unbind()
    dq_sum = None
    if form.one_pass:
        dq_sum = torch.empty(*rows, padded(q.shape[-1]), dtype=torch.float32, device=q.device)
    call = passes.Call(q, k, v, dout, start, delta, schedule, scale, dropout_p, seed, memo)
    passes.prepare(call, dlse, out, lse, dq_sum)
    dk, dv = passes.backward_cols(call, form.cols, dq_sum)
    if dq_sum is None:
        dq = passes.backward_rows(call, form.rows)
    else:
        dq = passes.finish(call, dq_sum)
    return dq, dk, dv


def lists(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, dropout_p: float, deterministic: bool
) -> tuple[TileLists, ...]:
    """The tile lists that `backward` walks for inputs like these."""
    form = _form(q, k, v, schedule, dropout_p, deterministic)
    if form is None:
        return ()
    cols = passes.lists(q, k, schedule, "cols", form.cols)
    return (cols,) if form.one_pass else (cols, passes.lists(q, k, schedule, "rows", form.rows))


def _memo(schedule: Schedule | None, layout: tuple[Any, ...]) -> dict[Any, Any]:
    """Of the calls of one layout; empty for the first of them, and where no two are alike."""
    if schedule is None:
        key = layout
    elif schedule.dynamic:
        return {}
    else:  # the entry keeps the schedule, so that no other can take its addresses
        key = (schedule.rows.ptr.data_ptr(), schedule.bits.data_ptr(), *schedule.numbers, layout)
    found = _memos.get(key)
    if found is None:
        found = {}, schedule
        tensors = [] if schedule is None else as_tensors(schedule)[0]
        _memos.put(key, found, size=sum(t.nbytes for t in tensors))
    return found[0]


_memos: Cache[tuple[dict[Any, Any], Schedule | None]] = Cache(max_count=256, max_bytes=2**28)


def _form(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule | None, dropout_p: float,
    deterministic: bool,
) -> Form | None:  # fmt: skip
    """None where the kernels have none for this call."""
    width = max(padded(q.shape[-1]), padded(v.shape[-1]))
    one_pass = not deterministic and _keys_per_query(k, schedule) > _FEW_KEYS
    if dropout_p > 0 and width > 64:  # not enough registers
        one_pass = False
    block_q, block_k = (schedule.block_q, schedule.block_k) if schedule else (128, 128)
    cols, rows = cols_tiles(width, block_k, with_dq=one_pass), rows_tiles(width, block_q)
    reason = expressible(schedule, "cols", cols.major, cols.minor)
    if not one_pass:
        reason = reason or expressible(schedule, "rows", rows.major, rows.minor)
    if width > 128 or reason:
        return None
    # pieces that are missing in a list add 0 * K to queries beyond the last one: for a NaN among
    # the keys these must not be queries of another head
    gather = granularity(schedule, "cols", cols.major, cols.minor)[1]
    spare = gather > 1 or (schedule is not None and schedule.dynamic)
    n_pad = passes.cdiv(q.shape[2], _PAD) * _PAD + (_PAD if spare else 0)
    return Form(one_pass, cols, rows, n_pad)


def _keys_per_query(k: Tensor, schedule: Schedule | None) -> float:
    """In the mean, of the mask as its blocks have them; at most, of a selection."""
    if schedule is None:
        return k.shape[2]
    return schedule.rows.idx.numel() * schedule.block_k / (schedule.rows.ptr.numel() - 1)
