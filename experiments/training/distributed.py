"""The processes that torchrun starts. Each takes a part of every batch, and of every sequence where
several share them.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparseflash import BlockSparseAttention
from sparseflash.distributed import ContextParallel, context_parallel

T = TypeVar("T")
PATIENCE = timedelta(hours=6)  # for data that rank 0 makes while the others wait


@dataclass(frozen=True)
class Group:
    """This process and how many there are; a single one needs no torch.distributed.

    `ways` processes, those of the group `context`, share each sequence: they take the same part of
    a batch.
    """

    rank: int
    world: int
    device: torch.device
    ways: int = 1
    context: Any = None

    @property
    def replica(self) -> int:
        """The number of the part of a batch."""
        return self.rank // self.ways

    @property
    def replicas(self) -> int:
        """How many parts a batch has."""
        return self.world // self.ways

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def mean_(self, tensor: Tensor) -> None:
        """Replace a tensor by its mean over all processes."""
        if self.world > 1:
            dist.all_reduce(tensor)
            tensor.div_(self.world)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.world == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in at least one process."""
        if self.world == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def gather(self, value: object) -> list[object]:
        """Return the value of every process, in rank 0; elsewhere an empty list."""
        if self.world == 1:
            return [value]
        found: list[object] = [None] * self.world if self.leads else []
        dist.gather_object(value, found if self.leads else None)
        return found

    def wait(self) -> None:
        """Return once every process has called it."""
        if self.world > 1:
            self.sum(torch.zeros(1, device=self.device)).item()

    def in_turn(self, make: Callable[[], T]) -> T:
        """Return what `make` does, which the first process calls before the others."""
        if not self.leads:
            self.wait()
        made = make()
        if self.leads:
            self.wait()
        return made

    def part(self, batch: int) -> slice:
        """Return the slice of a batch that belongs to this process."""
        size = batch // self.replicas
        return slice(self.replica * size, (self.replica + 1) * size)


def join(device: str, ways: int = 1) -> Group:
    """Return the group that torchrun's environment describes; one process without it.

    Raises ValueError for processes that cannot be divided into contexts of `ways`.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world % ways:
        raise ValueError(
            f"context_parallel={ways} does not divide {world} processes: start them with"
            f" torchrun --nproc-per-node {ways}, or a multiple"
        )
    if world == 1:
        return Group(0, 1, torch.device(device))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = torch.device(device)
    if chosen.type == "cuda":
        count = torch.cuda.device_count()
        if count <= local:
            raise ValueError(
                f"process {local} of torchrun has no GPU: give --nproc-per-node {count} at most"
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        # If an optimizer imported it later, it would keep the group and its threads beyond `leave`;
        # a thread that still runs when Python exits aborts the process.
        from torch import _dynamo  # noqa: F401

        backend = "nccl" if chosen.type == "cuda" else "gloo"
        own = chosen if chosen.type == "cuda" else None
        dist.init_process_group(backend, timeout=PATIENCE, device_id=own)
    return Group(dist.get_rank(), world, chosen, ways, _context(ways))


@cache
def _context(ways: int) -> Any:
    """Return the group of the processes that share sequences with this one."""
    return None if ways == 1 else dist.new_subgroups(ways, timeout=PATIENCE)[0]


def leave() -> None:
    """End the group of `join`."""
    _context.cache_clear()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def share(model: nn.Module, states: int, group: Group) -> ContextParallel | None:
    """Let the attentions of a model attend over tokens of all processes of a context.

    Every attention gets a plan in place of its mask; all plans have the same owners of tokens. The
    plan of the first one is returned: the model takes its own tokens with it.

    Args:
        states: tokens that the attentions see.

    Raises ValueError for attentions that are not those of sparseflash under a mask.
    """
    if group.context is None:
        return None
    layers = [layer for layer in model.modules() if isinstance(layer, BlockSparseAttention)]
    if not layers:
        raise ValueError(
            f"context_parallel={group.ways}: the attention of this model needs all tokens in one"
            " process: give attention=sparse or attention=flash"
        )
    given: Any = getattr(model, "masks", None) or [layer.mask for layer in layers]
    size = getattr(layers[0].mask, "block_size", (128,))[0]
    size = min(size, max(16, states // group.ways // 16 * 16))  # a block for every process
    options: dict[str, Any] = {"block_size": size}
    options |= {name: getattr(layers[0], name) for name in ("heads", "kv_heads", "head_dim")}
    first = context_parallel(group.context, given[0], states, **options)
    layers[0].mask = first
    for layer, mask in zip(layers[1:], given[1:], strict=True):
        layer.mask = first.with_mask(mask)
    return first
