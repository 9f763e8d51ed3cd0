"""The text of a rule as lines of Triton."""

import hashlib
import linecache
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import triton

from masks.predicate.expression import BOOL, INT, REAL, Expression, constant, multiply, walk, whole
from sparseflash.kernels.common.shapes import LOG2E
from sparseflash.kernels.portable import score as of_tiles
from sparseflash.kernels.portable.capping import capped
from sparseflash.kernels.portable.score import SPAN
from sparseflash.score.rule import (
    OPERATIONS,
    SYMBOLS,
    Read,
    bare,
    distance_form,
    factors,
    is_pair,
    is_tile,
    operands,
    reach,
    symbols,
)

_OF_TILE = {"q", "k", "s", "g", "d"}
_INVERSE = Expression("inverse", REAL)  # 1 / scale
_TOKENS = 2**24  # more than any call has
_SINGULAR = ("exp", "log", "sqrt", "load")  # may be infinite where g is 0


def _split(node: Expression) -> tuple[list[Expression], list[Expression]]:
    """Return expressions whose product is the node: numbers, and tiles."""
    if node.op == "multiply":
        (numbers, tiles), (more, others) = map(_split, node.args)
        return numbers + more, tiles + others
    return ([], [node]) if symbols(node) & _OF_TILE else ([node], [])


def _slant(node: Expression) -> Expression | None:
    """Return r of a product of numbers and abs(k - q + r), r being an integer of the call."""
    match _split(node)[1]:
        case [Expression(data=(0, (1,)), args=(Expression(op="absolute", args=(total,)),))]:
            factors = {arg.op: f for arg, f in zip(total.args, total.data[1], strict=True)}
            k = factors.get("k", 0)
            if abs(k) == 1 and factors.get("q") == -k and {*factors} <= {"q", "k", "n_q", "n_k"}:
                rest = {arg: k * factors[arg.op] for arg in total.args if arg.op not in ("q", "k")}
                return whole(k * total.data[0], rest)
    return None


def listed(names: Any) -> str:
    return "".join(f"{name}, " for name in names)


