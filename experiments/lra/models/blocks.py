"""The parts of the encoder: its sizes, the pre-LN block, the head, initial weights, and dropout.

The default sizes are those of the Nystromformer authors' PyTorch port (arXiv 2102.03902).

Dropout is by a hash that torch.compile puts into the kernels around it. torch's own takes ten
rounds of Philox for each entry, more arithmetic than the GELU beside it, and keeps its choices for
the backward. This one takes a round of two products, and computes it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.common.config import Checked, option
from experiments.lra.models.attention import Attention
from sparseflash.schedule.blocks import Schedule

SETTINGS = ("nystrom", "google")
POOLS = ("mean", "mean_tokens", "max", "last", "cls")
POSITIONS = ("learned", "sinusoidal", "none", "waves")


@dataclass
class ModelConfig(Checked):
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
        super().__post_init__()
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


class Block(nn.Module):
    """x + attention(LN(x)), then x + feed-forward(LN(x))."""

    dropouts = 3  # how many seeds `forward` takes

    def __init__(self, config: ModelConfig, attention: Attention, rotary: nn.Module | None = None):
        super().__init__()
        dim, eps = config.dim, norm_eps(config)
        self.norm_attention = nn.LayerNorm(dim, eps)
        biased = config.setting == "nystrom"
        self.attention = attention.with_projections(dim, bias=biased, rotary=rotary)
        self.dropout = Dropout(config.dropout)
        self.norm_mlp = nn.LayerNorm(dim, eps)
        self.mlp = nn.Sequential(
            nn.Linear(dim, config.mlp_dim),
            nn.GELU(),
            Dropout(config.dropout),
            nn.Linear(config.mlp_dim, dim),
            Dropout(config.dropout),
        )

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | Schedule | None,
        seeds: Sequence[Tensor | None] = (None,) * dropouts,
    ) -> Tensor:
        """seeds: one for each dropout; None drops nothing."""
        attended = self.attention(self.norm_attention(x), lengths=lengths)
        x = x + self.dropout(attended, seeds[0])
        widen, gelu, drop_wide, narrow, drop_narrow = self.mlp
        wide = drop_wide(gelu(widen(self.norm_mlp(x))), seeds[1])
        return x + drop_narrow(narrow(wide), seeds[2])


class Head(nn.Sequential):
    """Logits of the classes from pooled states; of pairs from [a, b, a * b, a - b]."""

    def __init__(self, config: ModelConfig, classes: int, pair: bool):
        width, hidden = config.dim * (4 if pair else 1), config.mlp_dim
        layers = [nn.Linear(width, hidden), nn.ReLU()]
        if pair and config.setting == "google":
            layers += [nn.Linear(hidden, hidden // 2), nn.ReLU()]
            hidden //= 2
        super().__init__(*layers, nn.Linear(hidden, classes))
        self.pair = pair

    def forward(self, pooled: Tensor) -> Tensor:
        """(B, classes) from (B, dim), or for pairs (B, 2, dim)."""
        if self.pair:
            a, b = pooled.unbind(1)
            pooled = torch.cat([a, b, a * b, a - b], dim=1)
        return super().forward(pooled)


def norm_eps(config: ModelConfig) -> float:
    return 1e-6 if config.setting == "google" else 1e-5


def initialise(module: nn.Module, config: ModelConfig) -> None:
    """Draw the initial weights of the setting; "nystrom" keeps torch's own for linear layers."""
    if config.setting != "google":
        return
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.normal_(layer.bias, std=1e-6)


VERSION = 2  # of what a seed drops; 1, to 26 November 2026, was torch's dropout

# Of two hashes of C. Wellons, https://nullprogram.com/blog/2018/07/31/, as int32
FACTORS = 0x2C1B3C6D, 0x7FEB352D, 0x846CA68B - 2**32


@torch.library.custom_op(
    "sparseflash_lra::draw_seeds", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded]
)
def draw_seeds(count: int, device: torch.device) -> Tensor:
    """Seeds of `count` dropouts from torch's generator: int32 (count, 2).

    An operator, since torch.compile would compute the seeds again for every entry. It would also
    take equal calls for one, so draw all seeds of a forward in one call.
    """
    return torch.randint(-(2**31), 2**31, (count, 2), dtype=torch.int32, device=device)


@draw_seeds.register_fake
def _(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, 2, dtype=torch.int32, device=device)


class Dropout(nn.Module):
    """Zeroes each entry with probability p, and scales the others by 1 / (1 - p)."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, seed: Tensor | None) -> Tensor:
        """Return a tensor of the shape of x. seed: int32 (2,), of `draw_seeds`; None: torch's
        dropout, which is faster where nothing is compiled.
        """
        return F.dropout(x, self.p, self.training) if seed is None else _Drop.apply(x, seed, self.p)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, seed: Tensor, p: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(seed)
        ctx.p = p
        return _drop(x, places(x) + seed[0], seed[1], p)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        """Return the sum is the other way round, lest torch.compile keep what the forward has
        found.
        """
        (seed,) = ctx.saved_tensors
        return _drop(gradient, seed[0] + places(gradient), seed[1], ctx.p), None, None


def places(x: Tensor) -> Tensor:
    """int32, of the shape of x: the number of each entry."""
    return torch.arange(x.numel(), device=x.device).int().view(x.shape)


def _drop(x: Tensor, h: Tensor, key: Tensor, p: float) -> Tensor:
    # torch.compile would multiply an index, without a seed, as an integer of any size
    h = h * FACTORS[0]
    h = (h ^ (h >> 16)) * FACTORS[1] + key
    h = (h ^ (h >> 15)) * FACTORS[2]
    return torch.where(h >= round(p * 2**32) - 2**31, x * (1 / (1 - p)), 0.0)
