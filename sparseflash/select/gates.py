"""A learned gate over blocks, and the target and the loss to train it with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from masks.algebra import Mask
from masks.block_mask import BlockMask
from masks.checks import block_sizes, flag, integer
from sparseflash.checks import check_scale, check_tensors, is_empty
from sparseflash.select.base import BlockSelector, selector
from sparseflash.select.blocks import KINDS, SCORES_AT_ONCE, dot, pool
from sparseflash.select.rules import adaptive, budget


class Gate(nn.Module):
    """Scores of blocks from pooled queries and keys, one linear map a head (SeerAttention,
    arXiv:2410.13276).

    The queries and keys of a block are pooled, the pooled vectors put end to end and mapped to
    gate_dim; the score of a block is their product. Train it against `attention_map` with
    `distillation_loss`; q and k get no gradient.

    Args:
        heads, kv_heads: of q and k; kv_heads defaults to heads.
        head_dim: D; gate_dim defaults to it.
        block_size: tokens, one size or (block_q, block_k).
        q_pool, k_pool: some of "mean", "max", "min".
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        gate_dim: int | None = None,
        block_size: int | tuple[int, int] = 64,
        q_pool: Sequence[str] = ("mean", "max", "min"),
        k_pool: Sequence[str] = ("mean", "max", "min"),
    ):
        super().__init__()
        self.block_size = block_sizes(block_size)
        heads, head_dim = integer("heads", heads, min=1), integer("head_dim", head_dim, min=1)
        kv_heads = heads if kv_heads is None else integer("kv_heads", kv_heads, min=1)
        gate_dim = head_dim if gate_dim is None else integer("gate_dim", gate_dim, min=1)
        if heads % kv_heads:
            raise ValueError(f"kv_heads is {kv_heads}; it must divide heads, {heads}")
        for name, kinds in (("q_pool", q_pool), ("k_pool", k_pool)):
            if not kinds or not set(kinds) <= set(KINDS):
                raise ValueError(f"{name} is {kinds!r}: give some of {', '.join(KINDS)}")
        self.q_pool, self.k_pool = tuple(q_pool), tuple(k_pool)
        self.q_weight = nn.Parameter(torch.empty(heads, len(self.q_pool) * head_dim, gate_dim))
        self.k_weight = nn.Parameter(torch.empty(kv_heads, len(self.k_pool) * head_dim, gate_dim))
        for weight in (self.q_weight, self.k_weight):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, H, rows, cols), differentiable by the weights; softmax makes them probabilities."""
        check_tensors(q, k)
        for name, t, weight, kinds in (
            ("q", q, self.q_weight, self.q_pool), ("k", k, self.k_weight, self.k_pool)
        ):  # fmt: skip
            if (made := (len(weight), weight.shape[1] // len(kinds))) != (t.shape[1], t.shape[3]):
                raise ValueError(
                    f"{name} has {t.shape[1]} heads and head dim {t.shape[3]}, the gate is for"
                    f" {made[0]} and {made[1]}: make it with those of q and k"
                )
        block_q, block_k = self.block_size
        q_pooled, k_pooled = pool((q, block_q, self.q_pool), (k, block_k, self.k_pool))
        q_gate, k_gate = (
            pooled.to(weight.dtype) @ weight
            for pooled, weight in ((q_pooled, self.q_weight), (k_pooled, self.k_weight))
        )
        return dot(q_gate, k_gate, q_gate.shape[-1] ** -0.5)

    forward = scores


@dataclass(frozen=True, repr=False, eq=False)
class Gated(BlockSelector):
    """The selectors of `gate`."""

    module: Any

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return self.module.scores(q, k)


@selector
def gate(
    module: Gate,
    k: int | float | None = None,
    *,
    threshold: float | None = None,
    mass: float | None = None,
    min_blocks: int = 1,
    max_blocks: int | None = None,
    within: Mask | BlockMask | None = None,
    always: Mask | BlockMask | None = None,
) -> Gated:
    """Return the blocks that a learned gate opens; give one of k, threshold and mass.

    Args:
        module: a `Gate`, or any module with its `block_size` and `scores`.
        k: that many key blocks of each query block, or that share of them, the best first.
        threshold: the blocks of at least this probability.
        mass: the fewest blocks whose probabilities reach this sum.
        min_blocks, max_blocks: bounds on the blocks of a row, with `threshold` and `mass`.
        within, always: as in `top_k`. SeerAttention always takes the diagonal: local(0).

    Raises ValueError for arguments out of range.
    """
    if sum(x is not None for x in (k, threshold, mass)) != 1:
        raise ValueError(f"k, threshold and mass are {k}, {threshold} and {mass}: give one of them")
    if isinstance(module, type) or not (
        hasattr(module, "block_size") and hasattr(module, "scores")
    ):
        raise ValueError(
            f"module is {module!r}: give a Gate, or a module with block_size and scores"
        )
    if threshold is not None:
        rule = adaptive("level", "threshold", threshold, min_blocks, max_blocks)
    elif mass is not None:
        rule = adaptive("mass", "mass", mass, min_blocks, max_blocks)
    else:
        rule = budget("k", k)
    return Gated(block_sizes(module.block_size), within, rule, always, module)


@torch.no_grad()
def attention_map(
    q: Tensor,
    k: Tensor,
    block_size: int | tuple[int, int] = 64,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return the target of a gate: the largest probability of every block, each row scaled to sum
    to 1.

    Returns (B, H, rows, cols) from dense attention of q (B, H, N_q, D) and k (B, H_kv, N_k, D);
    `causal` aligns the first query with the first key. Takes the time of dense attention, for
    training; the scores are computed some block rows at a time.
    """
    check_tensors(q, k)
    if is_empty(q, k):
        raise ValueError(f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}: give some tokens")
    check_scale(scale)
    flag("causal", causal)
    block_q, block_k = block_sizes(block_size)
    n_q, n_k = q.shape[2], k.shape[2]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    key = torch.arange(n_k, device=q.device)
    step = max(1, SCORES_AT_ONCE // (q.shape[0] * q.shape[1] * n_k * block_q)) * block_q
    rows = []
    for start in range(0, n_q, step):
        part = dot(q[:, :, start : start + step].to(dtype) * factor, k.to(dtype))
        if causal:
            token = torch.arange(start, start + part.shape[2], device=q.device)
            part = part.masked_fill(key > token[:, None], -torch.inf)
        p = F.pad(part.softmax(-1), (0, -n_k % block_k, 0, -part.shape[2] % block_q))
        p = p.unflatten(3, (-1, block_k)).amax(4).unflatten(2, (-1, block_q)).amax(3)
        rows.append(p)
    found = torch.cat(rows, 2)
    return found / found.sum(-1, keepdim=True)


def distillation_loss(scores: Tensor, target: Tensor, candidates: Tensor | None = None) -> Tensor:
    """KL divergence of a gate's softmax from `attention_map`: a scalar, the mean over rows.

    Args:
        scores, target: (B, H, rows, cols), of query blocks and key blocks.
        candidates: bool, broadcastable to scores: the blocks that are allowed, such as
            `masks.causal().build(n, n, 64).layout() > 0` as a tensor.
    """
    if scores.shape != target.shape:
        raise ValueError(
            f"scores have shape {tuple(scores.shape)}, target {tuple(target.shape)}: make the map"
            " with the block size of the gate"
        )
    if candidates is not None:
        scores = scores.masked_fill(~candidates, torch.finfo(scores.dtype).min)
    log_p = scores.log_softmax(-1).flatten(0, -2)
    return F.kl_div(log_p, target.to(log_p.dtype).flatten(0, -2), reduction="batchmean")
