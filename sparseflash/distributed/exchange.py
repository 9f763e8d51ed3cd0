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
from sparseflash.kernels.common.device import kernels_of


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
        """Return (B, H, blocks * size, D) from (slices * blocks, size, ., ., D).

        A view, where the mask has one slice.
        """
        blocks = units.shape[0] // (self.slices[0] * self.slices[1])
        return self.whole(units.unflatten(0, (*self.slices, blocks)))

    def whole(self, view: Tensor) -> Tensor:
        """Return the tensor that `of` gave a view of."""
        x = view.permute(0, 4, 1, 5, 2, 3, 6)
        return x.flatten(4, 5).flatten(2, 3).flatten(0, 1)


class Chosen:
    """Some units of tensors on one device, `slice * blocks + block` each."""

    def __init__(self, units: Units, unit: Ints, blocks: int, device: Any):
        self.units, self.blocks, self.count = units, max(1, blocks), len(unit)
        self.unit = torch.from_numpy(unit).to(device)
        line, block = np.divmod(unit, self.blocks)
        at = line // units.slices[1], line % units.slices[1], block
        self.at = tuple(torch.from_numpy(x).to(device) for x in at)

    def pack(self, *tensors: Tensor) -> Tensor:
        """Return (units, size, ., ., D), the tensors side by side."""
        if in_kernels(tensors[0]):
            units = self.units
            return kernels_of("distributed").pack(
                tensors, self.unit, units.slices, units.size, self.blocks
            )
        return torch.cat([self.units.of(x)[self.at] for x in tensors], -1)

    def unpack(self, packed: Tensor, *tensors: Tensor) -> None:
        """Fill the units of tensors whose blocks are whole from what lies side by side."""
        offset = 0
        for x in tensors:
            if in_kernels(x):
                units = self.units
                call = offset, units.slices, units.size, self.blocks
                kernels_of("distributed").unpack(x, self.unit, packed, *call)
            else:
                self.units.of(x)[self.at] = packed[..., offset : offset + x.shape[3]]
            offset += x.shape[3]

    def update(self, tensors: Sequence[Tensor], change: Any) -> None:
        """Replace the units [(units, size, ., ., D), ...] by change(them), in float32 at least."""
        views = [self.units.of(x) for x in tensors]
        given = [v[self.at].to(torch.promote_types(v.dtype, torch.float32)) for v in views]
        for x, view, changed in zip(tensors, views, change(given), strict=True):
            view[self.at] = changed.to(view.dtype)
            if x.shape[2] % self.units.size:  # no view
                x.copy_(self.units.whole(view)[:, :, : x.shape[2]])


