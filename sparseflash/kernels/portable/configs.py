"""Tile shapes of the Triton kernels: a table, measured offline, so that no call pays for tuning."""

from typing import Literal, NamedTuple

import torch


class Tiles(NamedTuple):
    """How a kernel is cut: BLOCK_M queries x BLOCK_N keys, warps, pipeline stages.

    max_registers: cap per thread, so that more programs fit on a multiprocessor.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


Family = Literal["ampere", "hopper", "blackwell", "geforce", "cdna"]
Table = dict[tuple[str, int], Tiles]

# (kernel, padded head dim) -> tiles for 16-bit inputs. A row " partial" is for masks with partial
# blocks: the code that masks needs registers. A row " short" is for masks with few keys to a query,
# where occupancy counts most. A row " padded" is for head dims that are padded, which TMA does not
# copy: addresses need registers. A row " score" is for calls with a function of the scores, whose
# code needs registers, a row " tables" for those with tables, and a row " paired" for tables that
# are read by key or by pair. Rows are measured for Hopper, the padded ones apart; those for scores
# and for other GPUs are chosen by what compiles with few spills (docs/results/kernels.md).
HOPPER = {
    ("forward", 32): Tiles(64, 128, 4, 1, max_registers=128),
    ("forward paired", 32): Tiles(64, 64, 4, 2),
    ("forward", 64): Tiles(128, 128, 8, 2, max_registers=128),
    ("forward short", 64): Tiles(64, 128, 4, 1, max_registers=128),
    ("forward short paired", 64): Tiles(64, 64, 4, 2),
    ("forward score", 64): Tiles(64, 128, 4, 1, max_registers=128),
    ("forward paired", 64): Tiles(128, 64, 8, 3),
    ("forward partial", 64): Tiles(128, 64, 8, 2, max_registers=128),
    ("forward", 128): Tiles(64, 128, 4, 1, max_registers=168),
    ("forward partial", 128): Tiles(128, 64, 8, 2, max_registers=128),
    ("forward paired", 128): Tiles(128, 64, 8, 3),
    ("forward partial paired", 128): Tiles(64, 32, 4, 2),
    ("forward", 256): Tiles(128, 64, 8, 2),
    ("backward_kv", 32): Tiles(128, 64, 4, 2),
    ("backward_kv paired", 32): Tiles(32, 64, 4, 2),
    ("backward_kv", 64): Tiles(32, 64, 4, 2),
    ("backward_kv tables", 64): Tiles(32, 64, 4, 2, max_registers=128),
    ("backward_kv paired", 64): Tiles(64, 64, 4, 1),
    ("backward_kv partial", 64): Tiles(64, 64, 4, 1, max_registers=168),
    ("backward_kv partial score", 64): Tiles(32, 64, 4, 1, max_registers=168),
    ("backward_kv", 128): Tiles(64, 64, 4, 2),
    ("backward_kv paired", 128): Tiles(64, 64, 4, 1),
    ("backward_kv partial", 128): Tiles(32, 64, 4, 2),
    ("backward_kv", 256): Tiles(64, 32, 4, 1),
    ("backward_q", 32): Tiles(64, 64, 4, 3),
    ("backward_q", 64): Tiles(128, 64, 8, 3),
    ("backward_q score", 64): Tiles(64, 64, 4, 3, max_registers=168),
    ("backward_q paired", 64): Tiles(64, 64, 4, 3),
    ("backward_q tables", 64): Tiles(128, 64, 8, 3, max_registers=128),
    ("backward_q partial", 64): Tiles(64, 64, 4, 3),
    ("backward_q partial score", 64): Tiles(64, 64, 4, 3, max_registers=168),
    ("backward_q", 128): Tiles(128, 64, 8, 3),
    ("backward_q paired", 128): Tiles(64, 64, 4, 2),
    ("backward_q partial", 128): Tiles(64, 64, 4, 2),
    ("backward_q", 256): Tiles(128, 64, 8, 1),
    ("backward_tables", 32): Tiles(64, 64, 8, 2),
    ("backward_tables", 64): Tiles(64, 64, 8, 2),
    ("backward_tables paired", 64): Tiles(64, 128, 8, 2),
    ("backward_tables", 128): Tiles(64, 64, 8, 2),
    ("backward_tables", 256): Tiles(64, 32, 8, 1),
    **{("backward_batch", width): Tiles(64, 64, 8, 2) for width in (32, 64, 128)},
    ("backward_batch", 256): Tiles(64, 32, 8, 1),
}
_PADDED: Table = {
    ("forward padded", 32): Tiles(64, 32, 4, 2),
    ("forward padded", 64): Tiles(64, 32, 4, 2),
    ("forward padded", 128): Tiles(64, 32, 4, 2),
    ("backward_kv padded", 32): Tiles(32, 32, 4, 2),
    ("backward_kv padded", 64): Tiles(32, 32, 8, 1),
    ("backward_kv padded", 128): Tiles(32, 32, 8, 1),
    ("backward_kv padded", 256): Tiles(32, 32, 8, 1),
    ("backward_q padded", 64): Tiles(64, 32, 4, 2),
    ("backward_q padded", 128): Tiles(32, 32, 4, 2),
    ("backward_q padded", 256): Tiles(32, 32, 4, 2),
}
_SUMS: Table = {
    (kernel, width): Tiles(16, 16, 4, 1) if width == 256 else Tiles(32, 32, 4, 1)
    for width in (32, 64, 128, 256)
    for kernel in ("backward_tables", "backward_batch")
}
_BLACKWELL: Table = {
    ("forward partial", 32): Tiles(64, 128, 4, 1),
    ("forward", 64): Tiles(128, 64, 8, 2),
    ("forward short", 64): Tiles(64, 64, 4, 2),
    ("forward partial", 128): Tiles(128, 64, 8, 2),
    ("forward padded", 128): Tiles(64, 32, 8, 2),
    ("forward padded", 256): Tiles(64, 32, 4, 2),
    ("backward_kv", 32): Tiles(128, 64, 8, 1),
    ("backward_kv partial", 64): Tiles(64, 64, 8, 1),
    ("backward_kv partial", 128): Tiles(64, 64, 8, 1),
    ("backward_kv", 256): Tiles(64, 32, 8, 1),
    ("backward_q partial", 256): Tiles(128, 32, 8, 1),
}
_AMPERE: Table = {
    (kernel, width): tiles
    for width, tiles in {
        32: Tiles(64, 64, 4, 2),
        64: Tiles(64, 64, 4, 2),
        128: Tiles(64, 32, 4, 2),
        256: Tiles(32, 32, 4, 1),
    }.items()
    for kernel in ("forward", "backward_kv", "backward_q")
} | {
    ("backward_kv", 64): Tiles(32, 64, 4, 2),
    ("backward_kv score", 64): Tiles(64, 32, 4, 2),
    ("backward_kv", 256): Tiles(32, 32, 8, 1),
    ("backward_q paired", 64): Tiles(64, 32, 4, 2),
}
_GEFORCE: Table = {
    ("forward padded", 128): Tiles(64, 32, 8, 2),
    ("backward_kv", 32): Tiles(64, 64, 4, 1),
    ("backward_kv", 64): Tiles(64, 32, 4, 2),
    ("backward_kv", 128): Tiles(64, 32, 8, 2),
    ("backward_q", 64): Tiles(64, 32, 4, 2),
}
_CDNA: Table = {
    ("backward_kv", 32): Tiles(32, 64, 4, 2),
    ("backward_kv", 64): Tiles(32, 64, 4, 2),
    ("backward_kv", 128): Tiles(32, 64, 4, 1),
    ("backward_kv padded", 128): Tiles(32, 32, 4, 1),
    ("backward_kv", 256): Tiles(16, 32, 4, 1),
}
SHORT_ROW = 2048  # keys
_FLOAT32 = {
    32: Tiles(32, 32, 4, 1),
    64: Tiles(32, 32, 4, 1),
    128: Tiles(32, 32, 4, 1),
    256: Tiles(16, 16, 4, 1),
}


def _tables(family: Family) -> tuple[Table, ...]:
    """Return the tables of a family: the first that has a row decides."""
    return {
        "ampere": (_AMPERE, _PADDED, _SUMS),
        "hopper": (HOPPER, _PADDED, _SUMS),
        "blackwell": (_BLACKWELL, HOPPER, _PADDED, _SUMS),
        "geforce": (_GEFORCE, _AMPERE, _PADDED, _SUMS),
        "cdna": (_CDNA, _AMPERE, _SUMS),
    }[family]


def tiles_for(
    kernel: str,
    head_dim: int,
    dtype: torch.dtype,
    *,
    family: Family,
    padded: bool,
    partial: bool,
    keys_per_query: float,
    block_q: int,
    block_k: int,
    score: Literal["", "plain", "tables", "paired"] = "",
) -> Tiles:
    """Tiles of `kernel` that divide the mask's blocks of block_q x block_k tokens.

    padded: whether a head dim is not a power of two, or is below 16; partial: whether the mask has
        partial blocks; keys_per_query: the mean over its query blocks; score: whether there is a
        function of the scores, with tables, or with tables read by key or pair.
    """
    width = max(32, 1 << (head_dim - 1).bit_length())
    if dtype == torch.float32:
        tiles = _FLOAT32[width]
    else:
        kinds = ["padded"] * padded
        kinds += ["partial"] if partial else ["short"] if keys_per_query <= SHORT_ROW else []
        names = [*(f"{kernel} {kind}" for kind in kinds), kernel]
        kinds_of = {"paired": [" paired", " tables"], "tables": [" tables"]}
        ends = [*kinds_of.get(score, []), *[" score"] * bool(score), ""]
        rows = [(f"{n}{end}", width) for n in names for end in ends]
        tables = _tables(family)
        tiles = next(table[row] for row in rows for table in tables if row in table)
    block_m = min(tiles.block_m, power_of_two_divisor(block_q))
    block_n = min(tiles.block_n, power_of_two_divisor(block_k))
    if (block_m, block_n) == (tiles.block_m, tiles.block_n):
        return tiles
    warps = 4 if block_m <= 64 else tiles.num_warps
    return tiles._replace(block_m=block_m, block_n=block_n, num_warps=warps)


def power_of_two_divisor(n: int) -> int:
    """Return the largest power of two that divides n."""
    return n & -n
