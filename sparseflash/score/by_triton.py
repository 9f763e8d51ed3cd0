"""Scores as the text of Triton functions.

A rule becomes functions of a tile. `numbers` gives what depends on batch entry and head alone.
`score` gives x, unit and add, whose (x unit + add) are the logits in base 2, and the values that
the derivatives use again; `slope` multiplies a gradient of the logits with the derivatives. They
get the products `raw` and `g`, tiles; `scale`, `b` and `h`, numbers; `q` and `k`, a column and a
row of token numbers, or the other way round; and `args`: of each table its pointer and its sizes.
`first` is the distance of the first key from the first query. docs/internals/kernels.md says how
the gradients of tables are summed.
"""

import hashlib
import linecache
import math
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from masks.predicate.expression import (
    BOOL,
    INT,
    REAL,
    Expression,
    constant,
    multiply,
    walk,
    whole,
)
from sparseflash.cache import cached
from sparseflash.kernels.common.shapes import LOG2E
from sparseflash.kernels.portable.capping import capped
from sparseflash.kernels.portable.score import (
    SPAN,
    band,
    fixed,
    floor_divide,
    remainder,
    spread,
    sums_by_distance,
)
from sparseflash.score.by_torch import Scored, as_tables, gather
from sparseflash.score.rule import Read, Rule, bare, distance_form, is_paired, reach, rule_of

_INFIX = {
    "add": "+", "subtract": "-", "multiply": "*", "divide": "/", "less": "<", "less_equal": "<=",
    "greater": ">", "greater_equal": ">=", "equal": "==", "not_equal": "!=", "and": "&", "or": "|",
    "xor": "^", "bit_and": "&", "bit_or": "|", "bit_xor": "^",
}  # fmt: skip
_CALLS = {
    "minimum": "tl.minimum", "maximum": "tl.maximum", "absolute": "tl.abs", "where": "tl.where",
    "exp": "tl.exp", "log": "tl.log", "sqrt": "tl.sqrt", "floor": "tl.floor", "ceil": "tl.ceil",
}  # fmt: skip
_GLOBALS = {
    "tl": tl, "capped": capped, "floor_divide": floor_divide, "remainder": remainder,
    "sums_by_distance": sums_by_distance, "band": band, "spread": spread, "fixed": fixed,
}  # fmt: skip
_NUMBERS = ("b", "h", "q", "k", "n_q", "n_k")
_SYMBOLS = (*_NUMBERS, "s", "g", "d", "inverse")
_OF_TILE = {"q", "k", "s", "g", "d"}
_INVERSE = Expression("inverse", REAL)  # 1 / scale
_PLACE = "b, h, q, k, n_q, n_k, first"
_SHAPE = "M: tl.constexpr, N: tl.constexpr, T: tl.constexpr, FAST: tl.constexpr"
_ARGS = f"raw, scale, numbers, {_PLACE}, args, {_SHAPE}"
_SLOPE_ARGS = f"raw, scale, g, kept, numbers, {_PLACE}, far, args, sums, {_SHAPE}"
_NUMBER_ARGS = "b, h, n_q, n_k, args"
_BAND_ARGS = f"scale, b, h, d, n_q, n_k, args, {_SHAPE}"
_NOWHERE = 2**30  # beyond all distances, and a multiple of 16
_BOUNDED = 50  # a logit whose exponential, and sums of these, fit the range of bfloat16
_COSTLY = ("tanh", "exp", "log", "sqrt", "divide", "load")  # kept for the derivatives
_SINGULAR = ("exp", "log", "sqrt", "load")  # may be infinite where g is 0


