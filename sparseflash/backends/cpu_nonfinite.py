"""NaN and infinities on the CPU: they reach the rows that see them, and no others.

Products over a whole block multiply the zero probability of a hidden pair by its key and value, and
zero times NaN or infinity is NaN. So where a result is not finite, it is computed again carefully:
what is hidden is overwritten, and NaN and infinities are left out of the second factors of
products. Those of q and k are in the probabilities, too. Those of v and dout are marked here.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sparseflash.backends.protocol import NO_TERMS, Results, Saved


def all_finite(*tensors: Tensor) -> bool:
    """Whether nothing is NaN or infinite; False as well where a sum overflows."""
    return all(math.isfinite(_sum(t)) for t in tensors)


def _sum(t: Tensor) -> float:
    """Return the sum by one thread: torch's threads take longer to wake up than this takes."""
    if t.dtype.itemsize == 2:  # NumPy lacks bfloat16, and sums of float16 overflow
        return t.sum(dtype=torch.float32).item()
    with np.errstate(all="ignore"):
        return float(t.numpy().sum())


def mark_rows(
    run: Callable[..., Results], q: Tensor, k: Tensor, v: Tensor, found: Results
) -> Results:
    """Return the results, NaN where a query sees a value that is not finite."""
    bad = ~v.isfinite()
    if bad.any():  # with scores of 0, out is a mean of what a query sees
        found.out[run(_zeros(q, 1), _zeros(k, 1), bad.float(), None, NO_TERMS).out > 0] = math.nan
    return found


def mark_keys(
    run: Callable[..., tuple[Tensor, ...]], dout: Tensor, saved: Saved, dv: Tensor
) -> None:
    """Make dv NaN where a query sees the key whose cotangent is not finite."""
    bad = ~dout.isfinite()
    if bad.any():  # with scores and an LSE of 0 every pair has the probability 1: dv is a count
        q, k, v = saved[:3]
        lse, width = _zeros(q, 1).squeeze(-1), v.shape[3]
        zeros = Saved(_zeros(q, 1), _zeros(k, 1), _zeros(v, width), _zeros(q, width), lse, None)
        dv[run(bad.float(), None, zeros)[2] > 0] = math.nan


def _zeros(t: Tensor, width: int) -> Tensor:
    return torch.zeros(*t.shape[:3], width, device=t.device)
