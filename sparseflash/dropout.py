"""Counter-based dropout: the bits are a function of (seed, batch, head, query, key) alone.

Every backend computes the same bits, whatever its tiling, so the backward pass stores none of them.
docs/internals/kernels.md has the definition. The four entries of queries q, q + 8 and keys k, k + 8
share a hash, and multiply it by factors of their own. Entries that are 2**24 tokens apart, or more,
go together a little (a correlation of 0.002 to 0.03); nearer ones do not.

The arithmetic is that of uint32 with wrap-around. torch has no such products and shifts, so the
values are held in int32: products and sums have the same bits, right shifts are masked.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

VERSION = 2  # of what a seed drops; 1, to 23 November 2026, had a hash for every entry

# The constants of the definition, for the kernels too.
HEAD_STEP = 0x9E3779B9  # 2**32 / golden ratio: spreads neighbouring heads over the 32 bits
KEY_STREAM = 0x85EBCA6B  # sets the stream of the keys apart from that of the queries
QUERY_STEP, KEY_STEP = 0x9E3779B1, 0x85EBCA77
SPREAD = 0xD2511F53  # a factor of Philox: both halves of a product of 64 bits
FACTOR, QUERY_FACTOR, KEY_FACTOR = 0x846CA68B, 0x88F4DA73, 0x5B010BA3
BEYOND = 256  # further entries of a table: kernels read whole tiles


def keep_threshold(dropout_p: float) -> int:
    """Return the 16-bit value below which the upper half of a noise drops its entry."""
    return min(round(dropout_p * 2**16), 2**16 - 1)


def keep_scale(dropout_p: float) -> float:
    """Return the factor of what is kept: 1 / (1 - p), with the probability that the threshold
    gives.
    """
    return 2**16 / (2**16 - keep_threshold(dropout_p))


def dropout_keys(seed: Tensor, batch: int, heads: int, n_q: int, n_k: int) -> tuple[Tensor, Tensor]:
    """Keys (batch, heads, n / 2) of queries and of keys: uint32 bits in int32. Tokens 8 apart share
    one, so 16 tokens have 8 in a row; n is rounded up to a multiple of 16.

    seed: int64 tensor with one element, or a `key_table`; the keys live on its device.
    """
    if is_table(seed):
        found = seed[2 : len(seed) - BEYOND].view(batch, heads, -1).split(seed[:2].tolist(), -1)
        rows, columns = (
            pad(x, (0, -(-n // 16) * 8 - x.shape[2]))
            for x, n in zip(found, (n_q, n_k), strict=True)
        )
        return rows, columns
    number = torch.arange(batch * heads, device=seed.device).view(batch, heads)
    q, k = (torch.arange(0, n, 16, dtype=torch.int32, device=seed.device) for n in (n_q, n_k))
    return _keys(seed, number, q, k)


def key_table(seed: Tensor, number: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the keys of some heads and tokens of a larger call, which backends take as a seed.

    Args:
        seed: of the call, int64 with one element.
        number: (B, H) int64, b * heads + h of each head in the call.
        q, k: int tensors that broadcast to (B, H, n / 16): where each 16 tokens begin in the call.
    """
    rows, columns = _keys(seed, number, q.int(), k.int())
    counts = [rows.new_full((1,), x.shape[2]) for x in (rows, columns)]
    keys = torch.cat([rows, columns], -1).flatten()
    return torch.cat([*counts, keys, keys.new_zeros(BEYOND)])


def is_table(seed: Any) -> bool:
    """Return whether a seed is a `key_table`."""
    return isinstance(seed, Tensor) and seed.dtype == torch.int32


def holds_keys(seed: Tensor, q: Tensor, k: Tensor) -> bool:
    """Return whether a `key_table` is as long as a call of q and k reads."""
    tokens = -(-q.shape[2] // 16) - (-k.shape[2] // 16)
    return seed.numel() >= 2 + 8 * q.shape[0] * q.shape[1] * tokens and seed.device == q.device


def _keys(seed: Tensor, number: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    seed, number = seed.reshape(()), number.unsqueeze(-1)
    head = _mix(_mix(_low32(seed)) ^ _low32(seed >> 32) ^ _low32(number * HEAD_STEP))
    key_head = _mix(head + _signed(KEY_STREAM))
    # of each 16 the first 8, which stand for pairs
    eight = torch.arange(8, dtype=torch.int32, device=seed.device)
    q, k = ((x.unsqueeze(-1) + eight).flatten(-2) for x in (q, k))
    return q * _signed(QUERY_STEP) + head, k * _signed(KEY_STEP) + key_head


def keep_from_keys(rows: Tensor, columns: Tensor, dropout_p: float, *, transposed: bool = False):
    """Bool (..., 2 rows, 2 columns) from the keys of rows (..., rows) and of columns: 8 keys for
    each 16 tokens that follow one another. transposed: the rows are of keys, not of queries.
    """
    x = (rows.unsqueeze(-1) ^ columns.unsqueeze(-2)).long() & 0xFFFFFFFF
    x.mul_(SPREAD)
    x = x.int() ^ (x >> 32).int()  # [..., rows, columns]
    x = x.mul_(_signed(FACTOR)).unflatten(-1, (-1, 8)).unflatten(-3, (-1, 8))
    row_factor, column_factor = QUERY_FACTOR, KEY_FACTOR
    if transposed:
        row_factor, column_factor = column_factor, row_factor
    x = torch.stack((x, x * _signed(row_factor)), -4)  # [..., 16s, 2, 8, 16s, 8]
    x = torch.stack((x, x * _signed(column_factor)), -2)  # [..., 16s, 2, 8, 16s, 2, 8]
    x = x.flatten(-3).flatten(-4, -2)
    # With the sign bit of both sides flipped, the signed order is the unsigned one.
    return x.bitwise_xor_(-(2**31)) >= (keep_threshold(dropout_p) << 16) - 2**31


def keep_mask(seed: Tensor, batch: int, heads: int, n_q: int, n_k: int, dropout_p: float) -> Tensor:
    """Bool (batch, heads, n_q, n_k): True where an attention probability survives dropout."""
    keep = keep_from_keys(*dropout_keys(seed, batch, heads, n_q, n_k), dropout_p)
    return keep[..., :n_q, :n_k]


def _mix(x: Tensor) -> Tensor:
    """lowbias32 of C. Wellons, https://nullprogram.com/blog/2018/07/31/: a bijection of uint32 in
    which every input bit reaches every output bit.
    """
    x = x ^ ((x >> 16) & 0xFFFF)
    x.mul_(0x7FEB352D).bitwise_xor_((x >> 15) & 0x1FFFF).mul_(_signed(0x846CA68B))
    return x ^ ((x >> 16) & 0xFFFF)


def _low32(x: Tensor) -> Tensor:
    """Return the low 32 bits of int64, as int32."""
    return (((x & 0xFFFFFFFF) ^ 2**31) - 2**31).int()


def _signed(x: int) -> int:
    """Return the int32 with the bits of a uint32."""
    return (x ^ 2**31) - 2**31
