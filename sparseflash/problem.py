"""What a plan depends on: the layout of q, k and v, the mask and the options of a call."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Layout = tuple[int, ...]


def scale_or_default(scale: float | None, head_dim: int) -> float:
    """Return what the scores are multiplied by."""
    return head_dim**-0.5 if scale is None else scale


class Options(NamedTuple):
    """Options of a call that its results depend on, beside the seed."""

    scale: float | None  # see `scale_or_default`
    dropout_p: float
    deterministic: bool
    backend: str
    score: str = ""  # the key of a score function; see `sparseflash.score.rule.rule_of`
    keyed: bool = False  # whether the seed is a table; see `sparseflash.dropout.key_table`
    max_scores: bool = False  # whether the largest logit of each query is kept


class Problem(NamedTuple):
    """One kind of call: everything but the values of its tensors. The key of a plan.

    mask: None for dense attention, the key of a `Mask` or `BlockMask`, or the `ScheduleFacts` of
        a schedule that each call brings.
    misaligned: which of "q", "k" and "v" do not begin at a multiple of 16 bytes.
    needs_grad: whether a gradient of q, k or v may be asked for.
    """

    q_shape: Layout
    k_shape: Layout
    v_shape: Layout
    q_strides: Layout
    k_strides: Layout
    v_strides: Layout
    dtype: torch.dtype
    device: torch.device
    mask: Hashable
    options: Options
    misaligned: str
    needs_grad: bool

    @property
    def scale(self) -> float:
        return scale_or_default(self.options.scale, self.head_dim)

    @property
    def batch(self) -> int:
        return self.q_shape[0]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.q_shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k_shape[1]

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.q_shape[1] // self.k_shape[1]

    @property
    def n_q(self) -> int:
        return self.q_shape[2]

    @property
    def n_k(self) -> int:
        return self.k_shape[2]

    @property
    def head_dim(self) -> int:
        """Of q and k."""
        return self.q_shape[3]

    @property
    def head_dim_v(self) -> int:
        return self.v_shape[3]

    @property
    def layouts(self) -> dict[str, tuple[Layout, Layout]]:
        """Shape and strides by name."""
        return {
            "q": (self.q_shape, self.q_strides),
            "k": (self.k_shape, self.k_strides),
            "v": (self.v_shape, self.v_strides),
        }


def key_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Hashable, options: Options, needs_grad: bool
) -> tuple[Any, ...]:
    """Return a key that compares equal to the call's `Problem`.

    k and v must have the dtype and device of q.

    A plain tuple is made in half the time of a `Problem`, which it finds in the cache.
    """
    misaligned = ""
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        names = zip("qkv", (q, k, v), strict=True)
        misaligned = "".join(name for name, t in names if t.data_ptr() & 15)
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, mask,
        options, misaligned, needs_grad,
    )  # fmt: skip


def describe(
    q: Tensor, k: Tensor, v: Tensor, mask: Hashable, options: Options, needs_grad: bool
) -> Problem:
    """Return the problem of a call."""
    return Problem._make(key_of(q, k, v, mask, options, needs_grad))
