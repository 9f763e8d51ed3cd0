"""The parts of the encoder: a fused projection around an attention, and the pre-LN block."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from experiments.lra.models.attention import Attention
from experiments.lra.models.config import ModelConfig

Turn = Callable[[Tensor], Tensor]


class SelfAttention(nn.Module):
    """One matrix product makes q, k and v of all heads; the attention reads them in place."""

    def __init__(self, config: ModelConfig, attention: Attention):
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.parts = 2 if attention.shared_qk else 3
        inner, bias = config.heads * config.head_dim, config.setting == "nystrom"
        self.qkv = nn.Linear(config.dim, self.parts * inner, bias)
        self.attention = attention
        self.out = nn.Linear(inner, config.dim, bias)

    def forward(self, x: Tensor, lengths: Any, turn: Turn | None = None) -> Tensor:
        """(B, N, dim) from (B, N, dim). lengths: as the attention takes them; turn: of q and k."""
        shape = (self.parts, self.heads, self.head_dim)
        *qk, v = self.qkv(x).unflatten(2, shape).unbind(2)
        qk = [turn(t) for t in qk] if turn else qk
        *qk, v = (t.transpose(1, 2) for t in (*qk, v))
        q, k = qk if self.parts == 3 else (qk[0], qk[0])
        return self.out(self.attention(q, k, v, lengths).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """x + attention(LN(x)), then x + feed-forward(LN(x))."""

    def __init__(self, config: ModelConfig, attention: Attention):
        super().__init__()
        dim, eps = config.dim, norm_eps(config)
        self.norm_attention = nn.LayerNorm(dim, eps)
        self.attention = SelfAttention(config, attention)
        self.dropout = nn.Dropout(config.dropout)
        self.norm_mlp = nn.LayerNorm(dim, eps)
        self.mlp = nn.Sequential(
            nn.Linear(dim, config.mlp_dim),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.mlp_dim, dim),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor, lengths: Any, turn: Turn | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x), lengths, turn))
        return x + self.mlp(self.norm_mlp(x))


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
    """The initial weights of the setting; "nystrom" keeps torch's own for linear layers."""
    if config.setting != "google":
        return
    fused = {m.qkv: m.parts for m in module.modules() if isinstance(m, SelfAttention)}
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            for weight in layer.weight.detach().chunk(fused.get(layer, 1)):
                nn.init.xavier_uniform_(weight)
            if layer.bias is not None:
                nn.init.normal_(layer.bias, std=1e-6)
