"""Ready score functions, as `score=` of `sparseflash.attention`.

Those without a parameter, `alibi` and `pair`, are called with their tensors; the others make such a
function: `score_rules.alibi(slopes=slopes)`, `score_rules.swin(7)(bias=table)`. Distances are
counted from the last token of queries and keys, which face each other.
"""

import math
from functools import partial

import numpy as np

from masks.checks import integer
from sparseflash.checks import is_number
from sparseflash.score.function import Score, score


def softcap(cap: float) -> Score:
    """Return cap tanh(s / cap), which bounds the scores: Gemma 2, arXiv 2408.00118. No tensors."""
    if not is_number(cap) or not 0 < cap < math.inf:
        raise ValueError(f"cap is {cap!r}; pass a positive finite number")
    return score(partial(_softcap, cap))


def _softcap(cap, s):
    return cap * np.tanh(s / cap)


def _alibi(s, h, q, k, n_q, n_k, slopes):
    return s - slopes[h] * abs(k - q + n_q - n_k)


def _pair(s, b, h, q, k, bias):
    return s + bias[b, h, q, k]


#: s - slopes[h] |distance|, slopes (H,): ALiBi, arXiv 2108.12409. The slopes may be learned.
alibi = score(_alibi)

#: s + bias, (B, H, N_q, N_k), such as the pair representation of AlphaFold, Nature 596:583 (2021).
pair = score(_pair)


def relative(radius: int) -> Score:
    """Return s + bias[h, distance], bias (H, 2 radius + 1) for the distances -radius to radius of
    key and query. Longer ones take the first or the last entry: Shaw et al., arXiv 1803.02155.
    """
    radius = integer("radius", radius, min=1)
    return score(partial(_relative, radius))


def _relative(radius, s, h, q, k, n_q, n_k, bias):
    return s + bias[h, k - q + n_q - n_k + radius]


def t5(buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Score:
    """Return s + bias[bucket of the distance, h], bias (buckets, H): T5, arXiv 1910.10683, whose
    models also have scale=1.0. Half of the buckets are for one distance each, the others grow with
    the logarithm up to `max_distance`. In a decoder bidirectional is False.
    """
    buckets = integer("buckets", buckets, min=4)
    half = buckets // 2 if bidirectional else buckets
    exact = half // 2
    max_distance = integer("max_distance", max_distance, min=exact + 1)
    # 1e-4: where a bucket begins the logarithm is an integer, give or take its rounding
    growth = (half - exact) / math.log(max_distance / exact)

    return score(partial(_t5, (half, exact, growth, bidirectional)))


def _t5(buckets, s, h, q, k, n_q, n_k, bias):
    half, exact, growth, bidirectional = buckets
    d = k - q + n_q - n_k
    far = abs(d) if bidirectional else np.maximum(-d, 0)
    log = np.floor(np.log(np.maximum(far, exact) / exact) * growth + 1e-4) + exact
    bucket = np.where(far < exact, far, np.minimum(log, half - 1))
    after = np.where(d > 0, half, 0) if bidirectional else 0
    return s + bias[bucket + after, h]


def swin(rows: int, columns: int | None = None) -> Score:
    """Return s + bias[difference of the places, h] for the tokens of a window, row by row; bias
    ((2 rows - 1) (2 columns - 1), H), columns = rows by default: Swin, arXiv 2103.14030, BEiT.
    """
    rows = integer("rows", rows, min=1)
    columns = rows if columns is None else integer("columns", columns, min=1)
    return score(partial(_swin, rows, columns))


def _swin(rows, columns, s, h, q, k, bias):
    down, right = q // columns - k // columns + rows - 1, q % columns - k % columns
    return s + bias[down * (2 * columns - 1) + right + columns - 1, h]
