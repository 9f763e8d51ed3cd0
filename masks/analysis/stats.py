"""The numbers of a block mask: densities, loads, holes and distances."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from masks.segments import (
    Load,
    Segments,
    allowed_pairs,
    area,
    cover,
    ranges,
    seeing,
    seen,
)
from masks.types import BlockMask

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Stats:
    """What `stats` finds. `print` shows it as a table.

    Attributes:
        text: the mask, in words.
        n_q, n_k, block_size, slices: extents; the counts below are sums over all slices.
        blocks, full, partial, empty: all blocks, and those of each kind.
        tiles: different bit tiles among the partial blocks.
        pairs: allowed pairs of tokens, exactly.
        block_density: non-empty blocks / all blocks.
        element_density: allowed pairs / all pairs.
        flop_density: pairs of existing tokens in non-empty blocks / all pairs; what is computed.
        row_load: non-empty blocks of a query block (forward and dQ).
        column_load: non-empty blocks of a key block (dK and dV).
        blind, blind_ranges: queries that see no key, and (first, last) of those in any slice.
        unseen, unseen_ranges: keys that no query sees, likewise.
        back, ahead: the largest q - k and k - q of an allowed pair; None where nothing is allowed.
    """

    text: str
    n_q: int
    n_k: int
    block_size: tuple[int, int]
    slices: int
    blocks: int
    full: int
    partial: int
    tiles: int
    pairs: int
    element_density: float
    flop_density: float
    row_load: Load
    column_load: Load
    blind: int
    blind_ranges: Ranges
    unseen: int
    unseen_ranges: Ranges
    back: int | None
    ahead: int | None

    @property
    def empty(self) -> int:
        return self.blocks - self.full - self.partial

    @property
    def block_density(self) -> float:
        return (self.full + self.partial) / self.blocks

    @property
    def waste(self) -> float:
        """Computed pairs / allowed pairs: 1 where no block is cut; infinite where all is empty."""
        return self.flop_density / self.element_density if self.pairs else float("inf")

    @property
    def causal(self) -> bool:
        """No query sees a key that comes after it."""
        return self.ahead is None or self.ahead <= 0

    @property
    def regular(self) -> tuple[bool, bool]:
        """Whether all query blocks have the same load, and all key blocks."""
        rows, columns = self.row_load, self.column_load
        return rows.min == rows.max, columns.min == columns.max

    @property
    def bandwidth(self) -> int | None:
        """The largest |q - k| of an allowed pair."""
        if self.back is None or self.ahead is None:
            return None
        return max(self.back, self.ahead)

    def __str__(self) -> str:
        block_q, block_k = self.block_size
        shape = f"{self.n_q} x {self.n_k} tokens, blocks {block_q} x {block_k}"
        if self.slices > 1:
            shape += f", {self.slices} slices together"
        both = [n for n, yes in zip(("rows", "columns"), self.regular, strict=True) if yes]
        lines = [
            ("density", f"blocks {percent(self.block_density)}, pairs "
             f"{percent(self.element_density)}, computed {percent(self.flop_density)} "
             f"(waste {number(self.waste)})"),
            ("blocks", f"{self.full} full, {self.partial} partial of {self.tiles} kinds, "
             f"{self.empty} empty"),
            ("row load", _load(self.row_load)),
            ("column load", _load(self.column_load)),
            ("blind queries", _holes(self.blind, self.blind_ranges)),
            ("unseen keys", _holes(self.unseen, self.unseen_ranges)),
            ("causal", "yes" if self.causal else "no"),
            ("regular", " and ".join(both) or "no"),
            ("sees", "nothing" if self.back is None else
             f"up to {self.back} back and {self.ahead} ahead"),
        ]  # fmt: skip
        head = [self.text, shape] if self.text else [shape]
        return "\n".join([*head, *(f"  {name:14} {value}" for name, value in lines)])


def stats(blocks: BlockMask, *, batch: int | None = None, head: int | None = None) -> Stats:
    """Return the numbers of all slices together, or of one batch entry, one head, or both.

    Exact at a million tokens as well: they come from the runs and the bit tiles, without an N x N
    array.

    Raises:
        ValueError: `batch` or `head` out of range.
    """
    segments = Segments.of(blocks, batch, head)
    grid = segments.grid
    pairs, all_pairs = allowed_pairs(segments), grid.slices * grid.n_q * grid.n_k
    rows = np.bincount(segments.line, segments.length, grid.slices * grid.rows)
    columns = cover(grid.slices, grid.cols, segments.s, segments.first, segments.stop)
    full = int(segments.length[segments.full].sum())
    sees, keys_seen = seeing(segments), seen(segments)
    back, ahead = _extents(segments)
    return Stats(
        text=blocks.text,
        n_q=grid.n_q,
        n_k=grid.n_k,
        block_size=(grid.block_q, grid.block_k),
        slices=grid.slices,
        blocks=grid.size,
        full=full,
        partial=int(segments.length.sum()) - full,
        tiles=len(np.unique(segments.tile[~segments.full])),
        pairs=pairs,
        element_density=pairs / all_pairs,
        flop_density=area(segments) / all_pairs,
        row_load=Load.of(rows),
        column_load=Load.of(columns),
        blind=int(np.count_nonzero(~sees)),
        blind_ranges=ranges(~np.logical_and.reduce(sees)),
        unseen=int(np.count_nonzero(~keys_seen)),
        unseen_ranges=ranges(~np.logical_and.reduce(keys_seen)),
        back=back,
        ahead=ahead,
    )


def _extents(segments: Segments) -> tuple[int | None, int | None]:
    """Largest q - k and largest k - q of an allowed pair."""
    if not len(segments.row):
        return None, None
    grid, full = segments.grid, segments.full
    last = segments.stop - 1
    back = grid.q_last[segments.row] - grid.k_first[segments.first]
    ahead = grid.k_last[last] - grid.q_first[segments.row]
    tile = segments.tile[~full]
    offset = grid.q_first[segments.row] - grid.k_first[segments.first]
    back[~full] = offset[~full] + segments.facts.back[tile]
    offset = grid.k_first[last] - grid.q_first[segments.row]
    ahead[~full] = offset[~full] + segments.facts.ahead[tile]
    return int(back.max()), int(ahead.max())


def _load(load: Load) -> str:
    return (
        f"{load.min} to {load.max}, mean {number(load.mean)} (imbalance {number(load.imbalance)})"
    )


def _holes(count: int, where: Ranges) -> str:
    return f"{count} ({spans(where)})" if count else "none"


def number(value: float) -> str:
    """Three significant digits, and whole numbers in full."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def percent(share: float) -> str:
    """Return a share in percent, three digits; never rounded to 0 or to 100 % when it is not."""
    if 0.9995 <= share < 1:
        return "99.9 %"
    value = 100 * share
    return "0 %" if share == 0 else "less than 0.001 %" if value < 0.001 else f"{value:.3g} %"


def spans(ranges: Sequence[tuple[int, int]], most: int = 3) -> str:
    """`0-127, 512, 640-767 and 5 more ranges`."""
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:most]]
    more = len(ranges) - len(shown)
    text = ", ".join(shown)
    return f"{text} and {more} more range{'s' * (more > 1)}" if more else text


def count_of(count: int, one: str) -> str:
    """`1 layer`, `5 layers`."""
    return f"{count} {one if count == 1 else one + 's'}"
