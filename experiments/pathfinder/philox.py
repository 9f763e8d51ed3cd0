"""Philox4x32-10 (Salmon et al., SC 2011): random numbers that depend only on (seed, index)."""

import numpy as np
from numba import njit

KEY, COUNTER, OUTPUT, USED = 0, 2, 6, 10  # places in the state, an array of uint64
STATE = 11
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))


@njit(cache=True, nogil=True)
def start(state, seed, index, kind):
    """Set the state to the beginning of the stream of image `index`.

    kind: below 2**32, different for each size and level.
    """
    state[:] = 0
    state[KEY] = np.uint64(seed) & LOW
    state[KEY + 1] = np.uint64(seed) >> HALF
    state[COUNTER + 1] = np.uint64(kind)
    state[COUNTER + 2] = np.uint64(index) & LOW
    state[COUNTER + 3] = np.uint64(index) >> HALF
    state[USED] = 4


@njit(cache=True, nogil=True)
def refill(state):
    """Draws four new words of 32 bits and advances the counter."""
    k0, k1 = state[KEY], state[KEY + 1]
    c0, c1, c2, c3 = state[COUNTER], state[COUNTER + 1], state[COUNTER + 2], state[COUNTER + 3]
    for _ in range(10):
        a = MULTIPLIERS[0] * c0
        b = MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (b >> HALF) ^ c1 ^ k0, b & LOW, (a >> HALF) ^ c3 ^ k1, a & LOW
        k0 = (k0 + WEYL[0]) & LOW
        k1 = (k1 + WEYL[1]) & LOW
    state[OUTPUT], state[OUTPUT + 1], state[OUTPUT + 2], state[OUTPUT + 3] = c0, c1, c2, c3
    state[COUNTER] += np.uint64(1)  # no image draws 2**34 numbers
    state[USED] = 0


@njit(cache=True, nogil=True)
def word(state):
    if state[USED] == np.uint64(4):
        refill(state)
    value = state[OUTPUT + np.int64(state[USED])]
    state[USED] += np.uint64(1)
    return value


@njit(cache=True, nogil=True)
def uniform(state):
    """Return a float in [0, 1)."""
    return float(word(state)) * 2.0**-32


@njit(cache=True, nogil=True)
def below(state, n):
    """Return an integer in [0, n), for n < 2**32."""
    return np.int64((word(state) * np.uint64(n)) >> HALF)
