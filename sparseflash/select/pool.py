"""One vector for each block of tokens: means, maxima and minima, end to end."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparseflash.kernels.device import kernels_of, on_nvidia

KINDS = ("mean", "max", "min")
PARTS = ("positive", "negative")  # the mean where it is above 0, and where it is below
SCORES_AT_ONCE = 1 << 26  # bounds the memory of scores that are computed part by part


def pool(*inputs: tuple[Tensor, int, Sequence[str]]) -> tuple[Tensor, ...]:
    """Pools one or two (x, block, kinds), in one launch on a GPU that reads each x once.

    Returns (B, H, blocks, kinds * D) for each x (B, H, N, D): the kinds end to end, over the
    tokens that exist. float64 stays float64, all else comes out in float32.
    """
    if all(
        on_nvidia(x) and x.dtype != torch.float64 and len(set(kinds)) == len(kinds)
        for x, _, kinds in inputs
    ):
        return kernels_of("select").pool_blocks(*inputs)
    return tuple(pool_torch(*given) for given in inputs)


def pool_torch(x: Tensor, block: int, kinds: Sequence[str]) -> Tensor:
    """`pool` of one tensor in plain torch."""
    x = x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    whole = x.shape[2] // block * block
    blocks = x[:, :, :whole].unflatten(2, (-1, block)) if whole else x[:, :, :0, None]
    rest = x[:, :, whole:]
    pooled = []
    for kind in kinds:
        reduce = {"max": torch.amax, "min": torch.amin}.get(kind, torch.mean)
        parts = [reduce(blocks, 3)] if whole else []
        parts += [reduce(rest, 2, keepdim=True)] if rest.shape[2] else []
        found = torch.cat(parts, 2)
        if kind in PARTS:
            found = found.clamp(min=0) if kind == "positive" else found.clamp(max=0)
        pooled.append(found)
    return torch.cat(pooled, -1)


def dot(q: Tensor, k: Tensor, scale: float = 1.0) -> Tensor:
    """scale q (B, H, n, D) times k (B, H_kv, m, D) transposed: (B, H, n, m); heads in groups."""
    batch, heads, n, dim = q.shape
    grouped = q.reshape(batch * k.shape[1], -1, dim)
    keys = k.flatten(0, 1).mT
    if scale == 1.0:
        return torch.bmm(grouped, keys).view(batch, heads, n, k.shape[2])
    found = torch.baddbmm(grouped.new_empty(()), grouped, keys, beta=0, alpha=scale)
    return found.view(batch, heads, n, k.shape[2])
