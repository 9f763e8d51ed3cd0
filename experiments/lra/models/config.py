"""What an encoder is made of. The defaults are those of the Nystromformer authors' PyTorch port
(arXiv 2102.03902), which the tables of the FlashAttention paper follow.
"""

import math
from dataclasses import dataclass
from typing import Any

from experiments.common.checks import is_number

SETTINGS = ("nystrom", "google")


@dataclass(frozen=True)
class ModelConfig:
    """A pre-LN encoder with a classification head on the pooled states."""

    # initialisation, biases of the attention, depth of a pair's head: "nystrom", or "google", as in
    # the original benchmark (Tay et al., arXiv 2011.04006)
    setting: str = "nystrom"
    layers: int = 2
    dim: int = 64
    heads: int = 2
    head_dim: int = 32
    mlp_dim: int = 128  # of the feed-forward layers and of the head
    dropout: float = 0.1
    attention_dropout: float = 0.1
    # "mean": over the padded length, padding counting as zeros; over the tokens alone
    # "mean_tokens", or the "max" of each feature; the "last" token, or a class token, "cls"
    pool: str = "mean"
    # "learned", "sinusoidal", "none", "axial": learned ones of rows and of columns, or "waves": the
    # same as learned maps of waves, which suit images of every size
    positions: str = "learned"
    rotary: bool = False  # queries and keys are turned by their places, as well
    embedding: str = "table"  # of tokens, or "smooth": near intensities of pixels look alike
    embedding_std: float | None = None  # of tokens and learned positions at first; None: published
    causal: bool = False  # a token attends to those up to itself
    lm_head: bool = False  # a second head that predicts tokens

    def __post_init__(self):
        for name, allowed in (
            ("setting", SETTINGS),
            ("pool", ("mean", "mean_tokens", "max", "last", "cls")),
            ("embedding", ("table", "smooth")),
            ("positions", ("learned", "sinusoidal", "none", "axial", "waves")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}"
                )
        for name in ("layers", "dim", "heads", "head_dim", "mlp_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, at least 1")
        for name in ("rotary", "causal"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        std = self.embedding_std
        if std is not None and not (is_number(std) and 0 < std < math.inf):
            raise ValueError(f"embedding_std is {std!r}; it must be a number above 0")
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a number in [0, 1)")
        if self.rotary and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary takes an even one")

    def refuse_grid(self, images: bool) -> None:
        """ValueError for what takes images, where there are none, or no class token."""
        if self.embedding == "smooth" and not images:
            raise ValueError("embedding is smooth: that takes images")
        if self.positions in ("axial", "waves") and (not images or self.pool == "cls"):
            raise ValueError(f"positions is {self.positions}: that takes images and no class token")
        if self.rotary and images and self.head_dim % 4:
            raise ValueError(f"head_dim is {self.head_dim}; rotary of images takes a multiple of 4")


def model_config(**changes: Any) -> ModelConfig:
    """The model of the port, with some fields changed; None changes nothing.

    Raises ValueError for a field or a value that does not exist.
    """
    if unknown := changes.keys() - ModelConfig.__dataclass_fields__.keys():
        raise ValueError(
            f"a model has no field {', '.join(sorted(unknown))};"
            f" its fields are {', '.join(ModelConfig.__dataclass_fields__)}"
        )
    return ModelConfig(**{name: value for name, value in changes.items() if value is not None})
