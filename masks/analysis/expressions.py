"""The analyses of a mask expression: it is built first, once or once a layer."""

from typing import TYPE_CHECKING, Any

from masks.analysis.reach import Reach, reach
from masks.checks import integer

if TYPE_CHECKING:
    from masks.types import BlockMask, Mask


def built(
    mask: "Mask", seq_len: int, layers: int | None, block_size: Any, heads: int | None
) -> "list[BlockMask]":
    """The block mask of every layer; only one where all layers have the same.

    Raises:
        ValueError: as `Mask.build`, or a mask that differs from layer to layer without `layers`.
    """
    if not mask.per_layer:
        return [mask.build(seq_len, block_size=block_size, heads=heads)]
    if layers is None:
        raise ValueError(f"{mask} differs from layer to layer: give layers=")
    count = integer("layers", layers, min=1)
    return [mask.layer(i).build(seq_len, block_size=block_size, heads=heads) for i in range(count)]


def reach_of(
    mask: "Mask",
    seq_len: int,
    layers: int | None = None,
    *,
    causal: bool = False,
    exact: bool = False,
    block_size: int | tuple[int, int] = 128,
    heads: int | None = None,
) -> Reach:
    """See `reach`; a mask that differs from layer to layer needs `layers`."""
    blocks = built(mask, seq_len, layers, block_size, heads)
    return reach(blocks, layers, causal=causal, exact=exact)
