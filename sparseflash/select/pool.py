"""One vector for every block of tokens: means, maxima and minima, put end to end."""

from collections.abc import Sequence

import torch
from torch import Tensor

KINDS = ("mean", "max", "min")
PARTS = ("positive", "negative")  # the mean where it is above 0, and where it is below


def pool(x: Tensor, block: int, kinds: Sequence[str]) -> Tensor:
    """(B, H, blocks, kinds * D): the kinds end to end, over existing tokens of x (B, H, N, D).

    x is read once. float64 stays as it is, all else comes out in float32.
    """
    if _by_kernel(x, kinds):
        from sparseflash.select.kernels import pool_kernel

        return pool_kernel((x, block, kinds))[0]
    return pool_torch(x, block, kinds)


def pool_both(
    q: Tensor, q_block: int, q_kinds: Sequence[str], k: Tensor, k_block: int, k_kinds: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """`pool` of both, in one launch where there is one."""
    if _by_kernel(q, q_kinds) and _by_kernel(k, k_kinds):
        from sparseflash.select.kernels import pool_kernel

        of_q, of_k = pool_kernel((q, q_block, q_kinds), (k, k_block, k_kinds))
        return of_q, of_k
    return pool(q, q_block, q_kinds), pool(k, k_block, k_kinds)


def _by_kernel(x: Tensor, kinds: Sequence[str]) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and len(set(kinds)) == len(kinds)


def pool_torch(x: Tensor, block: int, kinds: Sequence[str]) -> Tensor:
    """`pool` in plain torch."""
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
