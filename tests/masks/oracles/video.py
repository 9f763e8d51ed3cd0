"""Videos, frame after frame."""

import math
import random

import numpy as np

from masks import Mask
from masks.patterns.canvas import Radial, frame_causal, radial
from tests.masks.oracles import leaf, oracle


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    chunk = rng.choice([1, 1, 2, 3])
    window = rng.choice([None, *range(chunk, 8)])
    sinks = rng.randrange(4) if window else 0
    return frame_causal(rng.choice([1, 4, 10, 16, 32]), window, sinks=sinks, chunk=chunk)


@oracle("frame_causal")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    """Frame by frame: what is kept for the chunk that is generated is what its frames see."""
    tokens, chunk = mask.arguments["tokens"], mask.arguments["chunk"]
    frames = np.arange(max(n_q, n_k) + chunk)
    seen = np.zeros((len(frames),) * 2, bool)
    for begin in range(0, max(n_q, n_k), chunk):
        kept = frames[: begin + chunk]
        kept = [*kept[: mask.arguments["sinks"]], *kept[-mask.arguments["window"] :]]
        seen[np.ix_(range(begin, begin + chunk), kept)] = True
    q, k = np.arange(n_q) // tokens, np.arange(n_k) // tokens
    return seen[np.ix_(q, k)]


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    tokens = rng.choice([1, 2, 5, 8, 16, 20, 24, 50])
    return radial(tokens, least=rng.choice([1, 1, rng.randint(1, tokens)]))


@oracle(Radial)
def _(mask: Radial, n_q: int, n_k: int, heads: int) -> np.ndarray:
    """The paper's equation 4, pair of frames by pair, and wider than one token where told."""
    s, least = mask.tokens, mask.least
    place = abs(np.subtract.outer(np.arange(s), np.arange(s)))
    frames = -(-max(n_q, n_k) // s)
    pairs = []  # of frames, by their distance
    for apart in range(frames):
        power = 2 ** math.floor(math.log2(max(apart, 1)))
        near = (place + 1 <= s / power) if s / power >= least else np.zeros_like(place, bool)
        if apart % math.ceil(least * power / s) == 0:
            near = near | (place < least)
        pairs.append(near)
    rows = [[pairs[abs(i - j)] for j in range(frames)] for i in range(frames)]
    return np.block(rows)[:n_q, :n_k]
