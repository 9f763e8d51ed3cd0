"""NaN and infinities on the CPU: they reach the rows that see them, and no others.

Products over a whole block multiply the zero probability of a forbidden pair by its key and value,
and zero times NaN or infinity is NaN. Where a result is not finite, it is computed again without
the tokens that are not, and only rows and keys that see such a token keep the first result.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sparseflash.backends.protocol import NO_TERMS, Results, Saved, TermTensors

RunForward = Callable[[Tensor, Tensor, Tensor, Tensor | None, TermTensors], Results]
RunBackward = Callable[[Tensor, Tensor | None, Saved], tuple[Tensor, ...]]


def all_finite(*tensors: Tensor) -> bool:
    """Whether nothing is NaN or infinite; False as well where a sum overflows."""
    return all(math.isfinite(_sum(t)) for t in tensors)


def _sum(t: Tensor) -> float:
    """The sum by one thread: torch's threads take longer to wake up than this takes."""
    if t.dtype.itemsize == 2:  # NumPy lacks bfloat16, and sums of float16 overflow
        return t.sum(dtype=torch.float32).item()
    with np.errstate(all="ignore"):
        return float(t.numpy().sum())


def contain_forward(
    run: RunForward, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, terms: TermTensors,
    first: Results,
) -> Results:  # fmt: skip
    """The results of `run`, which gave `first`."""
    bad = _not_finite(k) | _not_finite(v)
    if not bad.any():
        return first
    clean = run(q, _without(k, bad), _without(v, bad), seed, terms)
    sees = run(_zeros(q), _zeros(k), bad.float().unsqueeze(-1), None, NO_TERMS)[0] > 0
    rows, max_scores = sees.squeeze(-1), None
    if first.max_scores is not None and clean.max_scores is not None:
        max_scores = torch.where(rows, first.max_scores, clean.max_scores)
    out, lse = torch.where(sees, first.out, clean.out), torch.where(rows, first.lse, clean.lse)
    return Results(out, lse, max_scores)


def contain_backward(
    run: RunBackward, dout: Tensor, dlse: Tensor | None, saved: Saved,
    first: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients, likewise; that of the bias is the sum over all that is finite."""
    q, k, v, out, lse, *_ = saved
    bad_key = _not_finite(k) | _not_finite(v)
    bad_row = _not_finite(q) | _not_finite(dout) | _not_finite(out)
    bad_row |= ~(lse.isfinite() | (lse == -torch.inf))
    if dlse is not None:
        bad_row |= ~dlse.isfinite() & (lse != -torch.inf)
    if not (bad_key.any() or bad_row.any()):
        return first
    clean = saved._replace(
        q=_without(q, bad_row), k=_without(k, bad_key), v=_without(v, bad_key),
        out=_without(out, bad_row), lse=lse.masked_fill(bad_row, -torch.inf),
    )  # fmt: skip
    dq, dk, dv, *dbias = run(_without(dout, bad_row), dlse, clean)
    # with scores of 0 and an LSE of 0 every pair has the probability 1: dv counts the bad rows
    marks = bad_row.float().unsqueeze(-1)
    counted = Saved(_zeros(q), _zeros(k), _zeros(v), _zeros(q), _zeros(q).squeeze(-1), None)
    seen = run(marks, None, counted)[2] > 0
    first_dq, first_dk, first_dv = first[:3]
    dq = torch.where(bad_row.unsqueeze(-1), first_dq, dq)
    return dq, torch.where(seen, first_dk, dk), torch.where(seen, first_dv, dv), *dbias


def _not_finite(t: Tensor) -> Tensor:
    """Bool (B, H, N): tokens with an element that is NaN or infinite."""
    return ~t.isfinite().all(-1)


def _without(t: Tensor, tokens: Tensor) -> Tensor:
    return t.masked_fill(tokens.unsqueeze(-1), 0.0)


def _zeros(t: Tensor) -> Tensor:
    return torch.zeros(*t.shape[:3], 1, device=t.device)
