"""Transfers of blocks of tokens between ranks, in units: everything of one block in one slice.

A tensor (B, H, N, D) has (slices, blocks, block size, B / mask batch, H / mask heads, D) in units.
One collective moves all that travels at once; every rank takes part, with nothing to send as well.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from masks.runs import Ints
from sparseflash.distributed.route import Exchange


class Units:
    """Views of tensors as units; slices: (batch entries, key heads) that the mask tells apart."""

    def __init__(self, slices: tuple[int, int], size: int):
        self.slices, self.size = slices, size

    def of(self, x: Tensor) -> Tensor:
        """Return (mask batch, key heads, blocks, size, ., ., D), a view where N divides by size."""
        if rest := -x.shape[2] % self.size:
            x = pad(x, (0, 0, 0, rest))
        x = x.unflatten(1, (self.slices[1], -1)).unflatten(0, (self.slices[0], -1))
        x = x.reshape(*x.shape[:4], x.shape[4] // self.size, self.size, x.shape[5])
        return x.permute(0, 2, 4, 5, 1, 3, 6)

    def tensor(self, units: Tensor) -> Tensor:
        """Return (B, H, blocks * size, D) from (slices * blocks, size, ., ., D)."""
        blocks = units.shape[0] // (self.slices[0] * self.slices[1])
        x = units.unflatten(0, (*self.slices, blocks)).permute(0, 4, 1, 5, 2, 3, 6)
        return x.flatten(4, 5).flatten(2, 3).flatten(0, 1)

    def whole(self, view: Tensor, tokens: int) -> Tensor:
        """Return the tensor (B, H, tokens, D) that `of` gave a view of; the same memory again."""
        x = view.permute(0, 4, 1, 5, 2, 3, 6)
        return x.flatten(4, 5).flatten(2, 3).flatten(0, 1)[:, :, :tokens]


class Transfer:
    """An `Exchange` on one device: from units of own tensors to those of the received tensor."""

    def __init__(self, exchange: Exchange, slices: tuple[int, int], blocks: int, device: Any):
        """blocks: of the tensor that is sent from."""
        self.blocks = exchange.blocks
        self.sent = [len(t) for t in exchange.send]
        self.received = [len(t) for t in exchange.slots]
        self.index = self._indices(np.concatenate(exchange.send), slices, blocks, device)
        # the units that any peer gets, once each, and for each peer their places among them
        touched, places = np.unique(np.concatenate(exchange.send), return_inverse=True)
        self.touched = self._indices(touched, slices, blocks, device)
        self.within = torch.from_numpy(places.ravel()).to(device).split(self.sent)
        slots = torch.cat([torch.from_numpy(t) for t in exchange.slots])
        self.units = slices[0] * slices[1] * exchange.blocks  # of the received tensor
        in_place = torch.equal(slots, torch.arange(self.units))
        self.slots = None if in_place else slots.to(device)

    @staticmethod
    def _indices(unit: Ints, slices: tuple[int, int], blocks: int, device: Any):
        line, block = np.divmod(unit, max(1, blocks))
        found = line // slices[1], line % slices[1], block
        return tuple(torch.from_numpy(x).to(device) for x in found)

    def send(self, tensors: Sequence[Tensor], group: Any) -> "Pending":
        """Begin to send units, (..., D) side by side, of tensors that `Units.of` gave."""
        packed = torch.cat([x[self.index] for x in tensors], -1)
        return Pending(packed, self.received, self.sent, group)

    def place(self, come: Tensor) -> Tensor:
        """Return the units that came, in their slots; 0 in slots that nothing was sent for."""
        if self.slots is None:
            return come
        return come.new_zeros(self.units, *come.shape[1:]).index_copy_(0, self.slots, come)

    def update(self, totals: Sequence[Tensor], parts: Sequence[Tensor], add: Any) -> None:
        """Change the units that were sent, (..., D) views of `Units.of`, by what each peer returns.

        add(totals, part) changes its totals in place, in float32 at least; ranks take turns.
        """
        wide = [torch.promote_types(t.dtype, torch.float32) for t in totals]
        sums = [t[self.touched].to(to) for t, to in zip(totals, wide, strict=True)]
        for within, part in zip(self.within, parts, strict=True):
            if part.shape[0]:
                chosen = [t[within] for t in sums]
                add(chosen, part)
                for t, x in zip(sums, chosen, strict=True):
                    t[within] = x
        for t, x in zip(totals, sums, strict=True):
            t[self.touched] = x.to(t.dtype)

    def send_back(self, units: Tensor, group: Any) -> "Pending":
        """Begin to send units of the received tensor to where they came from."""
        packed = units if self.slots is None else units.index_select(0, self.slots)
        return Pending(packed.contiguous(), self.sent, self.received, group)


class Pending:
    """Units that are on their way."""

    def __init__(self, packed: Tensor, come: list[int], gone: list[int], group: Any):
        self.nbytes, self.come = packed.nbytes, come
        self.packed, self.got = packed, packed.new_empty(sum(come), *packed.shape[1:])
        self.work: Any = dist.all_to_all_single(
            self.got, packed, come, gone, group=group, async_op=True
        )

    def wait(self) -> Tensor:
        """Return all that came, by the rank that sent it."""
        self.work.wait()  # the current stream waits, not the host
        return self.got

    def by_peer(self) -> tuple[Tensor, ...]:
        """Return what came, a tensor for each rank that sent it."""
        return self.wait().split(self.come)
