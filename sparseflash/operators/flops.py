"""Formulas of the operators for `torch.utils.flop_counter.FlopCounterMode`."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from masks import Mask
from masks.segments import Segments, area
from masks.spec import find


def register() -> None:
    """Let FlopCounterMode count the operators, also where it is active already.

    Its module imports Triton, so this waits until something else has imported it.
    """
    module: Any = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    ops = torch.ops.sparseflash
    formulas = {ops.forward: _forward, ops.inference: _forward, ops.backward: _backward}
    counters = (getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack())
    known: Any
    for known in (module, *counters):
        if hasattr(known, "flop_registry"):
            known.flop_registry.update(formulas)


def _count(
    direction: str, q: Tensor, k: Tensor, v: Tensor, mask: str,
    schedule: list[Tensor] | None, numbers: list[int] | None,
) -> int:  # fmt: skip
    """Return the operations of the matrix products over the computed blocks.

    Those of a schedule are its entries, which for a selection are at most so many. A backward has
    five products for two of the forward, whatever a kernel repeats.
    """
    (batch, heads, n_q, d), (_, _, n_k, d_v) = q.shape, v.shape
    pairs = n_q * n_k
    if schedule and numbers:
        block_q, block_k, own_batch, own_heads = numbers[:4]
        entries = schedule[2].shape[0]
        pairs = min(n_q, block_q) * min(n_k, block_k) * entries / (own_batch * own_heads)
    elif mask:
        blocks = find(mask)
        if isinstance(blocks, Mask):
            blocks = blocks.build(n_q, n_k, heads=heads if blocks.per_head else None)
        pairs = area(Segments.of(blocks)) / (blocks.batch * blocks.heads)
    products = d + d_v if direction == "forward" else 3 * d + 2 * d_v
    return round(2 * batch * heads * pairs * products)


def _forward(q, k, v, mask, schedule, numbers, *_, **__) -> int:
    return _count("forward", q, k, v, mask, schedule, numbers)


def _backward(dout, dlse, q, k, v, out, lse, mask, schedule, numbers, *_, **__) -> int:
    return _count("backward", q, k, v, mask, schedule, numbers)
