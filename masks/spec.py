"""Masks as text: `parse`, and the register of the patterns that it knows."""

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from masks.algebra import Mask

Factory = TypeVar("Factory", bound="Callable[..., Mask]")

PATTERNS: "dict[str, Callable[..., Mask]]" = {}  # every name, long and short


def pattern(short: str | None = None) -> Callable[[Factory], Factory]:
    """Decorator of a function that makes a mask: `parse` knows it by its name, and by `short`."""

    def register(function: Factory) -> Factory:
        for name in (function.__name__, short):
            if name:
                PATTERNS[name] = function
        return function

    return register


def call_text(name: str, *args: Any, **options: tuple[Any, Any]) -> str:
    """Canonical text of a call; `options` are (value, default), and defaults are left out."""
    parts = [repr(arg) for arg in args]
    parts += [f"{key}={value!r}" for key, (value, default) in options.items() if value != default]
    return f"{name}({', '.join(parts)})"


def parse(text: str) -> "Mask":
    """The mask of a text such as `local(256) | butterfly(128) & causal()`; `|` binds least.

    The colon form `local:256+butterfly:128+global:64*causal` needs no quotes in a shell or Hydra:
    + is |, * is &, - is difference, and a bare name is a call. `name=value` is an argument too
    (`random:0.1:seed=3`; Hydra wants quotes around that, and around parentheses). The precedence
    is Python's: ~ before *, then + and -, then &, then |.

    Raises:
        ValueError: text that is no mask; the message has the position and the known names.
    """
    if not isinstance(text, str):
        raise ValueError(f"a mask text is expected, not {text!r}: give a str")
    return _Parser(text).mask()


_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_ARGUMENT = rf":(?:([A-Za-z_]\w*)=)?(-?{_NUMBER}|[A-Za-z_]\w*)"
_TOKEN = re.compile(rf"([A-Za-z_]\w*)((?:{_ARGUMENT})*)|{_NUMBER}|'[^']*'|\"[^\"]*\"|.", re.DOTALL)
_WORDS = {"true": "True", "false": "False", "none": "None"}
_JOINS: dict[type, str] = {
    ast.BitOr: "|",
    ast.Add: "|",
    ast.BitAnd: "&",
    ast.Mult: "&",
    ast.Sub: "-",
}


class _Parser:
    """Turns the colon form into calls, lets Python parse, and evaluates what is on a whitelist."""

    def __init__(self, text: str):
        self.text = text
        self.python = ""
        self.origin: list[int] = []  # position in `text` of every character of `python`

    def mask(self) -> "Mask":
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
            is_word = value[0].isalpha() or value[0] == "_"
            value = _WORDS.get(value.lower(), repr(value)) if is_word else value
            parts.append(f"{keyword}={value}" if keyword else value)
        return f"{name}({', '.join(parts)})"

    def _mask(self, node: ast.AST) -> "Mask":
        match node:
            case ast.BinOp(left, op, right) if type(op) in _JOINS:
                a, b = self._mask(left), self._mask(right)
                join = _JOINS[type(op)]
                return a | b if join == "|" else a & b if join == "&" else a - b
            case ast.UnaryOp(ast.Invert(), operand):
                return ~self._mask(operand)
            case ast.Name(name):
                return self._call(node, name, [], {})
            case ast.Call(ast.Name(name), args, keywords):
                if name == "mask_from":
                    raise self._error("an array mask has no text: it shows a digest only", node)
                named = {k.arg: self._value(k.value) for k in keywords if k.arg is not None}
                if len(named) < len(keywords):
                    raise self._error("** has no place in a mask", node)
                return self._call(node, name, [self._value(a) for a in args], named)
        raise self._error("is no mask here: use a pattern, | & ~ - and parentheses", node)

    def _call(self, node: ast.AST, name: str, args: list[Any], named: dict[str, Any]) -> "Mask":
        function = PATTERNS.get("global" if name == "global_" else name)
        if function is None:
            raise self._error(f"unknown pattern {name!r}", node)
        try:
            return function(*args, **named)
        except (TypeError, ValueError) as error:
            raise self._error(str(error), node) from error

    def _value(self, node: ast.AST) -> Any:
        try:
            value = ast.literal_eval(node)  # type: ignore[arg-type]
        except (ValueError, TypeError, SyntaxError):
            raise self._error("is no number or word: arguments are constants", node) from None
        if not isinstance(value, int | float | str | None):
            raise self._error("is no number or word: arguments are constants", node)
        return value

    def _error(self, problem: str, where: ast.AST | int) -> ValueError:
        offset = where if isinstance(where, int) else getattr(where, "col_offset", 0)
        position = self.origin[offset] if offset < len(self.origin) else len(self.text)
        here = self.text[position : position + 20]
        return ValueError(
            f"mask text {self.text!r}, position {position} ({here!r}): {problem}. "
            f"Known patterns: {', '.join(sorted(PATTERNS))}"
        )
