"""The parts of the encoder: the pre-LN block, the head, and the initial weights."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from experiments.lra.models.attention import Attention
from experiments.lra.models.config import ModelConfig
from experiments.lra.models.dropout import Dropout
from sparseflash.schedule import Schedule


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