class KernelScore:
    """A rule in Triton: its functions, and the gradients of its tables.

    A gradient that is a number for each query is summed by the kernel of dq over the keys, and then
    by torch. The others are added by a kernel of their own to a buffer like the table, as integers:
    sums of these are the same in any order. What bounds such a sum, and so sets the unit, is the
    largest sum of absolute values of a query: that of dS has a bound that torch computes, any
    other one is summed by the kernel of dq. Where each pair has an entry of its own, it is stored.

    Terms that are added to the score take the form of a number for a tile where they can: those of
    batch entry and head, and reads by distance that take one entry beyond a radius. The kernel of
    dq sums the gradients of such an entry over blocks of SPAN x SPAN pairs.

    pairs: `score` takes any places, and heads that differ by row: no gradients, nothing shared.
    gluon: the functions are for Gluon, whose layouts have no gathers. What a tile reads by distance
    comes from vectors, which `by_distance` makes before; and `first` is a tuple, see
    `kernels.hopper.score.places`. `slope_sums` gives in place of sums the values to add up, each
    with the conditions of its sums.
    """

    def __init__(self, rule: Rule, gluon: bool = False, pairs: bool = False):
        self.rule, self.gluon, self.pairs = rule, gluon, pairs
        # what `bands` and `numbers` give; complete after the other functions
        self.near: dict[Expression, int] = {}
        self.once: dict[Expression, int] = {}
        # where args have the pointer of a table, before its sizes
        *self.places, self.n_args = accumulate((1 + kind.ndim for kind in rule.kinds), initial=0)
        self.kept = _kept(rule)
        self.terms = _terms(rule.logits)
        self.scaled = sum("s" in _symbols(node) for _, node in self.terms) == 1 and any(
            sign > 0 and node.op == "s" for sign, node in self.terms
        )  # x is that of the products as they are
        # where args have the last of the first distances with one entry, and the first of the last
        self.spans: dict[Expression, int] = {}
        for _, node in self.terms:
            if node.op == "load" and len(self.terms) > 1 and not pairs and _has_ends(node):
                self.spans.setdefault(node, self.n_args + 2 * len(self.spans))
        self.n_args += 2 * len(self.spans)
        self.added = [read for read in rule.reads if not _is_carried(read)]
        self.counted = {r.node: i for i, r in enumerate(r for r in self.added if not _stored(r))}
        self.summed = [
            read
            for read in rule.reads
            if _is_carried(read) or not (_stored(read) or _is_plain(read.grad))
        ]
        self.number = {read.node: i for i, read in enumerate(self.summed)}
        self.paired = is_paired(rule.text)
        far = (r for r in self.added if r.node in self.spans and _is_plain(r.grad))
        self.far = {read.node: len(self.summed) + 2 * i for i, read in enumerate(far)}
        self.n_sums = len(self.summed) + 2 * len(self.far)
        # whether the sums of a tile may be those by key
        self.any_side = all(read.reach == "bh" for read in self.summed)

    @cached_property
    def score(self) -> Any:
        """The function (x, unit, add, what the slopes take) of a tile."""
        write = _Writer(self, once=not self.pairs)
        factor, parts = _factors(self.rule.logits)
        apart = len(parts) == 1 and factor > 0
        amplified = self.gluon and apart and parts[0].op == "tanh"
        if amplified:
            write.amplified(parts[0], factor * LOG2E)
        kept = [f"{write(node)}{self._packed(node)[0]}" for node in self.kept]
        if amplified:
            result = "x, unit, 0.0"
        elif len(self.terms) == 1:
            x = write(parts[0] if apart else self.rule.logits)
            result = f"{x}, {(factor if apart else 1.0) * LOG2E!r}, 0.0"
        else:
            result = write.sum_of_terms()
        return _function(write, _ARGS, f"{result}, ({_listed(kept)})")

    @property
    def bounded(self) -> bool:
        """Whether exponentials of the logits fit the range of bfloat16 without running maxima."""
        low, high = _range(self.rule.logits)
        return -_BOUNDED <= low and high <= _BOUNDED

    @cached_property
    def slope(self) -> Any:
        """The function (gradient of the scaled scores, ()) of a tile."""
        return self._slope(False)

    @cached_property
    def bands(self) -> Any:
        """The function (values of `near`) of a vector of distances d, in place of a tile."""
        _ = self.score, self.slope_sums  # which name what is kept
        write = _Writer(self, of_band=True, once=False)
        values = [write(distance_form(node)) for node in self.near]
        return _function(write, _BAND_ARGS, f"({_listed(values)})")

    @cached_property
    def numbers(self) -> Any:
        """The function of `once`."""
        _ = self.score, self.slope, self.slope_sums, None if self.gluon else self.slope_tables
        write = _Writer(self, of_band=True, once=False)
        values = [write(node) for node in self.once]
        return _function(write, _NUMBER_ARGS, f"({_listed(values)})")

    @cached_property
    def slope_sums(self) -> Any:
        """`slope`, with sums [M] of `summed`, and two of each of `far`, in place of ()."""
        return self._slope(True)

    @cached_property
    def slope_tables(self) -> Any:
        """The function that adds to the buffers, which are args after the tables and the units."""
        write = self._after()
        for i, read in enumerate(self.added):
            at = self.counted.get(read.node)
            unit = "" if at is None else f"args[{self.n_args}] + {at}"
            write.add(read, f"args[{self.n_args + 1 + i}]", unit)
        return _function(write, _SLOPE_ARGS, "g, sums")

    def _slope(self, with_sums: bool) -> Any:
        write, sums = self._after(), []
        result = write.guarded(self.rule.ds) if _is_tile(self.rule.ds) else "g * 0.0"
        far = [read for read in self.added if read.node in self.far]
        for read in (*self.summed, *far) if with_sums else ():
            value, ends = write.guarded(read.grad), ("True",)
            if read.node in self.far:
                ends = self.ends_of(read)
            elif not _is_carried(read):
                value = f"tl.abs({value})"
            if self.gluon:
                sums.append(f"({value}, ({_listed(ends)}))")
                continue
            value = write.line(f"tl.sum({value}, 1)")
            for end in ends:
                part = value if end == "True" else f"tl.where({end}, {value}, 0.0)"
                sums.append(f"sums[{len(sums)}] + {part}")
        return _function(write, _SLOPE_ARGS, f"{result}, ({_listed(sums)})")

    def _after(self) -> "_Writer":
        kept = (f"kept[{i}]{self._packed(node)[1]}" for i, node in enumerate(self.kept))
        return _Writer(self, known=dict(zip(self.kept, kept, strict=True)))

    def _packed(self, node: Expression) -> tuple[str, str]:
        """Return how a value is kept, and taken again: bounded ones in half of the registers."""
        packed = self.gluon and node.op == "tanh"
        return (".to(tl.float16)", ".to(tl.float32)") if packed else ("", "")

    def ends_of(self, read: Read) -> tuple[str, str]:
        """Return whether a block takes the entry of the first distances, and that of the last."""
        at = self.spans[read.node]
        return f"(far + {SPAN.value} <= args[{at}])", f"(far - {SPAN.value} >= args[{at + 1}])"

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

    def units(self, row_sums: Tensor, n_rows: int, bound: Tensor) -> Tensor:
        """Return powers of two that make integers of gradients, whose sums stay below 2**62.

        row_sums (n_sums, B, H, N): those of queries, of which there are n_rows in all. bound: of
            such a sum of absolute values of dS. A NaN makes gradients of NaN.
        """
        numbers = [self.number.get(node) for node in self.counted]
        sums = [bound if i is None else row_sums[i].abs().amax() for i in numbers]
        if not sums:
            return bound
        largest = torch.stack(sums).log2()
        return torch.exp2((61.0 - math.log2(n_rows) - largest).floor().clamp(max=100.0))

    def gradients(
        self, tables: tuple[Tensor, ...], row_sums: Tensor, units: Tensor,
        buffers: Sequence[Tensor], n_q: int, n_k: int,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Return those of the tables; row_sums: from `slope_sums`, (n_sums, B, H, any)."""
        b, h, q = (torch.arange(n, device=row_sums.device) for n in row_sums.shape[1:])
        numbers = {"b": b[:, None, None], "h": h[:, None], "q": q}
        made = {read.node: buffer for read, buffer in zip(self.added, buffers, strict=True)}
        totals: list[Tensor | None] = [None] * len(tables)
        for read in self.rule.reads:
            table, known = tables[read.table], totals[read.table]
            if _is_carried(read):
                sums = row_sums[self.number[read.node]]
                part = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
                if not _placed(part, read, sums):  # which launches less
                    at = Scored(self.rule, tables, sums, n_q, n_k, **numbers)
                    gather(part, at.place(read.table, read.index), sums)
            else:
                part = made[read.node]
                if read.node in self.counted:
                    part = part / units[self.counted[read.node]].double()
            if read.node in self.far:
                first = self.far[read.node]
                sums = row_sums[first : first + 2].sum(-1, keepdim=True)  # (2, B, H, 1)
                # the smallest and the largest, made on the device: a CUDA graph may record this
                d = torch.arange(2, device=table.device) * (n_q + n_k - 2) + 1 - n_q
                d = d.view(2, 1, 1, 1)
                at = Scored(self.rule, tables, sums, n_q, n_k, d=d, **numbers)
                gather(part, at.place(read.table, map(distance_form, read.index)), sums)
            totals[read.table] = part if known is None else known + part
        for i, kind in enumerate(self.rule.kinds):
            if kind.wanted and totals[i] is None:  # never read
                totals[i] = torch.zeros_like(tables[i])
        return as_tables(totals, tables)


@lru_cache(maxsize=512)
def kernel_score(text: str, gluon: bool = False, pairs: bool = False) -> KernelScore:
    """Return the rule of a key."""
    return KernelScore(rule_of(text), gluon, pairs)


@cached
def _ends(text: str, shapes: tuple[tuple[int, ...], ...], n_q: int, n_k: int) -> tuple[int, ...]:
    score, d = kernel_score(text), torch.arange(1 - n_q, n_k)
    zero, found = torch.zeros((), dtype=torch.int64), []
    like = tuple(torch.empty(shape, device="meta") for shape in shapes)
    at = Scored(score.rule, like, torch.empty(0), n_q, n_k, d=d, b=zero, h=zero)
    for node in score.spans:
        places = at.place(node.data, map(distance_form, node.args)).expand(len(d))
        turns = (places.diff() != 0).nonzero().flatten()
        low = high = _NOWHERE  # where all take the same
        if len(turns):
            low, high = int(turns[0]) + 1 - n_q, int(turns[-1]) + 2 - n_q
        found += [low // 16 * 16, -(-high // 16) * 16]
    return tuple(found)


def _is_carried(read: Read) -> bool:
    """Whether its gradient is a number for each query."""
    return read.reach in ("bh", "q")


def _placed(part: Tensor, read: Read, row_sums: Tensor) -> bool:
    """Put sums (B, H, N_q) at their entries, where the index is numbers of these alone."""
    names = [bare(i) or "" for i in read.index]
    if len(set(names)) < len(names) or not set(names) <= set("bhq"):
        return False
    others = [dim for dim, name in enumerate("bhq") if name not in names]
    found = row_sums.sum(others) if others else row_sums
    order = sorted(names, key="bhq".index)
    found = found.permute([order.index(name) for name in names])
    part[tuple(slice(n) for n in found.shape)] = found
    return True


def _has_ends(node: Expression) -> bool:
    """Whether a read goes by distance alone, and not by what another table has for it."""
    if node.kind != REAL or reach(node.args) != "d":
        return False
    dims = [_symbols(i) for i in map(distance_form, node.args)]
    inner = any(part.op == "load" for i in node.args for part in walk(i))
    return not inner and not any("d" in names and names & {"b", "h"} for names in dims)


def _stored(read: Read) -> bool:
    """Whether each pair of each head has an entry of its own."""
    return sorted(bare(i) or "" for i in read.index) == ["b", "h", "k", "q"]


def _kept(rule: Rule) -> list[Expression]:
    """Return the nodes of a tile whose values the derivatives take from the logits."""
    costly = {node for node in walk(rule.logits) if node.op in _COSTLY and _is_tile(node)}
    found: dict[Expression, None] = {}

    def visit(node: Expression) -> None:
        if node in costly:
            found[node] = None
        else:
            for arg in node.args:
                visit(arg)

    for part in (rule.ds, *(read.grad for read in rule.reads)):
        visit(part)
    return list(found)


def _factors(node: Expression) -> tuple[float, list[Expression]]:
    """Return a number and expressions whose product is the node: itself if there is no number."""
    parts = [node]
    if node.op == "float":
        factor, parts = node.data, []
    elif (value := constant(node)) is not None:
        factor, parts = float(value), []
    elif node.op == "multiply":
        (a, left), (b, right) = map(_factors, node.args)
        factor = a * b
        parts = left + right if a != 1 or b != 1 else parts
    elif node.op == "divide" and (by := _factors(node.args[1]))[0] and not by[1]:
        factor, parts = _factors(node.args[0])
        factor /= by[0]
    else:
        factor = 1.0
    return (factor, parts) if 1e-30 <= abs(factor) <= 1e30 else (1.0, [node])


def _is_plain(grad: Expression) -> bool:
    """Whether a gradient is that of the logits, or no larger."""
    factor, parts = _factors(grad)
    return abs(factor) <= 1 and [part.op for part in parts] == ["g"]


def _terms(node: Expression, sign: int = 1) -> list[tuple[int, Expression]]:
    """Return expressions with signs whose sum is the node."""
    if node.op not in ("add", "subtract"):
        return [(sign, node)]
    left, right = node.args
    return _terms(left, sign) + _terms(right, sign if node.op == "add" else -sign)


def _leaves(node: Expression) -> list[Expression]:
    """Return expressions whose product is the node."""
    return [leaf for arg in node.args for leaf in _leaves(arg)] if node.op == "multiply" else [node]


def _split(node: Expression) -> tuple[list[Expression], list[Expression]]:
    """Return expressions whose product is the node: numbers, and tiles."""
    leaves = _leaves(node)
    tiles = [leaf for leaf in leaves if _symbols(leaf) & _OF_TILE]
    return [leaf for leaf in leaves if leaf not in {*tiles}], tiles


def _slant(node: Expression) -> Expression | None:
    """Return r of a product of numbers and abs(k - q + r), r being an integer of the call."""
    _, tiles = _split(node)
    if len(tiles) == 1 and tiles[0].kind == INT and tiles[0].data == (0, (1,)):
        (inner,) = tiles[0].args
        if inner.op == "absolute":
            (total,) = inner.args
            factors = dict(zip((arg.op for arg in total.args), total.data[1], strict=True))
            k = factors.get("k", 0)
            if abs(k) == 1 and factors.get("q") == -k and {*factors} <= {"q", "k", "n_q", "n_k"}:
                rest = {arg: k * factors[arg.op] for arg in total.args if arg.op not in ("q", "k")}
                return whole(k * total.data[0], rest)
    return None


def _range(node: Expression) -> tuple[float, float]:
    """Return bounds of a real."""
    if node.op == "float":
        return node.data, node.data
    if (value := constant(node)) is not None:
        return value, value
    if node.op == "tanh":
        return -1.0, 1.0
    if node.kind == REAL and len(node.args) > 1:
        (a, b), (c, d) = map(_range, node.args[-2:])
        match node.op:
            case "add":
                return a + c, b + d
            case "subtract":
                return a - d, b - c
            case "where":
                return min(a, c), max(b, d)
            case "minimum":
                return min(a, c), min(b, d)
            case "maximum":
                return max(a, c), max(b, d)
            case "multiply" if math.inf not in map(abs, (a, b, c, d)):
                return min(a * c, a * d, b * c, b * d), max(a * c, a * d, b * c, b * d)
    return -math.inf, math.inf


def _symbols(node: Expression) -> set[str]:
    return {part.op for part in walk(node)} & set(_SYMBOLS)


def _is_tile(node: Expression) -> bool:
    found = _symbols(node)
    return "s" in found or "g" in found or ("q" in found and "k" in found)


def _nonnegative(x: Expression) -> bool:
    """Whether an integer is surely no less than 0."""
    if x.op in (*_NUMBERS, "absolute"):
        return True
    if x.op == "sum":
        return min((x.data[0], *x.data[1])) >= 0 and all(map(_nonnegative, x.args))
    if x.op in ("floor_divide", "remainder"):
        return (constant(x.args[1]) or 0) > 0 and (x.op == "remainder" or _nonnegative(x.args[0]))
    return False


def _listed(names: Any) -> str:
    return "".join(f"{name}, " for name in names)


class _Writer:
    """The lines of a function, one for each node.

    of_band: of a band of distances in place of a tile. once: whether the function gets `numbers`.
    """

    def __init__(
        self, score: KernelScore, lines: list[str] | None = None, *, prefix: str = "x",
        known: dict[Expression, str] | None = None, of_band: bool = False, once: bool = True,
        distance: str = "d",
    ):  # fmt: skip
        self.score, self.known, self.reals = score, {} if known is None else known, {}
        self.lines, self.prefix = [] if lines is None else lines, prefix
        self.of_band, self.once, self.distance = of_band, once, distance

    def __call__(self, node: Expression) -> str:
        if node not in self.known:
            self.known[node] = self._named(node)
        return self.known[node]

    def _named(self, node: Expression) -> str:
        if self.once and node.kind == REAL and not _symbols(node) & {*_OF_TILE, "inverse"}:
            if any(part.op == "load" for part in walk(node)):
                return f"numbers[{self.score.once.setdefault(node, len(self.score.once))}]"
        if self._by_distance(node):
            if self.score.gluon:
                return self.line(self._near(node, "first[2]", " + first[3]"))
            band = _Writer(self.score, self.lines, prefix=self.prefix, of_band=True)
            return self.line(f"spread({band(distance_form(node))}, M, N, T)")
        if node.op == "s":
            return self.line("raw * scale")
        if node.op == "d":
            return self.distance
        if node.op in _SYMBOLS:
            return node.op
        if node.op == "sum" and node.data == (0, (1,)):
            return self(node.args[0])
        if node.op == "float" and math.isinf(node.data):
            return f"float('{node.data}')"
        if node.op in ("float", "truth") or constant(node) is not None:
            return repr(node.data[0] if node.kind == INT else node.data)
        return self.line(self._text(node))

    def line(self, text: str) -> str:
        name = f"{self.prefix}{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def number(self, node: Expression) -> str:
        return self.real(node) if node.kind == INT else self(node)

    def sum_of_terms(self) -> str:
        """Return x, unit and add for the terms of the logits."""
        score, out = self.score, "raw" if self.score.scaled else ""
        unit = self.line(f"scale * {LOG2E!r}") if score.scaled else repr(LOG2E)
        adds, late = [], []
        for sign, node in score.terms:
            op = "+" if sign > 0 else "-"
            if not score.pairs and not _symbols(node) & {"q", "k", "s"}:
                adds.append(f"{op} {self.number(node)} * {LOG2E!r}")
            elif node in score.spans:
                late.append((op, self._near_or_far, node))
            elif score.gluon and _slant(node) is not None:
                late.append((op, self._slanted, node))
            elif node.op != "s" or not score.scaled:
                out += f" {op} {self._scaled(node)}"
        self.lines.append(f"x = {out.removeprefix(' + ').strip()}")
        for i, (op, write, node) in enumerate(late):
            write(f"add{i}", op, unit, node)
            adds.append(f"+ add{i}")
        return f"x, {unit}, {' '.join(adds).removeprefix('+ ') or '0.0'}"

    def _scaled(self, node: Expression) -> str:
        """Return a term of x: where it has numbers, their product with a tile."""
        if self._by_distance(node):
            return self(multiply(node, _INVERSE) if self.score.scaled else node)
        numbers, tiles = _split(node) if not self.score.pairs else ([], [node])
        value = self.line(" * ".join(map(self.number, tiles)))
        return f"{factor} * {value}" if (factor := self._factor(numbers)) else value

    def _factor(self, numbers: Sequence[Expression]) -> str:
        """Return the product of the numbers of a term of x, or nothing."""
        factors = [*map(self.number, numbers), *["inverse"] * self.score.scaled]
        return self.line(" * ".join(factors)) if factors else ""

    def _near_or_far(self, add: str, op: str, unit: str, node: Expression) -> None:
        """Add a read by distance to x, or its one entry in tiles that are far to `add`."""
        score, at, minus = self.score, self.score.spans[node], op.strip("+")
        low, high = ("first[4]", "first[5]") if score.gluon else ("first - M", "first + N")
        node = multiply(node, _INVERSE) if score.scaled else node
        near = _Writer(score, prefix=f"{add}_near")
        value = near(node)
        far = _Writer(score, prefix=f"{add}_far", of_band=True, distance="first")
        entry = far.line(self._near(node, low, "")) if score.gluon else far(distance_form(node))
        self.lines += [
            f"if ({high} > args[{at}]) & ({low} < args[{at + 1}]):",
            *_indented([*near.lines, f"x = x {op} {value}", f"{add} = scale * 0.0"]),
            "else:",
            *_indented([*far.lines, f"{add} = {minus}({entry} * {unit})"]),
        ]

    def _slanted(self, add: str, op: str, unit: str, node: Expression) -> None:
        """Add the product of a number and abs(k - q + r) to x. Where the sign of the distance is
        the same in a tile, its rows and columns add up: the rows become `add`.
        """
        factor, rest = self._factor(_split(node)[0]) or "1.0", _slant(node)
        above, below = (factor, f"-{factor}")[:: 1 if op == "+" else -1]
        assert rest is not None
        whole, real = self(rest), self.real(rest)
        near = f"x = x {op} {factor} * tl.abs({real} + first[0] + first[1])"
        self.lines += [
            "if T:",
            *_indented([near, f"{add} = 0.0"]),
            f"elif (first[5] + {whole} > 0) & (first[4] + {whole} < 0):",
            *_indented([near, f"{add} = first[6] * 0.0"]),
            "else:",
            *_indented([
                f"{add}_factor = tl.where(first[4] + {whole} >= 0, {above}, {below})",
                f"x = tl.fma(first[1], {add}_factor, x)",  # LLVM would join it with the other one
                f"{add} = ({add}_factor * {unit}) * (first[6] + {real})",
            ]),
        ]  # fmt: skip

    def _near(self, node: Expression, first: str, step: str) -> str:
        """Return the load of a tile, or of one distance, from a vector of `by_distance`."""
        number = self.score.near.setdefault(node, len(self.score.near))
        vectors, length, middle, heads, size = (f"args[{self.score.n_args + i}]" for i in range(5))
        at = f"tl.cast(b * {heads} + h, tl.int64) * {length} + ({middle} + {number} * {size})"
        return f"tl.load({vectors} + ({at} + {first}){step})"

    def _by_distance(self, node: Expression) -> bool:
        """Whether a tile is looked up by distance alone: once for each, and then spread."""
        if self.of_band or self.score.pairs or node.kind != REAL:
            return False
        if not {"q", "k"} <= _symbols(node):
            return False
        if _symbols(node) & {"s", "g"} or reach((node,)) != "d":
            return False
        return any(part.op == "load" and reach(part.args) == "d" for part in walk(node))

    def guarded(self, part: Expression) -> str:
        """Return a product with g, 0 where g is 0, whatever the derivative is there."""
        name = self(part)
        singular = any(
            n.op in _SINGULAR or (n.op == "divide" and _symbols(n.args[1])) for n in walk(part)
        )
        return self.line(f"tl.where(g != 0.0, {name}, 0.0)") if singular else name

    def add(self, read: Read, buffer: str, unit: str) -> None:
        """Add the gradients of a read in a tile to its buffer."""
        value = self.guarded(read.grad)
        if not unit:
            at = self.place(read.table, read.index)
            self.lines.append(f"tl.store({buffer} + {at}, {value}, mask=g != 0.0)")
            return
        if read.reach == "d":
            band = _Writer(self.score, self.lines, of_band=True)
            at = band.place(read.table, tuple(map(distance_form, read.index)))
            value = self.line(f"sums_by_distance({value}, M, N)")
        else:
            at = self.place(read.table, read.index)
            if read.reach == "k":
                value = self.line(f"tl.sum({value}, 0)[None, :]")
        if read.node in self.score.far:
            low = self.score.spans[read.node]
            near = f"(far + {SPAN.value} > args[{low}]) & (far - {SPAN.value} < args[{low + 1}])"
            value = self.line(f"tl.where({near}, {value}, 0.0)")
        number = f"fixed({value}, tl.load({unit}))"
        self.lines.append(
            f"tl.atomic_add({buffer} + {at}, {number}, mask={value} != 0.0, sem='relaxed')"
        )

    def place(self, number: int, index: tuple[Expression, ...]) -> str:
        """Return the offset of an entry. The caller checks that numbers of tokens, heads and batch
        entries are in the table; any other index is moved into it.
        """
        first, large = self.score.places[number], self.score.rule.kinds[number].large
        at = ""
        for dim, i in enumerate(index):
            name, size = self(i), f"args[{first + 1 + dim}]"
            if i.kind == REAL:
                name = f"tl.minimum(tl.maximum({name}, 0.0), 2.0e9).to(tl.int32)"  # not infinite
            if bare(i) is None:
                name = f"tl.minimum(tl.maximum({name}, 0), {size} - 1)"
            if large:
                name = f"tl.cast({name}, tl.int64)"
            at = f"({at}) * {size} + {name}" if at else name
        return self.line(at or "0")

    def _text(self, node: Expression) -> str:
        args = node.args
        if node.op == "sum":
            return self._sum(node, self)
        if node.op == "load":
            kind = {INT: "tl.int32", REAL: "tl.float32", BOOL: "tl.int1"}[node.kind]
            at = self.place(node.data, args)
            return f"tl.load(args[{self.score.places[node.data]}] + {at}).to({kind})"
        if node.kind == BOOL and len(args) == 3 and node.op != "where":
            args = args[1:]  # of integers that are compared
        if node.op == "tanh":
            return self._tanh(node)
        if node.op in ("multiply", "divide"):
            factor, parts = _factors(node)
            if not parts or parts[0] is not node:
                found = [self.real(p) if p.kind == INT else self(p) for p in parts]
                return " * ".join([*found, repr(factor)] if factor != 1 or not parts else found)
        names = [self.real(a) if node.kind == REAL and a.kind == INT else self(a) for a in args]
        if node.op == "not":
            return f"~{names[0]}"
        if node.op in ("floor_divide", "remainder"):
            if _nonnegative(args[0]) and (constant(args[1]) or 0) > 0:
                return f"{names[0]} {'//' if node.op == 'floor_divide' else '%'} {names[1]}"
            return f"{node.op}({names[0]}, {names[1]})"
        if node.op == "divide" and not _symbols(args[1]) & {"s", "q", "k", "d"}:  # by one number
            return f"{names[0]} * (1.0 / {names[1]})"
        if node.op in _INFIX:
            return f"{names[0]} {_INFIX[node.op]} {names[1]}"
        return f"{_CALLS[node.op]}({', '.join(names)})"

    def amplified(self, node: Expression, factor: float) -> None:
        """Write x = factor * tanh and unit = 1 for a forward, x = tanh for a backward, and know the
        tanh.
        """
        back, on = (_Writer(self.score, prefix=prefix) for prefix in ("back", "on"))
        # with numbers that are known here, a backward has registers for them
        back.lines += [f"x = capped({back(node.args[0])}, 1.0, 1.0, FAST)", f"unit = {factor!r}"]
        on.lines += [f"x = {on._tanh(node, factor)}", "unit = 1.0"]
        self.lines += ["if T:", *_indented([*back.lines, "t = x"])]
        self.lines += ["else:", *_indented([*on.lines, f"t = x * {1 / factor!r}"])]
        self.known[node] = "t"

    def _tanh(self, node: Expression, amplitude: float = 1.0) -> str:
        fast = "FAST" if _is_tile(node) and not self.of_band else "False"
        factor, parts = _factors(node.args[0])
        if len(parts) != 1 or parts[0].op != "s" or factor < 0:
            return f"capped({self(node.args[0])}, 1.0, {amplitude}, {fast})"
        # of the products as they are; beyond these limits tanh is linear, or its sign
        cap = self.line(f"{1 / factor!r} / scale")
        near = self.line(f"tl.minimum(tl.maximum({cap}, 1e-7), 1e7)")
        return f"capped(raw, {near}, tl.minimum({near} / {cap}, 1.0) * {amplitude}, {fast})"

    def real(self, node: Expression) -> str:
        """Return an integer in float32. Sums of token numbers are made of these, exact below 2**24:
        an addition for each score, where a conversion takes as long as four.
        """
        if (value := constant(node)) is not None:
            return repr(float(value))
        if node not in self.reals:
            if node.op == "sum":
                text = self._sum(node, self.real)
            elif node.op in ("absolute", "minimum", "maximum"):
                text = f"{_CALLS[node.op]}({', '.join(map(self.real, node.args))})"
            else:
                text = f"tl.cast({self(node)}, tl.float32)"
            self.reals[node] = self.line(text)
        return self.reals[node]

    def _sum(self, node: Expression, number: Any) -> str:
        """Return a sum in which terms of a tile come last: others are added for a row or column."""
        order = {"b": 0, "h": 0, "n_q": 0, "n_k": 0, "q": 1, "k": 2}
        pairs = sorted(
            zip(node.args, node.data[1], strict=True), key=lambda pair: order.get(pair[0].op, 3)
        )
        factors = {arg.op: factor for arg, factor in pairs}
        apart = self.score.gluon and factors.get("q", 0) == -factors.get("k", 0) != 0
        terms = [(number(a), f) for a, f in pairs if not (apart and a.op in ("q", "k"))]
        if apart:
            places = (0, 1) if number == self.real else (2, 3)
            terms += ((f"first[{i}]", factors["k"]) for i in places)
        text = repr(node.data[0]) if node.data[0] else ""
        for name, factor in terms:
            if abs(factor) != 1:
                name = f"{name} * {abs(factor)}"
            text += f" - {name}" if factor < 0 else f" + {name}" if text else name
        return text


def _function(write: _Writer, parameters: str, result: str) -> Any:
    lines = write.lines
    if any("spread(" in line or "sums_by_distance(" in line for line in lines):
        lines = ["d = band(first, M, N)", *lines]
    if any("inverse" in line for line in lines):
        lines = ["inverse = 1.0 / scale", *lines]
    body = "".join(f"{line}\n" for line in _indented([*lines, f"return {result}"]))
    return _compiled(f"({parameters}):\n{body}")


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


@cache
def _compiled(text: str) -> Any:
    """Return the Triton function of a text, whose hash is its name: equal texts are one function,
    and one kernel in Triton's cache on disk. Triton reads it from linecache, as debuggers do.
    """
    name = f"score_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    text, file = f"def {name}{text}", f"<sparseflash {name}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    made: dict[str, Any] = _GLOBALS | {"__name__": __name__}
    exec(compile(text, file, "exec"), made)  # noqa: S102, of a text that is written here
    return triton.jit(made[name])
