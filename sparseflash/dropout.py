"""Counter-based dropout: the bits are a function of (seed, batch, head, query, key) alone.

Every backend computes the same bits, whatever its tiling, so the backward pass stores none of them.
The arithmetic is that of uint32 with wrap-around. torch has no such products and shifts, so the
values are held in int32: products and sums have the same bits, right shifts are masked.
`_mix` is the `lowbias32` hash of C. Wellons, https://nullprogram.com/blog/2018/07/31/. What kernels
compute for every probability is the middle of it: its first line is that of the keys, since it
commutes with ^, and its last changes no high bit. Entries that are 2**24 tokens apart, or more, go
together a little (a correlation of 0.002 to 0.03); nearer ones do not.
"""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: spreads neighbouring heads over the 32 bits
_COLUMN = 0x85EBCA6B  # sets the stream of the columns apart from that of the rows
_ROW_STEP, _COLUMN_STEP = 0x9E3779B1, 0x85EBCA77
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B  # the factors of lowbias32


def keep_threshold(dropout_p: float) -> int:
    """The uint32 value below which a hash drops its entry."""
    return min(round(dropout_p * 2**32), 2**32 - 1)


def dropout_keys(seed: Tensor, batch: int, heads: int, n_q: int, n_k: int) -> tuple[Tensor, Tensor]:
    """The row keys (batch, heads, n_q) and column keys (batch, heads, n_k): uint32 bits in int32.

    seed: int64 tensor with one element; the keys live on its device.
    """
    seed = seed.reshape(())
    q, k = (torch.arange(n, dtype=torch.int32, device=seed.device) for n in (n_q, n_k))
    head_id = torch.arange(batch * heads, device=seed.device).view(batch, heads, 1)
    head = _mix(_mix(_low32(seed)) ^ _low32(seed >> 32) ^ _low32(head_id * _GOLDEN))
    column = _mix(head + _signed(_COLUMN))
    return _fold(q * _signed(_ROW_STEP) + head), _fold(k * _signed(_COLUMN_STEP) + column)


def keep_from_keys(row_key: Tensor, col_key: Tensor, dropout_p: float) -> Tensor:
    """Bool (..., queries, keys) from any row keys (..., queries) and column keys (..., keys)."""
    x = row_key.unsqueeze(-1) ^ col_key.unsqueeze(-2)
    x.mul_(_FIRST).bitwise_xor_((x >> 15) & 0x1FFFF).mul_(_signed(_SECOND))
    # With the sign bit of both sides flipped, the signed order is the unsigned one.
    return x.bitwise_xor_(-(2**31)) >= keep_threshold(dropout_p) - 2**31


def keep_mask(seed: Tensor, batch: int, heads: int, n_q: int, n_k: int, dropout_p: float) -> Tensor:
    """Bool (batch, heads, n_q, n_k): True where an attention probability survives dropout."""
    return keep_from_keys(*dropout_keys(seed, batch, heads, n_q, n_k), dropout_p)


def _mix(x: Tensor) -> Tensor:
    """A bijection of uint32 in which every input bit reaches every output bit."""
    x = _fold(x)
    x.mul_(_FIRST).bitwise_xor_((x >> 15) & 0x1FFFF).mul_(_signed(_SECOND))
    return _fold(x)


def _fold(x: Tensor) -> Tensor:
    return x ^ ((x >> 16) & 0xFFFF)


def _low32(x: Tensor) -> Tensor:
    """The low 32 bits of int64, as int32."""
    return (((x & 0xFFFFFFFF) ^ 2**31) - 2**31).int()


def _signed(x: int) -> int:
    """The int32 with the bits of a uint32."""
    return (x ^ 2**31) - 2**31
