"""The gradient of attention sinks, for backends that compute with torch. The kernels of the others
sum it where they make delta. See docs/internals/kernels.md.
"""

import math

from torch import Tensor

from sparseflash.backends.protocol import Saved


def sink_gradient(dout: Tensor, dlse: Tensor | None, saved: Saved) -> Tensor | None:
    """(H,) like the sink: -sum exp(sink - lse) delta, with delta = rowsum(dout * out) - dlse.

    out and lse are those with the sink. None where there is no sink.
    """
    out, lse, sink = saved.out, saved.lse, saved.terms.sink
    if sink is None:
        return None
    delta = (dout.to(lse.dtype) * out).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    p = (sink[:, None] - lse.masked_fill(lse == -math.inf, math.inf)).exp_()
    return -(p * delta).sum((0, 2))
