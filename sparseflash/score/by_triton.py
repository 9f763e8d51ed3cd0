"""Scores as the text of Triton functions.

A rule becomes two functions of a tile. The first gives its logits up to a positive factor, this
factor in base 2, and the values that its derivatives use again; the second multiplies a gradient of
the logits with the derivatives. Both get the products `raw` and `g`, tiles; `scale`, `b` and `h`,
numbers; `q` and `k`, a column and a row of token
numbers, or the other way round; and `args`: of each table its pointer and its sizes. `first` is the
distance of the first key from the first query. docs/internals/kernels.md says how the gradients of
tables are summed.
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

from masks.predicate.expression import BOOL, INT, REAL, Expression, constant, walk
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
_SYMBOLS = (*_NUMBERS, "s", "g", "d")
_ARGS = "raw, scale, b, h, q, k, n_q, n_k, first, args"
_SLOPE_ARGS = "raw, scale, g, kept, b, h, q, k, n_q, n_k, first, far, args, sums"
_NOWHERE = 2**30  # beyond all distances, and a multiple of 16
_SHAPE = "M: tl.constexpr, N: tl.constexpr, T: tl.constexpr, FAST: tl.constexpr"
_COSTLY = ("tanh", "exp", "log", "sqrt", "divide", "load")  # kept for the derivatives
_SINGULAR = ("exp", "log", "sqrt", "load")  # may be infinite where g is 0


class KernelScore:
    """A rule in Triton: its functions, and the gradients of its tables.

    A gradient that is a number for each query is summed by the kernel of dq over the keys, and then
    by torch. The others are added by a kernel of their own to a buffer like the table, as integers:
    sums of these are the same in any order. What bounds such a sum, and so sets the unit, is the
    largest sum of absolute values of a query, which the kernel of dq has too. Where each pair has
    an entry of its own, it is stored.

    Far from the diagonal a read by distance may take one entry, as it does beyond a radius: tiles
    load it alone there, and the kernel of dq sums the gradients of blocks of SPAN x SPAN pairs.

    gluon: the functions are for Gluon, whose layouts have no gathers. What a tile reads by distance
    comes from vectors, which `by_distance` makes before; and `first` is a tuple of tiles: two of
    float32 that add up to the distances, the second of constants, and two of integers.
    """

    def __init__(self, rule: Rule, gluon: bool = False):
        self.rule, self.gluon = rule, gluon
        self.near: dict[Expression, int] = {}  # what `bands` gives; complete after the functions
        # where args have the pointer of a table, before its sizes
        *self.places, self.n_args = accumulate((1 + kind.ndim for kind in rule.kinds), initial=0)
        self.kept = _kept(rule)
        factor, parts = _factors(rule.logits)
        apart = len(parts) == 1 and 0 < factor and not gluon
        self.factor, self.root = (factor, parts[0]) if apart else (1.0, rule.logits)
        self.summed = [read for read in rule.reads if not _stored(read)]
        self.added = [read for read in rule.reads if not _is_carried(read)]
        self.number = {read.node: i for i, read in enumerate(self.summed)}
        self.paired = is_paired(rule.text)
        # where args have the last of the first distances with one entry, and the first of the last
        loads = (node for node in walk(rule.logits) if node.op == "load" and not gluon)
        spans = (node for node in loads if _has_ends(node))
        self.spans = {node: self.n_args + 2 * i for i, node in enumerate(spans)}
        self.n_args += 2 * len(self.spans)
        far = (read for read in self.added if read.node in self.spans)
        self.far = {read.node: len(self.summed) + 2 * i for i, read in enumerate(far)}
        self.n_sums = len(self.summed) + 2 * len(self.far)

    @cached_property
    def score(self) -> Any:
        """The function (logits / factor, factor in base 2, what the slopes take) of a tile."""
        write = _Writer(self)
        kept = (f"{write(node)}{self._packed(node)[0]}" for node in self.kept)
        result = f"{write(self.root)}, {self.factor * LOG2E!r}, ({_listed(kept)})"
        return _function(write, _ARGS, result)

    @property
    def bounded(self) -> bool:
        """Whether exponentials of the logits fit the range of bfloat16 without running maxima."""
        return self.root.op == "tanh" and self.factor <= 50

    @cached_property
    def slope(self) -> Any:
        """The function (gradient of the scaled scores, ()) of a tile."""
        return self._slope([])

    @cached_property
    def bands(self) -> Any:
        """The function (values of `near`) of a vector of distances d, in place of a tile."""
        _ = self.score, self.slope  # which name what is kept
        write = _Writer(self, lines=[])
        values = [write(distance_form(node)) for node in self.near]
        return _function(write, "b, h, d, n_q, n_k, args", f"({_listed(values)})")

    @cached_property
    def slope_sums(self) -> Any:
        """`slope`, with sums [M] of `summed`, and two of each of `far`, in place of ()."""
        return self._slope(self.summed)

    @cached_property
    def slope_tables(self) -> Any:
        """The function that adds to the buffers, which are args after the tables and the units."""
        write = self._after()
        for i, read in enumerate(self.added):
            number = self.number.get(read.node)
            unit = "" if number is None else f"args[{self.n_args}] + {number}"
            write.add(read, f"args[{self.n_args + 1 + i}]", unit)
        return _function(write, _SLOPE_ARGS, "g, sums")

    def _slope(self, reads: Sequence[Read]) -> Any:
        write, sums = self._after(), []
        result = write.guarded(self.rule.ds) if _is_tile(self.rule.ds) else "g * 0.0"
        for i, read in enumerate(reads):
            value = write.guarded(read.grad)
            value = value if _is_carried(read) else f"tl.abs({value})"
            sums.append(f"sums[{i}] + tl.sum({value}, 1)")
        for read in (read for read in reads if read.node in self.far):
            value = write.line(f"tl.sum({write.guarded(read.grad)}, 1)")
            for end in self.ends_of(read):
                sums.append(f"sums[{len(sums)}] + tl.where({end}, {value}, 0.0)")
        return _function(write, _SLOPE_ARGS, f"{result}, ({_listed(sums)})")

    def _after(self) -> "_Writer":
        kept = (f"kept[{i}]{self._packed(node)[1]}" for i, node in enumerate(self.kept))
        return _Writer(self, dict(zip(self.kept, kept, strict=True)))

    def _packed(self, node: Expression) -> tuple[str, str]:
        """Return how a value is kept, and taken again: bounded ones in half of the registers."""
        packed = self.gluon and node.op == "tanh"
        return (".to(tl.float16)", ".to(tl.float32)") if packed else ("", "")

    def ends_of(self, read: Read) -> tuple[str, str]:
        """Return whether a block takes the entry of the first distances, and that of the last."""
        at = self.spans[read.node]
        return f"(far + {SPAN.value} <= args[{at}])", f"(far - {SPAN.value} >= args[{at + 1}])"

    def options(
        self, tables: Sequence[Tensor], n_q: int, n_k: int, *more: Tensor
    ) -> dict[str, Any]:
        """Return the arguments of a kernel; more: args after the tables."""
        args = *(x for t in tables for x in (t, *t.shape)), *self.ends(tables, n_q, n_k), *more
        return {"score_args": args, "SCORE": self.score, "PAIRED": self.paired}

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
        return [
            torch.zeros_like(
                tables[read.table], dtype=torch.int64 if read.node in self.number else None
            )
            for read in self.added
        ]

    def units(self, row_sums: Tensor) -> Tensor:
        """Return powers of two that make integers of gradients, whose sums stay below 2**62.

        row_sums (summed, B, H, N_q): a NaN among them makes gradients of NaN.
        """
        rows, largest = math.prod(row_sums.shape[1:]), row_sums.abs().amax((1, 2, 3))
        return torch.exp2((61.0 - math.log2(rows) - largest.log2()).floor().clamp(max=100.0))

    def gradients(
        self, tables: tuple[Tensor, ...], row_sums: Tensor, units: Tensor,
        buffers: Sequence[Tensor], n_k: int,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Return those of the tables."""
        shape = row_sums.shape[1:]  # B, H, N_q
        b, h, q = (torch.arange(n, device=row_sums.device) for n in shape)
        numbers = {"b": b[:, None, None], "h": h[:, None], "q": q}
        made = {read.node: buffer for read, buffer in zip(self.added, buffers, strict=True)}
        totals: list[Tensor | None] = [None] * len(tables)
        for read in self.rule.reads:
            number, table, known = (
                self.number.get(read.node),
                tables[read.table],
                totals[read.table],
            )
            if _is_carried(read):
                part = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
                if not _placed(part, read, row_sums[number]):
                    at = Scored(self.rule, tables, row_sums, shape[2], n_k, **numbers)
                    gather(part, at.place(read.table, read.index), row_sums[number])
            else:
                part = made[read.node]
                if number is not None:
                    part = part / units[number].double()
            if read.node in self.far:
                first = self.far[read.node]
                sums = row_sums[first : first + 2].sum(-1, keepdim=True)  # (2, B, H, 1)
                # the smallest and the largest, made on the device: a CUDA graph may record this
                d = torch.arange(2, device=table.device) * (shape[2] + n_k - 2) + 1 - shape[2]
                d = d.view(2, 1, 1, 1)
                at = Scored(self.rule, tables, sums, shape[2], n_k, d=d, **numbers)
                gather(part, at.place(read.table, map(distance_form, read.index)), sums)
            totals[read.table] = part if known is None else known + part
        for i, kind in enumerate(self.rule.kinds):
            if kind.wanted and totals[i] is None:  # never read
                totals[i] = torch.zeros_like(tables[i])
        return as_tables(totals, tables)


