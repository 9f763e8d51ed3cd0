"""Scores as the text of Triton functions.

A rule becomes functions of a tile. `numbers` gives what depends on batch entry and head alone.
`score` gives x, unit and add, whose (x unit + add) are the logits in base 2, and the values that
the derivatives use again; `slope` multiplies a gradient of the logits with the derivatives. They
get the products `raw` and `g`, tiles; `scale`, `b` and `h`, numbers; `q` and `k`, a column and a
row of token numbers, or the other way round; and `args`: of each table its pointer and its sizes.
`first` is the distance of the first key from the first query. docs/internals/kernels.md says how
the gradients of tables are summed.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from masks.predicate.expression import Expression, walk
from sparseflash.cache import cached
from sparseflash.kernels.common.shapes import LOG2E
from sparseflash.kernels.portable.score import SPAN
from sparseflash.score.by_torch import Scored, as_tables, gather
from sparseflash.score.rule import Rule, distance_form, factors, has_ends, is_tile, rule_of, symbols
from sparseflash.score.writer import Writer, function_of, listed

_PLACE = "b, h, q, k, n_q, n_k, first"
_SHAPE = "M: tl.constexpr, N: tl.constexpr, T: tl.constexpr, FAST: tl.constexpr"
_ARGS = f"raw, scale, numbers, {_PLACE}, args, {_SHAPE}"
_SLOPE_ARGS = f"raw, scale, g, kept, numbers, {_PLACE}, far, args, sums, {_SHAPE}"
_NUMBER_ARGS = "b, h, n_q, n_k, args"
_BAND_ARGS = f"scale, b, h, d, n_q, n_k, args, {_SHAPE}"
_NOWHERE = 2**30  # beyond all distances, and a multiple of 16
_BOUNDED = 50  # a logit whose exponential, and sums of these, fit the range of bfloat16


class KernelScore:
    """A rule in Triton: its functions, and how the gradients of its tables are summed.

    Attributes:
        added: the reads whose gradients a kernel of their own adds to buffers like the tables;
            `counted` of them in the `steps` at these places, the others are stored.
        summed: the reads whose gradients the kernel of dq sums by query: those that are no more
            than that, and those whose sums of absolute values set a step; `far` in two more each.
        score: the function (x, unit, add, what the slopes take) of a tile.
        slope: the function (gradient of the scaled scores, ()) of a tile.
        slope_sums: `slope`, with sums [M] of `summed`, and two of each of `far`, in place of ();
            if `direct`, it stores the gradients that are added, in buffers after the tables.
        slope_tables: adds to the buffers, which are args after the tables and the steps.
        slope_batch, add_batch: where `shared`, sum what it adds in tiles, and add these.
        bands: the function (values of `near`) of a vector of distances d, in place of a tile.
        numbers: the function of `once`.

    pairs: `score` takes any places, and heads that differ by row: no gradients, nothing shared.
    gluon: the functions are for Gluon, whose layouts have no gathers. What a tile reads by distance
    comes from vectors, which `by_distance` makes before; and `first` is a tuple, see
    `kernels.hopper.score.places`. `slope_sums` gives in place of sums the values to add up, each
    with the conditions of its sums.
    """

    def __init__(self, rule: Rule, gluon: bool = False, pairs: bool = False):
        self.rule, self.gluon, self.pairs = rule, gluon, pairs
        # what `bands` and `numbers` give
        self.near: dict[Expression, int] = {}
        self.once: dict[Expression, int] = {}
        # where args have the pointer of a table, before its sizes
        *self.places, self.n_args = accumulate((1 + kind.ndim for kind in rule.kinds), initial=0)
        of_score = [(sign, node.op) for sign, node in rule.terms if "s" in symbols(node)]
        self.scaled = of_score == [(1, "s")]  # x is that of the products as they are
        # where args have the last of the first distances with one entry, and the first of the last
        self.spans: dict[Expression, int] = {}
        for _, node in rule.terms:
            if node.op == "load" and len(rule.terms) > 1 and not pairs and has_ends(node):
                self.spans.setdefault(node, self.n_args + 2 * len(self.spans))
        self.n_args += 2 * len(self.spans)
        self.added = [read for read in rule.reads if not read.carried]
        self.summed = [r for r in rule.reads if r.carried or not (r.stored or r.plain)]
        self.number = number = {read.node: i for i, read in enumerate(self.summed)}
        self.counted = {r.node: number.get(r.node, -1) + 1 for r in self.added if not r.stored}
        self.direct = not gluon and bool(self.added) and not self.counted
        # where args have the buffers of `added`, after the steps
        first = self.n_args + (not self.direct)
        self.buffer = {read.node: first + i for i, read in enumerate(self.added)}
        # the reads whose places another table decides on
        self.led = {r.node for r in rule.reads if [p.op for p in walk(r.node)].count("load") > 1}
        far = (r for r in self.added if r.node in self.spans and r.plain)
        self.far = {read.node: len(self.summed) + 2 * i for i, read in enumerate(far)}
        self.n_sums = len(self.summed) + 2 * len(self.far)
        # whether the sums of a tile may be those by key
        self.any_side = all(read.reach == "bh" for read in self.summed)
        self.score = self._score()
        if not pairs:
            self.slope, self.slope_sums = self._slope(False), self._slope(True)
            self.slope_tables = None if gluon or self.direct else self._slope_tables(False)
            # whether all batch entries add to the same entries, by query and key
            self.shared = bool(self.counted) and all(
                read.reach == "qk" and "b" not in symbols(read.node) for read in self.added
            )
            if self.shared and not gluon:
                self.slope_batch, self.add_batch = self._slope_batch(), self._slope_tables(True)
        self.bands = self._values(_BAND_ARGS, map(distance_form, self.near))
        self.numbers = self._values(_NUMBER_ARGS, self.once)

    def _score(self) -> Any:
        write = Writer(self, once=not self.pairs)
        factor, parts = factors(self.rule.logits)
        apart = len(parts) == 1 and factor > 0
        amplified = self.gluon and apart and parts[0].op == "tanh"
        if amplified:
            write.amplified(parts[0], factor * LOG2E)
        kept = [f"{write(node)}{self._packed(node)[0]}" for node in self.rule.kept]
        if amplified:
            result = "x, unit, 0.0"
        elif len(self.rule.terms) == 1:
            x = write(parts[0] if apart else self.rule.logits)
            result = f"{x}, {(factor if apart else 1.0) * LOG2E!r}, 0.0"
        else:
            result = write.sum_of_terms()
        return function_of(write, _ARGS, f"{result}, ({listed(kept)})")

    @property
    def bounded(self) -> bool:
        """Whether exponentials of the logits fit the range of bfloat16 without running maxima."""
        factor, parts = factors(self.rule.logits)
        return abs(factor) <= _BOUNDED and [part.op for part in parts] == ["tanh"]

    def _slope_tables(self, of_batch: bool) -> Any:
        write = Writer(self, once=False) if of_batch else self._after()
        for i, read in enumerate(self.added):
            write.add(read, f"sums[{i}]" if of_batch else "")
        return function_of(write, _SLOPE_ARGS, "g, sums")

    def _slope_batch(self) -> Any:
        write = self._after()
        values = [write.guarded(read.grad) for read in self.added]
        sums = (f"sums[{i}] + {value}" for i, value in enumerate(values))
        return function_of(write, _SLOPE_ARGS, f"g, ({listed(sums)})")

    def _slope(self, with_sums: bool) -> Any:
        write, sums = self._after(), []
        result = write.guarded(self.rule.ds) if is_tile(self.rule.ds) else "g * 0.0"
        far = [read for read in self.added if read.node in self.far]
        for read in self.added if with_sums and self.direct else ():
            write.add(read)
        for read in (*self.summed, *far) if with_sums else ():
            value, ends = write.guarded(read.grad), ("True",)
            if read.node in self.far:
                at, span = self.spans[read.node], SPAN.value
                ends = f"(far + {span} <= args[{at}])", f"(far - {span} >= args[{at + 1}])"
            elif not read.carried:
                value = f"tl.abs({value})"
            if self.gluon:
                sums.append(f"({value}, ({listed(ends)}))")
                continue
            value = write.line(f"tl.sum({value}, 1)")
            for end in ends:
                part = value if end == "True" else f"tl.where({end}, {value}, 0.0)"
                sums.append(f"sums[{len(sums)}] + {part}")
        return function_of(write, _SLOPE_ARGS, f"{result}, ({listed(sums)})")

    def _values(self, parameters: str, nodes: Iterable[Expression]) -> Any:
        write = Writer(self, distance="d", once=False)
        return function_of(write, parameters, f"({listed([*map(write, nodes)])})")

    def _after(self) -> "Writer":
        kept = (f"kept[{i}]{self._packed(node)[1]}" for i, node in enumerate(self.rule.kept))
        return Writer(self, known=dict(zip(self.rule.kept, kept, strict=True)))

    def _packed(self, node: Expression) -> tuple[str, str]:
        """Return how a value is kept, and taken again: bounded ones in half of the registers."""
        packed = self.gluon and node.op == "tanh"
        return (".to(tl.float16)", ".to(tl.float32)") if packed else ("", "")

    def options(self, tables: Sequence[Tensor], n_q: int, n_k: int, *more: Any) -> dict[str, Any]:
        """Return the arguments of a kernel; more: args after the tables."""
        args = *self.args(tables), *self.ends(tables, n_q, n_k), *more
        return {"score_args": args, "SCORE": self.score, "NUMBERS": self.numbers}

    def args(self, tables: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the pointers and sizes of tables."""
        return tuple(x for t in tables for x in (t, *t.shape))

    def ends(self, tables: Sequence[Tensor], n_q: int, n_k: int) -> tuple[int, ...]:
        """Return the two distances of each of `spans`, multiples of 16, as Triton compiles others
        apart.
        """
        shapes = tuple(tuple(t.shape) for t in tables)
        return _ends(self.rule.text, shapes, n_q, n_k) if self.spans else ()

    def near_range(self, tables: Sequence[Tensor], n_q: int, n_k: int) -> tuple[int, int] | None:
        """Return between which distances the kernel of tables has all pairs to add, or None."""
        if not self.far or len(self.far) < len(self.added):
            return None
        ends, first = self.ends(tables, n_q, n_k), self.n_args - 2 * len(self.spans)
        places = [self.spans[node] - first for node in self.far]
        return min(ends[at] for at in places), max(ends[at + 1] for at in places)

    def buffers(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Return zeros for each of `added`."""
        dtypes = (torch.int64 if read.node in self.counted else None for read in self.added)
        return [
            torch.zeros_like(tables[read.table], dtype=dtype)
            for read, dtype in zip(self.added, dtypes, strict=True)
        ]

    def steps(self, bound: Tensor, row_sums: Tensor, share: float) -> Tensor:
        """Return what gradients are counted in: a share, queries / 2**61, of the largest sum by
        query, so that no sum is above 2**62 steps. NaN makes gradients of NaN.

        bound (1,): that of sums of |dS|. row_sums (n_sums, B, H, N): other sums.
        """
        if not any(self.counted.values()):
            return bound
        largest = torch.linalg.vector_norm(row_sums[: len(self.summed)], torch.inf, (1, 2, 3))
        return torch.cat([bound, (largest * share).clamp_(min=1e-30)])

    def gradients(
        self, tables: tuple[Tensor, ...], row_sums: Tensor, steps: Tensor,
        buffers: Sequence[Tensor], n_q: int, n_k: int,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Return those of the tables; row_sums: from `slope_sums`, (n_sums, B, H, any)."""
        made = {read.node: buffer for read, buffer in zip(self.added, buffers, strict=True)}
        totals: list[Tensor | None] = [None] * len(tables)
        shapes, device = tuple(t.shape for t in tables), row_sums.device
        for i, read in enumerate(self.rule.reads):
            total, sums = totals[read.table], None
            if (part := made.get(read.node)) is None:  # carried
                part = torch.zeros(shapes[read.table], dtype=torch.float32, device=device)
                sums = row_sums[self.number[read.node]]
            elif read.node in self.counted:
                part = part * steps[self.counted[read.node]]
            if read.node in self.far:
                sums = row_sums[self.far[read.node] :][:2]
            if sums is not None:
                of_call = tuple(row_sums.shape[1:]), n_q, n_k, device
                if read.node in self.led:
                    place, alone = self.entries(i, tables, *of_call), False
                else:
                    place, alone = _entries(self.rule.text, i, shapes, *of_call)
                gather(part, place, sums, alone)
            totals[read.table] = part if total is None else total + part
        for i, kind in enumerate(self.rule.kinds):
            if kind.wanted and totals[i] is None:  # never read
                totals[i] = torch.zeros_like(tables[i])
        return as_tables(totals, tables)

    def entries(
        self, i: int, tables: tuple[Tensor, ...], extents: tuple[int, ...], n_q: int, n_k: int,
        device: torch.device,
    ) -> Tensor:  # fmt: skip
        """Return where read i has the entries of sums (B, H, any), or of those of the smallest and
        the largest distance (2, B, H, any).
        """
        read = self.rule.reads[i]
        b, h, q = (torch.arange(n, device=device) for n in extents)
        given, node = {"b": b[:, None, None], "h": h[:, None], "q": q}, read.node
        if node in self.far:
            given["d"] = torch.tensor([1 - n_q, n_k - 1], device=device).view(2, 1, 1, 1)
            node = distance_form(node)
        s = torch.empty(0, device=device)
        return Scored(self.rule, tables, s, n_q, n_k, **given).place(node)


@cached
def _entries(
    text: str, i: int, shapes: tuple[tuple[int, ...], ...], extents: tuple[int, ...], n_q: int,
    n_k: int, device: torch.device,
) -> tuple[Tensor, bool]:  # fmt: skip
    """Return `KernelScore.entries` of a read that no table decides on, and whether each entry is
    there once.
    """
    like, cpu = tuple(torch.empty(shape, device="meta") for shape in shapes), torch.device("cpu")
    found = kernel_score(text).entries(i, like, extents, n_q, n_k, cpu)
    return found.to(device), int(found.flatten().bincount().max()) == 1


@lru_cache(maxsize=512)
def kernel_score(text: str, gluon: bool = False, pairs: bool = False) -> KernelScore:
    """Return the rule of a key."""
    return KernelScore(rule_of(text), gluon, pairs)


@cached
def _ends(text: str, shapes: tuple[tuple[int, ...], ...], n_q: int, n_k: int) -> tuple[int, ...]:
    score, d = kernel_score(text), torch.arange(1 - n_q, n_k, device="cpu")
    zero, found = d.new_zeros(()), []
    like = tuple(torch.empty(shape, device="meta") for shape in shapes)
    at = Scored(
        score.rule, like, d.new_empty(0, dtype=torch.float32), n_q, n_k, d=d, b=zero, h=zero
    )
    for node in score.spans:
        places = at.place(distance_form(node)).expand(len(d))
        turns = (places.diff() != 0).nonzero().flatten()
        low = high = _NOWHERE  # where all take the same
        if len(turns):
            low, high = int(turns[0]) + 1 - n_q, int(turns[-1]) + 2 - n_q
        found += [low // 16 * 16, -(-high // 16) * 16]
    return tuple(found)
