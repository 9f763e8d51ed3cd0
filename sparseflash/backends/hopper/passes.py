"""The kernels of the Hopper backward, and how they are launched. Needs Triton with Gluon."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.hopper.score import ScoreLaunch
from sparseflash.backends.hopper.tma import descriptor, empty_like, panel, vector_descriptor
from sparseflash.backends.protocol import Saved
from sparseflash.dropout import keep_scale, keep_threshold
from sparseflash.kernels.common.device import multiprocessors
from sparseflash.kernels.common.launch import Launch
from sparseflash.kernels.common.shapes import scale_log2
from sparseflash.kernels.hopper.backward.cols import backward_cols
from sparseflash.kernels.hopper.backward.rows import backward_rows
from sparseflash.kernels.hopper.configs import (
    BackwardTiles,
    columns_in_use,
    keeps_kv,
    padded,
    side_by_side,
)  # fmt: skip
from sparseflash.kernels.hopper.gluon import HOISTS
from sparseflash.kernels.hopper.merge_parts import backward_merge
from sparseflash.kernels.hopper.prepare import backward_finish, backward_start
from sparseflash.problem import Problem
from sparseflash.schedule.blocks import TileLists


class Call(NamedTuple):
    """The tensors that all kernels of one backward take."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse_log2: Tensor  # float32 (B, H, n_pad)  the LSE in base 2
    neg_delta: Tensor  # float32 (B, H, n_pad)  -delta, where the sums of dP begin
    counters: Tensor  # int32 (2,): tiles claimed by the passes over columns and rows
    seed: Tensor | None

    def gradient(self, i: int) -> Tensor:
        """Of q, k or v: i is 0, 1 or 2."""
        return empty_like((self.q, self.k, self.v)[i])

    @property
    def n_pad(self) -> int:
        return self.lse_log2.shape[2]


