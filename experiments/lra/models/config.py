"""Sizes of the encoder in the two published settings of the Long Range Arena.

"nystrom": the PyTorch port of the Nystromformer authors (arXiv 2102.03902), which the tables of the
FlashAttention paper follow; one size for all tasks. "google": the sizes of Tay et al. (arXiv
2011.04006), task by task.
"""

from dataclasses import dataclass, replace
from typing import Any

SETTINGS = ("nystrom", "google")


@dataclass(frozen=True)
class ModelConfig:
    """A pre-LN encoder with a classification head on the pooled states."""

    setting: str = "nystrom"  # initialisation, biases of the attention, depth of a pair's head
    layers: int = 2
    dim: int = 64
    heads: int = 2
    head_dim: int = 32
    mlp_dim: int = 128  # of the feed-forward layers and of the head
    dropout: float = 0.1
    attention_dropout: float = 0.1
    pool: str = "mean"  # over the padded length, padding counting as zeros; or "cls"
    # "learned", "sinusoidal", "axial": learned ones of rows and of columns, or "waves": the same as
    # learned maps of waves, which suit images of every size
    positions: str = "learned"
    rotary: bool = False  # queries and keys of images are turned by their places, as well
    embedding: str = "table"  # of tokens, or "smooth": near intensities of pixels look alike
    embedding_std: float | None = None  # of tokens and learned positions at first; None: published
    lm_head: bool = False  # a second head that predicts hidden tokens

    def __post_init__(self):
        for name, allowed in (
            ("setting", SETTINGS),
            ("pool", ("mean", "cls")),
            ("embedding", ("table", "smooth")),
            ("positions", ("learned", "sinusoidal", "axial", "waves")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}"
                )
        for name in ("layers", "dim", "heads", "head_dim", "mlp_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not isinstance(self.rotary, bool):
            raise ValueError(f"rotary is {self.rotary!r}; it must be True or False")
        if self.embedding_std is not None and not self.embedding_std > 0:
            raise ValueError(f"embedding_std is {self.embedding_std}; it must be above 0")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie in [0, 1)")


def _google(layers, dim, qkv, mlp, heads, dropout, attention_dropout, pool, positions):
    return ModelConfig(
        "google", layers, dim, heads, qkv // heads, mlp, dropout, attention_dropout, pool, positions
    )


_GOOGLE = {
    "listops": _google(4, 512, 512, 1024, 8, 0.1, 0.1, "cls", "sinusoidal"),
    "text": _google(4, 256, 256, 1024, 4, 0.1, 0.1, "cls", "sinusoidal"),
    "retrieval": _google(4, 128, 128, 512, 4, 0.1, 0.1, "cls", "sinusoidal"),
    "image": _google(1, 128, 64, 128, 8, 0.3, 0.2, "cls", "learned"),
    "pathfinder32": _google(4, 32, 16, 32, 4, 0.2, 0.1, "mean", "sinusoidal"),
    "pathfinder64": _google(2, 32, 32, 32, 4, 0.1, 0.1, "cls", "learned"),
    "pathfinder128": _google(1, 32, 16, 32, 2, 0.1, 0.1, "mean", "learned"),
    "pathfinder256": _google(2, 32, 32, 32, 4, 0.1, 0.1, "cls", "learned"),
}
_GOOGLE["imdb_same_movie"] = _GOOGLE["retrieval"]


def model_config(setting: str = "nystrom", task: str | None = None, **changes: Any) -> ModelConfig:
    """The sizes of a setting (and task, which "nystrom" does not need), with some of them changed.

    Raises ValueError for a setting, task or field that does not exist.
    """
    if setting == "google":
        if task not in _GOOGLE:
            raise ValueError(
                f"the google setting has no task {task!r}; it has {', '.join(sorted(_GOOGLE))}"
            )
        config = _GOOGLE[task]
    else:
        config = ModelConfig(setting)
    if unknown := changes.keys() - config.__dataclass_fields__.keys():
        raise ValueError(
            f"a model has no field {', '.join(sorted(unknown))};"
            f" its fields are {', '.join(config.__dataclass_fields__)}"
        )
    return replace(config, **changes)
