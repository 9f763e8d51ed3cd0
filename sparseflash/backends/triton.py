"""The triton backend: block-sparse FlashAttention in plain Triton.

It runs on any NVIDIA GPU since Ampere, or on a CPU under TRITON_INTERPRET=1. Dense attention is the
same kernel without the lists. See docs/internals/kernels.md.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sparseflash.backends.protocol import (
    NO_TERMS,
    Direction,
    Gradients,
    Results,
    Saved,
    TermTensors,
    Walk,
    empty_out,
)
from sparseflash.dropout import keep_scale, keep_threshold
from sparseflash.kernels.common.device import (
    described,
    interpreted,
    multiprocessors,
    nvidia_capability,
)
from sparseflash.kernels.common.launch import Launch
from sparseflash.kernels.common.shapes import cdiv, padded_dim, padded_dim_v, scale_log2, strides
from sparseflash.kernels.common.versions import release
from sparseflash.kernels.portable.configs import Family, tiles_for
from sparseflash.kernels.portable.tma import descriptors
from sparseflash.problem import Problem
from sparseflash.schedule.blocks import Schedule
from sparseflash.schedule.tile_spec import Side

name = "triton"
WIDEST, MOST_APART = 256, 2**23  # the widest head dim, and a token stride that is too large
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported(problem: Problem, direction: Direction) -> str | None:
    """Return the reason this backend cannot run the call, or None."""
    device = problem.device.type
    if device != "cuda" and not interpreted():
        return f"its kernels run on CUDA tensors (or under TRITON_INTERPRET=1), not on {device}"
    try:
        import triton
    except ImportError as error:
        return f"triton cannot be imported ({error}); install it with pip install triton"
    if problem.dtype not in _DTYPES:
        return f"its kernels take bfloat16, float16 and float32, not {problem.dtype}"
    if (widest := max(problem.head_dim, problem.head_dim_v)) > WIDEST:
        return f"its kernels hold head dims up to {WIDEST}, not {widest}"
    if max(strides[2] for _, strides in problem.layouts.values()) >= MOST_APART:
        return "its 32-bit offsets inside a tile hold token strides below 2**23; call contiguous()"
    if device == "cuda":
        capability = nvidia_capability(problem.device)
        if capability is not None and capability >= (8, 0):
            return None
        return f"it needs an NVIDIA GPU of compute capability 8.0; {described(capability)}"
    if problem.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly; use float32 or float16 there"
    if release(triton.__version__) < (3, 7) and release(np.__version__) >= (2, 4):
        return (
            f"the interpreter of Triton {triton.__version__} fails with NumPy {np.__version__};"
            " install numpy<2.4"
        )
    return None


class Forward:
    specs = ()

    def __init__(self, problem: Problem, schedule: Schedule | None):
        from sparseflash.kernels.portable.forward import attention_forward

        self.cut = Cut("forward", problem, schedule)
        self.launch = Launch(attention_forward, static=self.cut.static)
        self.max_scores, self.score = problem.options.max_scores, score_of(problem)
        # float16 does not hold the exponentials
        wanted = self.max_scores or problem.dtype == torch.float16
        self.bounded = self.score is not None and self.score.bounded and not wanted

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, walk: Walk,
        terms: TermTensors = NO_TERMS,
    ) -> Results:  # fmt: skip
        cut, (batch, heads, n_q, _) = self.cut, q.shape
        out = empty_out(q, v)
        lse = torch.empty(size=(batch, heads, n_q), dtype=torch.float32, device=q.device)
        max_scores = torch.empty_like(lse) if self.max_scores else None
        lists = _lists(walk.schedule, "rows")

        def arguments():
            n_tiles = cdiv(n_q, cut.tiles.block_m)
            k_desc, v_desc = descriptors((k, v), cut.tiles.block_n, cut.widths)
            args = (
                q, k, v, k_desc, v_desc, out, lse, *lists, *strides(q, k, v, out),
                cut.scale_log2, *cut.dropout(seed), *cut.counts(n_tiles, by_query=True),
                terms.sink, max_scores,
            )  # fmt: skip
            options = cut.options(k_desc) | {"BOUNDED": self.bounded}
            if self.score is not None:
                options |= self.score.options(terms.tables, n_q, k.shape[2])
            return (n_tiles * batch * heads,), args, options

        given = terms.sink is not None, *_kinds(terms)
        tensors = (q, k, v, out, lse, max_scores, seed, *terms.flat)
        self.launch(tensors, arguments, lists, layout=given)
        return Results(out, lse, max_scores)


class Backward:
    """Three kernels: what both passes need of a query, dk and dv by columns, dq by rows. Tables of
    a score that are not read by query alone have one more, for their gradients.

    They use no atomics but those of integers, so the results are always the same bits.
    """

    specs = ()

    def __init__(self, problem: Problem, schedule: Schedule | None):
        from sparseflash.kernels.portable import backward, backward_prepare

        self.kv, self.q = (Cut(name, problem, schedule) for name in ("backward_kv", "backward_q"))
        self.score = score_of(problem)
        if self.score is not None and self.score.added and not self.score.direct:
            # the batch entries share their mask and all entries of tables; with 4 it is no faster
            one_mask = schedule is None or schedule.facts.batch == 1
            self.batched = self.score.shared and one_mask and problem.batch >= 8
            kernel = "backward_batch" if self.batched else "backward_tables"
            self.added = Cut(kernel, problem, schedule)
        self.share = problem.batch * problem.heads * problem.n_q / 2.0**61
        static, self.keep_scale = self.kv.static, keep_scale(problem.options.dropout_p)
        self.launch_rows = Launch(backward_prepare.backward_prepare, static=True)
        self.launch_kv = Launch(backward.backward_kv, static=static)
        self.launch_q = Launch(backward.backward_q, static=static)
        self.launch_tables = Launch(backward.backward_q, static=static)
        self.launch_batch = Launch(backward.backward_batch, static=static)

    def __call__(self, dout: Tensor, dlse: Tensor | None, saved: Saved, walk: Walk) -> Gradients:
        delta, lse_log2, dsink, zeros = self.rows(dout, dlse, saved)
        dk, dv = self.keys(dout, delta, lse_log2, saved, walk)
        dq, sums = self.queries(dout, delta, lse_log2, saved, walk, buffers=zeros[1:])
        dtables = ()
        if self.score is not None:
            dtables = self.tables(dout, delta, lse_log2, sums, zeros, saved, walk)
        return Gradients(dq, dk, dv, dsink, dtables)

    def rows(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """delta = rowsum(out * dout) - dlse, the LSE in base 2, inf for empty rows, dsink where
        there is a sink, and for `tables` what bounds gradients, and zeros.
        """
        out, lse, v, (sink, tables) = saved.out, saved.lse, saved.v, saved.terms
        batch, heads, n_q, head_dim = out.shape
        n_tiles = cdiv(n_q, 64)
        delta, lse_log2 = torch.empty_like(lse), torch.empty_like(lse)
        sums = None if sink is None else lse.new_empty(batch, heads, n_tiles)
        zeros, more = [], {}
        if self.score is not None and self.score.added:
            zeros = [lse.new_zeros(3, dtype=torch.int32), *self.score.buffers(tables)]
        if self.score is not None and self.score.counted:
            more = {
                "V": v, "Largest": zeros[0], "v_strides": strides(v), "n_k": v.shape[2],
                "group": heads // v.shape[1], "share": self.share,
            }  # fmt: skip
        tensors = (out, dout, lse, dlse, delta, lse_log2, sink, sums)
        dlse_strides = (0, 0, 0) if dlse is None else dlse.stride()

        def arguments():
            args = *tensors, *strides(out, dout), *dlse_strides, n_q, n_tiles, heads
            shape = {"HEAD_DIM": head_dim, "BLOCK_D": padded_dim(head_dim), "BLOCK_M": 64}
            return (n_tiles * batch * heads,), args, {**shape, "LSE_GRAD": dlse is not None, **more}

        gradient = dlse is not None and (dlse_strides, dlse.dtype)
        layout = out.stride(), dout.stride(), gradient, sink is not None
        everything = *tensors, more.get("V"), more.get("Largest")
        self.launch_rows(everything, arguments, layout=layout)
        return delta, lse_log2, None if sums is None else sums.sum((0, 2)), zeros

    def keys(
        self, dout: Tensor, delta: Tensor, lse_log2: Tensor, saved: Saved, walk: Walk
    ) -> tuple[Tensor, Tensor]:
        """dk and dv, by key tiles over the columns of the mask."""
        q, k, v, *_, seed, terms = saved
        cut = self.kv
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        lists = _lists(walk.schedule, "cols")

        def arguments():
            n_tiles = cdiv(k.shape[2], cut.tiles.block_n)
            q_desc, dout_desc = descriptors((q, dout), cut.tiles.block_m, cut.widths)
            args = (
                q, k, v, dout, q_desc, dout_desc, dk, dv, lse_log2, delta, *lists,
                *strides(q, k, v, dout, dk, dv), cut.scale, cut.scale_log2,
                *cut.dropout(seed), *cut.counts(n_tiles, by_query=False),
            )  # fmt: skip
            options = cut.options(q_desc)
            if self.score is not None:
                options |= self.score.options(terms.tables, q.shape[2], k.shape[2])
                options["SLOPE"] = self.score.slope
            return (n_tiles * k.shape[0] * k.shape[1],), args, options

        tensors = (q, k, v, dout, dk, dv, lse_log2, delta, seed, *terms.tables)
        self.launch_kv(tensors, arguments, lists, (dout.stride(), dk.stride(), *_kinds(terms)))
        return dk, dv

    def queries(
        self, dout: Tensor, delta: Tensor, lse_log2: Tensor, saved: Saved, walk: Walk,
        steps: Tensor | None = None, buffers: Sequence[Tensor] = (),
    ) -> tuple[Any, Tensor | None]:  # fmt: skip
        """dq, by query tiles over the rows of the mask, and where there is a score its sums by
        query (sums, B, Hq, N_q).

        steps: of gradients of tables, which are added to buffers; there is no dq then. Without
            steps, those that no two pairs share are stored.
        """
        q, k, v, *_, seed, terms = saved
        cut, launch, score, sums = self.q, self.launch_q, self.score, None
        if steps is None and (score is None or not score.direct):
            buffers = ()
        dq = None if steps is not None else torch.empty_like(q)
        if dq is None:
            cut, launch = self.added, self.launch_tables
        lists = _lists(walk.schedule, "rows")
        n_tiles = cdiv(q.shape[2], cut.tiles.block_m)
        if score is not None and dq is not None:
            sums = lse_log2.new_empty(score.n_sums, *q.shape[:3])

        def arguments():
            k_desc, v_desc = descriptors((k, v), cut.tiles.block_n, cut.widths)
            args = (
                q, k, v, dout, k_desc, v_desc, dq, lse_log2, delta, *lists,
                *strides(q, k, v, dout, q if dq is None else dq), cut.scale, cut.scale_log2,
                *cut.dropout(seed), *cut.counts(n_tiles, by_query=True),
            )  # fmt: skip
            options = cut.options(k_desc)
            if score is not None and steps is not None:
                options |= score.options(terms.tables, q.shape[2], k.shape[2], steps, *buffers)
                options["SLOPE"] = score.slope_tables
                if (near := score.near_range(terms.tables, q.shape[2], k.shape[2])) is not None:
                    options["near_low"], options["near_high"] = near
            elif score is not None:
                carried = {"SLOPE": score.slope_sums, "RowSums": sums, "SUMS": score.n_sums}
                options |= score.options(terms.tables, q.shape[2], k.shape[2], *buffers) | carried
            return (n_tiles * q.shape[0] * q.shape[1],), args, options

        tensors = (
            q, k, v, dout, dq, lse_log2, delta, seed, sums, *terms.tables, steps, *buffers,
        )  # fmt: skip
        layout = dout.stride(), dq is not None and dq.stride(), *_kinds(terms)
        launch(tensors, arguments, lists, layout)
        return dq, sums

    def of_batch(
        self, dout: Tensor, delta: Tensor, lse_log2: Tensor, saved: Saved, walk: Walk,
        steps: Tensor, buffers: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Add gradients of tables to buffers, summed over batch entries in each tile before."""
        q, k, v, *_, seed, terms = saved
        cut, score = self.added, self.score
        assert score is not None
        lists = _lists(walk.schedule, "rows")
        n_tiles, (batch, heads, *_) = cdiv(q.shape[2], cut.tiles.block_m), q.shape
        wanted = 4 * multiprocessors(q.device) if q.is_cuda else 2  # programs
        parts = min(batch, cdiv(wanted, n_tiles * heads))
        entries = cdiv(batch, parts)

        def arguments():
            args = (
                q, k, v, dout, lse_log2, delta, *lists, *strides(q, k, v, dout),
                cut.scale, cut.scale_log2, *cut.dropout(seed),
                *cut.counts(n_tiles, by_query=True), batch, entries,
            )  # fmt: skip
            options = cut.options(None) | {"ADD": score.add_batch, "COUNT": len(score.added)}
            options |= score.options(terms.tables, q.shape[2], k.shape[2], steps, *buffers)
            options["SLOPE"] = score.slope_batch
            del options["TMA"], options["PAIRED"]
            return (n_tiles * heads * cdiv(batch, entries),), args, options

        tensors = q, k, v, dout, lse_log2, delta, seed, *terms.tables, steps, *buffers
        self.launch_batch(tensors, arguments, lists, (dout.stride(), *_kinds(terms)))

    def tables(
        self, dout: Tensor, delta: Tensor, lse_log2: Tensor, row_sums: Any, zeros: list[Tensor],
        saved: Saved, walk: Walk,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Return the gradients of the tables of a score; row_sums: from `queries`.

        The sum of |dS| of a query is at most |dO| |V| + |delta|, as dP is, and delta without dLSE.
        What no query sees may be NaN or infinite. A value that is seen makes delta so.
        """
        score, (q, k, v, *_), tables = self.score, saved, saved.terms.tables
        assert score is not None
        steps, buffers = row_sums, zeros[1:]
        if score.counted:
            x = zeros[0].view(torch.float32)  # of dout, v and delta
            value = v.shape[3] * self.keep_scale * self.share
            bound = torch.addcmul(x[2:], x[:1], x[1:2], value=value)
            steps = score.steps(bound, row_sums, self.share)
            add = self.of_batch if self.batched else self.queries
            add(dout, delta, lse_log2, saved, walk, steps, buffers)
        return score.gradients(tables, row_sums, steps, buffers, q.shape[2], k.shape[2])


plan_forward, plan_backward = Forward, Backward


class Cut:
    """How one kernel is cut for a problem: its tiles and the arguments that follow from them."""

    def __init__(self, kernel: str, problem: Problem, schedule: Schedule | None):
        facts = schedule.facts if schedule is not None else None
        self.problem, self.facts = problem, facts
        self.static = schedule is None or not schedule.dynamic
        self.scale, self.dropout_p = problem.scale, problem.options.dropout_p
        self.scale_log2 = scale_log2(self.scale)
        head_dim, head_dim_v = problem.head_dim, problem.head_dim_v
        if facts is None:
            block_q = block_k = 256
            partial, keys = False, problem.n_k
        else:
            block_q, block_k, partial = facts.block_q, facts.block_k, facts.n_partial > 0
            keys = facts.keys_per_query
        # the interpreter has no registers to run out of: float32 takes the tiles, and the code
        # paths, of 16 bits there
        dtype = torch.float16 if interpreted() else problem.dtype
        kind, family = _kind_of(score_of(problem)), family_of(problem.device)
        self.tiles = tiles_for(
            kernel, max(head_dim, head_dim_v), dtype, partial=partial, keys_per_query=keys,
            family=family, block_q=block_q, block_k=block_k,
            padded=not interpreted() and any(padded_dim(d) != d for d in (head_dim, head_dim_v)),
            score=kind,
        )  # fmt: skip
        if facts is None:  # no lists: what sticks out of the last tile is all that is partial
            by_key = kernel == "backward_kv"
            n, tile = (
                (problem.n_q, self.tiles.block_m) if by_key else (problem.n_k, self.tiles.block_n)
            )
            partial = n % tile > 0
        self.widths = padded_dim(head_dim), padded_dim_v(head_dim, head_dim_v)
        self.shape = {
            "HEAD_DIM": head_dim,
            "HEAD_DIM_V": head_dim_v,
            "BLOCK_D": self.widths[0],
            "BLOCK_DV": self.widths[1],
            "BLOCK_M": self.tiles.block_m,
            "BLOCK_N": self.tiles.block_n,
            "BLOCK_Q": block_q,
            "BLOCK_K": block_k,
            "DENSE": facts is None,
            "PARTIAL": partial,
            "PAIRED": kind == "paired" and family != "blackwell",  # for wgmma
            # of float32 products only
            "PRECISION": "ieee" if problem.dtype == torch.float32 else "tf32",
        }

    def options(self, descriptor: Any) -> dict[str, Any]:
        """Compile-time arguments and launch options; descriptor: None where there is no TMA."""
        tiles = self.tiles
        options = {
            **self.shape, "TMA": descriptor is not None, "DROPOUT": self.dropout_p > 0,
            "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
        }  # fmt: skip
        return options | {"maxnreg": tiles.max_registers} if tiles.max_registers else options

    def dropout(self, seed: Tensor | None) -> tuple[Tensor | None, int, float]:
        return seed, keep_threshold(self.dropout_p), keep_scale(self.dropout_p)

    def counts(self, n_tiles: int, *, by_query: bool) -> tuple[int, ...]:
        """n_q, n_k, tiles, heads, group, and the strides of batch and head in the row (or column)
        lists of the mask.
        """
        problem, facts = self.problem, self.facts
        stride_b = stride_h = 0
        if facts is not None:
            n, block = (facts.n_q, facts.block_q) if by_query else (facts.n_k, facts.block_k)
            lists = cdiv(n, block)
            stride_h = lists if facts.heads > 1 else 0
            stride_b = lists * facts.heads if facts.batch > 1 else 0
        sizes = problem.n_q, problem.n_k, n_tiles, problem.heads, problem.group
        return *sizes, stride_b, stride_h


@cache
def family_of(device: torch.device) -> Family:
    """Return the GPUs whose tiles a device takes; the interpreter takes those of Hopper."""
    if device.type == "cpu":
        return "hopper"
    capability = nvidia_capability(device)
    if capability is None:
        return "cdna"
    families: dict[int, Family] = {9: "hopper", 10: "blackwell", 12: "geforce"}
    return families.get(capability[0], "ampere")


def _kind_of(score: Any) -> Literal["", "plain", "tables", "paired"]:
    """Return what of a score decides about tiles."""
    if score is None:
        return ""
    return "paired" if score.rule.paired else "tables" if score.rule.kinds else "plain"


def score_of(problem: Problem, *, pairs: bool = False) -> Any:
    """Return the `KernelScore` of a problem, or None."""
    if not problem.options.score:
        return None
    from sparseflash.score.by_triton import kernel_score

    return kernel_score(problem.options.score, pairs=pairs)


def _lists(schedule: Schedule | None, side: Side) -> tuple[Tensor | None, ...]:
    if schedule is None:
        return (None,) * 5
    return (*(schedule.rows if side == "rows" else schedule.cols), schedule.bits)


def _kinds(terms: TermTensors) -> tuple[torch.Size, ...]:
    """Return what a launch depends on."""
    return tuple(t.shape for t in terms.tables)
