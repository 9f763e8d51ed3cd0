"""Terms of the softmax beside scale q k^T: sinks, soft-capping, and biases by distance."""

import math
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.protocol import NO_TERMS, TermTensors
from sparseflash.checks import check_tensors, is_number
from sparseflash.score import rules
from sparseflash.score.function import Bound, Score, check_fit


class Terms(NamedTuple):
    """What the softmax has beside scale q k^T.

    The logit of query i and key j is softcap tanh(scale q_i k_j / softcap) - slope |d| + bias[d],
    at the distance d = (j - N_k) - (i - N_q): the last query stands at the last key.

    Args:
        sink: (H_q,), a logit for each query head that joins the denominator of every query and has
            no value. It has a gradient. A query with nothing to attend to gives output 0 and the
            LSE `sink`. See Xiao et al., arXiv 2309.17453; as in gpt-oss, it is learnable.
        softcap: bound of the scores, a positive number. See Gemma 2, arXiv 2408.00118.
        slopes: (H_q,), those of ALiBi, arXiv 2108.12409. They have no gradient.
        bias: (H_q, 2 R + 1), added to the logits of distances -R to R. Longer distances take the
            first or the last entry. It has a gradient. See Shaw et al., arXiv 1803.02155.
    """

    sink: Tensor | None = None
    softcap: float | None = None
    slopes: Tensor | None = None
    bias: Tensor | None = None


def term_options(terms: Any, score: Any = None) -> tuple[float, bool, str]:
    """Return softcap, biased and score of `Options`.

    Raises ValueError if `terms` is not a `Terms`, its softcap not a positive finite number, or
    `score` no score function with its tensors.
    """
    key = "" if score is None else bound(score).key()
    if terms is None:
        return 0.0, False, key
    if not isinstance(terms, Terms):
        raise ValueError(f"terms is a {type(terms).__name__}; pass sparseflash.Terms(...) or None")
    cap = terms.softcap
    if cap is not None and (not is_number(cap) or not 0 < cap < math.inf):
        raise ValueError(f"terms.softcap is {cap!r}; pass a positive finite number or None")
    given = [name for name in ("softcap", "slopes", "bias") if getattr(terms, name) is not None]
    if key and given:
        raise ValueError(
            f"terms.{given[0]} beside score=; write it in the score, as sparseflash.score_rules do"
        )
    return float(cap or 0.0), terms.slopes is not None or terms.bias is not None, key


def bound(score: Any) -> Bound:
    """Return the score function with its tensors; ValueError for anything else."""
    if isinstance(score, Score):
        return score()
    if not isinstance(score, Bound):
        what = score.__qualname__ if isinstance(score, FunctionType) else type(score).__name__
        raise ValueError(f"score is {what}; pass sparseflash.score(fn), called with its tensors")
    return score


def term_tensors(terms: Terms | None, q: Tensor, k: Tensor, v: Tensor, score: Any) -> TermTensors:
    """Return the terms of a call as its backends take them: float32, or float64 like q; and the
    tables of its score function, as they are.

    Raises ValueError for terms and tables that do not fit q.
    """
    check_tensors(q, k, v)
    found = NO_TERMS if terms is None else _of_terms(terms, q)
    if score is None:
        return found
    score = bound(score)
    check_fit(score, q.device, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    return found._replace(tables=tuple(t.contiguous() for t in score.tables))


def _of_terms(terms: Terms, q: Tensor) -> TermTensors:
    if terms.slopes is not None and getattr(terms.slopes, "requires_grad", False):
        raise ValueError("terms.slopes requires a gradient and has none; pass slopes.detach()")
    bias = terms.bias
    length = bias.shape[-1] if isinstance(bias, Tensor) and bias.ndim == 2 else 1
    if isinstance(bias, Tensor) and (length < 3 or length % 2 == 0):
        raise ValueError(
            f"terms.bias has shape {tuple(bias.shape)}; it must be (H_q, 2 R + 1) with R > 0"
        )
    heads = q.shape[1]
    return TermTensors(
        _checked("sink", terms.sink, (heads,), q),
        _checked("bias", bias, (heads, length), q),
        _checked("slopes", terms.slopes, (heads,), q),
    )


def as_score(terms: Terms, q: Tensor) -> Bound:
    """Return softcap, slopes and bias as a score function; ValueError where they do not fit q."""
    given = _of_terms(terms, q)
    tensors = {"slopes": given.slopes, "bias": given.bias}
    tensors = {name: t for name, t in tensors.items() if t is not None}
    radius = 0 if given.bias is None else given.bias.shape[1] // 2
    return _rule(float(terms.softcap or 0.0), given.slopes is not None, radius)(**tensors)


@lru_cache(maxsize=64)
def _rule(cap: float, sloped: bool, radius: int) -> Score:
    def capped(s):
        return rules.softcap(cap).fn(s) if cap else s

    def with_slopes(s, h, q, k, n_q, n_k, slopes):
        return rules.alibi.fn(capped(s), h, q, k, n_q, n_k, slopes)

    def with_bias(s, h, q, k, n_q, n_k, bias):
        return rules.relative(radius).fn(capped(s), h, q, k, n_q, n_k, bias)

    def with_both(s, h, q, k, n_q, n_k, slopes, bias):
        s = with_slopes(s, h, q, k, n_q, n_k, slopes)
        return rules.relative(radius).fn(s, h, q, k, n_q, n_k, bias)

    return Score((with_both if sloped else with_bias) if radius else with_slopes)


def _checked(name: str, t: Any, shape: tuple[int, ...], q: Tensor) -> Tensor | None:
    if t is None:
        return None
    if not isinstance(t, Tensor) or not t.is_floating_point():
        kind = t.dtype if isinstance(t, Tensor) else type(t).__name__
        raise ValueError(f"terms.{name} is {kind}; pass a tensor of floating-point numbers")
    if tuple(t.shape) != shape:
        raise ValueError(f"terms.{name} has shape {tuple(t.shape)}; it must be {shape}")
    if t.device != q.device:
        raise ValueError(f"terms.{name} is on {t.device}, q on {q.device}; move it there")
    return t.to(torch.float64 if q.dtype == torch.float64 else torch.float32).contiguous()
