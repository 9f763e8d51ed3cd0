"""Scores as the text of Triton functions.

A rule becomes two functions of a tile. The first gives its logits, and the values that its
derivatives use again; the second multiplies a gradient of the logits with the derivatives. Both get
the scaled scores `s` and `g`, tiles; `b` and `h`, numbers; `q` and `k`, a column and a row of token
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
from sparseflash.kernels.portable.capping import capped
from sparseflash.kernels.portable.score import fixed, floor_divide, remainder
from sparseflash.kernels.portable.terms import band, spread, sums_by_distance
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
_SLOPE_ARGS = "s, g, kept, b, h, q, k, n_q, n_k, first, args, sums"
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
        self.summed = [read for read in rule.reads if not _stored(read)]
        self.added = [read for read in rule.reads if not _is_carried(read)]
        self.number = {read.node: i for i, read in enumerate(self.summed)}
        self.paired = is_paired(rule.text)

    @cached_property
    def score(self) -> Any:
        """The function (logits, values that the slopes take) of a tile."""
        write = _Writer(self)
        logits = write(self.rule.logits)
        kept = (f"{write(node)}{self._packed(node)[0]}" for node in self.kept)
        result = f"{logits}, ({_listed(kept)})"
        return _function(write, "s, b, h, q, k, n_q, n_k, first, args", result)

    @cached_property
    def slope(self) -> Any:
        """The function (gradient of the scaled scores, ()) of a tile."""
        return self._slope([])

    @cached_property
    def bands(self) -> Any:
        """The function (values of `near`) of a vector of distances d, in place of a tile."""
        self.score, self.slope  # noqa: B018
        write = _Writer(self, lines=[])
        values = [write(distance_form(node)) for node in self.near]
        return _function(write, "b, h, d, n_q, n_k, args", f"({_listed(values)})")

    @cached_property
    def slope_sums(self) -> Any:
        """`slope`, with sums [M] of `summed` in place of ()."""
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
        return _function(write, _SLOPE_ARGS, f"{result}, ({_listed(sums)})")

    def _after(self) -> "_Writer":
        kept = (f"kept[{i}]{self._packed(node)[1]}" for i, node in enumerate(self.kept))
        return _Writer(self, dict(zip(self.kept, kept, strict=True)))

    def _packed(self, node: Expression) -> tuple[str, str]:
        """Return how a value is kept, and taken again: bounded ones in half of the registers."""
        packed = self.gluon and node.op == "tanh"
        return (".to(tl.float16)", ".to(tl.float32)") if packed else ("", "")

    def options(self, tables: Sequence[Tensor], *more: Tensor) -> dict[str, Any]:
        """Return the arguments of a kernel; more: args after the tables."""
        args = (*(x for t in tables for x in (t, *t.shape)), *more)
        return {"score_args": args, "SCORE": self.score, "PAIRED": self.paired}

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
                at = Scored(self.rule, tables, row_sums, shape[2], n_k, **numbers)
                part = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
                gather(part, at.place(read.table, read.index), row_sums[number])
            else:
                part = made[read.node]
                if number is not None:
                    part = part / units[number].double()
            totals[read.table] = part if known is None else known + part
        for i, kind in enumerate(self.rule.kinds):
            if kind.wanted and totals[i] is None:  # never read
                totals[i] = torch.zeros_like(tables[i])
        return as_tables(totals, tables)


@lru_cache(maxsize=512)
def kernel_score(text: str, gluon: bool = False) -> KernelScore:
    """Return the rule of a key."""
    return KernelScore(rule_of(text), gluon)


def _is_carried(read: Read) -> bool:
    """Whether its gradient is a number for each query."""
    return read.reach in ("bh", "q")


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

    def __call__(self, node: Expression) -> str:
        if node not in self.known:
            self.known[node] = self._named(node)
        return self.known[node]

    def _named(self, node: Expression) -> str:
        if self._by_distance(node):
            if self.score.gluon:
                return self.line(self._near(node))
            return self.line(f"spread({self.of_band(distance_form(node))}, M, N, T)")
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
        self.lines.append(f"x{len(self.lines)} = {text}")
        return f"x{len(self.lines) - 1}"

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
        names = [self.real(a) if node.kind == REAL and a.kind == INT else self(a) for a in args]
        if node.op == "tanh":
            fast = "FAST" if _is_tile(node) and not self.band else "False"
            return f"capped({names[0]}, 1.0, 1.0, {fast})"
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
