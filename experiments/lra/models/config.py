"""What an encoder is made of. The defaults are those of the Nystromformer authors' PyTorch port
(arXiv 2102.03902).
"""

from dataclasses import dataclass
from typing import Any

from experiments.common.config import check, option

SETTINGS = ("nystrom", "google")
POOLS = ("mean", "mean_tokens", "max", "last", "cls")
POSITIONS = ("learned", "sinusoidal", "none", "waves")


@dataclass
class ModelConfig:
    """A pre-LN encoder with a classification head on the pooled states."""

    # "google" is the original benchmark (Tay et al., arXiv 2011.04006)
    setting: str = option(
        "nystrom", "initial weights, biases and the head of pairs", choices=SETTINGS
    )
    layers: int = option(2, "encoder layers", least=1)
    dim: int = option(64, "features of a token", least=1)
    heads: int = option(2, "query heads", least=1)
    head_dim: int = option(32, "features of a head", least=1)
    mlp_dim: int = option(128, "features of the feed-forward layers and of the head", least=1)
    dropout: float = option(0.1, "probability, in training", least=0, below=1)
    attention_dropout: float = option(
        0.1, "probability that an attention probability is dropped", least=0, below=1
    )
    pool: str = option("mean", "mean counts padding as zeros; cls is a class token", choices=POOLS)
    positions: str = option("learned", "waves are of rows and columns of images", choices=POSITIONS)
    rotary: bool = option(False, "rotary embeddings, of rows and columns for images")
    embedding: str = option(
        "table", "smooth: near intensities of pixels look alike", choices=("table", "smooth")
    )
    embedding_std: float | None = option(
        None, "of tokens and learned positions at first; null: published", above=0
    )
    lm_head: bool = option(False)  # a second head that predicts tokens, for pretrain=

    def __post_init__(self) -> None:
        check(self)
        if self.rotary and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rotary takes an even one")

    def refuse_grid(self, images: bool) -> None:
        """Raise ValueError for what takes images, where there are none, or no class token."""
        if self.embedding == "smooth" and not images:
            raise ValueError("embedding=smooth takes images")
        if self.positions == "waves" and (not images or self.pool == "cls"):
            raise ValueError("positions=waves takes images and no class token")
        if self.rotary and images and self.head_dim % 4:
            raise ValueError(f"head_dim={self.head_dim}: rotary of images takes a multiple of 4")


def model_config(**changes: Any) -> ModelConfig:
    """Return the model of the port, with some fields changed; None changes nothing."""
    return ModelConfig(**{name: value for name, value in changes.items() if value is not None})