@lru_cache(maxsize=512)
def kernel_score(text: str, gluon: bool = False) -> KernelScore:
    """Return the rule of a key."""
    return KernelScore(rule_of(text), gluon)


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
    """The lines of a function, one for each node; given `lines`, of a band in place of a tile."""

    def __init__(
        self, score: KernelScore, known: dict[Expression, str] | None = None, lines: Any = None
    ):
        self.score, self.known, self.reals = score, known or {}, {}
        self.band, self.lines = lines is not None, [] if lines is None else lines
        self.distance, self.prefix = "d", "x"

    def __call__(self, node: Expression) -> str:
        if node not in self.known:
            self.known[node] = self._named(node)
        return self.known[node]

    def _named(self, node: Expression) -> str:
        if self._by_distance(node):
            if self.score.gluon:
                return self.line(self._near(node))
            if node in self.score.spans:
                return self._near_or_far(node)
            return self.line(f"spread({self.of_band(distance_form(node))}, M, N, T)")
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

    def _near_or_far(self, node: Expression) -> str:
        """Return a tile, with one load where it takes one entry."""
        at, name = self.score.spans[node], f"y{len(self.lines)}"
        test = f"(first + N > args[{at}]) & (first - M < args[{at + 1}])"
        forms = []
        for distance, form in (("d", "spread({}, M, N, T)"), ("first", "tl.zeros_like(raw) + {}")):
            inner = _Writer(self.score, lines=[])
            inner.distance, inner.prefix = distance, f"{name}_{distance}"
            value = form.format(inner(distance_form(node)))
            forms.append([*inner.lines, f"{name} = {value}"])
        near, far = ("".join(f"\n        {line}" for line in lines) for lines in forms)
        self.lines.append(f"if {test}:{near}\n    else:{far}")
        return name

    def of_band(self, node: Expression) -> str:
        """Return that of the distances in a tile [2 max(M, N)]."""
        return _Writer(self.score, lines=self.lines)(node)

    def _near(self, node: Expression) -> str:
        """Return the load of a tile from a vector of `by_distance`."""
        number = self.score.near.setdefault(node, len(self.score.near))
        vectors, length, middle, heads, size = (f"args[{self.score.n_args + i}]" for i in range(5))
        at = f"tl.cast(b * {heads} + h, tl.int64) * {length} + ({middle} + {number} * {size})"
        return f"tl.load({vectors} + ({at} + first[2]) + first[3])"

    def _by_distance(self, node: Expression) -> bool:
        """Whether a tile is looked up by distance alone: once for each, and then spread."""
        if self.band or node.kind != REAL or not {"q", "k"} <= _symbols(node):
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
            band = _Writer(self.score, lines=self.lines)
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

    def _tanh(self, node: Expression) -> str:
        fast = "FAST" if _is_tile(node) and not self.band else "False"
        factor, parts = _factors(node.args[0])
        if len(parts) != 1 or parts[0].op != "s" or factor < 0 or self.score.gluon:
            return f"capped({self(node.args[0])}, 1.0, 1.0, {fast})"
        # of the products as they are; beyond these limits tanh is linear, or its sign
        cap = self.line(f"{1 / factor!r} / scale")
        near = self.line(f"tl.minimum(tl.maximum({cap}, 1e-7), 1e7)")
        return f"capped(raw, {near}, tl.minimum({near} / {cap}, 1.0), {fast})"

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
    body = "".join(f"    {line}\n" for line in (*lines, f"return {result}"))
    return _compiled(f"({parameters}, {_SHAPE}):\n{body}")


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
