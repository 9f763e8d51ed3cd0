"""The forward of the hopper backend."""

from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.hopper.tma import descriptor, panel
from sparseflash.backends.protocol import NO_TERMS, Results, TermTensors, Walk, empty_out
from sparseflash.dropout import keep_scale, keep_threshold
from sparseflash.kernels.common.device import multiprocessors
from sparseflash.kernels.common.launch import Launch, zeroed_counter
from sparseflash.kernels.common.shapes import scale_log2
from sparseflash.kernels.hopper.configs import (
    PACKED_GAIN,
    SHARED_KEYS,
    TALL_GAIN,
    TALL_KEYS,
    ForwardTiles,
    columns_in_use,
    forward_tiles,
    keeps_q,
    side_by_side,
)  # fmt: skip
from sparseflash.problem import Problem
from sparseflash.schedule.blocks import Schedule, ScheduleFacts, TileLists
from sparseflash.schedule.tile_lists import tile_entries
from sparseflash.schedule.tile_spec import TileSpec
from sparseflash.score.rule import rule_of


class Forward:
    """One persistent kernel over the rows of the mask, and one that merges rows that it split."""

    def __init__(self, problem: Problem, schedule: Schedule | None):
        from sparseflash.backends.hopper.score import ScoreLaunch
        from sparseflash.kernels.hopper import forward, gluon, merge_parts

        facts = None if schedule is None else schedule.facts
        static = schedule is None or not schedule.dynamic
        self.scale_log2 = scale_log2(problem.scale)
        self.dropout_p, self.max_scores = problem.options.dropout_p, problem.options.max_scores
        sms = multiprocessors(problem.device)
        self.tiles = forward_tiles_for(problem, facts, sms, schedule if static else None)
        self.score = ScoreLaunch.of(problem)
        bounded = self.score is not None and self.score.score.bounded
        # float16 does not hold the exponentials
        self.bounded = bounded and problem.dtype == torch.bfloat16 and not self.max_scores
        dims = problem.head_dim, problem.head_dim_v
        # beside dropout and the parts of split tiles there are no registers for it
        self.keep_q = not self.dropout_p and keeps_q(self.tiles, *dims, hoists=gluon.HOISTS.value)
        self.programs = sms * self.tiles.programs
        self.specs = (forward_spec(problem, self.tiles, sms),)
        self._launch = Launch(forward.attention_forward, static=static)
        self._merge = Launch(merge_parts.merge_parts, static=static)
        self._lse = {"size": problem.q_shape[:3], "dtype": torch.float32, "device": problem.device}
        self._device = problem.device

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, walk: Walk,
        terms: TermTensors = NO_TERMS,
    ) -> Results:  # fmt: skip
        lists = walk.lists[0]
        out, lse = empty_out(q, v), torch.empty(**self._lse)
        max_scores = torch.empty(**self._lse) if self.max_scores else None
        parts = self._parts(lists, out, lse, max_scores) if lists.n_parts else (None,) * 3
        counter = zeroed_counter(self._device)
        sink, given = terms.sink, terms.sink is not None
        tables, shapes = (), ()
        if self.score is not None:
            tables, shapes = self.score.tensors(terms.tables)
        tensors = q, k, v, out, lse, counter, *parts, seed, sink, max_scores, *tables
        arguments = lambda: self._arguments(lists, tensors)  # noqa: E731
        self._launch(tensors, arguments, lists[:4], (given, shapes))
        if lists.n_parts:
            merged: Any = (*parts, out, lse, sink, max_scores)
            arguments = lambda: _merge_arguments(lists, self.tiles.pack, *merged)  # noqa: E731
            self._merge(merged, arguments, [lists.merge], given)
        return Results(out, lse, max_scores)

    def _arguments(self, lists, tensors):
        q, k, v, out, lse, counter, part_out, part_lse, part_max, *others = tensors
        seed, sink, max_scores, *tables = others
        if not lists.n_parts:
            part_out, part_lse, part_max = lse, lse, max_scores
        tiles, dropout_p = self.tiles, self.dropout_p
        batch, heads, n_q, _ = q.shape
        n_bh, piece = batch * heads // tiles.heads, tiles.minor // lists.gather
        together = side_by_side(
            lists.n_items, n_bh, self.programs, partial=lists.partial,
            group=heads // v.shape[1] // tiles.heads,
        )  # fmt: skip
        columns, columns_v = columns_in_use(q.shape[3]), columns_in_use(v.shape[3])
        width, width_v = panel(tiles.width, columns), panel(tiles.width_v, columns_v)
        args = (
            descriptor(q, 64 // tiles.pack, width, tiles.pack),
            descriptor(k, piece, _panel(width, lists)),
            descriptor(v, piece, _panel(width_v, lists)),
            descriptor(out, 64 // tiles.pack, width_v, tiles.pack),
            out, lse, counter, part_out, part_lse, lists.items, lists.idx, lists.bit, lists.bits,
            lists.n_items, lists.n_long, lists.n_parts, lists.batch, lists.heads,
            n_q, v.shape[3], heads, heads // v.shape[1], n_bh, together,
            *out.stride()[:3], self.scale_log2, seed, keep_threshold(dropout_p),
            keep_scale(dropout_p), sink, max_scores, part_max,
        )  # fmt: skip
        options = {
            "BLOCK_N": tiles.minor, "CONSUMERS": tiles.consumers, "HEADS": tiles.heads,
            "K_STAGES": tiles.k_stages, "V_STAGES": tiles.v_stages, "BLOCK_D": tiles.width,
            "BLOCK_DV": tiles.width_v, "COLUMNS": columns,
            "COLUMNS_V": columns_v, "PARTIAL": lists.partial,
            "DROPOUT": dropout_p > 0, "SPLIT": lists.n_parts > 0, "DRAIN": tiles.drain,
            "PAIRS": tiles.pairs, "KEEP_Q": self.keep_q and not lists.n_parts, **_registers(tiles),
        }  # fmt: skip
        if self.score is not None:
            options |= self.score.options(tables) | {"BOUNDED": self.bounded}
        return (min(self.programs, n_bh * lists.n_items),), args, options

    def _parts(
        self, lists: TileLists, out: Tensor, lse: Tensor, max_scores: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Out, LSE and maxima of the parts of split tiles, float32."""
        rows = out.shape[0] * out.shape[1] * lists.n_parts * self.tiles.major
        part_out, part_lse = lse.new_empty(rows, self.tiles.width_v), lse.new_empty(rows)
        return part_out, part_lse, None if max_scores is None else torch.empty_like(part_lse)


def forward_tiles_for(
    problem: Problem, facts: ScheduleFacts | None, sms: int, schedule: Schedule | None = None
) -> ForwardTiles:
    """Return the tiles of the forward kernel on a GPU with `sms` multiprocessors.

    facts: of the schedule, None for dense attention. schedule: what tells whether neighbouring
    queries are so alike that they share tall tiles; without it those of a mask do not.
    """
    block_q = 128 if facts is None else facts.block_q
    twins = problem.batch * problem.heads // 2 if _have_twins(problem, facts) else 0
    given = problem.head_dim, problem.head_dim_v, block_q, problem.n_q, twins
    usual, tall = forward_tiles(*given), forward_tiles(*given, tall=True)
    if problem.options.score:  # a third consumer has no registers for it
        return usual._replace(minor=64) if rule_of(problem.options.score).paired else usual
    if problem.options.dropout_p or (facts is not None and schedule is None):
        return usual  # with dropout a third consumer would spill
    if facts is not None and facts.heads == 1 and (packed := _packed_heads(problem, block_q)):
        few = forward_tiles(*given, packed=packed)
        keys, own = (_mean_keys(tiles, problem, schedule) for tiles in (usual, few))
        if keys > PACKED_GAIN * own:
            return few
    if usual == tall:
        return usual
    most, least = (_most_queries(tiles, problem, sms) for tiles in (tall, usual))
    if most > TALL_GAIN * least:  # whatever they attend to
        return usual
    more, fewer = (_mean_keys(tiles, problem, schedule) for tiles in (tall, usual))
    return tall if most * (more + TALL_KEYS) <= TALL_GAIN * least * fewer else usual


def _have_twins(problem: Problem, facts: ScheduleFacts | None) -> bool:
    """Whether query heads come in pairs that have their keys and their mask in common, and keys
    enough for a tile of two.

    Blocks of a selection must also divide by the tiles, which have up to 128 keys then.
    """
    if problem.group % 2 or (facts is not None and facts.heads > 1):
        return False
    keys = problem.n_k if facts is None else facts.keys_per_query
    if max(problem.head_dim, problem.head_dim_v) <= 64 and keys < SHARED_KEYS:
        return False
    return not isinstance(problem.mask, ScheduleFacts) or problem.mask.block_k % 128 == 0


def _packed_heads(problem: Problem, block_q: int) -> int:
    """Return the query heads that fill tiles of one block below 64: for two consumers, or for one
    up to head dim 128; else 0.
    """
    block = block_q & -block_q
    if block >= 64:
        return 0
    rows = (128,) if max(problem.head_dim, problem.head_dim_v) > 128 else (128, 64)
    return next((n // block for n in rows if problem.group % (n // block) == 0), 0)


def _most_queries(tiles: ForwardTiles, problem: Problem, sms: int) -> float:
    """Those of the busiest multiprocessor, if all tiles are about as long."""
    n_tiles = problem.batch * problem.heads // tiles.heads * -(-problem.n_q // tiles.major)
    rounds = -(-n_tiles // (sms * tiles.programs))
    return rounds * tiles.programs * tiles.major * tiles.heads


def _mean_keys(tiles: ForwardTiles, problem: Problem, schedule: Schedule | None) -> float:
    """Keys of the blocks that a tile attends to."""
    if schedule is None:
        return problem.n_k
    lists = schedule.batch * schedule.heads * -(-schedule.n_q // tiles.major)
    return tile_entries(schedule, "rows", tiles.major) * schedule.block_k / lists


def forward_spec(problem: Problem, tiles: ForwardTiles, sms: int) -> TileSpec:
    """Return the work list of the forward kernel on a GPU with `sms` multiprocessors."""
    # lists are of single heads: a program has as many tiles at a time as heads share one
    at_once = sms * tiles.programs * tiles.heads
    return TileSpec.of(problem, "rows", tiles.major, tiles.minor, at_once)


def _panel(width: int, lists: TileLists) -> int:
    """Columns of one copy: where an entry is gathered, those that lie together for all its rows."""
    return width if lists.gather == 1 else min(width, 64)


def _registers(tiles: ForwardTiles) -> dict[str, int]:
    """Of a thread: of the consumers, of the warps that feed them, and the mean that a launch must
    name. A program has its consumers and one more warpgroup.
    """
    groups = tiles.consumers + 1
    mean = 65536 // (tiles.programs * groups * 128) // 8 * 8
    feed = 32 if groups == 4 else min(40, mean // 20 * 8)
    consumer = min(240, (mean * groups - feed) // tiles.consumers // 8 * 8)
    return {"REGISTERS": consumer, "FEED_REGISTERS": feed, "num_warps": 4, "maxnreg": mean}


def _merge_arguments(
    lists: TileLists, pack: int, part_out: Tensor, part_lse: Tensor, part_max: Tensor | None,
    out: Tensor, lse: Tensor, sink: Tensor | None, max_scores: Tensor | None,
) -> tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Return the launch of the kernel that merges the parts of split tiles."""
    batch, heads, n_q, head_dim_v = out.shape
    n_split, rows = lists.merge.shape[1], 16
    grid = n_split, batch * heads, lists.major // rows
    args = (
        part_out, part_lse, lists.merge, out, lse, sink, part_max, max_scores, n_split,
        lists.n_parts, lists.batch, lists.heads, heads, n_q, head_dim_v, *out.stride()[:3],
    )  # fmt: skip
    shape = {"BLOCK_M": lists.major, "BLOCK_DV": part_out.shape[-1], "ROWS": rows, "PACK": pack}
    return grid, args, shape
