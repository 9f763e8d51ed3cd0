"""The work list of a kernel."""

from typing import NamedTuple

from torch import Tensor


class TileLists(NamedTuple):
    """A mask in tiles of major x minor tokens, on one device.

    By rows the major tokens are queries and the minor ones keys; by columns the reverse. An item is
    the work on one major tile or on a part of it; its entries are minor tiles, partial ones first.
    In a full entry every pair of tokens is allowed that exists; its minor tokens all exist, the
    major ones may stick out of the end, so nothing may be summed over them. All other non-empty
    entries are partial.

    The columns of an entry come in `gather` pieces of minor // gather tokens. Piece g lies at the
    tokens idx[e, g] * (minor // gather) and following. A missing piece begins beyond the end and
    has no bits. By columns with `group` query heads to a key head, all of them are in one list, and
    idx is head_in_group * (ceil(n_minor / piece) + 1) + piece number: the last number of a head is
    for what is missing.

    Item w of batch * heads * n_items: the first n_long items of every slice go over all (b, h)
    first, (b, h) fastest; then the others, (b, h) slowest. The slice of (b, h) is
    (b if batch > 1 else 0) * heads + (h if heads > 1 else 0).
    """

    items: Tensor  # int32 (slices, n_items, 8): tile, first entry, entries, partial ones, slot
    #   The slot of a whole tile is -1. An item with tile -1 is padding.
    idx: Tensor  # int32 (entries + SPARE, gather)
    bit: Tensor  # int32 (entries + SPARE,)  row of `bits` of a partial entry, -1 for a full one
    bits: Tensor  # int32 (bit tiles, major, 4)  column 8g + 2c + e is bit 2g + e of word c
    merge: Tensor  # int32 (slices, split tiles, 4): tile or -1, first slot, slots, 0
    n_items: int
    n_long: int
    n_parts: int  # slots of a slice; 0 where nothing is split
    major: int
    minor: int
    gather: int
    batch: int  # 1, or the batch of q
    heads: int  # 1, or the heads of q (by columns: of k)
    partial: bool  # False: no entry is partial
    n_major: int  # tokens
    n_minor: int
    group: int  # query heads in one list
    by_rows: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.items, self.idx, self.bit, self.bits, self.merge

    @property
    def numbers(self) -> tuple[object, ...]:
        """All that is no tensor: what a launch depends on beside addresses."""
        return self[self._fields.index("n_items") :]
