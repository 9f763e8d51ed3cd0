"""The same algorithms for a CPU: torch on tiles that fit its caches, with counted accesses.

A pass goes over the whole batch, tile by tile, so that every pass reads x from memory again. On a
GPU thousands of rows do so at once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

COLUMNS, ELEMENTS = 4096, 65_536  # of a tile, at most: 256 KiB
LOWEST = -3.0e38  # a maximum before the first element: finite, so that no NaN arises

Tile = tuple[slice, slice]


class Memory:
    """Counts the elements that tiles of a matrix are read from or written to."""

    def __init__(self):
        self.accesses = 0

    def move(self, matrix: Tensor, tile: Tile) -> Tensor:
        """A tile of the matrix, about to be read or written once."""
        part = matrix[tile]
        self.accesses += part.numel()
        return part


class Softmax:
    """One call: x (batch, vocabulary), its running maximum and sum, (batch, 1) each."""

    def __init__(self, x: Tensor, memory: Memory):
        self.x, self.memory = x, memory
        self.m = x.new_full((len(x), 1), LOWEST)
        self.total = x.new_zeros(len(x), 1)
        self._buffer = x.new_empty(ELEMENTS)

    def tiles(self) -> Iterator[Tile]:
        """All tiles, row by row: a pass."""
        batch, vocabulary = self.x.shape
        columns = min(vocabulary, COLUMNS)
        rows = max(1, ELEMENTS // columns)
        for row in range(0, batch, rows):
            for column in range(0, vocabulary, columns):
                yield slice(row, row + rows), slice(column, column + columns)

    def maximum(self) -> None:
        """A pass for the maximum."""
        for tile in self.tiles():
            m = self.m[tile[0]]
            torch.maximum(m, self.memory.move(self.x, tile).amax(1, keepdim=True), out=m)

    def sum(self) -> None:
        """A pass for the sum, once the maximum is known."""
        for tile in self.tiles():
            self.add(tile, self.memory.move(self.x, tile))

    def maximum_and_sum(self) -> None:
        """One pass for both: the online softmax."""
        for tile in self.tiles():
            x = self.memory.move(self.x, tile)
            self.online_step(tile, x, x.amax(1, keepdim=True))

    def online_step(self, tile: Tile, x: Tensor, top: Tensor) -> None:
        """Adds a tile of x, with the maxima of its rows, to the maximum and the sum."""
        m, total = self.m[tile[0]], self.total[tile[0]]
        m_new = torch.maximum(m, top)
        total.mul_(torch.exp(m - m_new))
        m.copy_(m_new)
        self.add(tile, x)

    def add(self, tile: Tile, x: Tensor) -> None:
        """Adds a tile of x to the sum."""
        self.total[tile[0]] += self.exp(tile, x).sum(1, keepdim=True)

    def exp(self, tile: Tile, x: Tensor) -> Tensor:
        """exp(x - m), in a buffer that stays in the cache."""
        room = self._buffer[: x.numel()].view(x.shape)
        return torch.sub(x, self.m[tile[0]], out=room).exp_()

    def result(self, y: Tensor) -> Tensor:
        """The last pass: the softmax into y."""
        factor = 1 / self.total
        for tile in self.tiles():
            p = self.exp(tile, self.memory.move(self.x, tile))
            torch.mul(p, factor[tile[0]], out=self.memory.move(y, tile))
        return y


class TopK:
    """The k largest numbers of each row so far, largest first, and their indices."""

    def __init__(self, batch: int, k: int):
        self.values = torch.full((batch, k), -torch.inf)
        self.indices = torch.zeros(batch, k, dtype=torch.int64)

    def insert(self, tile: Tile, x: Tensor, top: Tensor) -> None:
        """Takes a tile of x; only rows whose maximum belongs into the list are searched."""
        rows = torch.nonzero(top[:, 0] > self.values[tile[0], -1])[:, 0]
        if not len(rows):
            return
        k, at = self.values.shape[1], rows + tile[0].start
        values, indices = x[rows].topk(min(k, x.shape[1]))
        values = torch.cat([self.values[at], values], 1)
        indices = torch.cat([self.indices[at], indices + tile[1].start], 1)
        self.values[at], order = values.topk(k)
        self.indices[at] = indices.gather(1, order)


def run(
    algorithm: str, x: Tensor, y: Tensor, k: int, memory: Memory | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """An algorithm of `ALGORITHMS`; y is room for a softmax, `memory` counts the accesses."""
    memory = memory or Memory()
    call, best = Softmax(x, memory), TopK(len(x), k)
    match algorithm:
        case "safe":
            call.maximum()
            call.sum()
            return call.result(y)
        case "online":
            call.maximum_and_sum()
            return call.result(y)
        case "safe_topk":
            run("safe", x, y, k, memory)
            for tile in call.tiles():
                p = memory.move(y, tile)
                best.insert(tile, p, p.amax(1, keepdim=True))
            return best.values, best.indices
        case "safe_fused":
            call.maximum()
            for tile in call.tiles():
                part = memory.move(x, tile)
                call.add(tile, part)
                best.insert(tile, part, part.amax(1, keepdim=True))
        case "online_fused":
            for tile in call.tiles():
                part = memory.move(x, tile)
                top = part.amax(1, keepdim=True)
                call.online_step(tile, part, top)
                best.insert(tile, part, top)
        case _:
            raise ValueError(f"{algorithm!r} is not computed by blocks")
    return torch.exp(best.values - call.m) / call.total, best.indices
