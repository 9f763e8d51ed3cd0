"""`score`: the function of a score, traced, and bound to its tensors."""

import inspect
import itertools
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from masks.predicate import expression as ops
from masks.predicate.expression import INT, Expression, lift, walk
from sparseflash.checks import is_wrapped
from sparseflash.score.rule import SYMBOLS, Kind, node_of, rule_of, symbol, symbols, text_of

Kinds = tuple[tuple[int, torch.dtype, bool, bool], ...]
_scores: "WeakValueDictionary[str, Score]" = WeakValueDictionary()
_numbers = itertools.count()


def score(fn: Callable[..., Any]) -> "Score":
    """Return the score function of `fn`, which gives the logits of attention in place of the
    scores.

    The logit of a pair is `fn` of its score and its place, before the mask, the sink and the
    softmax. The arguments of `fn` are known by their names:

        s            the score scale q k^T, a number in float32, or float64 like q
        b, h, q, k   the numbers of the batch entry, the query head, the query and the key from 0,
                     as in `masks.where`. Query 0 faces key 0; with fewer queries than keys the
                     distance from the end is k - q + n_q - n_k
        n_q, n_k     how many queries and keys the call has

    Every other one is a tensor, indexed as in `bias[h, q - k + 64]`, without an index where it has
    no dimensions. A call of the result binds it: `attention(..., score=rule(bias=tensor))`. It
    gets a gradient where it requires one. An index outside takes the nearest entry. `fn` runs with
    symbols, once for tensors of one kind: functions of NumPy and torch, comparisons, `np.where`,
    tanh, exp, log, sqrt, no `if`. A logit may be -inf.

    Raises ValueError for a function that cannot be read, with what to write instead.
    """
    return Score(fn)


# what torch.compiler.disable does, which takes seconds to import the compiler
vars(score)["_torchdynamo_disable"] = True
vars(score)["_torchdynamo_disable_msg"] = "make score functions outside of the compiled function"


class Score:
    """A function of scores. `names` are those of its tensors.

    fn: the function; or what it computes, an expression, with its name and those of its tensors.
    """

    def __init__(self, fn: Callable[..., Any] | Expression, name: str = "", *names: str):
        self.fn, self.name, self.names, self.places = fn, name, names, []
        if not isinstance(fn, Expression):
            self._read_names(fn)
        self._texts: dict[Kinds, str] = {}
        self.number = str(next(_numbers))  # torch.compile makes symbols of ints
        _scores[self.number] = self
        if not self.names:
            self.text(())

    def _read_names(self, fn: Any) -> None:
        if not callable(fn):
            raise ValueError(f"score is given {fn!r}; pass a function such as lambda s, q, k: ...")
        own = getattr(fn, "func", fn)  # of a partial
        self.name, self.names = getattr(own, "__qualname__", type(fn).__name__), ()
        for name, p in inspect.signature(fn).parameters.items():
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
                raise ValueError(f"{self.name} has the argument {p}; name each one")
            if name in SYMBOLS:
                self.places.append(name)
            elif p.default is p.empty:
                self.names += (name,)
        if "s" not in self.places:
            raise ValueError(f"{self.name} has no argument s; name the score so: lambda s, ...")

    def __call__(self, **tensors: Tensor) -> "Bound":
        """Return the function with its tensors, which are all given by name."""
        if set(tensors) != set(self.names):
            wanted = ", ".join(f"{name}=" for name in self.names) or "nothing"
            raise ValueError(f"{self.name} is given {tuple(tensors)}; call it with {wanted}")
        bound = Bound(self, tuple(tensors[name] for name in self.names))
        bound.key()
        return bound

    def __repr__(self) -> str:
        return f"score({self.name})"

    def __reduce__(self) -> Any:
        return Score, (self.fn, self.name, *self.names)

    def text(self, kinds: Kinds) -> str:
        """Return the key of the rule for such tensors."""
        if kinds not in self._texts:
            made = tuple(
                Kind(n, str(dtype).removeprefix("torch."), *rest) for n, dtype, *rest in kinds
            )
            logits = self.fn
            if not isinstance(logits, Expression):
                given: dict[str, Any] = {name: symbol(name) for name in self.places}
                for i, (name, kind) in enumerate(zip(self.names, made, strict=True)):
                    table = Table(i, name, kind)
                    given[name] = table if kind.ndim else table[()]
                logits = trace(logits, self.name, given)
            self._texts[kinds] = text_of(logits, made)
        return self._texts[kinds]


class Bound(NamedTuple):
    """A score function with its tensors, as `attention` takes it."""

    score: Score
    tables: tuple[Tensor, ...]

    def key(self) -> str:
        """Return the key of the rule: `rule_of` finds it."""
        for name, t in zip(self.score.names, self.tables, strict=True):
            if not isinstance(t, Tensor) or t.is_complex():
                what = t.dtype if isinstance(t, Tensor) else type(t).__name__
                raise ValueError(f"{self.score.name}: {name} is {what}; pass a tensor of numbers")
        eager = not torch.compiler.is_compiling()
        kinds = tuple(
            (
                t.ndim, t.dtype, True if t.numel() >= 2**31 else False,  # so a compiler guards it
                t.is_floating_point() and (t.requires_grad or (eager and is_wrapped(t))),
            )
            for t in self.tables
        )  # fmt: skip
        return _text(self.score.number, kinds)


def bound(score: Any) -> Bound:
    """Return the score function with its tensors; ValueError for anything else."""
    if isinstance(score, Score):
        return score()
    if not isinstance(score, Bound):
        what = score.__qualname__ if isinstance(score, FunctionType) else type(score).__name__
        raise ValueError(f"score is {what}; pass sparseflash.score(fn), called with its tensors")
    return score


