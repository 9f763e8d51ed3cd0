"""The plan of a mask for a mesh: blocks of tokens, heads, or both."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from masks import BlockMask, Mask
from masks.analysis.partition import Partition
from masks.checks import integer
from masks.runs import Ints
from sparseflash.distributed.heads import share_of_heads
from sparseflash.distributed.plan import ContextParallel, blocks_of, digest_of
from sparseflash.distributed.selected import differs_by_head
from sparseflash.select.base import Selector

Route = Literal["auto", "blocks", "keys", "heads"]
ROUTES = ("auto", "blocks", "keys", "heads")


def context_parallel(
    mesh: Any,
    mask: Mask | BlockMask | Selector | np.ndarray | Tensor | str | None,
    n: int,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int = 128,
    block_size: int = 128,
    owner: str | Ints = "auto",
    route: Route = "auto",
    tflops: float = 600.0,
    gb_s: float = 450.0,
) -> ContextParallel:
    """Return a plan of attention over a sequence that the ranks of a group share.

    Each rank owns some blocks of tokens and computes the rows of its queries. It receives the key
    blocks that these need and no others; a row that needs most keys sends its queries instead. The
    result is that of one device.

    Args:
        mesh: a one-dimensional `DeviceMesh`, a process group, or None for all ranks. In a mesh of
            two dimensions heads are shared on the first and blocks of tokens on the second. Or
            (rank, ranks): then no group is needed, as in a worker of a data loader, the plan can be
            pickled, and `plan.on(mesh)` gives it its group.
        mask: of the whole sequence, as in `sparseflash.attention`; the same on every rank. Or a
            selector of `sparseflash.select`, which chooses at each call.
        n: tokens of the whole sequence.
        heads, kv_heads: of queries, and of keys and values; those of the mask by default, and
            `heads`.
        head_dim: of the model that times are estimated from.
        block_size: tokens; that of a BlockMask or a selector stays.
        owner: who owns which block of tokens: "auto" takes the fastest by the model of
            `masks.Mask.partition`, which lists the others; or (blocks,) ranks.
        route: "blocks" (keys, or queries where these are fewer), "keys", "heads" (all tokens of a
            share of the heads, for masks that need all keys everywhere), or "auto".
        tflops, gb_s: of one device and its link, for the model.

    Every rank of the group has to call it, with the same arguments; without a group they are
    compared at the first call of attention.
    Raises ValueError for arguments out of range, and where the ranks disagree.
    """
    kind = Grid if getattr(mesh, "ndim", 1) == 2 else ContextParallel
    group: Any = mesh
    if kind is Grid:
        group = mesh.get_group(0), mesh.get_group(1)
    elif hasattr(mesh, "get_group"):
        group = mesh.get_group()
    n = integer("n", n, min=1)
    if route not in ROUTES:
        raise ValueError(f"route is {route!r}; choose one of {', '.join(ROUTES)}")
    unbound = isinstance(mesh, tuple)
    tokens_of: Any = group[1] if kind is Grid else group
    ranks = _place(mesh)[1] if unbound else dist.get_world_size(tokens_of)
    source, blocks = blocks_of(mask, n, block_size, heads)
    by_head = isinstance(source, Selector) and differs_by_head(source)
    if isinstance(source, Selector) and kind is Grid:
        raise ValueError(f"a mesh of two dimensions takes a mask, not the selector {source!r}")
    sizes: dict[str, Any] = {"head_dim": head_dim, "tflops": tflops, "gb_s": gb_s}
    sizes |= {"heads": heads, "kv_heads": kv_heads}
    chosen = isinstance(source, Selector)
    found = blocks.partition(ranks, owner=owner, queries=not chosen and route != "keys", **sizes)
    if kind is Grid:
        route, ranks = "blocks" if route == "auto" else route, dist.get_world_size(group[0])
        if route == "heads" or found.sizes.kv_heads < ranks:
            raise ValueError(
                f"route is {route!r}, and there are {found.sizes.kv_heads} key heads: a mesh of two"
                f" dimensions takes {ranks} or more, a key head for each rank of the first one, and"
                " route='blocks' or 'keys' for the second"
            )
    elif route == "auto":
        heads_travel = found.rivals().get("heads", (0.0, 0.0))[1] > 1.05 * found.speedup
        possible = found.sizes.kv_heads >= ranks and not by_head
        route = "heads" if heads_travel and possible else "blocks"
    if route == "heads" and found.sizes.kv_heads < ranks:
        raise ValueError(f"route='heads' needs a key head a rank: {found.sizes.kv_heads} < {ranks}")
    made = kind(group, source, blocks, found, route)
    if not unbound:
        made.check_agreement()
    return made


class Grid(ContextParallel):
    """Heads on one dimension of a mesh, blocks of tokens on the other.

    The ranks of the first dimension share the heads of the same tokens, which are those of one rank
    of the second one: heads travel among the ones, then blocks among the others.
    """

    def __init__(
        self, groups: tuple[Any, Any], source: Any, mask: BlockMask, found: Partition, route: str
    ):
        """found: of the ranks of the second dimension, for all heads."""
        self.group, self._groups, self.bound = groups[0], groups, True
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.source, self.mask, self.partition = source, mask, found
        self.heads, self.kv_heads = found.sizes.heads, found.sizes.kv_heads
        share = share_of_heads(mask, self.heads, self.kv_heads, self.ranks)
        sizes = found.sizes._replace(
            heads=len(share.heads[self.rank]), kv_heads=len(share.kv_heads[self.rank])
        )
        own = share.masks[self.rank]
        ranks = dist.get_world_size(groups[1])
        part = own.partition(ranks, owner=found.owner, **sizes._asdict())
        given = source if mask.heads == 1 else own
        self.number, self.whole_heads = share.heads[self.rank], self.heads
        heads = self.number, self.heads
        self.inner = ContextParallel(groups[1], given, own, part, route, *heads)
        self.share = replace(share, masks=(self.inner,) * self.ranks)
        self.n, self.size, self.owner = self.inner.n, self.inner.size, found.owner
        ends = self.inner.tokens * np.arange(self.ranks + 1) // self.ranks
        self._tokens, self._ends = np.diff(ends).tolist(), ends
        self.tokens, self.route = self._tokens[self.rank], route
        self.changes = False
        self.key, self._others, self._agreed, self.bytes_sent = digest_of(self), {}, False, 0

    def _made(self, source: Any, mask: BlockMask, found: Partition) -> "Grid":
        return Grid(self._groups, source, mask, found, self.route)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        first, stop = self._ends[self.rank : self.rank + 2]
        return self.inner.positions(device)[first:stop]

    def order(self, device: torch.device) -> None:
        return None

    def _whole(self, x: Tensor, dim: int) -> Tensor:
        part = torch.cat(self._gathered(x.movedim(dim, 0)))
        return self.inner._whole(part, 0).movedim(0, dim)

    def _sum(self, x: Tensor) -> None:
        super()._sum(x)
        self.inner._sum(x)

    def check_agreement(self) -> None:
        self.inner.check_agreement()
        super().check_agreement()

    def shared_seed(self, seed: Any, device: torch.device) -> Any:
        return seed  # the inner plan shares one of its own

    def explain(self) -> str:
        return "\n".join([super().explain(), "of its heads:", self.inner.explain()])


def _place(given: tuple[Any, ...]) -> tuple[int, int]:
    rank, ranks = (*given, None, None)[:2]
    if len(given) != 2 or not isinstance(rank, int) or not isinstance(ranks, int):
        raise ValueError(f"mesh is {given!r}: give a mesh, a group, None or (rank, ranks)")
    if not 0 <= rank < ranks:
        raise ValueError(f"mesh is (rank, ranks) {given}: the rank must be from 0 to {ranks - 1}")
    return rank, ranks
