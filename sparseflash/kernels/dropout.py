"""Dropout inside kernels: which probabilities are kept, a hash of (seed, head, query, key).

The same arithmetic as sparseflash/dropout.py, for the kernels in Triton and those in Gluon.
docs/internals/kernels.md has the definition.
"""

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """lowbias32, a finaliser of 32-bit integers."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def head_keys(seed_ptr, head):
    """The keys with which the rows and the columns of one batch x head begin."""
    seed = tl.load(seed_ptr)
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    key = mix(mix(low) ^ high ^ (head.to(tl.uint32) * 0x9E3779B9))
    return key, mix(key + 0x85EBCA6B)


@triton.jit
def row_key(q_token, row_head):
    x = q_token.to(tl.uint32) * 0x9E3779B1 + row_head
    return x ^ (x >> 16)


@triton.jit
def column_key(k_token, column_head):
    x = k_token.to(tl.uint32) * 0x85EBCA77 + column_head
    return x ^ (x >> 16)


@triton.jit
def keeps(row_keys, column_keys, threshold):
    """Which probabilities are kept; the keys broadcast to the shape of the tile."""
    x = row_keys ^ column_keys
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x >= threshold.to(tl.uint32)
