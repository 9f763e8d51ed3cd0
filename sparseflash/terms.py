"""Terms of the softmax beside scale q k^T: sinks, soft-capping, and biases by distance."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.protocol import TermTensors
from sparseflash.checks import check_tensors, is_number


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


def term_options(terms: Any) -> tuple[float, bool]:
    """Return the last two of `Options`.

    Raises ValueError if `terms` is not a `Terms`, or its softcap not a positive finite number.
    """
    if terms is None:
        return 0.0, False
    if not isinstance(terms, Terms):
        raise ValueError(f"terms is a {type(terms).__name__}; pass sparseflash.Terms(...) or None")
    cap = terms.softcap
    if cap is not None and (not is_number(cap) or not 0 < cap < math.inf):
        raise ValueError(f"terms.softcap is {cap!r}; pass a positive finite number or None")
    return float(cap or 0.0), terms.slopes is not None or terms.bias is not None


def term_tensors(terms: Terms, q: Tensor, k: Tensor, v: Tensor) -> TermTensors:
    """Return the terms of a call as its backends take them: float32, or float64 like q.

    Raises ValueError for terms that do not fit q.
    """
    check_tensors(q, k, v)
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
