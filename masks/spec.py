"""Masks as text: `parse`, and `find` for masks that no text spells."""

import ast
import difflib
import re
from collections.abc import Callable
from operator import and_, or_, sub
from typing import Any

from masks.algebra import Mask
from masks.registry import OWN, PATTERNS, TRANSFORMS, Entry, import_own, living


def parse(text: str) -> Mask:
    """Return the mask of a text such as `local(256) | butterfly(128) & causal()`; `|` binds least.

    The colon form `local:256+butterfly:128+global:64*causal` needs no quotes in a shell or Hydra:
    + is |, * is &, - is difference, a bare name is a call, and `128x64` is the pair (128, 64).
    `name=value` is an argument too (`random:0.1:seed=3`; Hydra wants quotes around that, around
    parentheses and around >>). The precedence is Python's: ~ before *, then + and -, then >>, then
    &, then |.

    Raises:
        ValueError: text that is no mask; the message has the position, and the name that was
            perhaps meant.
    """
    if not isinstance(text, str):
        raise ValueError(f"a mask text is expected, not {text!r}: give a str")
    return _Parser(text).mask()


def find(key: str) -> Any:
    """Return the mask or block mask in memory with this key, or else the mask that the key spells.

    Raises:
        ValueError: there is neither.
    """
    found = living(key)
    if found is None and re.fullmatch("[0-9a-f]{64}", key):
        raise ValueError(
            f"no block mask with the key {key} is in memory: make or load it first, and keep it;"
            " for an exported program, make the layer that it was exported from"
        )
    return parse(key) if found is None else found


_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_ARGUMENT = rf":(?:([A-Za-z_]\w*)=)?(\d+(?:x\d+)+|-?{_NUMBER}|[A-Za-z_]\w*)"
_TOKEN = re.compile(rf"([A-Za-z_]\w*)((?:{_ARGUMENT})*)|{_NUMBER}|'[^']*'|\"[^\"]*\"|.", re.DOTALL)
_WORDS = {"true": "True", "false": "False", "none": "None"}
_JOINS = {ast.BitOr: or_, ast.Add: or_, ast.BitAnd: and_, ast.Mult: and_, ast.Sub: sub}
_NO_MASK = "is no mask here: use a pattern, | & ~ - >> and parentheses"
_NO_ARGUMENT = "is no argument: give a number, a word, a tuple of these, or a mask"


class _Parser:
    """Turns the colon form into calls, lets Python parse, and evaluates what is on a whitelist."""

    def __init__(self, text: str):
        self.text = text
        self.python = ""
        self.origin: list[int] = []  # position in `text` of every character of `python`

    def mask(self) -> Mask:
        for token in _TOKEN.finditer(self.text):
            python = self._python(token)
            last = token.end() - 1
            self.origin += [min(token.start() + i, last) for i in range(len(python))]
            self.python += python
        try:
            return self._mask(ast.parse(self.python, mode="eval").body)
        except (SyntaxError, RecursionError, MemoryError) as error:
            offset = getattr(error, "offset", 1) or len(self.python) + 1  # 0 means the end
            raise self._error("does not read as an expression", offset - 1) from None

    def _python(self, token: re.Match[str]) -> str:
        """Python text of a token of the mask text."""
        name, arguments = token[1], token[2]
        if token[0].isspace():
            return " " if self.python else ""  # one line, and no indentation
        if not name:
            return token[0]
        if name == "global":  # a keyword of Python
            name = "global_"
        if not arguments:
            return name
        parts = []
        for keyword, value in re.findall(_ARGUMENT, arguments):
            if "x" in value and value[0].isdigit():
                value = f"({value.replace('x', ', ')})"
            elif value[0].isalpha() or value[0] == "_":
                value = _WORDS.get(value.lower(), repr(value))
            parts.append(f"{keyword}={value}" if keyword else value)
        return f"{name}({', '.join(parts)})"

    def _mask(self, node: ast.AST) -> Mask:
        match node:
            case ast.BinOp(left, op, right) if type(op) in _JOINS:
                a, b = self._mask(left), self._mask(right)
                return self._try(node, lambda: _JOINS[type(op)](a, b))
            case ast.BinOp(left, ast.RShift(), right):
                mask, step = self._mask(left), self._call(right, TRANSFORMS, "transform")
                return self._try(right, lambda: mask >> step)
            case ast.UnaryOp(ast.Invert(), operand):
                return ~self._mask(operand)
            case ast.Name() | ast.Call():
                return self._call(node, PATTERNS, "pattern")
        raise self._error(_NO_MASK, node)

    def _call(self, node: ast.AST, names: dict[str, Entry], kind: str) -> Any:
        """Return what a name, or a call of one, makes."""
        args, keywords = [], []
        match node:
            case ast.Name(name):
                pass
            case ast.Call(ast.Name(name), args, keywords):
                pass
            case _:
                raise self._error(_NO_MASK if kind == "pattern" else f"is no {kind}", node)
        name = "global" if name == "global_" else name
        if name not in names:
            import_own()
        if name not in names:
            raise self._error(self._unknown(name, names, kind), node)
        if any(keyword.arg is None for keyword in keywords):
            raise self._error("** has no place in a mask", node)
        values = [self._argument(arg) for arg in args]
        named = {str(keyword.arg): self._argument(keyword.value) for keyword in keywords}
        return self._try(node, lambda: names[name].function(*values, **named))

    def _unknown(self, name: str, names: dict[str, Entry], kind: str) -> str:
        if name == "mask_from":
            return "an array mask has no text: it shows a digest only"
        if name in TRANSFORMS:
            return f"{name!r} is a transform: write mask >> {name}(...)"
        if name in PATTERNS:
            return f"{name!r} is a pattern: a transform belongs right of >>"
        close = difflib.get_close_matches(name, names, 3)
        meant = f"did you mean {' or '.join(close)}? " if close else ""
        return (
            f"unknown {kind} {name!r}; {meant}Known {kind}s: {', '.join(sorted(names))}. For "
            f"those of your own set {OWN}=MODULE in the environment"
        )

    def _argument(self, node: ast.AST) -> Any:
        """Return a constant, a tuple of constants, or a mask."""
        try:
            value = ast.literal_eval(node)  # type: ignore[arg-type]
        except (ValueError, TypeError, SyntaxError):
            if isinstance(node, ast.Name | ast.Call | ast.BinOp | ast.UnaryOp):
                return self._mask(node)
            raise self._error(_NO_ARGUMENT, node) from None
        if not _is_plain(value):
            raise self._error(_NO_ARGUMENT, node)
        return value

    def _try(self, node: ast.AST, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except (TypeError, ValueError) as error:
            raise self._error(str(error), node) from error

    def _error(self, problem: str, where: ast.AST | int) -> ValueError:
        offset = where if isinstance(where, int) else getattr(where, "col_offset", 0)
        position = self.origin[offset] if offset < len(self.origin) else len(self.text)
        here = self.text[position : position + 20]
        return ValueError(f"mask text {self.text!r}, position {position} ({here!r}): {problem}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value)
    return isinstance(value, int | float | str | None)