class Rows:
    """Some of the own tokens on one device, by whole blocks."""

    def __init__(self, blocks: Ints, size: int, tokens: int, device: Any):
        index = (blocks[:, None] * size + np.arange(size)).ravel()
        index = index[index < tokens]
        self.count, self.start = len(index), int(index[0]) if len(index) else 0
        self.side_by_side = not len(index) or index[-1] - index[0] + 1 == len(index)
        self.index = torch.from_numpy(index).to(device)
        self.chosen = Chosen(Units((1, 1), size), blocks, -(-tokens // size), device)
        self.one_each = torch.arange(len(blocks) + 1, device=device)

    def take(self, x: Tensor) -> Tensor:
        """Return these tokens of (B, H, N, D), or contiguous (B, H, N)."""
        if self.side_by_side:
            own = x.narrow(2, self.start, self.count)
            return own if x.dim() == 4 else own.contiguous()
        if x.dim() == 4 and in_kernels(x):
            packed = self.chosen.pack(x)
            return self.chosen.units.tensor(packed)[:, :, : self.count]
        return x.index_select(2, self.index)

    def add(self, x: Tensor, come: Tensor) -> None:
        """Add (B, H, count, D) to these tokens of x, in place."""
        if self.side_by_side:
            x.narrow(2, self.start, self.count).add_(come)
        elif in_kernels(x):
            chosen, one = self.chosen, self.one_each
            packed = chosen.units.of(come).flatten(0, 2).contiguous()
            size, slices = chosen.units.size, chosen.units.slices
            kernels_of("distributed").add(
                x, chosen.unit, one, one, packed, 0, slices, size, chosen.blocks
            )
        else:
            x.index_add_(2, self.index, come)


class Transfer:
    """An `Exchange` on one device: from units of own tensors to those of the received tensor."""

    def __init__(self, exchange: Exchange, units: Units, blocks: int, device: Any):
        """blocks: of the tensor that is sent from."""
        self.sent = [len(t) for t in exchange.send]
        self.received = [len(t) for t in exchange.slots]
        gone = np.concatenate(exchange.send)
        self.outgoing = Chosen(units, gone, blocks, device)
        # the units that any peer gets, once each, and those that come back for each, by rank
        touched, places = np.unique(gone, return_inverse=True)
        self.touched = Chosen(units, touched, blocks, device)
        self.within = torch.from_numpy(places.ravel()).to(device).split(self.sent)
        first = np.append(0, np.cumsum(np.bincount(places.ravel(), minlength=len(touched))))
        self.first = torch.from_numpy(first).to(device)
        self.order = torch.from_numpy(np.argsort(places.ravel(), kind="stable")).to(device)
        slots = torch.cat([torch.from_numpy(t) for t in exchange.slots])
        self.units = units.slices[0] * units.slices[1] * exchange.blocks  # of the received tensor
        in_place = torch.equal(slots, torch.arange(self.units))
        self.slots = None if in_place else slots.to(device)
        # the received units in a tensor that has the own blocks first
        line, place = np.divmod(np.arange(self.units), max(1, exchange.blocks))
        total = blocks + exchange.blocks
        self.behind = Chosen(units, line * total + blocks + place, total, device)

    def send(self, *tensors: Tensor, group: Any) -> "Pending":
        """Begin to send units of tensors, side by side."""
        return self.send_packed(self.outgoing.pack(*tensors), group)

    def send_packed(self, packed: Tensor, group: Any) -> "Pending":
        """Begin to send what `outgoing.pack` gave."""
        return Pending(packed, self.received, self.sent, group)

    def place(self, come: Tensor) -> Tensor:
        """Return the units that came, in their slots; 0 in slots that nothing was sent for."""
        if self.slots is None:
            return come
        return come.new_zeros(self.units, *come.shape[1:]).index_copy_(0, self.slots, come)

    def send_back(self, units: Tensor, group: Any) -> "Pending":
        """Begin to send units of the received tensor to where they came from."""
        packed = units if self.slots is None else units.index_select(0, self.slots)
        return Pending(packed.contiguous(), self.sent, self.received, group)

    def add(self, tensors: Sequence[Tensor], come: Tensor) -> None:
        """Add what came back, side by side, to the units that were sent: rank by rank, in place."""
        widths = [x.shape[3] for x in tensors]
        if in_kernels(tensors[0]):
            chosen, offset = self.touched, 0
            for x, width in zip(tensors, widths, strict=True):
                kernels_of("distributed").add(
                    x, chosen.unit, self.first, self.order, come, offset, chosen.units.slices,
                    chosen.units.size, chosen.blocks,
                )  # fmt: skip
                offset += width
            return

        def add(totals: list[Tensor], part: Tensor) -> list[Tensor]:
            return [t + x for t, x in zip(totals, part.split(widths, -1), strict=True)]

        self.update(tensors, come, add)

    def update(self, tensors: Sequence[Tensor], come: Tensor, change: Any) -> None:
        """Replace the units that were sent by change(them, what a peer returned), rank by rank."""

        def by_peer(totals: list[Tensor]) -> list[Tensor]:
            for within, part in zip(self.within, come.split(self.sent), strict=True):
                changed = change([t[within] for t in totals], part)
                for t, x in zip(totals, changed, strict=True):
                    t[within] = x
            return totals

        self.touched.update(tensors, by_peer)


class Pending:
    """Units that are on their way."""

    def __init__(self, packed: Tensor, come: list[int], gone: list[int], group: Any):
        self.nbytes, self.packed = packed.nbytes, packed
        self.got = packed.new_empty(sum(come), *packed.shape[1:])
        self.work: Any = dist.all_to_all_single(
            self.got, packed, come, gone, group=group, async_op=True
        )
        if packed.is_cuda:
            kernels_of("distributed").let_transfer_start(packed.device)

    def wait(self) -> Tensor:
        """Return all that came, by the rank that sent it."""
        self.work.wait()  # the current stream waits, not the host
        return self.got


def in_kernels(x: Tensor) -> bool:
    """Whether our kernels move and merge the rows of x."""
    return x.is_cuda and x.dtype != torch.float64