def placed(bound: Bound, text: str, tables: tuple[Tensor, ...]) -> Bound:
    """Return a score function with the rule of `text`, which has further tables."""
    return Bound(_of_rule(bound.score.number, text), (*bound.tables, *tables))


@lru_cache(maxsize=512)
def _of_rule(number: str, text: str) -> Score:
    """Return the score function that score `number` becomes."""
    score, rule = _scores[number], rule_of(text)
    names = *score.names, *(f"place {i}" for i in range(len(rule.kinds) - len(score.names)))
    return Score(rule.logits, score.name, *names)


def from_score_mod(score_mod: Callable[..., Any]) -> Bound:
    """Return a function (score, b, h, q_idx, kv_idx), with the tensors that it indexes.

    It is traced, which takes about half a millisecond.
    """
    found: list[Tensor] = []

    def read(tensor: Tensor, index: Any) -> Expression:
        at = next((i for i, t in enumerate(found) if t is tensor), len(found))
        found[at : at + 1] = [tensor]
        kind = Kind(tensor.ndim, str(tensor.dtype).removeprefix("torch."), False, False)
        return Table(at, f"tensor {at} of {name}", kind)[index]

    name = getattr(score_mod, "__qualname__", type(score_mod).__name__)
    places = {place: symbol(place) for place in ("s", "b", "h", "q", "k")}
    logits = trace(lambda **given: score_mod(*given.values()), name, places, read)
    names = (f"tensor {i} of {name}" for i in range(len(found)))
    return Bound(Score(logits, name, *names), tuple(found))


class Table:
    """A tensor while its function is traced."""

    def __init__(self, number: int, name: str, kind: Kind):
        self.number, self.name, self.kind = number, name, kind

    def __getitem__(self, index: Any) -> Expression:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != self.kind.ndim:
            raise ValueError(
                f"{self.name} has {self.kind.ndim} dimensions and is read with {len(index)}"
                f" indices: write {self.name}[i, j, ...] with one for each"
            )
        args = tuple(map(lift, index))
        for i, arg in enumerate(args):
            if "s" in symbols(arg):
                raise ValueError(
                    f"index {i} of {self.name} depends on the score s; take b, h, q, k"
                )
            if not _is_whole(arg):
                raise ValueError(f"index {i} of {self.name} is no integer; write np.floor(...)")
        return node_of("load", self.kind.of_entries, args, self.number)

    def __torch_function__(self, *_: Any) -> Any:  # expressions take it for a tensor
        return self[()]


def _of_closure(tensor: Any, index: Any) -> Expression:
    if isinstance(tensor, Table):
        return tensor[index]
    raise ValueError("it reads a tensor of its closure; make it an argument of the function")


def trace(
    fn: Callable[..., Any], name: str, values: dict[str, Any], read: Any = _of_closure
) -> Expression:
    """Return what fn(**values) computes; read: what it does with a tensor and an index.

    Raises ValueError for what symbols cannot do.
    """
    token = ops.read_tensor.set(read)
    try:
        rule = lift(fn(**values))
    except (ops.Unsupported, ValueError) as error:
        how = "an array is indexed, or int() or math used: make it an argument, and write np.tanh"
        raise ValueError(f"{name}: {str(error).replace(ops.INDEXED, how)}") from error
    except Exception as error:
        raise ValueError(
            f"{name} fails on symbols ({error}); write functions of NumPy or torch, and np.where"
            " for if"
        ) from error
    finally:
        ops.read_tensor.reset(token)
    if rule.kind == ops.BOOL:
        raise ValueError(f"{name} gives truth values; give numbers, and a mask for what is hidden")
    used = {part.op for part in walk(rule)}
    if "entry" in used:
        raise ValueError(f"{name} reads a masks.table; make it an argument, a tensor")
    if "isin" in used:
        raise ValueError(f"{name} uses np.isin; write comparisons joined by |")
    if "s" not in used:
        raise ValueError(f"{name} does not use the score s; give a logit that depends on it")
    return rule


def check_fit(bound: Bound, device: torch.device, sizes: tuple[int, int, int, int]) -> None:
    """Raise ValueError for tables on another device, or smaller than a symbol that indexes them.

    sizes: batch, query heads, queries and keys.
    """
    text, tables, names = bound.key(), bound.tables, bound.score.names
    for name, t in zip(names, tables, strict=True):
        if t.device != device:
            raise ValueError(f"{name} is on {t.device}, q on {device}; move it there")
        if not t.numel() and all(sizes):
            raise ValueError(f"{name} has shape {tuple(t.shape)}; give at least one entry")
    for table, dim, place in _bare(text):
        have, need = tables[table].shape[dim], sizes[place]
        if have < need:
            raise ValueError(
                f"dimension {dim} of {names[table]} has {have} entries, and its index"
                f" {'bhqk'[place]} goes to {need - 1}: give {need}, for one entry that all share"
                f" expand()"
            )


def _bare(text: str) -> tuple[tuple[int, int, int], ...]:
    """Return (table, dimension, place in "bhqk") of the symbols that are an index."""
    return rule_of(text).bare


def _text(number: str, kinds: Kinds) -> str:
    return _scores[number].text(kinds)


# what torch.compiler.assume_constant_result does; see `traced_specs` of sparseflash.plan
_text._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
_bare._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _is_whole(x: Expression) -> bool:
    """Whether the values of an expression are integers."""
    if x.op in ("add", "subtract", "multiply", "minimum", "maximum", "absolute", "where"):
        return all(_is_whole(arg) for arg in x.args if arg.kind != ops.BOOL)
    return x.kind == INT or x.op in ("floor", "ceil") or (x.op == "float" and x.data.is_integer())
