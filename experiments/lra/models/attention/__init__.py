"""The attentions of the comparison, one file each, behind one interface."""

import inspect
from importlib import import_module
from typing import Any

from experiments.lra.models.attention.base import Attention

_CLASSES = {
    "standard": "standard.Standard",
    "flash": "flash.Flash",
    "sparse": "flash.Sparse",
    "linformer": "linformer.Linformer",
    "linear": "linear.Linear",
    "performer": "performer.Performer",
    "local": "local.Local",
    "reformer": "reformer.Reformer",
    "smyrf": "smyrf.Smyrf",
}
NAMES = tuple(_CLASSES)

__all__ = ["NAMES", "Attention", "make_attention", "options_of"]


def make_attention(
    name: str,
    *,
    heads: int,
    head_dim: int,
    length: int,
    dropout: float = 0.0,
    layer: int = 0,
    causal: bool = False,
    class_token: bool = False,
    **options: Any,
) -> Attention:
    """The attention of one layer; see `Attention`. An option that is None keeps its default.

    Raises ValueError for a name, an option or a value that does not exist.
    """
    known = options_of(name)
    options = {key: value for key, value in options.items() if value is not None}
    if unknown := sorted(options.keys() - known.keys()):
        raise ValueError(
            f"{name} attention has no option {', '.join(unknown)};"
            f" it has {', '.join(known) or 'none'}"
        )
    for key in options.keys() & {"rank", "features", "window", "bucket", "cluster", "hashes"}:
        if not isinstance(options[key], int) or options[key] < 1:
            raise ValueError(f"{key} is {options[key]!r}; it must be a positive integer")
    sizes: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "length": length}
    sizes |= {"layer": layer, "causal": causal, "class_token": class_token}
    return _find(name)(**sizes, dropout=dropout, **options)


def options_of(name: str) -> dict[str, Any]:
    """The options of an attention beyond the sizes, with their defaults (None: by the length)."""
    shared = inspect.signature(Attention).parameters
    own = inspect.signature(_find(name)).parameters.values()
    return {p.name: p.default for p in own if p.kind is p.KEYWORD_ONLY and p.name not in shared}


def _find(name: str) -> type[Attention]:
    if name not in _CLASSES:
        raise ValueError(f"there is no attention {name!r}; choose one of {', '.join(NAMES)}")
    module, cls = _CLASSES[name].split(".")
    return getattr(import_module(f"experiments.lra.models.attention.{module}"), cls)
