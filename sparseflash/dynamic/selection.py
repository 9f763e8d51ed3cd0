"""Selection: the block mask that a selector picked from q and k, on their device."""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from masks.algebra import Mask
from masks.block_mask import BlockMask
from masks.checks import integer, layout_extents
from masks.runs import Grid
from masks.tiles import EMPTY, FULL, Tiles
from sparseflash.cache import cached

MAX_PRODUCTS = 1 << 14  # tiles that two tables may make together


@dataclass(frozen=True, eq=False, repr=False)
class Selection:
    """Which blocks a query may attend to, for every batch entry and head.

    `&`, `|` and `-` take a Mask, a BlockMask or another Selection, and give a Selection.
    `sparseflash.attention` takes it for its mask. Nothing but `to_block_mask` waits for the device.

    Attributes:
        codes: int32 (B or 1, H or 1, rows, cols): EMPTY = -2, FULL = -1 (every pair of existing
            tokens is allowed), or t >= 0: the pairs that are set in `bits[t]`.
        bits: int32 (T, block_q, ceil(block_k / 32)); bit j of word w is key column 32 * w + j of
            the block, 0 outside n_q x n_k. Unlike those of a BlockMask, tiles may be equal, unused,
            and after `&` and `-` even empty.
        n_q, n_k: tokens.
        block_size: (block_q, block_k).
        max_blocks: a bound on the blocks that are not EMPTY. The host knows it, and lays out lists
            of blocks without asking the device.
        owned: that many tiles, the first ones, belong to one block each; the others may be shared.
    """

    codes: Tensor
    bits: Tensor
    n_q: int
    n_k: int
    block_size: tuple[int, int]
    max_blocks: int
    owned: int = 0

    @classmethod
    def from_layout(
        cls,
        layout: Tensor,
        block_size: int | tuple[int, int] = 128,
        *,
        n_q: int | None = None,
        n_k: int | None = None,
        max_blocks: int | None = None,
    ) -> "Selection":
        """Return the selection of whole blocks that a map of blocks gives, without waiting.

        Args:
            layout: a tensor (rows, cols), (heads, rows, cols) or (batch, heads, rows, cols) of
                booleans or integers: 0 is an empty block, any other value a full one.
            block_size, n_q, n_k: as in `masks.BlockMask.from_layout`.
            max_blocks: a bound on the non-empty blocks, which saves memory for their lists; all by
                default. More blocks than that fail an assertion on the device.
        """
        if not isinstance(layout, Tensor) or layout.is_floating_point():
            kind = layout.dtype if isinstance(layout, Tensor) else type(layout).__name__
            raise ValueError(f"layout is {kind}: give a tensor of booleans or integers")
        batch, heads, n_q, n_k, *sizes = layout_extents(layout.shape, block_size, n_q, n_k)
        taken = layout.detach().reshape(batch, heads, *layout.shape[-2:]) != 0
        codes = torch.where(taken, FULL, EMPTY).int()
        most = taken.numel()
        if max_blocks is not None:
            most = min(most, integer("max_blocks", max_blocks, min=0))
            message = f"layout has more than {most} blocks: give a greater max_blocks"
            torch._assert_async(taken.sum() <= most, message)  # pyright: ignore
        bits = codes.new_empty(0, sizes[0], -(-sizes[1] // 32))
        return cls(codes, bits, n_q, n_k, (sizes[0], sizes[1]), most)

    @property
    def batch(self) -> int:
        """Extent: 1 means the same for all."""
        return self.codes.shape[0]

    @property
    def heads(self) -> int:
        """Extent: 1 means the same for all."""
        return self.codes.shape[1]

    @property
    def rows(self) -> int:
        """Query blocks."""
        return self.codes.shape[2]

    @property
    def cols(self) -> int:
        """Key blocks."""
        return self.codes.shape[3]

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.codes.device

    def density(self) -> Tensor:
        """Blocks with any allowed pair / all blocks: a float32 scalar on the device."""
        filled = F.pad((self.bits != 0).flatten(1).any(1), (0, 1), value=True)  # the last is FULL
        number = self.codes.clamp(min=FULL).long()
        return ((self.codes != EMPTY) & filled[number]).float().mean()

    def __and__(self, other: "Mask | BlockMask | Selection") -> "Selection":
        return self._joined(other, FULL, EMPTY)

    def __or__(self, other: "Mask | BlockMask | Selection") -> "Selection":
        return self._joined(other, EMPTY, FULL)

    def __sub__(self, other: "Mask | BlockMask | Selection") -> "Selection":
        if isinstance(other, Selection) and len(other.bits):
            raise ValueError(
                "the selection on the right of - has partial blocks: subtract one of whole blocks, "
                "or a Mask"
            )
        return self._joined(other, FULL, EMPTY, complement=True)

    __rand__, __ror__ = __and__, __or__

    def _joined(
        self, other: object, neutral: int, absorbing: int, *, complement: bool = False
    ) -> "Selection":
        operand = self._operand(other, complement)
        return NotImplemented if operand is None else _join(self, operand, neutral, absorbing)

    def _operand(self, other: object, complement: bool) -> "Selection | None":
        """`other`, or all that is not in it, as a selection that fits this one."""
        if isinstance(other, Mask | BlockMask):
            if heads_of(other, 1) and self.heads == 1:
                raise ValueError(
                    f"{other} differs from head to head, the selection does not: pass it to the "
                    "selector (within=), or join mask.build(n, block_size=..., heads=...)"
                )
            extents = (self.n_q, self.n_k, self.block_size)
            heads = heads_of(other, self.heads)
            other = static_selection(other, *extents, heads, self.device, complement)
        elif not isinstance(other, Selection):
            return None
        elif complement:
            codes = (EMPTY + FULL) - other.codes
            other = replace(other, codes=codes, max_blocks=codes.numel())
        mine, its = ((x.n_q, x.n_k, x.block_size, x.device) for x in (self, other))
        if mine != its:
            raise ValueError(
                f"(n_q, n_k, block_size, device) are {mine} and {its}: select with the same"
            )
        for name in ("batch", "heads"):
            a, b = getattr(self, name), getattr(other, name)
            if a != b and 1 not in (a, b):
                raise ValueError(f"selections of {name} {a} and {b} do not combine")
        return other

    def to_block_mask(self) -> BlockMask:
        """Return the same as an exact `masks.BlockMask`, for pictures, analysis and files.

        Waits for the device, and copies everything to the host.
        """
        grid = Grid(self.n_q, self.n_k, *self.block_size, self.batch, self.heads)
        codes = self.codes.cpu().numpy().astype(np.int32).ravel()
        tiles, x = Tiles(grid), np.flatnonzero(codes >= 0)
        _, row, col = grid.split(x)
        bits = self.bits.cpu().numpy().view(np.uint32)
        number = codes[x].astype(np.int64)
        codes[x] = tiles.codes_of(bits, number, grid.cut(row, col))
        return BlockMask.of_blocks(tiles, np.arange(grid.size), codes, "selection")

    def __repr__(self) -> str:
        return (
            f"Selection({self.n_q} x {self.n_k} tokens, block size {self.block_size}, "
            f"batch {self.batch}, heads {self.heads}, {self.device})"
        )


@cached
def static_selection(
    mask: Mask | BlockMask,
    n_q: int,
    n_k: int,
    block_size: tuple[int, int],
    heads: int | None,
    device: torch.device,
    complement: bool = False,
) -> Selection:
    """Return `mask`, or all that is not in it, as a selection, from the cache: it is built on the
    host and copied once.

    heads: those of `heads_of`. Raises ValueError for a BlockMask of other lengths.
    """
    blocks = built(mask, n_q, n_k, block_size, heads)
    codes, bits = blocks.codes(), blocks.bits
    if complement:
        tiles, partial = Tiles(blocks.grid), codes >= 0
        _, row, col = blocks.grid.split(np.flatnonzero(partial))
        cut = blocks.grid.cut(row, col)
        codes, own = (EMPTY + FULL) - codes, codes[partial].astype(np.int64)
        codes[partial] = tiles.codes_of(~bits, own, cut)
        bits = tiles.bits
    max_blocks = int((codes != EMPTY).sum())
    made = to_device(codes, device), to_device(bits.view(np.int32), device)
    return Selection(*made, n_q, n_k, block_size, max_blocks)


def number_tiles(
    taken: Tensor, partial: Tensor, room: int, new: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """int32 codes of blocks of which the partial ones take the tiles 0, 1, .. in order, and int64
    (room,): the block of every tile, as its place in the flattened `partial`.

    taken, partial: bool of one shape. Partial blocks beyond `room` are taken whole. new: those that
        do not share the tile of the one before; all by default.
    """
    number = (partial if new is None else new).flatten().cumsum(0, dtype=torch.int32)
    codes = torch.where(taken, FULL, EMPTY).int()
    number = number.view_as(partial)
    codes = torch.where(partial & (number <= room), number - 1, codes)
    tile = torch.arange(1, room + 1, dtype=torch.int32, device=number.device)
    return codes, torch.searchsorted(number.flatten(), tile).clamp(max=number.numel() - 1)


def _join(a: Selection, b: Selection, neutral: int, absorbing: int) -> Selection:
    """Return a & b, where FULL is neutral and EMPTY absorbs, or a | b, the other way round.

    The tiles of a come first, those it owns changed in place; then the tiles of b; then one for
    every pair of a shared tile of a and a tile of b.
    """
    if b.owned:
        a, b = b, a  # at most one of the two owns tiles
    a_codes, b_codes = torch.broadcast_tensors(a.codes, b.codes)
    owned = a.owned if a.codes.shape == a_codes.shape else 0
    mine, shared = a.bits[:owned], a.bits[owned:]
    if b.owned or len(shared) * len(b.bits) > MAX_PRODUCTS:
        raise ValueError(
            f"selections with {len(a.bits)} and {len(b.bits)} tiles make too many together: pass "
            "a static mask to the selector (within=), join static masks before, or take larger "
            "blocks"
        )
    operator = torch.bitwise_and if neutral == FULL else torch.bitwise_or
    if owned:
        mine = operator(mine, _facing(a, b_codes, b.bits, -1 if neutral == FULL else 0))
    products = operator(shared[:, None], b.bits).flatten(0, 1)
    paired = len(a.bits) + len(b.bits) + (a_codes - owned) * len(b.bits) + b_codes
    b_shifted = torch.where(b_codes >= 0, b_codes + len(a.bits), b_codes)
    codes = torch.where(
        (b_codes == neutral) | ((a_codes >= 0) & (a_codes < owned)), a_codes, paired
    )
    codes = torch.where(a_codes == neutral, b_shifted, codes)
    codes = codes.masked_fill((a_codes == absorbing) | (b_codes == absorbing), absorbing)
    a_max, b_max = (x.max_blocks * (codes.numel() // x.codes.numel()) for x in (a, b))
    max_blocks = min(a_max, b_max) if neutral == FULL else min(a_max + b_max, codes.numel())
    bits = torch.cat([mine, shared, b.bits, products])
    return Selection(codes, bits, a.n_q, a.n_k, a.block_size, max_blocks, owned)


def _facing(a: Selection, b_codes: Tensor, b_bits: Tensor, fill: int) -> Tensor:
    """Return what b has in the block of each tile that a owns: int32 (a.owned, block_q, words), or
    words of `fill` where b has no tile.
    """
    cell = torch.zeros(a.owned + 1, dtype=torch.int64, device=a.device)
    tile = a.codes.flatten().long()
    tile = tile.masked_fill((tile < 0) | (tile >= a.owned), a.owned)  # the last takes the rest
    cell = cell.scatter(
        0, tile, torch.arange(len(tile), device=a.device)
    )  # torch.vmap may batch it
    code = b_codes.flatten()[cell[:-1]].long()
    code = code.masked_fill(code < 0, len(b_bits))
    return torch.cat([b_bits, b_bits.new_full((1, *b_bits.shape[1:]), fill)])[code]


def selection_of_pairs(pairs: Tensor, heads: int, block: int) -> Selection:
    """Return the selection of bool (B, H, N_q, N_k) for q of `heads` heads, a multiple of H.

    Waits for the device, to count the tiles.
    """
    n_q, n_k = pairs.shape[2:]
    if pairs.shape[1] > 1:
        pairs = pairs.repeat_interleave(heads // pairs.shape[1], 1)

    def cells(outside: bool) -> Tensor:  # (B, H, rows, cols, block, block)
        padded = F.pad(pairs, (0, -n_k % block, 0, -n_q % block), value=outside)
        return padded.unflatten(3, (-1, block)).unflatten(2, (-1, block)).transpose(3, 4)

    inside = cells(False)
    taken, full = inside.flatten(4).any(4), cells(True).flatten(4).all(4)
    partial = taken & ~full
    room = int(partial.sum())
    codes, cell = number_tiles(taken, partial, room)
    tiles = inside.flatten(0, 3)[cell].unflatten(2, (-1, 32))  # (T, block, words, 32)
    weights = 1 << torch.arange(32, device=pairs.device)
    words = (tiles * weights).sum(3)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    return Selection(codes, words, n_q, n_k, (block, block), codes.numel(), owned=room)


def of_heads(found: Selection, heads: int) -> Selection:
    """Return the selection for `heads` query heads, where those that follow each other share."""
    if found.heads in (1, heads):
        return found
    group = heads // found.heads
    codes = found.codes[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)
    blocks = found.max_blocks * group
    return Selection(codes, found.bits, found.n_q, found.n_k, found.block_size, blocks)


def heads_of(mask: Mask | BlockMask | None, heads: int | None) -> int | None:
    """Return the heads that the mask has to be built with; None where they do not matter."""
    return heads if isinstance(mask, Mask) and mask.per_head else None


def built(
    mask: Mask | BlockMask, n_q: int, n_k: int, block_size: tuple[int, int], heads: int | None
) -> BlockMask:
    """Return the block mask of `mask`; ValueError where it is a BlockMask of something else."""
    if isinstance(mask, Mask):
        return mask.build(n_q, n_k, block_size, heads=heads)
    if (mask.n_q, mask.n_k, mask.block_size) != (n_q, n_k, block_size):
        raise ValueError(
            f"the mask is for {mask.n_q} x {mask.n_k} tokens in blocks of {mask.block_size}, the "
            f"selection for {n_q} x {n_k} in blocks of {block_size}: pass the Mask it comes from"
        )
    return mask


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a copy to remember: it is there for every stream, and outlives any inference mode."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.array(array, order="C")).to(device)
