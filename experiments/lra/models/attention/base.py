"""What the attentions of the encoder share, and their registry."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

import torch
from torch import Tensor, nn

from experiments.common.config import choose, whole_number
from masks import Mask
from sparseflash.dynamic.lengths import real_tokens as within


class Attention(nn.Module):
    """softmax(q k^T / sqrt(D)) v or what stands for it, the same shape out as q.

    heads, head_dim: of q, k and v.
    length: tokens of the padded sequences, the same at every call.
    dropout: of the attention probabilities, for kinds that have them.
    layer: number of the layer, for kinds that differ from layer to layer.
    class_token: the first token is the one that is classified, for kinds whose pattern would not
        show it all others.
    """

    shared_qk = False  # the projection makes one tensor for q and k
    scattered = False  # `lengths` may be bool (B, N), True for tokens that count, wherever they are
    redraw = True  # kinds that hash draw new hashes at every call; False: they keep their buffers'

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        length: int,
        dropout: float = 0.0,
        layer: int = 0,
        class_token: bool = False,
    ):
        super().__init__()
        self.heads, self.head_dim, self.length, self.layer = heads, head_dim, length, layer
        self.dropout, self.class_token = dropout, class_token

    def pattern(self) -> Mask | None:
        """Return the pairs that may attend, where sizes alone say so; None: all, or what data
        decide.
        """
        return None

    def share(self, first: "Attention") -> None:
        """Take the parameters that all layers have in common from the first layer's attention."""

    def with_projections(self, dim: int, *, bias: bool, rotary: nn.Module | None) -> nn.Module:
        """Return the layer with its projections: (B, N, dim) to (B, N, dim), of x and the
        lengths.
        """
        return Projected(self, dim, bias=bias, rotary=rotary)

    def plan(self, lengths: Tensor, dtype: torch.dtype) -> Any:
        """Return what `forward` takes for the lengths, made outside of any graph of
        torch.compile, for q, k and v of this dtype.
        """
        return lengths

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Any = None) -> Tensor:
        """(B, H, N, D) from q, k, v of this shape, any strides (k is q where `shared_qk`).

        lengths: int32 (B,) on the device, how many tokens count, or what `plan` made of them;
        None: all of them. Other keys are not attended to, and the output of other queries is
        finite and means nothing.

        Under autocast q, k and v take its dtype, and the precision of each step is explicit.
        """
        device = q.device.type
        if torch.is_autocast_enabled(device):
            q, k, v = (t.to(torch.get_autocast_dtype(device)) for t in (q, k, v))
        with torch.autocast(device, enabled=False):
            return self.attend(q, k, v, lengths)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Any) -> Tensor:
        raise NotImplementedError

    @property
    def dropout_p(self) -> float:
        return self.dropout if self.training else 0.0


class Projected(nn.Module):
    """An attention between linear layers `q`, `k`, `v` and `out`; there is no `k` where it is q.

    rotary: turns queries and keys (B, N, heads, head_dim) by their places.
    """

    def __init__(self, attention: Attention, dim: int, *, bias: bool, rotary: nn.Module | None):
        super().__init__()
        inner = attention.heads * attention.head_dim
        self.q = nn.Linear(dim, inner, bias)
        self.k = None if attention.shared_qk else nn.Linear(dim, inner, bias)
        self.v = nn.Linear(dim, inner, bias)
        self.attention = attention
        self.out = nn.Linear(inner, dim, bias)
        self.rotary = rotary

    def forward(self, x: Tensor, *, lengths: Tensor | None = None) -> Tensor:
        made = [layer(x) for layer in (self.q, self.k, self.v) if layer is not None]
        *qk, v = (t.unflatten(2, (-1, self.attention.head_dim)) for t in made)
        qk = [self.rotary(t) for t in qk] if self.rotary is not None else qk
        *qk, v = (t.transpose(1, 2) for t in (*qk, v))
        return self.out(self.attention(qk[0], qk[-1], v, lengths).transpose(1, 2).flatten(2))


def real_tokens(lengths: Tensor, n: int) -> Tensor:
    """Bool (B, n): True for the tokens that count."""
    return lengths if lengths.dtype == torch.bool else within(lengths, n)


def budget(length: int, share: int, most: int) -> int:
    """length / share rounded to a power of two, in [16, most].

    The published sizes of the small attentions go by length: a sixteenth (Linformer, Local) or a
    32nd (the others) of 1024, 2048 and 4096 tokens.
    """
    power = max(length // share, 1).bit_length() - 1
    nearest = power + (length / share > 1.5 * 2**power)
    return min(max(2**nearest, 16), most)


A = TypeVar("A", bound=type[Attention])
SHARED = inspect.signature(Attention).parameters.keys()  # what every attention takes


@dataclass(frozen=True)
class Kind:
    """An attention of the comparison."""

    name: str  # on the command line, as conf/attention/NAME.yaml
    label: str  # in tables and figures
    style: tuple[str, str, str]  # colour, marker and line of its curve
    cls: type[Attention]

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """The keyword arguments of the class and its bases but for those of every attention."""
        bases = self.cls.__mro__[: self.cls.__mro__.index(Attention)]
        found = [p for base in bases for p in inspect.signature(base).parameters.values()]
        own = (p for p in found if p.kind is p.KEYWORD_ONLY and p.name not in SHARED)
        return {p.name: p for p in own}


KINDS: dict[str, Kind] = {}


def register(name: str, *, label: str, style: tuple[str, str, str]) -> Callable[[A], A]:
    """Decorate the class of an attention. Its keyword arguments are its options, checked against
    their annotations: positive integers, numbers, True or False, or one of a Literal.
    """

    def add(cls: A) -> A:
        KINDS[name] = Kind(name, label, style, cls)
        return cls

    return add


def make_attention(name: str, **options: Any) -> Attention:
    """Return the attention of one layer: the sizes of `Attention`, and options of its own.

    An option that is None keeps its default. Raises ValueError for a name, an option or a value
    that does not exist.
    """
    choose("attention", name, KINDS)
    kind = KINDS[name]
    options = {key: value for key, value in options.items() if value is not None}
    for key in options.keys() - SHARED:
        choose(f"option of {name} attention", key, kind.options)
        _check(key, options[key], kind.options[key].annotation)
    return kind.cls(**options)


def _check(name: str, value: Any, annotation: Any) -> None:
    kinds = {annotation, *get_args(annotation)}
    if get_origin(annotation) is Literal:
        choose(name, value, get_args(annotation))
    elif bool in kinds and not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: give true or false")
    elif int in kinds:
        whole_number(name, value)
    elif float in kinds and (isinstance(value, bool | str) or not 0 <= value < 1e30):
        raise ValueError(f"{name}={value!r}: give a number of at least 0")
