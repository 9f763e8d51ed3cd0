"""How the Hopper kernels are cut: rules instead of a search, so that no call pays for tuning."""

from functools import cache
from typing import NamedTuple

_SHARED = 228 * 1024  # bytes of a multiprocessor
_SET_ASIDE = 2048  # of a program, for the system and the barriers


class ForwardTiles(NamedTuple):
    """Tiles of major queries x minor keys, with a consumer for each 64 queries of a head.

    width, width_v: padded head dims. k_stages, v_stages: tiles of K and of V in shared memory.
    drain: the pipeline ends with every tile. pairs: K of a block and V of the one before it share
    their barriers.
    programs: of one multiprocessor. heads: query heads that share a tile.
    """

    consumers: int
    minor: int
    width: int
    width_v: int
    k_stages: int
    v_stages: int
    drain: bool
    pairs: bool
    programs: int
    heads: int

    @property
    def major(self) -> int:
        return 64 * self.consumers // self.heads

    @property
    def pack(self) -> int:
        """Heads of a consumer, side by side."""
        return max(1, self.heads // self.consumers)


# Tiles of two heads run one program to a multiprocessor: with fewer of them, some would be idle.
_FILL = 132


# How much faster tiles of 192 queries multiply than tiles of 128, and the keys whose time a tile of
# them takes longer to begin and to end. Measured on an H200.
TALL_GAIN = 1.15
TALL_KEYS = 128
# Blocks below 64 have tiles of several heads where others would compute so much more.
PACKED_GAIN = 1.2
# At head dims up to 64, two heads share a tile from so many keys to a query on.
SHARED_KEYS = 768


@cache
def forward_tiles(
    head_dim: int, head_dim_v: int, block_q: int, n_q: int, twins: int = 0, *, tall: bool = False,
    packed: int = 0,
) -> ForwardTiles:  # fmt: skip
    """For a mask with blocks of block_q queries.

    twins: pairs of query heads, over the batch, that have keys and mask in common. Where blocks
    fill half a tile only, the two share it: K and V are copied once for both.
    tall: with a third consumer where there are registers for it, at head dims from 33 to 64.
    packed: heads of a tile of one query block below 64, which have keys and mask in common.
    """
    width, width_v = padded(head_dim), padded(head_dim_v)
    widest = max(width, width_v)
    drain = widest > 128
    tall = tall and width == width_v == 64
    half = not tall and (block_q % 128 != 0 or n_q <= 64)
    shared = half and twins * -(-n_q // 64) >= _FILL
    if packed:
        shared = packed * (block_q & -block_q) == 128
    small = half and not shared and not drain
    consumers, programs = (3, 1) if tall else (1, 2) if small else (2, 1)
    minor = 64 if drain or (small and widest > 64) else 128  # shared memory
    if widest == 32:  # latencies count most: four consumers to a multiprocessor
        minor, programs = 64, 2 * programs
    # Q and O share a place, of which there are two unless the pipeline drains
    places = 2 * 64 * consumers * widest * (1 if drain else 2)
    left = _SHARED // programs - _SET_ASIDE - places
    k_tile, v_tile = 2 * minor * width, 2 * minor * width_v
    stages = min(4, left // (k_tile + v_tile))
    # a tile of V is needed a block longer than one of K
    more = stages < 4 and left - stages * (k_tile + v_tile) >= v_tile
    pairs = stages > 2 and not more and not drain
    return ForwardTiles(
        consumers, minor, width, width_v, stages, stages + more, drain, pairs, programs,
        heads=packed or (2 if shared else 1),
    )  # fmt: skip


# Causal tiles of a head end with the longest ones first. Launches of few tiles have so many heads
# side by side, so that no head is left to the end. Measured on an H100.
SIDE_BY_SIDE = 4
FEW_TILES = 16  # for each program


def side_by_side(n_tiles: int, n_bh: int, programs: int, *, partial: bool, group: int = 1) -> int:
    """How many heads run a tile one after the other, before the next tile; they divide n_bh.

    n_tiles: of a head. partial: whether some blocks of the mask are. group: heads that share keys,
    which always run together: their keys come from memory once.
    """
    if not partial or n_tiles * n_bh >= FEW_TILES * programs:
        return group
    together = max(1, SIDE_BY_SIDE // group) * group
    while n_bh % together:
        together -= group
    return together


def keeps_q(tiles: ForwardTiles, head_dim: int, head_dim_v: int, *, hoists: bool) -> bool:
    """Whether Q stays in registers for a tile, where its numbers fit beside those of S, P and O.

    hoists: Triton after 3.6, which spills above head dim 64.
    """
    numbers = columns_in_use(head_dim_v) // 2 + columns_in_use(head_dim) // 4  # of a thread
    fit = tiles.minor * 3 // 4 + numbers <= (144 if hoists else 192)
    return tiles.consumers == 2 and max(tiles.width, tiles.width_v) > 32 and fit


class BackwardTiles(NamedTuple):
    """Of a pass of the backward: tiles of 64 * consumers (major) x minor tokens, stages of what
    streams by, and of what stays for a tile.

    wide: the two consumers share the products of 64 tokens (major).
    """

    consumers: int
    minor: int
    stages: int
    ring: int
    wide: bool = False

    @property
    def major(self) -> int:
        return 64 if self.wide else 64 * self.consumers

    @property
    def programs(self) -> int:
        """Of one multiprocessor."""
        return 3 - self.consumers

    def extent(self, head_dim: int) -> int:
        """Return what a head dim takes in shared memory."""
        return max(128, padded(head_dim)) if self.wide else padded(head_dim)

    def columns(self, head_dim: int) -> int:
        """Return what is multiplied of it."""
        return max(128, -(-head_dim // 64) * 64) if self.wide else columns_in_use(head_dim)


# A pair of tiles of 64 keys takes as long as this many tiles of 128 at head dims from 65 to 128.
JOINED_GAIN = 1.35


def cols_tiles(width: int, block_k: int, *, with_dq: bool, joined: bool = True) -> BackwardTiles:
    """Of the pass over columns, for head dims up to `width` and a mask with blocks of block_k.

    joined: at head dims from 65 to 128, smaller key blocks share a tile of 128 keys, which attend
    to the union of their query blocks. It is the only form without dQ, and with dropout.
    """
    if width > 128:
        return BackwardTiles(2, 64, stages=2, ring=1, wide=True)
    if width > 64:
        if with_dq and not joined:
            return BackwardTiles(1, 64, stages=2, ring=1)
        return BackwardTiles(2, 64, stages=2, ring=2)
    if block_k % 128:
        return BackwardTiles(1, 64, stages=2, ring=2)
    if with_dq:
        return BackwardTiles(2, 64, stages=3, ring=2)
    return BackwardTiles(2, 128, stages=2, ring=2)


def keeps_kv(tiles: BackwardTiles, columns: int, *, hoists: bool) -> bool:
    """Whether K and V stay in registers for a tile of the pass over columns with dQ.

    columns: what is multiplied of the larger head dim. hoists: Triton after 3.6; 3.9 spills 450 to
    620 bytes above 64 columns.
    """
    return tiles.major == 128 and columns <= (64 if hoists else 80)


def rows_tiles(width: int, block_q: int) -> BackwardTiles:
    """Of the pass over rows, likewise."""
    if width > 64:
        return BackwardTiles(2, 128, stages=2, ring=1)
    if block_q % 128:
        return BackwardTiles(1, 128, stages=2, ring=2)
    return BackwardTiles(2, 128, stages=2, ring=2)


def padded(head_dim: int) -> int:
    """Return the extent that a head dim takes in a kernel."""
    return max(32, 1 << (head_dim - 1).bit_length())


def columns_in_use(head_dim: int) -> int:
    """Return what the kernels multiply of a head dim: a power of two, 64 and 16 or 32 columns, or
    192.
    """
    if 128 < head_dim <= 192:
        return 192
    return -(-head_dim // 16) * 16 if 64 < head_dim <= 96 else padded(head_dim)
