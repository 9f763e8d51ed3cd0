"""Decoding by Triton kernels: the keys are split into parts, whose results a second kernel merges.

The grid follows from the layout alone. Lengths, pages and lists are read on the device, so nothing
waits for it, and a CUDA graph serves caches that grow.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

import masks
from sparseflash.backends import triton as portable
from sparseflash.backends.protocol import NO_TERMS, Results, TermTensors, Walk, empty_out
from sparseflash.decoding.pattern import Bounds, Pattern
from sparseflash.kernels.common.device import interpreted, kernels_of, multiprocessors
from sparseflash.kernels.common.launch import Launch
from sparseflash.kernels.common.shapes import padded_dim, padded_dim_v, scale_log2
from sparseflash.kernels.portable.configs import Family, Tiles, power_of_two_divisor
from sparseflash.problem import Problem
from sparseflash.schedule.blocks import Schedule, ScheduleFacts

PROGRAMS = 2  # for each multiprocessor: their copies in flight fill the memory's bandwidth
LONGEST = 128  # key tiles of a part: sequences of unlike lengths share the device
MOST_PARTS = 256
MOST_QUERIES, LEAST_KEYS = 16, 1024  # of `FewQueries`; tiles of other kernels are mostly empty
TILE_BYTES = 2**14  # of keys, and of values


class Decode:
    """A decoding step of one problem."""

    def __init__(
        self, problem: Problem, pattern: Pattern, n: int, page: int, splits: int | None, *,
        last: bool = True,
    ):  # fmt: skip
        """last: the queries are the last tokens of a sequence for a score, or those of its own."""
        self.problem, self.n = problem, n
        self.score = portable.score_of(problem, pairs=True)
        group, schedule = problem.group, pattern.schedule
        # where the query heads of a key head have masks of their own, each reads its keys itself
        self.pack = group if pattern.heads in (1, problem.kv_heads) else 1
        block_q, block_k = (schedule.block_q, schedule.block_k) if schedule else BLOCKLESS
        head_dim, head_dim_v = problem.head_dim, problem.head_dim_v
        width, width_v = padded_dim(head_dim), padded_dim_v(head_dim, head_dim_v)
        tiles_for = partial(
            decode_tiles, self.pack * problem.n_q, max(width, width_v), problem.dtype,
            portable.family_of(problem.device), block_k,
            lookups=(page > 0) + (schedule is not None),
        )  # fmt: skip
        tiles = tiles_for()
        self.m_tiles = -(-self.pack * problem.n_q // tiles.block_m)
        self.packs = problem.heads // self.pack
        programs = problem.batch * self.packs * self.m_tiles
        self.parts = splits or _parts(programs, _most_tiles(pattern, n, tiles.block_n), problem)
        if programs * self.parts > _slots(problem):
            tiles = tiles_for(crowded=True)
        self.lists = schedule if schedule is not None and not schedule.dynamic else None
        self.pattern = pattern._replace(schedule=self.lists)  # a dynamic one is that of a call
        static = schedule is None or self.lists is not None
        self.launch_parts = Launch(kernels_of("decoding").decode_parts, static=static)
        self.launch_merge = Launch(kernels_of("decoding").merge_splits, static=True)
        self.options = {
            "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v, "BLOCK_D": width, "BLOCK_DV": width_v,
            "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_Q": block_q,
            "BLOCK_K": block_k, "PAGE": page,
            "LISTED": schedule is not None, "FROM_END": pattern.from_end,
            "PARTIAL": schedule is not None and schedule.n_partial > 0, "CAUSAL": pattern.causal,
            "PRECISION": "ieee" if problem.dtype == torch.float32 else "tf32", "LAST": last,
            "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
        }  # fmt: skip

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, schedule: Schedule | None,
        tables: Sequence[Tensor] = (), sink: Tensor | None = None,
    ) -> Results:  # fmt: skip
        """out (B, H_q, N_q, D_v) and lse (B, H_q, N_q); schedule: that of a dynamic mask."""
        problem = self.problem
        out = empty_out(q, v)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        most = torch.empty_like(lse) if problem.options.max_scores else None
        parts, part_lse, part_max = out, lse, most
        merged = self.parts > 1 or sink is not None
        if merged:
            parts = q.new_empty(self.parts, *out.shape, dtype=torch.float32)
            part_lse = q.new_empty(self.parts, *lse.shape, dtype=torch.float32)
            part_max = None if most is None else torch.empty_like(part_lse)
        schedule = self.lists or schedule
        lists = (None,) * 4
        if schedule is not None:
            lists = (*schedule.rows[:1], *schedule.rows[2:], schedule.bits)

        def arguments():
            step = parts.stride()[1:] if merged else parts.stride()
            args = (
                q, k, v, parts, part_lse, part_max, *bounds, *lists,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *step[:3],
                out.numel(), lse.numel(), 0 if bounds.table is None else bounds.table.stride(0),
                scale_log2(problem.scale), problem.n_q, self.n, self.parts, self.m_tiles,
                self.packs, self.pack, problem.group, *_list_strides(schedule),
            )  # fmt: skip
            grid = (self.parts * self.m_tiles * problem.batch * self.packs,)
            given = {"LENGTHS": bounds.lengths is not None, "STARTS": bounds.starts is not None}
            if self.score is not None:
                given |= {"score_args": self.score.args(tables), "SCORE": self.score.score}
            return grid, args, self.options | given

        tensors = q, k, v, parts, part_lse, part_max, *bounds, *tables
        self.launch_parts(tensors, arguments, lists, (merged, *[t.shape for t in tables]))
        if merged:
            self._merge((parts, part_lse, part_max, out, lse, most, sink), out, lse)
        return Results(out, lse, most)

    def _merge(self, tensors: Sequence[Tensor | None], out: Tensor, lse: Tensor) -> None:
        def arguments():
            width = self.options["BLOCK_DV"]
            args = *tensors, *out.stride()[:3], self.parts, lse.numel(), *lse.shape[1:]
            shape = {"HEAD_DIM": out.shape[3], "BLOCK_D": width, "BLOCK_P": max(16, 4096 // width)}
            return (lse.numel(),), args, {**shape, "num_warps": 4}

        self.launch_merge(tensors, arguments, layout=tensors[-1] is not None)


class FewQueries:
    """The forward of `attention` where few queries attend to many keys."""

    specs = ()

    def __init__(self, problem: Problem, schedule: Schedule | None):
        causal = problem.mask == masks.causal(align="bottom_right").key
        pattern = Pattern(None, True, True) if causal else Pattern(schedule, False, False)
        self.listed = not causal
        self.step = Decode(problem, pattern, problem.n_k, 0, None, last=False)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, walk: Walk,
        terms: TermTensors = NO_TERMS,
    ) -> Results:  # fmt: skip
        schedule = walk.schedule if self.listed else None
        return self.step(q, k, v, Bounds(None, None, None), schedule, terms.tables, terms.sink)


def is_for_few(problem: Problem, facts: ScheduleFacts | None) -> bool:
    """Return whether `FewQueries` takes a problem; facts: of its schedule, None for all keys."""
    keys = problem.n_k if facts is None else facts.keys_per_query
    few = problem.n_q <= MOST_QUERIES and not problem.options.dropout_p
    return few and keys >= LEAST_KEYS


BLOCKLESS = 256, 256  # of a call without lists


def decode_tiles(
    rows: int,
    width: int,
    dtype: torch.dtype,
    family: Family,
    block_k: int,
    *,
    lookups: int,
    crowded: bool = False,
) -> Tiles:
    """Return the tiles for `rows` rows that share a key head; width: the wider head dim, padded.

    lookups: loads, one after the other, that the address of a tile takes. Triton shares the stages
        out among them and the tile.
    crowded: there are more programs than `PROGRAMS` for each multiprocessor, which have less memory
        each to run at the same time.
    """
    block_m = min(64, max(16, 1 << (rows - 1).bit_length()))
    if dtype == torch.float32 and not interpreted():
        return Tiles(16, min(16, power_of_two_divisor(block_k)), 4, 1)
    tile_bytes = TILE_BYTES // 2 if family == "cdna" else TILE_BYTES
    block_n = min(128, tile_bytes // (2 * width), power_of_two_divisor(block_k))
    in_flight = 2 if family in ("hopper", "blackwell") and not crowded else 1
    warps = 8 if block_m * width > 64 * 128 else 4
    return Tiles(block_m, block_n, warps, 1 + in_flight * (1 + lookups))


def _most_tiles(pattern: Pattern, n: int, block_n: int) -> int:
    """Key tiles that a query may have: at most, but of a dynamic mask in the mean."""
    schedule = pattern.schedule
    if schedule is None:
        return -(-n // block_n)
    if schedule.dynamic:
        blocks = int(-(-schedule.facts.keys_per_query // schedule.block_k))
    else:
        blocks = int(schedule.rows.ptr.diff().max())
    return blocks * (schedule.block_k // block_n)


def _parts(programs: int, tiles: int, problem: Problem) -> int:
    """Parts that fill the device, none of them too long or shorter than a program takes."""
    wanted = max(_slots(problem) // programs, tiles // LONGEST)
    return max(1, min(wanted, -(-tiles // kernels_of("decoding").MIN_TILES.value), MOST_PARTS))


def _slots(problem: Problem) -> int:
    """Return how many programs fill the device."""
    on_gpu = problem.device.type == "cuda"
    return PROGRAMS * (multiprocessors(problem.device) if on_gpu else 4)


def _list_strides(schedule: Schedule | None) -> tuple[int, int]:
    """Return the distances of lists from a batch entry, and a pack of heads, to the next."""
    if schedule is None:
        return 0, 0
    lists = -(-schedule.n_q // schedule.block_q)
    heads = schedule.heads
    return (lists * heads if schedule.batch > 1 else 0), (lists if heads > 1 else 0)
