"""Attention of DTensors: each rank computes the batch entries and heads that it holds."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from masks import Mask
from sparseflash.picks.picks import Picks
from sparseflash.request import as_mask
from sparseflash.score.function import bound
from sparseflash.score.rule import rule_of
from sparseflash.select.base import Selector


def is_sharded(q: Any) -> bool:
    """Return whether q is a DTensor."""
    if type(q) is torch.nn.Parameter or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor  # a heavy import, which has been made if q is one

    return isinstance(q, DTensor)


def separable(mask: Any) -> tuple[bool, bool]:
    """Return whether a share of the batch, and one of the heads, takes the mask of the whole."""
    if isinstance(mask, Selector | None):
        return True, True
    if isinstance(mask, Picks):
        return False, False
    one = (None, 1)
    return mask.batch in one, mask.heads in one and not (isinstance(mask, Mask) and mask.per_head)


def on_shards(
    attend: Callable[..., Any], q: Any, k: Any, v: Any, mask: Any, lengths: Any, starts: Any,
    sink: Any, score: Any, *, seed: Any, dropout_p: float, **options: Any,
) -> Any:  # fmt: skip
    """Return the results of `attend`, which is `sparseflash.attention`, as DTensors sharded like q.

    The mesh dimensions that shard the batch or the heads of q shard them in every input and result.
    Along all others, and where the mask, the score or dropout depends on the number of the entry or
    the head, or the extent does not divide, the inputs are gathered and the ranks compute the same.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = q.device_mesh
    for name, t in (("k", k), ("v", v)):
        if not isinstance(t, DTensor) or t.device_mesh != mesh:
            raise ValueError(f"q is a DTensor on {mesh}, {name} is not: distribute {name} as q is")
    mask = mask if isinstance(mask, Picks) else as_mask(mask)
    free = separable(mask) if not dropout_p else (False, False)
    if score is not None:
        score = bound(score)
        numbers = rule_of(score.key()).symbols
        free = free[0] and "b" not in numbers, free[1] and "h" not in numbers
    extents, shards = [q.shape[0], k.shape[1]], [Replicate()] * mesh.ndim
    for i, placement in enumerate(q.placements):
        dim = placement.dim if type(placement) is Shard else 2
        if dim < 2 and free[dim] and extents[dim] % mesh.size(i) == 0:
            extents[dim] //= mesh.size(i)
            shards[i] = placement

    def share(t: Any, dim: int | None) -> Tensor:
        """Return the part of a tensor (extent of dim `dim` of q, ...) that this rank needs, or all
        of it.
        """
        if not isinstance(t, DTensor):
            t = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
        places = [Shard(0) if dim is not None and s == Shard(dim) else Replicate() for s in shards]
        # the ranks that share the tensor have a part of the gradient each
        of_gradient = [
            Partial() if s != Replicate() and place == Replicate() else place
            for s, place in zip(shards, places, strict=True)
        ]
        return t.redistribute(mesh, places).to_local(grad_placements=of_gradient)

    lengths, starts = (
        None if t is None else share(torch.as_tensor(t, device=q.device), 0)
        for t in (lengths, starts)
    )
    sink = None if sink is None else share(sink, 1)
    if score is not None:
        score = score._replace(tables=tuple(share(t, None) for t in score.tables))
    if dropout_p and not isinstance(seed, int):  # that of the first rank
        drawn = torch.randint(2**63 - 1, (1,), device=q.device) if seed is None else seed
        seed = DTensor.from_local(drawn, mesh, [Replicate()] * mesh.ndim, run_check=True).to_local()
    q, k, v = (t.redistribute(mesh, shards).to_local() for t in (q, k, v))
    options |= {"lengths": lengths, "starts": starts, "sink": sink, "score": score}
    found = attend(q, k, v, mask, seed=seed, dropout_p=dropout_p, **options)
    made = [
        DTensor.from_local(t, mesh, shards, run_check=False)
        for t in (found if isinstance(found, tuple) else [found])
    ]
    return tuple(made) if isinstance(found, tuple) else made[0]