class Writer:
    """The lines of a function, one for each node.

    score: the KernelScore that the lines are for.
    distance: name of the distances of a band, in place of a tile. once: whether the function gets
    `numbers`.
    """

    def __init__(
        self, score: Any, lines: list[str] | None = None, *, prefix: str = "x",
        known: dict[Expression, str] | None = None, distance: str = "", once: bool = True,
    ):  # fmt: skip
        self.score, self.known, self.reals = score, {} if known is None else known, {}
        self.lines, self.prefix = [] if lines is None else lines, prefix
        self.distance, self.once = distance, once

    def __call__(self, node: Expression) -> str:
        if node not in self.known:
            self.known[node] = self._named(node)
        return self.known[node]

    def _named(self, node: Expression) -> str:
        if self.once and node.kind == REAL and not symbols(node) & {*_OF_TILE, "inverse"}:
            if any(part.op == "load" for part in walk(node)):
                return f"numbers[{self.score.once.setdefault(node, len(self.score.once))}]"
        if self._by_distance(node):
            if self.score.gluon:
                return self.line(self._near(node, "first[2]", " + first[3]"))
            band = Writer(self.score, self.lines, prefix=self.prefix, distance="d")
            return self.line(f"spread({band(distance_form(node))}, M, N, T)")
        if node.op == "s":
            return self.line("raw * scale")
        if node.op == "d":
            return self.distance
        if node.op in (*SYMBOLS, "g", "inverse"):
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

    def block(self, head: str, *lines: str) -> None:
        self.lines += [f"{head}:", *(f"    {line}" for line in lines)]

    def number(self, node: Expression) -> str:
        return self.real(node) if node.kind == INT else self(node)

    def sum_of_terms(self) -> str:
        """Return x, unit and add for the terms of the logits."""
        score, out = self.score, "raw" if self.score.scaled else ""
        unit = self.line(f"scale * {LOG2E!r}") if score.scaled else repr(LOG2E)
        adds, late = [], []
        for sign, node in score.rule.terms:
            op = "+" if sign > 0 else "-"
            if not score.pairs and not symbols(node) & {"q", "k", "s"}:
                adds.append(f"{op} {self.number(node)} * {LOG2E!r}")
            elif node in score.spans:
                late.append((op, self._near_or_far, node))
            elif score.gluon and _slant(node) is not None:
                late.append((op, self._slanted, node))
            elif node.op != "s" or not score.scaled:
                out = self._added(out, op, self._scaled(node), node)
        self.lines.append(f"x = {out}")
        for i, (op, write, node) in enumerate(late):
            write(f"add{i}", op, unit, node)
            adds.append(f"+ add{i}")
        return f"x, {unit}, {' '.join(adds).removeprefix('+ ') or '0.0'}"

    def _added(self, x: str, op: str, value: str, node: Expression) -> str:
        """Return x with a term. Triton begins products with a term that is added to them, so they
        wait for its loads: for those of neighbours, but for transposed products, which have no
        registers for anything else, a multiplication by 1 hides the addition.
        """
        if not x:
            return value if op == "+" else f"-{value}"
        text, loads = f"{x} {op} {value}", (part for part in walk(node) if part.op == "load")
        if not any(map(is_pair, loads)) or self.score.gluon or self.score.pairs:
            return text
        return f"({text} if T else tl.fma({value}, {op}1.0, {x}))"

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
        write = Writer(score, prefix=f"{add}_near")
        value = write(node)
        far = Writer(score, prefix=f"{add}_far", distance="first")
        if score.gluon:  # of the first pair: pairs beyond the end may have other entries
            entry = far.line(self._near(node, f"{low} + M - 1", ""))
        else:
            entry = far(distance_form(node))
        near = [*write.lines, f"x = x {op} {value}"]
        if score.gluon:  # a tile of several blocks has no such distances
            self.block("if first[4] is None", *near, f"{add} = 0.0")
        near_by = f"({high} > args[{at}]) & ({low} < args[{at + 1}])"
        self.block(f"{'el' * score.gluon}if {near_by}", *near, f"{add} = scale * 0.0")
        self.block("else", *far.lines, f"{add} = {minus}({entry} * {unit})")

    def _slanted(self, add: str, op: str, unit: str, node: Expression) -> None:
        """Add the product of a number and abs(k - q + r) to x. Where the sign of the distance is
        the same in a tile, its rows and columns add up: the rows become `add`.
        """
        factor, rest = self._factor(_split(node)[0]) or "1.0", _slant(node)
        above, below = (factor, f"-{factor}")[:: 1 if op == "+" else -1]
        assert rest is not None
        whole, real = self(rest), self.real(rest)
        near = f"x = x {op} {factor} * tl.abs({real} + first[0] + first[1])"
        self.block("if T or first[4] is None", near, f"{add} = 0.0")
        both = f"(first[5] + {whole} > 0) & (first[4] + {whole} < 0)"
        self.block(f"elif {both}", near, f"{add} = first[6] * 0.0")
        self.block(
            "else",
            f"{add}_factor = tl.where(first[4] + {whole} >= 0, {above}, {below})",
            f"x = tl.fma(first[1], {add}_factor, x)",  # LLVM would join it with the other one
            f"{add} = ({add}_factor * {unit}) * (first[6] + {real})",
        )

    def _near(self, node: Expression, first: str, step: str) -> str:
        """Return the load of a tile, or of one distance, from a vector of `by_distance`."""
        number = self.score.near.setdefault(node, len(self.score.near))
        vectors, length, middle, heads, size = (f"args[{self.score.n_args + i}]" for i in range(5))
        at = f"tl.cast(b * {heads} + h, tl.int64) * {length} + ({middle} + {number} * {size})"
        return f"tl.load({vectors} + ({at} + {first}){step})"

    def _by_distance(self, node: Expression) -> bool:
        """Whether a tile is looked up by distance alone: once for each, and then spread."""
        if self.distance or self.score.pairs or node.kind != REAL or symbols(node) & {"s", "g"}:
            return False
        loads = (part for part in walk(node) if part.op == "load")
        return reach(node) == "d" and any(reach(part) == "d" for part in loads)

    def guarded(self, part: Expression) -> str:
        """Return a product with g, 0 where g is 0, whatever the derivative is there."""
        name = self(part)
        singular = any(
            n.op in _SINGULAR or (n.op == "divide" and symbols(n.args[1])) for n in walk(part)
        )
        return self.line(f"tl.where(g != 0.0, {name}, 0.0)") if singular else name

    def add(self, read: Read, value: str = "") -> None:
        """Add the gradients of a read in a tile, or `value`, to its buffer."""
        score, value = self.score, value or self.guarded(read.grad)
        buffer = f"args[{score.buffer[read.node]}]"
        if read.stored:
            at, inside = self.place_of_pair(read.node)
            self.lines.append(f"tl.store({buffer} + {at}, {value}, mask={inside})")
            return
        if read.reach == "d":
            at = Writer(score, self.lines, distance="d").place(distance_form(read.node))
            value = self.line(f"sums_by_distance({value}, M, N)")
        else:
            at = self.place(read.node)
            if read.reach == "k":
                value = self.line(f"tl.sum({value}, 0)[None, :]")
        if read.node in score.far:
            low = score.spans[read.node]
            near = f"(far + {SPAN.value} > args[{low}]) & (far - {SPAN.value} < args[{low + 1}])"
            value = self.line(f"tl.where({near}, {value}, 0.0)")
        number = f"fixed({value}, tl.load(args[{score.n_args}] + {score.counted[read.node]}))"
        self.lines.append(
            f"tl.atomic_add({buffer} + {at}, {number}, mask={value} != 0.0, sem='relaxed')"
        )

    def place(self, load: Expression, clamped: bool = True) -> str:
        """Return the offset of the entry that is read. The caller checks that numbers of tokens,
        heads and batch entries are in the table, those of tokens beyond the end become the last
        ones if `clamped`; any other index is moved into the table.
        """
        first, large = self.score.places[load.data], self.score.rule.kinds[load.data].large
        at = ""
        for dim, i in enumerate(load.args):
            name, size = self(i), f"args[{first + 1 + dim}]"
            if i.kind == REAL:
                name = f"tl.minimum(tl.maximum({name}, 0.0), 2.0e9).to(tl.int32)"  # not infinite
            if bare(i) is None:
                name = f"tl.minimum(tl.maximum({name}, 0), {size} - 1)"
                name += "" if large else ".to(tl.int32)"
            elif clamped and bare(i) in ("q", "k") and not self.score.pairs:
                name = f"tl.minimum({name}, n_{name} - 1)"
            if large:
                name = f"tl.cast({name}, tl.int64)"
            at = f"({at}) * {size} + {name}" if at else name
        return self.line(at or "0")

    def place_of_pair(self, load: Expression) -> tuple[str, str]:
        """Return the offset of an entry, and whether its tokens are in the table. Triton joins
        accesses to neighbours, which minima would hide from it.
        """
        inside = " & ".join(
            f"({name} < args[{self.score.places[load.data] + 1 + dim}])"
            for dim, name in enumerate(map(bare, load.args)) if name in ("q", "k")
        )  # fmt: skip
        return self.place(load, clamped=False), inside

    def _text(self, node: Expression) -> str:
        args = operands(node)
        if node.op == "sum":
            return self._sum(node, self)
        if node.op == "load":
            kind = {INT: "tl.int32", REAL: "tl.float32", BOOL: "tl.int1"}[node.kind]
            if self.score.rule.kinds[node.data].dtype in ("int64", "uint32", "uint64"):
                kind = "tl.int64"
            if self.score.pairs or not is_pair(node):
                at = self.place(node)
            else:
                at = "{}, mask={}, other=0".format(*self.place_of_pair(node))
            return f"tl.load(args[{self.score.places[node.data]}] + {at}).to({kind})"
        if node.op == "tanh":
            return self._tanh(node)
        if node.op in ("multiply", "divide"):
            factor, parts = factors(node)
            if not parts or parts[0] is not node:
                found = [*map(self.number, parts)]
                return " * ".join([*found, repr(factor)] if factor != 1 or not parts else found)
        names = [*map(self.number if node.kind == REAL else self, args)]
        if node.op in ("floor_divide", "remainder"):
            alone = args[0].args[0].op if args[0].data == (0, (1,)) else ""
            if alone in (*SYMBOLS, "absolute") and (constant(args[1]) or 0) > 0:  # not negative
                return f"{names[0]} {'//' if node.op == 'floor_divide' else '%'} {names[1]}"
        if node.op == "divide" and not symbols(args[1]) & {"s", "q", "k", "d"}:  # by one number
            return f"{names[0]} * (1.0 / {names[1]})"
        if node.op == "multiply" and node.kind == INT and self._most(node, _TOKENS) >= 2**31:
            names[0] = f"tl.cast({names[0]}, tl.int64)"
        return OPERATIONS[node.op].triton.format(*names)

    def amplified(self, node: Expression, factor: float) -> None:
        """Write x = factor * tanh and unit = 1 for a forward, x = tanh for a backward, and know the
        tanh.
        """
        back, on = (Writer(self.score, prefix=prefix) for prefix in ("back", "on"))
        # with numbers that are known here, a backward has registers for them
        back.lines += [f"x = capped({back(node.args[0])}, 1.0, 1.0, FAST)", f"unit = {factor!r}"]
        on.lines += [f"x = {on._tanh(node, factor)}", "unit = 1.0"]
        self.block("if T", *back.lines, "t = x")
        self.block("else", *on.lines, f"t = x * {1 / factor!r}")
        self.known[node] = "t"

    def _tanh(self, node: Expression, amplitude: float = 1.0) -> str:
        fast = "FAST" if is_tile(node) and not self.distance else "False"
        factor, parts = factors(node.args[0])
        if len(parts) != 1 or parts[0].op != "s" or factor < 0:
            return f"capped({self(node.args[0])}, 1.0, {amplitude}, {fast})"
        # of the products as they are; beyond these limits tanh is linear, or its sign
        cap = self.line(f"{1 / factor!r} / scale")
        near = self.line(f"tl.minimum(tl.maximum({cap}, 1e-7), 1e7)")
        return f"capped(raw, {near}, tl.minimum({near} / {cap}, 1.0) * {amplitude}, {fast})"

    def real(self, node: Expression) -> str:
        """Return an integer in float32. Sums of token numbers are made of these, exact up to 2**24:
        an addition for each score, where a conversion takes as long as four.
        """
        if (value := constant(node)) is not None:
            return repr(float(value))
        if node not in self.reals:
            if node.op == "sum" and (node.data == (0, (1,)) or self._most(node, 2**21) <= 2**24):
                text = self._sum(node, self.real)
            elif node.op in ("absolute", "minimum", "maximum", "multiply"):
                text = OPERATIONS[node.op].triton.format(*map(self.real, node.args))
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
        wide = number == self and self._most(node, _TOKENS) >= 2**31
        for name, factor in terms:
            name = f"tl.cast({name}, tl.int64)" if wide else name
            if abs(factor) != 1:
                name = f"{name} * {abs(factor)}"
            text += f" - {name}" if factor < 0 else f" + {name}" if text else name
        return text

    def _most(self, node: Expression, tokens: int) -> int:
        """Return a bound of an integer that is made of so many tokens, and entries below 2**24."""
        if node.op == "sum":
            parts = zip(node.args, node.data[1], strict=True)
            return abs(node.data[0]) + sum(abs(f) * self._most(arg, tokens) for arg, f in parts)
        if node.op == "load":
            return {"int8": 2**7, "uint8": 2**8}.get(self.score.rule.kinds[node.data].dtype, 2**24)
        most = [self._most(arg, tokens) for arg in node.args if arg.kind == INT] or [tokens]
        if node.op == "multiply":
            return most[0] * most[1]
        if node.op in ("floor_divide", "remainder"):
            by = abs(constant(node.args[1]) or 0)
            return by if by and node.op == "remainder" else most[0] // max(by, 1) + 1
        return max(most) * 2 ** node.op.startswith("bit")


def function_of(write: Writer, parameters: str, result: str) -> Any:
    """Return the Triton function of the lines that are written."""
    lines = write.lines
    if any("spread(" in line or "sums_by_distance(" in line for line in lines):
        lines = ["d = band(first, M, N)", *lines]
    if any("inverse" in line for line in lines):
        lines = ["inverse = 1.0 / scale", *lines]
    body = "".join(f"    {line}\n" for line in (*lines, f"return {result}"))
    return _compiled(f"({parameters}):\n{body}")


@cache
def _compiled(text: str) -> Any:
    """Return the Triton function of a text, whose hash is its name: equal texts are one function,
    and one kernel in Triton's cache on disk. Triton reads it from linecache, as debuggers do.
    """
    name = f"score_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    text, file = f"def {name}{text}", f"<sparseflash {name}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    made: dict[str, Any] = vars(of_tiles) | {"capped": capped, "__name__": __name__}
    exec(compile(text, file, "exec"), made)  # noqa: S102, of a text that is written here
    return triton.jit(made[name])
