"""The backward of the hopper backend, in one of two forms.

One pass over the columns of the mask gives dK and dV, and adds up dQ by float32 reductions, whose
order changes from run to run. Two passes without atomics, over columns and rows, take seven matrix
products instead of five. See docs/internals/hopper.md.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.backends import triton
from sparseflash.backends.hopper.tma import empty_like, fits_tma
from sparseflash.backends.protocol import Gradients, Saved, Walk
from sparseflash.kernels.common.device import multiprocessors
from sparseflash.kernels.hopper.configs import (
    JOINED_GAIN,
    BackwardTiles,
    cols_tiles,
    padded,
    rows_tiles,
)  # fmt: skip
from sparseflash.problem import Problem
from sparseflash.schedule.blocks import Schedule, ScheduleFacts
from sparseflash.schedule.tile_lists import gathered_tokens, tile_entries
from sparseflash.schedule.tile_spec import TileSpec
from sparseflash.score.rule import rule_of

_PAD = 128  # buffers with a number for every query have a multiple of this, unless grouped
# up to so many for a query, clearing and converting dQ costs more than it saves
_FEW_KEYS = 512
_FEW_KEYS_SMALL = 128  # where small key blocks do not share tiles: two passes have no such form
_L2 = 50e6  # bytes


class BackwardForm(NamedTuple):
    """Which passes run, and their tiles."""

    one_pass: bool
    cols: BackwardTiles
    rows: BackwardTiles

    def specs(self, problem: Problem, sms: int) -> tuple[TileSpec, ...]:
        """Return the work lists of the passes on a GPU with `sms` multiprocessors."""
        cols, rows = self.cols, self.rows
        traffic = _traffic(problem) if self.one_pass else 0
        by_cols = TileSpec.of(problem, "cols", cols.major, cols.minor, sms * cols.programs, traffic)
        if self.one_pass or problem.options.score:
            return (by_cols,)
        return by_cols, TileSpec.of(problem, "rows", rows.major, rows.minor, sms * rows.programs)


def backward_form(
    problem: Problem, facts: ScheduleFacts | None, schedule: Schedule | None = None
) -> BackwardForm:
    """Return the form for a problem; facts: of its schedule, None for dense attention.

    schedule: what tells whether small key blocks share tiles; without it none do.
    """
    width = max(padded(problem.head_dim), padded(problem.head_dim_v))
    block_q, block_k = (facts.block_q, facts.block_k) if facts else (128, 128)
    joined = width != 128 or problem.options.dropout_p > 0 or block_k % 128 == 0
    joined = joined or (schedule is not None and _join(schedule))
    keys = problem.n_k if facts is None else facts.keys_per_query
    few = _FEW_KEYS if joined else _FEW_KEYS_SMALL
    one_pass = not problem.options.deterministic and keys > few
    if width > 128:  # what it runs has no other form
        one_pass = True
    elif problem.options.score:
        one_pass, joined = not problem.options.deterministic and _sums_by_key(problem), True
    elif one_pass and joined and schedule is not None:
        one_pass = not _leaves_l2(problem, schedule)
    cols = cols_tiles(width, block_k, with_dq=one_pass, joined=joined)
    if problem.options.score:  # larger ones spill
        cols = cols._replace(minor=64)
    return BackwardForm(one_pass, cols, rows_tiles(width, block_q))


def _sums_by_key(problem: Problem) -> bool:
    """Whether the pass over columns can sum what gradients of the tables of a score take, and no
    pass over rows stores some of them.
    """
    from sparseflash.score.by_triton import kernel_score

    score = kernel_score(problem.options.score)
    alone = not score.n_sums or problem.heads == problem.kv_heads
    return not score.direct and score.any_side and alone


def _join(schedule: Schedule) -> bool:
    """Whether neighbouring key blocks have so many query blocks in common that tiles of 128 keys
    are faster than tiles of 64.
    """
    pairs = tile_entries(schedule, "cols", 64) / 2
    return tile_entries(schedule, "cols", 128) <= JOINED_GAIN * pairs


def _leaves_l2(problem: Problem, schedule: Schedule) -> bool:
    """Whether one pass would add to rows of dQ that have left L2. Something must be allowed.

    Programs walk lists of scattered entries at their own pace. What they touch at the end of random
    lists lies `apart` bytes from each other, in standard deviations.
    """
    n_blocks = -(-schedule.n_q // schedule.block_q)
    lists, idx = schedule.cols, schedule.cols.idx
    density = len(idx) / (len(lists.mid) * n_blocks)
    blocks = (n_blocks * (1 - density) / density) ** 0.5
    apart = schedule.block_q * _traffic(problem) * blocks
    if apart <= _L2:
        return False
    of = torch.arange(len(lists.mid), device=idx.device).repeat_interleave(lists.ptr.diff())
    place = of * (n_blocks + 2) + idx
    beside = [torch.isin(place + n_blocks + 2 + step, place) for step in (-1, 0, 1)]
    alike = int(torch.stack(beside).any(0).sum())  # entries that the next list has, or a neighbour
    return 4 * alike <= len(idx)


def _traffic(problem: Problem) -> int:
    """Bytes of a query of a list entry, which brings q and dout and adds to dq in float32."""
    return 6 * problem.head_dim + 2 * problem.head_dim_v


def _padded_queries(problem: Problem, minor: int, whole: bool, dynamic: bool) -> int:
    """Return the queries of a head in the buffers with a number for every query.

    whole: an entry of a list is one piece of `minor` queries. With grouped heads its number is then
    its place among the rows of the group, so that no kernel has to divide: see `TileLists`.
    """
    if whole and problem.heads != problem.kv_heads:
        return (-(-problem.n_q // minor) + 1) * minor
    # pieces that are missing in a list add 0 * K to queries beyond the last one: for a NaN among
    # the keys these must not be queries of another head
    spare = dynamic or not whole
    return -(-problem.n_q // _PAD) * _PAD + (_PAD if spare else 0)


class Backward:
    """The passes of the form that fits the problem."""

    def __init__(self, problem: Problem, schedule: Schedule | None):
        from sparseflash.backends.hopper import passes  # the kernels need Triton with Gluon

        facts = None if schedule is None else schedule.facts
        dynamic = schedule is not None and schedule.dynamic
        form = backward_form(problem, facts, None if dynamic else schedule)
        self.one_pass, self.options = form.one_pass, problem.options
        self.specs = form.specs(problem, multiprocessors(problem.device))
        whole = gathered_tokens(facts, self.specs[0]) == form.cols.minor
        n_pad = _padded_queries(problem, form.cols.minor, whole, dynamic)
        self.buffer = *problem.q_shape[:2], n_pad
        self.width = form.cols.extent(problem.head_dim)
        self.float32 = {"dtype": torch.float32, "device": problem.device}
        scale = problem.scale
        self.call = passes.Call
        self.prepare, self.finish = passes.Prepare(), passes.Finish(scale)
        self.cols = passes.ColumnPass(problem, form.cols, static=not dynamic)
        self.rows = passes.RowPass(problem, form.rows, static=not dynamic)
        # a score has no pass over rows here, and no gradients of its tables
        score, self.portable = problem.options.score, None
        if score and not (form.one_pass and not any(k.wanted for k in rule_of(score).kinds)):
            self.portable = triton.plan_backward(problem, schedule)

    def __call__(self, dout: Tensor, dlse: Tensor | None, saved: Saved, walk: Walk) -> Gradients:
        if not fits_tma(dout):
            dout = empty_like(dout).copy_(dout)
        q, k, v, *_, seed, _ = saved
        lse_log2 = torch.empty(size=self.buffer, **self.float32)  # a keyword is parsed faster
        neg_delta = torch.empty_like(lse_log2)
        sums = *self.buffer, self.width
        dq_sum = torch.empty(size=sums, **self.float32) if self.one_pass else None
        counters = torch.empty(size=(2,), dtype=torch.int32, device=q.device)
        call = self.call(q, k, v, dout, lse_log2, neg_delta, counters, seed)
        dsink = self.prepare(call, dlse, saved, dq_sum)
        dk, dv, sums = self.cols(call, walk.lists[0], dq_sum, saved.terms.tables)
        if self.portable is None:
            dq = self.rows(call, walk.lists[1]) if dq_sum is None else self.finish(call, dq_sum)
            return Gradients(dq, dk, dv, dsink, (None,) * len(saved.terms.tables))
        delta, score, zeros = neg_delta, self.portable.score, []
        assert score is not None
        if dq_sum is None or score.added:
            delta, lse_log2, _, zeros = self.portable.rows(dout, dlse, saved)
        if dq_sum is None:
            dq, sums = self.portable.queries(dout, delta, lse_log2, saved, walk, buffers=zeros[1:])
        else:
            dq = self.finish(call, dq_sum)
            sums = lse_log2.new_empty(0, *q.shape[:3]) if sums is None else sums
        tables = self.portable.tables(dout, delta, lse_log2, sums, zeros, saved, walk)
        return Gradients(dq, dk, dv, dsink, tables)
