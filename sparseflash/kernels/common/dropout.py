"""Dropout inside kernels: which probabilities are kept, a hash of (seed, head, query, key).

The same arithmetic as sparseflash/dropout.py, with its constants, for the kernels in Triton and
those in Gluon. docs/internals/kernels.md has the definition.

Four entries share a hash: those of queries q, q + 8 and keys k, k + 8. In the accumulators of MMA
and wgmma one thread holds all four, whether the scores are transposed or not. Kernels name the
tokens of every entry, and the compiler finds what they share.
"""

import triton
import triton.language as tl

from sparseflash import dropout as definition

QUERY_STEP = tl.constexpr(definition.QUERY_STEP)
KEY_STEP = tl.constexpr(definition.KEY_STEP)
_HEAD_STEP = tl.constexpr(definition.HEAD_STEP)
_KEY_STREAM = tl.constexpr(definition.KEY_STREAM)
_SPREAD = tl.constexpr(definition.SPREAD)
_FACTOR = tl.constexpr(definition.FACTOR)
_FACTOR_8 = tl.constexpr(definition.FACTOR * definition.QUERY_FACTOR % 2**32)
_KEY_FACTOR = tl.constexpr(definition.KEY_FACTOR)


@triton.constexpr_function
def is_table(seed):
    """Whether a seed, or what `head_keys` found with it, points to a table of keys."""
    pointer = isinstance(seed, tl.tensor) and seed.dtype.is_ptr()
    return pointer and seed.dtype.element_ty == tl.int32


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
    """Return the keys with which the rows and the columns of one batch x head begin; where the seed
    is a `key_table`, pointers to all of them.
    """
    if is_table(seed_ptr):
        rows = tl.load(seed_ptr)
        keys = seed_ptr + 2 + head.to(tl.int64) * (rows + tl.load(seed_ptr + 1))
        return keys, keys + rows
    else:
        seed = tl.load(seed_ptr)
        low = seed.to(tl.uint32)
        high = (seed >> 32).to(tl.uint32)
        key = mix(mix(low) ^ high ^ (head.to(tl.uint32) * _HEAD_STEP))
        return key, mix(key + _KEY_STREAM)


@triton.jit
def key_of(token, step, head):
    """Return the key of a query or key; one that is 8 tokens away has the same."""
    if is_table(head):
        return tl.load(head + ((token >> 4) * 8 + (token & 7))).to(tl.uint32)
    else:
        return (token & -9).to(tl.uint32) * step + head


@triton.jit
def group_hash(query_keys, key_keys):
    """Return the hash of four entries; the keys broadcast to the shape of the tile."""
    x = (query_keys ^ key_keys).to(tl.uint64) * _SPREAD
    return x.to(tl.uint32) ^ (x >> 32).to(tl.uint32)


@triton.jit
def noise(group, q_token, k_token):
    """Return a uniform uint32 for every entry, from the hash of its four."""
    query_factor = tl.where((q_token & 8) == 0, _FACTOR, _FACTOR_8).to(tl.uint32)
    key_factor = tl.where((k_token & 8) == 0, 1, _KEY_FACTOR).to(tl.uint32)
    return group * (query_factor * key_factor)


@triton.jit
def keeps(noise, threshold):
    """Which probabilities are kept."""
    return noise >= threshold.to(tl.uint32) << 16
