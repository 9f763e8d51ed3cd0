"""Masks that differ from head to head, or from layer to layer."""

from dataclasses import dataclass

import numpy as np

from masks import runs as rl
from masks.algebra import Mask, inherit
from masks.registry import pattern
from masks.runs import Bools, Grid, Ints
from masks.types import Placed

__all__ = ["heads", "layers"]
SECTION = "Composition"  # of the gallery


@pattern(
    "heads(local(24), butterfly(16))",
    "another mask for every other head (drawn: head 1)",
    "n*(L + 1)*B**2",
    head=1,
)
def heads(*parts: Mask) -> Mask:
    """Head h has the mask parts[h % len(parts)].

    `heads(local(64), butterfly(64))` gives every other head the butterfly. The heads of the inputs
    must be a multiple of the number of parts (for two local heads and six others, repeat them:
    `heads(*[a] * 2, *[b] * 6)`); `build` makes as many as there are parts by default.
    """
    return Heads(parts)


@pattern(
    "layers(local(24), butterfly(16)).layer(1)",
    "another mask for every other layer",
    "n*(L + 1)*B**2",
)
def layers(*parts: Mask) -> Mask:
    """Layer i has the mask parts[i % len(parts)]; `mask.layer(i)` returns it.

    It joins with other masks before that: `(layers(local(64), dense()) & causal()).layer(0)`.
    """
    return Layers(parts)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class _Turns(Mask):
    """Base: masks that take turns."""

    parts: tuple[Mask, ...]

    def __init__(self, parts: tuple[Mask, ...]):
        for part in parts:
            if not isinstance(part, Mask):
                raise ValueError(f"{self.kind} has {part!r} among its parts: give masks")
        if not parts:
            raise ValueError(f"{self.kind} has no parts: give at least one mask")
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "key", f"{self.kind}({', '.join([part.key for part in parts])})")
        inherit(self, parts)


class Heads(_Turns):
    kind = "heads"

    def __init__(self, parts: tuple[Mask, ...]):
        super().__init__(parts)
        object.__setattr__(self, "per_head", True)
        period = np.lcm(self.period, len(parts))  # 0 where a part never repeats
        object.__setattr__(self, "period", int(period))

    def _layer(self, index: int) -> Mask:
        return heads(*[part.layer(index) for part in self.parts])

    def place(self, grid: Grid) -> Placed:
        placed = [part.place(grid) for part in self.parts]
        count = len(placed)
        turns = np.arange(grid.slices) % grid.heads % count
        slices = [(placed[turn].runs, i) for i, turn in enumerate(turns.tolist())]

        def allowed(s: Ints, q: Ints, k: Ints) -> Bools:
            turn = s % grid.heads % count
            result = np.zeros(np.broadcast_shapes(s.shape, q.shape, k.shape), bool)
            for i in np.unique(turn).tolist():
                result |= placed[i].allowed(s, q, k) & (turn == i)
            return result

        def signature(x: Ints) -> list[Ints]:
            turn = grid.split(x)[0] % grid.heads % count
            columns: list[Ints] = [turn]
            for i in np.unique(turn).tolist():
                mine = turn == i
                for column in placed[i].signature(x[mine]):
                    columns.append(np.zeros(len(x), np.int64))
                    columns[-1][mine] = column
            return columns

        return Placed(rl.stitch(slices, grid.area), allowed, signature)


class Layers(_Turns):
    kind = "layers"

    def __init__(self, parts: tuple[Mask, ...]):
        super().__init__(parts)
        object.__setattr__(self, "per_layer", True)

    def _layer(self, index: int) -> Mask:
        return self.parts[index % len(self.parts)].layer(index)
