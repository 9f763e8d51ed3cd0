"""Base of the masks that `mask >> transform` makes."""

from dataclasses import dataclass
from typing import Any

from masks.algebra import Mask, Transform, inherit


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Transformed(Mask):
    """`part >> transform`; a subclass gives `place`."""

    part: Mask
    transform: Any
    binding = 2

    def __init__(self, part: Mask, transform: Transform):
        word = f"({part.key})" if part.binding < self.binding else part.key
        object.__setattr__(self, "part", part)
        object.__setattr__(self, "transform", transform)
        object.__setattr__(self, "key", f"{word} >> {transform.key}")
        inherit(self, (part,), spelled=transform.spelled)

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self.transform.kind

    @property
    def parts(self) -> tuple[Mask, ...]:  # type: ignore[override]
        return (self.part,)

    def layer(self, index: int) -> Mask:
        if not self.per_layer:
            return super().layer(index)
        return self.part.layer(index) >> self.transform
