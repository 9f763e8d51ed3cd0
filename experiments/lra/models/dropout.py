"""Dropout of hidden states, by a hash that torch.compile puts into the kernels around it.

torch's own takes ten rounds of Philox for each entry, more arithmetic than the GELU beside it, and
keeps its choices for the backward. This one takes a round of two products, and computes it again.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VERSION = 2  # of what a seed drops; 1, to 26 November 2026, was torch's dropout

# Of two hashes of C. Wellons, https://nullprogram.com/blog/2018/07/31/, as int32
FACTORS = 0x2C1B3C6D, 0x7FEB352D, 0x846CA68B - 2**32


@torch.library.custom_op(
    "sparseflash_lra::draw_seeds", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded]
)
def draw_seeds(count: int, device: torch.device) -> Tensor:
    """Seeds of `count` dropouts from torch's generator: int32 (count, 2).

    An operator, since torch.compile would compute the seeds again for every entry. It would also
    take equal calls for one, so draw all seeds of a forward in one call.
    """
    return torch.randint(-(2**31), 2**31, (count, 2), dtype=torch.int32, device=device)


@draw_seeds.register_fake
def _(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, 2, dtype=torch.int32, device=device)


class Dropout(nn.Module):
    """Zeroes each entry with probability p, and scales the others by 1 / (1 - p)."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, seed: Tensor | None) -> Tensor:
        """Return a tensor of the shape of x. seed: int32 (2,), of `draw_seeds`; None: torch's
        dropout, which is faster where nothing is compiled.
        """
        return F.dropout(x, self.p, self.training) if seed is None else _Drop.apply(x, seed, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, seed: Tensor, p: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(seed)
        ctx.p = p
        return _drop(x, places(x) + seed[0], seed[1], p)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        """Return the sum is the other way round, lest torch.compile keep what the forward has
        found.
        """
        (seed,) = ctx.saved_tensors
        return _drop(gradient, seed[0] + places(gradient), seed[1], ctx.p), None, None


def places(x: Tensor) -> Tensor:
    """int32, of the shape of x: the number of each entry."""
    return torch.arange(x.numel(), device=x.device).int().view(x.shape)


def _drop(x: Tensor, h: Tensor, key: Tensor, p: float) -> Tensor:
    # torch.compile would multiply an index, without a seed, as an integer of any size
    h = h * FACTORS[0]
    h = (h ^ (h >> 16)) * FACTORS[1] + key
    h = (h ^ (h >> 15)) * FACTORS[2]
    return torch.where(h >= round(p * 2**32) - 2**31, x * (1 / (1 - p)), 0.0)
