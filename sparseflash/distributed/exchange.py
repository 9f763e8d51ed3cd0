"""Transfers of blocks of tokens between ranks, in units: everything of one block in one slice.

A tensor (B, H, N, D) has (slices, blocks, block size, B / mask batch, H / mask heads, D) in units.
One collective moves all that travels at once; every rank takes part, with nothing to send as well.
"""

from collections.abc import Sequence
from functools import cached_property
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
    """Some units of tensors, (units,) int64 on their device: `slice * blocks + block` each."""

    def __init__(self, units: Units, unit: Tensor, blocks: int):
        self.units, self.unit, self.blocks = units, unit, max(1, blocks)
        self.place = units.slices, units.size, self.blocks  # as the kernels take it

    @cached_property
    def at(self) -> tuple[Tensor, Tensor, Tensor]:
        """Which units of `Units.of`."""
        line, block = self.unit // self.blocks, self.unit % self.blocks
        return line // self.units.slices[1], line % self.units.slices[1], block

    def pack(self, *tensors: Tensor) -> Tensor:
        """Return (units, size, ., ., D), the tensors side by side."""
        if in_kernels(tensors[0]):
            return kernels_of("distributed").pack(tensors, self.unit, *self.place)
        return torch.cat([self.units.of(x)[self.at] for x in tensors], -1)

    def unpack(self, packed: Tensor, *tensors: Tensor) -> None:
        """Fill the units of tensors whose blocks are whole from what lies side by side."""
        if in_kernels(packed):
            return kernels_of("distributed").unpack(tensors, self.unit, packed, *self.place)
        for x, part in zip(tensors, packed.split([x.shape[3] for x in tensors], -1), strict=True):
            self.units.of(x)[self.at] = part

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
        unit = torch.from_numpy(blocks).to(device)
        self.chosen = Chosen(Units((1, 1), size), unit, -(-tokens // size))
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
            kernels_of("distributed").add((x,), chosen.unit, one, one, packed, *chosen.place)
        else:
            x.index_add_(2, self.index, come)


class Transfer:
    """An `Exchange` on one device: from units of own tensors to those of the received tensor.

    Args:
        own, blocks: of a slice, in the own tensors and in the received one.
        gone: (units,) int64, the own units that travel, by the rank that gets them.
        sent, received: units for and from each rank.
        touched: how many units any peer gets.
        slots: (units,) int64, where what comes belongs in the received tensor, by the rank that
            sends it; None: all in their order.
    """

    def __init__(
        self, units: Units, own: int, blocks: int, gone: Tensor, sent: list[int], touched: int,
        slots: Tensor | None, received: list[int],
    ):  # fmt: skip
        self.outgoing, self.slots = Chosen(units, gone, own), slots
        self.sent, self.received, self.count = sent, received, touched
        self.lines, self.own, self.blocks = units.slices[0] * units.slices[1], own, blocks

    @classmethod
    def of(cls, exchange: Exchange, units: Units, own: int, device: Any) -> "Transfer":
        """Return that of an exchange which the host knows."""
        gone, slots = (np.concatenate(x) for x in (exchange.send, exchange.slots))
        sent, received = ([len(x) for x in t] for t in (exchange.send, exchange.slots))
        whole = np.arange(units.slices[0] * units.slices[1] * exchange.blocks)
        given = None if np.array_equal(slots, whole) else torch.from_numpy(slots).to(device)
        on_device, touched = torch.from_numpy(gone).to(device), len(np.unique(gone))
        return cls(units, own, exchange.blocks, on_device, sent, touched, given, received)

    @cached_property
    def touched(self) -> Chosen:
        """The units that any peer gets, once each."""
        own = self.outgoing
        taken = torch.zeros(self.lines * own.blocks, dtype=torch.bool, device=own.unit.device)
        unit = indices_of(taken.index_fill_(0, own.unit, True), self.count)
        return Chosen(own.units, unit, own.blocks)

    @cached_property
    def within(self) -> Tensor:
        """The place of each unit that travels among `touched`."""
        return torch.searchsorted(self.touched.unit, self.outgoing.unit)

    @cached_property
    def order(self) -> Tensor:
        """What comes back, unit by unit of `touched`, in the order of the ranks."""
        return self.within.argsort(stable=True)

    @cached_property
    def first(self) -> Tensor:
        """Where each unit of `touched` begins in `order`, and its end."""
        unit = torch.arange(self.count + 1, device=self.order.device)
        return torch.searchsorted(self.within[self.order], unit)

    @cached_property
    def behind(self) -> Chosen:
        """The received units in a tensor that has the own blocks first."""
        own, device = self.own, self.outgoing.unit.device
        line = torch.arange(self.lines, device=device)[:, None] * (own + self.blocks) + own
        unit = (line + torch.arange(self.blocks, device=device)).flatten()
        return Chosen(self.outgoing.units, unit, own + self.blocks)

    def send(self, packed: Tensor, cp: Any) -> "Pending":
        """Begin to send what `outgoing.pack` gave."""
        return Pending(packed, self.received, self.sent, cp)

    def place(self, come: Tensor) -> Tensor:
        """Return the units that came, in their slots; 0 in slots that nothing was sent for."""
        if self.slots is None:
            return come
        whole = come.new_zeros(self.lines * self.blocks, *come.shape[1:])
        return whole.index_copy_(0, self.slots, come)

    def send_back(self, units: Tensor, cp: Any) -> "Pending":
        """Begin to send units of the received tensor to where they came from."""
        packed = units if self.slots is None else units.index_select(0, self.slots)
        return Pending(packed.contiguous(), self.sent, self.received, cp)

    def add(self, tensors: Sequence[Tensor], come: Tensor) -> None:
        """Add what came back, side by side, to the units that were sent: rank by rank, in place."""
        if in_kernels(tensors[0]):
            call = self.touched.unit, self.first, self.order, come, *self.touched.place
            return kernels_of("distributed").add(tensors, *call)
        widths = [x.shape[3] for x in tensors]

        def add(totals: list[Tensor], part: Tensor) -> list[Tensor]:
            return [t + x for t, x in zip(totals, part.split(widths, -1), strict=True)]

        self.update(tensors, come, add)

    def update(self, tensors: Sequence[Tensor], come: Tensor, change: Any) -> None:
        """Replace the units that were sent by change(them, what a peer returned), rank by rank."""

        def by_peer(totals: list[Tensor]) -> list[Tensor]:
            parts = self.within.split(self.sent), come.split(self.sent)
            for within, part in zip(*parts, strict=True):
                changed = change([t[within] for t in totals], part)
                for t, x in zip(totals, changed, strict=True):
                    t[within] = x
            return totals

        self.touched.update(tensors, by_peer)


class Pending:
    """Units that are on their way among the ranks of a plan, which counts the bytes."""

    def __init__(self, packed: Tensor, come: list[int], gone: list[int], cp: Any):
        cp.bytes_sent += packed.nbytes
        self.packed = packed
        self.got = packed.new_empty(sum(come), *packed.shape[1:])
        self.work: Any = dist.all_to_all_single(
            self.got, packed, come, gone, group=cp.group, async_op=True
        )
        if packed.is_cuda:
            kernels_of("distributed").let_transfer_start(packed.device)

    def wait(self) -> Tensor:
        """Return all that came, by the rank that sent it."""
        self.work.wait()  # the current stream waits, not the host
        return self.got


def indices_of(taken: Tensor, count: int) -> Tensor:
    """Return the places of the `count` elements that are True, ascending, without waiting."""
    return (~taken).byte().argsort(stable=True)[:count]


def in_kernels(x: Tensor) -> bool:
    """Whether our kernels move and merge the rows of x."""
    return x.is_cuda and x.dtype != torch.float64
