"""Terms of the softmax beside scale q k^T: attention sinks."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.protocol import TermTensors
from sparseflash.checks import check_tensors


class Terms(NamedTuple):
    """What the softmax has beside scale q k^T.

    Args:
        sink: (H_q,), a logit for each query head that joins the denominator of every query and has
            no value. It has a gradient. A query with nothing to attend to gives output 0 and the
            LSE `sink`. See Xiao et al., arXiv 2309.17453; as in gpt-oss, it is learnable.
    """

    sink: Tensor | None = None


def term_tensors(terms: Any, q: Tensor, k: Tensor, v: Tensor) -> TermTensors:
    """The terms of a call as its backends take them: float32, or float64 like q.

    Raises ValueError for terms that do not fit q.
    """
    check_tensors(q, k, v)
    if not isinstance(terms, Terms):
        raise ValueError(f"terms is a {type(terms).__name__}; pass sparseflash.Terms(...) or None")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads = q.shape[1]
    return TermTensors(_checked("sink", terms.sink, (heads,), q.device, wide))


def _checked(
    name: str, t: Any, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    if t is None:
        return None
    if not isinstance(t, Tensor) or not t.is_floating_point():
        kind = t.dtype if isinstance(t, Tensor) else type(t).__name__
        raise ValueError(f"terms.{name} is {kind}; pass a tensor of floating-point numbers")
    if tuple(t.shape) != shape:
        raise ValueError(f"terms.{name} has shape {tuple(t.shape)}; it must be {shape}")
    if t.device != device:
        raise ValueError(f"terms.{name} is on {t.device}, q on {device}; move it there")
    return t.to(dtype).contiguous()
