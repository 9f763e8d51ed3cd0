"""How an expression repeats along the diagonal of queries and keys."""

from math import gcd, lcm

from masks.predicate.expression import BOOL, COMPARISONS, Expression, constant

LONGEST = 1 << 40  # tokens


def moves(rule: Expression) -> tuple[int, int, int] | None:
    """(period, first query, first key) of a truth value, see `Leaf.moves`; None for no period."""
    period = _least(rule, 1)
    first = {"q": 0, "k": 0}
    known: dict[Expression, int | None] = {}

    def growth(node: Expression) -> int | None:
        """Return what a number grows by when q and k grow by the period; 0 for what stays the
        same.
        """
        if node not in known:
            known[node] = _growth(node)
        return known[node]

    def _growth(node: Expression) -> int | None:
        if node.op in ("q", "k"):
            return period
        args = _seen(node)
        if node.kind == BOOL and len(args) == 1 and (beyond := _beyond(node, args[0])):
            side, token = beyond
            first[side] = max(first[side], token)
            return 0
        inner = [size for arg in args if (size := growth(arg)) is not None]
        if len(inner) < len(args):
            return None
        if not any(inner):
            return 0
        divided = node.op in ("floor_divide", "remainder")
        divisor = constant(args[1]) if divided else None  # pyright: ignore[reportGeneralTypeIssues]
        if node.op == "sum":
            return sum(size * factor for size, factor in zip(inner, node.data[1], strict=True))
        if divisor and inner[0] % divisor == 0:
            return inner[0] // divisor if node.op == "floor_divide" else 0
        return None

    return (period, first["q"], first["k"]) if period <= LONGEST and growth(rule) == 0 else None


def _seen(node: Expression) -> tuple[Expression, ...]:
    """Return the operands; of integers compared only the difference."""
    difference = node.kind == BOOL and len(node.args) == 3 and node.op != "where"
    return node.args[:1] if difference else node.args


def _beyond(node: Expression, x: Expression) -> tuple[str, int] | None:
    """(side, token) from which on a comparison of q or k alone stays the same."""
    if x.op != "sum" or len(x.args) != 1 or x.args[0].op not in ("q", "k"):
        return None
    offset, (factor,) = x.data
    if node.op in COMPARISONS:
        return x.args[0].op, abs(offset) // abs(factor) + 1
    if node.op == "isin" and len(node.data):
        return x.args[0].op, (int(abs(node.data).max()) + abs(offset)) // abs(factor) + 1
    return None


def _least(node: Expression, multiple: int) -> int:
    """Return a period that makes the number grow by a multiple, as far as divisors go."""
    args = node.args
    if node.op == "sum":
        both = sum(f for x, f in zip(args, node.data[1], strict=True) if x.op in ("q", "k"))
        least = multiple // gcd(multiple, both)
        return lcm(least, *[_least(x, multiple) for x in args if x.op not in ("q", "k")])
    divisor = constant(args[1]) if node.op in ("floor_divide", "remainder") else None
    if divisor:
        return _least(args[0], abs(divisor) * (multiple if node.op == "floor_divide" else 1))
    return lcm(*[_least(x, 1) for x in _seen(node)])
