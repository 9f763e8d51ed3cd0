"""Base of the transforms, and the mask that `mask >> transform` makes."""

from dataclasses import dataclass
from typing import dataclass_transform

from masks.algebra import Mask, inherit
from masks.leaves.leaf import place_own
from masks.registry import Keyed
from masks.runs import Grid
from masks.types import Placed, Repeats


@dataclass_transform(eq_default=False, frozen_default=True)
class Transform(Keyed):
    """The right side of `mask >> transform`: an immutable function from masks to masks.

    A subclass is made a frozen dataclass. Its canonical text `key` is given to it by the function
    with `@masks.transform()`.
    """

    kind: str
    spelled: bool = True

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, repr=False, eq=False)(cls)

    def __rrshift__(self, mask: Mask) -> Mask:
        return Transformed(mask, self) if isinstance(mask, Mask) else NotImplemented

    def place(self, part: Mask, grid: Grid) -> Placed:
        """`part >> self` on a grid with its own extents."""
        raise NotImplementedError

    def repeats(self, part: Mask, grid: Grid) -> Repeats | None:
        """`Mask.repeats` of `part >> self`."""
        return None

    def companions(self) -> tuple[Mask, ...]:
        """Masks whose extents the result has as well."""
        return ()


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Transformed(Mask):
    """`part >> transform`."""

    part: Mask
    transform: Transform
    binding = 2

    def __init__(self, part: Mask, transform: Transform):
        word = f"({part.key})" if part.binding < self.binding else part.key
        object.__setattr__(self, "part", part)
        object.__setattr__(self, "transform", transform)
        object.__setattr__(self, "key", f"{word} >> {transform.key}")
        inherit(self, (part,), transform.companions(), spelled=transform.spelled)

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self.transform.kind

    @property
    def parts(self) -> tuple[Mask, ...]:  # type: ignore[override]
        return (self.part,)

    def _layer(self, index: int) -> Mask:
        return self.part.layer(index) >> self.transform

    def repeats(self, grid: Grid) -> Repeats | None:
        return self.transform.repeats(self.part, grid)

    def moves(self) -> None:
        return None

    def place(self, grid: Grid) -> Placed:
        return place_own(self, grid, lambda own: self.transform.place(self.part, own))
