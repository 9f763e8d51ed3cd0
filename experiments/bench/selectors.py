"""Selectors as texts."""

import ast
from typing import Any

import masks
from experiments.common.files import reason
from sparseflash import select

SELECTORS = ("top_k", "mass", "antidiagonal", "gate", "moba", "nsa")


def parse(text: str) -> select.Selector:
    """Return the selector of a call such as `top_k(0.1, within=causal())`.

    Arguments are constants, masks, and `Gate(...)` of constants. Raise ValueError for another text.
    """
    try:
        return _call(ast.parse(text, mode="eval").body, SELECTORS)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"selectors: {text!r} is no selector ({reason(error)}); "
            "give a call of sparseflash.select, such as top_k(0.1)"
        ) from error


def _call(node: ast.AST, names: tuple[str, ...]) -> Any:
    match node:
        case ast.Call(ast.Name(name), args, keywords) if name in names:
            named = {str(keyword.arg): _argument(keyword.value) for keyword in keywords}
            return getattr(select, name)(*map(_argument, args), **named)
    raise ValueError(f"choose from {', '.join(names)}")


def _argument(node: ast.expr) -> Any:
    """Return a constant, a gate, or a mask."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        is_gate = isinstance(node, ast.Call) and ast.unparse(node.func) == "Gate"
        return _call(node, ("Gate",)) if is_gate else masks.parse(ast.unparse(node))