class Prepare:
    """`lse_log2` and `neg_delta` of every query, dsink; clears the counters and the float32 sums
    of dq.
    """

    def __init__(self):
        self.launch = Launch(backward_start, static=True)

    def __call__(
        self, call: Call, dlse: Tensor | None, saved: Saved, dq_sum: Tensor | None
    ) -> Tensor | None:
        out, lse, sink = saved.out, saved.lse, saved.terms.sink
        batch, heads, n_q, dim_v = out.shape
        sums = None if sink is None else lse.new_empty(batch, heads, call.n_pad // 64)
        dlse_strides = (0, 0, 0) if dlse is None else dlse.stride()
        tensors = (
            out, call.dout, lse, dlse, call.neg_delta, call.lse_log2, call.counters, dq_sum,
            sink, sums,
        )  # fmt: skip

        def arguments():
            args = (
                *tensors, *out.stride()[:3], *call.dout.stride()[:3], *dlse_strides,
                n_q, call.n_pad, heads,
            )  # fmt: skip
            options = {
                "HEAD_DIM": dim_v, "BLOCK_D": padded(dim_v), "BLOCK_M": 64,
                "DQ_BLOCK_D": padded(call.q.shape[-1]) if dq_sum is None else dq_sum.shape[-1],
                "LSE_GRAD": dlse is not None, "CLEAR": dq_sum is not None, "num_warps": 4,
            }  # fmt: skip
            return (batch * heads * call.n_pad // 64,), args, options

        gradient = dlse is not None and (dlse_strides, dlse.dtype)
        layout = out.stride(), call.dout.stride(), gradient, sink is not None
        self.launch(tensors, arguments, layout=layout)
        return None if sums is None else sums.sum((0, 2))


class Finish:
    """dq from its float32 sums."""

    def __init__(self, scale: float):
        self.scale, self.launch = scale, Launch(backward_finish, static=True)

    def __call__(self, call: Call, dq_sum: Tensor) -> Tensor:
        batch, heads, n_q, head_dim = call.q.shape
        dq = call.gradient(0)

        def arguments():
            args = (dq_sum, dq, *dq.stride()[:3], n_q, call.n_pad, heads, self.scale)
            options = {
                "HEAD_DIM": head_dim, "BLOCK_D": dq_sum.shape[-1], "BLOCK_M": 64, "num_warps": 4,
            }  # fmt: skip
            return (batch * heads * call.n_pad // 64,), args, options

        self.launch((dq_sum, dq), arguments)
        return dq


class _Pass:
    """What both passes share: tiles, options, and the merging of split tiles."""

    def __init__(self, problem: Problem, tiles: BackwardTiles, kernel: Any, *, static: bool):
        self.problem, self.tiles, self.static = problem, tiles, static
        self.scale_log2 = scale_log2(problem.scale)
        self.head_dim, self.dim_v = map(tiles.extent, (problem.head_dim, problem.head_dim_v))
        self.programs = multiprocessors(problem.device) * tiles.programs
        self.launch = Launch(kernel, static=static)
        self.merges = {first: Launch(backward_merge, static=static) for first in (0, self.head_dim)}

    def scalars(self) -> tuple[float, int, float]:
        """Scale in base 2, dropout threshold and the factor of what dropout keeps."""
        dropout_p = self.problem.options.dropout_p
        return self.scale_log2, keep_threshold(dropout_p), keep_scale(dropout_p)

    def options(self, parts: Tensor | None) -> dict[str, Any]:
        """Compile-time arguments of both kernels, and how they share out the register file: one
        consumer leaves half of it to another program.
        """
        tiles, problem = self.tiles, self.problem
        consumers = tiles.consumers
        return {
            "COLUMNS": tiles.columns(problem.head_dim),
            "COLUMNS_V": tiles.columns(problem.head_dim_v), "STAGES": tiles.stages,
            "DROPOUT": problem.options.dropout_p > 0, "SPLIT": parts is not None,
            "CONSUMERS": consumers, "REGISTERS": 240, "num_warps": 4,
            "maxnreg": 168 if consumers == 2 else 128,
        }  # fmt: skip

    def parts(self, lists: TileLists, width: int) -> Tensor | None:
        """Room for the float32 sums of the tiles that are split."""
        if not lists.n_parts:
            return None
        n = self.problem.batch * (self.problem.heads // lists.group) * lists.n_parts
        shape = n, lists.major, width
        return torch.empty(shape, dtype=torch.float32, device=self.problem.device)

    def merge(self, parts: Tensor, lists: TileLists, out: Tensor, *, first: int) -> None:
        """Add up the parts of split tiles, columns `first` and following, into `out`."""
        batch, heads, n, head_dim = out.shape
        n_merge = lists.merge.shape[1]

        def arguments():
            args = (
                parts, lists.merge, out, *out.stride()[:3], n, heads, lists.n_parts, n_merge,
                lists.batch, lists.heads,
            )  # fmt: skip
            options = {
                "WIDTH": parts.shape[2], "FIRST": first, "HEAD_DIM": head_dim,
                "BLOCK_D": padded(head_dim), "TILE": lists.major, "ROWS": 16, "num_warps": 4,
            }  # fmt: skip
            return (lists.major // 16 * n_merge * batch * heads,), args, options

        self.merges[first]((parts, out), arguments, [lists.merge], out.stride())


class ColumnPass(_Pass):
    """dk and dv, by key tiles."""

    def __init__(self, problem: Problem, tiles: BackwardTiles, *, static: bool):
        super().__init__(problem, tiles, backward_cols, static=static)
        columns = columns_in_use(max(problem.head_dim, problem.head_dim_v))
        self.score = ScoreLaunch.of(problem)
        self.keep_kv = self.score is None and keeps_kv(tiles, columns, hoists=HOISTS.value)

    def __call__(
        self, call: Call, lists: TileLists, dq_sum: Tensor | None, tables: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """dq is added to `dq_sum`, if that is not None. tables: of a score, whose sums by key
        (n_sums, B, H, any) come last where there is dq.
        """
        head_dim, dim_v = self.head_dim, self.dim_v
        q, k, v, dout = call[:4]
        dk, dv = call.gradient(1), call.gradient(2)
        parts, shapes, sums = self.parts(lists, head_dim + dim_v), (), None
        if self.score is not None:
            tables, shapes = self.score.tensors(tables)
            if dq_sum is not None and self.score.score.n_sums:
                n = (-(-k.shape[2] // lists.major) + lists.n_parts) * lists.major
                sums = call.lse_log2.new_zeros(self.score.score.n_sums, *k.shape[:2], n)

        def arguments():
            tiles, n_bh = self.tiles, k.shape[0] * k.shape[1]
            minor, major, piece = tiles.minor, tiles.major, tiles.minor // lists.gather
            width = panel(head_dim, tiles.columns(q.shape[3]))
            width_v = panel(dim_v, tiles.columns(v.shape[3]))
            # a list has all heads of a group
            together = side_by_side(lists.n_items, n_bh, self.programs, partial=lists.partial)
            args = (
                descriptor(q, piece, width), descriptor(dout, piece, width_v),
                descriptor(k, major, width), descriptor(v, major, width_v),
                descriptor(dk, major, width), descriptor(dv, major, width_v),
                vector_descriptor(call.lse_log2, piece),
                vector_descriptor(call.neg_delta, piece), call.lse_log2, call.neg_delta,
                *lists[:4], call.counters, _or(dq_sum, call.lse_log2), _or(parts, call.lse_log2),
                _or(call.seed, lists.items), lists.n_items, lists.n_long, lists.batch, lists.heads,
                k.shape[1], n_bh, together, lists.group, call.n_pad, -(-q.shape[2] // piece) + 1,
                k.shape[2], lists.n_parts, *self.scalars(),
            )  # fmt: skip
            options = self.options(parts) | {
                "BLOCK_M": minor, "BLOCK_D": head_dim, "BLOCK_DV": dim_v,
                "KV_STAGES": tiles.ring, "GROUPED": lists.group > 1,
                "PARTIAL": lists.partial or k.shape[2] % major > 0,
                "WITH_DQ": dq_sum is not None, "LATE": 4,
                "KEEP_KV": dq_sum is not None and self.keep_kv,
            }  # fmt: skip
            if self.score is not None:
                score = self.score.score
                options |= self.score.options(tables) | {"SLOPE": score.slope}
                if sums is not None:
                    options |= {
                        "SLOPE": score.slope_sums, "SUMS": score.n_sums, "row_sums_ptr": sums,
                        "n_sums": sums.shape[3],
                    }  # fmt: skip
            return (min(self.programs, n_bh * lists.n_items),), args, options

        tensors = (
            q, k, v, dout, dk, dv, call.lse_log2, call.neg_delta, call.counters, dq_sum, parts,
            call.seed, *tables, sums,
        )  # fmt: skip
        self.launch(tensors, arguments, lists[:4], (dout.stride(), shapes))
        if parts is not None:
            self.merge(parts, lists, dk, first=0)
            self.merge(parts, lists, dv, first=head_dim)
        return dk, dv, sums


class RowPass(_Pass):
    """dq, by query tiles."""

    def __init__(self, problem: Problem, tiles: BackwardTiles, *, static: bool):
        super().__init__(problem, tiles, backward_rows, static=static)

    def __call__(self, call: Call, lists: TileLists) -> Tensor:
        q, k, v, dout = call[:4]
        dq = call.gradient(0)
        parts = self.parts(lists, self.head_dim)

        def arguments():
            tiles, head_dim, dim_v = self.tiles, self.head_dim, self.dim_v
            major, piece = tiles.major, tiles.minor // lists.gather
            n_bh = q.shape[0] * q.shape[1]
            args = (
                descriptor(q, major, head_dim), descriptor(dout, major, dim_v),
                descriptor(k, piece, head_dim), descriptor(v, piece, dim_v),
                descriptor(dq, 64, head_dim),
                vector_descriptor(call.lse_log2, major),
                vector_descriptor(call.neg_delta, major),
                *lists[:4], call.counters, _or(parts, call.lse_log2), _or(call.seed, lists.items),
                lists.n_items, lists.n_long, lists.batch, lists.heads, q.shape[1], n_bh,
                q.shape[1] // k.shape[1], call.n_pad, lists.n_parts, *self.scalars(),
            )  # fmt: skip
            options = self.options(parts) | {
                "BLOCK_N": tiles.minor, "Q_STAGES": tiles.ring, "PARTIAL": lists.partial,
                "LATE": 3,
            }  # fmt: skip
            return (min(self.programs, n_bh * lists.n_items),), args, options

        tensors = (
            q, k, v, dout, dq, call.lse_log2, call.neg_delta, call.counters, parts, call.seed,
        )  # fmt: skip
        self.launch(tensors, arguments, lists[:4], dout.stride())
        if parts is not None:
            self.merge(parts, lists, dq, first=0)
        return dq


def _or(t: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if t is None else t
