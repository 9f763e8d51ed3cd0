"""The encoder of the Long Range Arena with its classification head."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.lra.models.attention import KINDS, Attention, make_attention
from experiments.lra.models.attention.base import real_tokens
from experiments.lra.models.attention.flash import Flash
from experiments.lra.models.blocks import (
    Block,
    Dropout,
    Head,
    ModelConfig,
    draw_seeds,
    initialise,
    norm_eps,
)
from experiments.lra.models.positions import (
    AxialRotary,
    Embedding,
    SmoothEmbedding,
    WavePositions,
    sinusoids,
)
from masks.analysis.reach import MOST_TOKENS, reach
from sparseflash import BlockSparseAttention, Rotary
from sparseflash.distributed import ContextParallel
from sparseflash.schedule.blocks import Schedule


class Classifier(nn.Module):
    """Logits of the classes of a token sequence, or of a pair of them.

    vocab: rows of the embedding table; length: tokens of a padded sequence; grid: (rows, columns)
    of an image, for which the position table is upsampled with `upsample_positions`.
    attention: the name and the options of `make_attention`, as {"name": "local", "window": 64}.
    order: the row-major pixel of each token of an image; row-major order where None.
    pad_black: tokens of id 0 are padding wherever they are, for attentions that are `scattered`.

    Raises ValueError for positions of rows and columns, and smooth embeddings, without a grid, and
    for a class token that the attention does not show all tokens.
    """

    def __init__(
        self,
        vocab: int,
        length: int,
        classes: int,
        pair: bool = False,
        grid: tuple[int, int] | None = None,
        model: ModelConfig | None = None,
        attention: Mapping[str, Any] | None = None,
        order: Sequence[int] | np.ndarray | None = None,
        pad_black: bool = False,
    ):
        super().__init__()
        if grid is not None and grid[0] * grid[1] != length:
            raise ValueError(f"a grid of {grid[0]} x {grid[1]} does not hold {length} tokens")
        config = model or ModelConfig()
        config.refuse_grid(grid is not None)
        self.config, self.length, self.pair, self.grid = config, length, pair, grid
        self.pad_black = pad_black
        cls = config.pool == "cls"
        self.states = length + cls  # what the attention sees
        self.context: ContextParallel | None = None  # where several processes share a sequence
        std = config.embedding_std or 0.02
        own = config.embedding_std or (1.0 if config.setting == "google" else 0.02)
        if config.embedding == "smooth":
            self.embedding = SmoothEmbedding(vocab, config.dim, own)
        else:
            self.embedding = Embedding(vocab, config.dim)
            nn.init.normal_(self.embedding.weight, std=own)
        self.cls = nn.Parameter(torch.zeros(1, 1, config.dim)) if cls else None
        if config.positions == "learned":
            self.positions = nn.Parameter(std * torch.randn(self.states, config.dim))
        elif config.positions == "waves":
            assert grid is not None
            self.waves = WavePositions(grid, config.dim, order, std)
        elif config.positions == "sinusoidal":
            self.register_buffer("positions", sinusoids(self.states, config.dim), persistent=False)
        rotary = None
        if config.rotary:
            rotary = AxialRotary(grid, config.head_dim, order, cls) if grid else Rotary()
        self.dropout = Dropout(config.dropout)
        options = dict(attention or {"name": "standard"})
        options |= {"heads": config.heads, "head_dim": config.head_dim, "length": self.states}
        options |= {"dropout": config.attention_dropout, "class_token": cls}
        kinds: list[Attention] = []
        self.blocks = nn.ModuleList()
        for layer in range(config.layers):
            kinds.append(make_attention(**options, layer=layer))
            self.blocks.append(Block(config, kinds[-1], rotary))
            kinds[-1].share(kinds[0])
        able = all(kind.scattered for kind in kinds) and config.pool in ("mean", "max", "cls")
        if pad_black and (config.lm_head or not able):
            names = ", ".join(name for name, kind in KINDS.items() if kind.cls.scattered)
            raise ValueError(
                "task.pad_black is true: give an attention of"
                f" {names}, model.pool=mean, max or cls, and no pretrain="
            )
        if cls:
            refuse_a_blind_class_token(kinds)
        self.masks = [
            kind.mask for kind in kinds if isinstance(kind, Flash) and kind.mask is not None
        ]
        self.skips = any(layer.padding == "skip" for layer in self._sparse_layers())
        self.norm = nn.LayerNorm(config.dim, norm_eps(config))
        self.head = Head(config, classes, pair)
        if config.lm_head:
            self.hidden_token = nn.Parameter(0.02 * torch.randn(config.dim))
            self.lm_head = nn.Linear(config.dim, vocab)
        initialise(self, config)

    def forward(
        self, tokens: Tensor, lengths: Tensor | None = None, places: Tensor | None = None
    ) -> Tensor:
        """float32 logits (B, classes); with `places`, (B, M, vocab) of the tokens there.

        tokens: ids (B, length), any integer dtype; of pairs (B, 2, length).
        lengths: (B,), of pairs (B, 2): how many tokens count; None: all of them.
        places: int64 (B, M), of pairs (2 B, M), for a model with `lm_head`: it predicts the tokens
            there, which it does not see.
        """
        if tokens.shape[-1] != self.length:
            raise ValueError(f"a sequence has {tokens.shape[-1]} tokens, the model {self.length}")
        if places is not None and not self.config.lm_head:
            raise ValueError("tokens are predicted by a model with lm_head=True")
        pairs = tokens.flatten(0, 1) if self.pair else tokens
        plans = None
        if self.pad_black:
            lengths = F.pad(pairs != 0, (int(self.cls is not None), 0), value=True)
        elif lengths is not None:
            lengths = lengths.flatten() if self.cls is None else lengths.flatten() + 1
            plans = self.plans(lengths) if self.skips and self.context is None else None
        x = self.encode(pairs, lengths, places, plans)
        if self.context is not None:
            x = self.context.unshard(x)
        if places is not None:
            states = places + (self.states - self.length)
            x = x.gather(1, states[:, :, None].expand(-1, -1, x.shape[2]))
            return self.lm_head(self.norm(x)).float()
        pooled = self._pool(x, lengths)
        return self.head(pooled.unflatten(0, (-1, 2)) if self.pair else pooled).float()

    @torch.compiler.disable()  # all that follows in `forward` stays one graph
    def plans(self, lengths: Tensor) -> list[Tensor | Schedule]:
        """Return what each layer takes for the lengths: layers that skip padding share the block
        lists of a mask.
        """
        found: list[Tensor | Schedule] = [lengths] * len(self.blocks)
        made: dict[Any, Schedule] = {}
        for i, layer in enumerate(self._sparse_layers()):
            if layer.padding == "skip":
                key = getattr(layer.mask, "key", None)
                if key not in made:
                    made[key] = layer.plan(lengths, self.states)
                found[i] = made[key]
        return found

    def _sparse_layers(self) -> list[BlockSparseAttention]:
        """Return the layers of sparseflash: all, or none."""
        layers = [block.attention for block in self.blocks]
        return [layer for layer in layers if isinstance(layer, BlockSparseAttention)]

    def encode(
        self,
        tokens: Tensor,
        lengths: Tensor | None,
        hidden: Tensor | None = None,
        plans: Sequence[Tensor | Schedule] | None = None,
    ) -> Tensor:
        """Return the states (B, states, dim) before the last LayerNorm: in a context the own ones.

        lengths: how many states count; plans: what `plans` made of them.
        """
        x = self.embedding(tokens.int())
        if hidden is not None:
            mark = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
            mark = mark.scatter(1, hidden, True)
            x = torch.where(mark[:, :, None], self.hidden_token.to(x.dtype), x)
        if self.cls is not None:
            x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1)
        if self.config.positions != "none":
            x = x + (self.waves() if self.config.positions == "waves" else self.positions)
        if self.context is not None:
            x = self.context.shard(x)
        count = 1 + Block.dropouts * len(self.blocks)
        drops = torch.compiler.is_compiling() and self.training and self.config.dropout > 0
        first, *seeds = draw_seeds(count, x.device).unbind() if drops else [None] * count
        x = self.dropout(x, first)
        for i, block in enumerate(self.blocks):
            own = seeds[i * Block.dropouts : (i + 1) * Block.dropouts]
            x = block(x, lengths if plans is None else plans[i], own)
        return x

    def _pool(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """(B, dim): one state of each sequence, as `ModelConfig.pool` says."""
        if self.cls is not None:
            return self.norm(x[:, 0])
        x, n = self.norm(x), x.shape[1]
        if lengths is None:
            lengths = torch.full((len(x),), n, device=x.device)
        real = real_tokens(lengths, n)[:, :, None]
        match self.config.pool:
            case "last":
                return x[torch.arange(len(x), device=x.device), lengths - 1]
            case "max":  # 0 of an image that is black
                return torch.where(real.any(1), x.masked_fill(~real, -torch.inf).amax(1), 0)
        sums = torch.where(real, x, 0).sum(1)
        return sums / (n if self.config.pool == "mean" else lengths[:, None])


def refuse_a_blind_class_token(layers: Sequence[Attention]) -> None:
    """Raise ValueError where the first token has not seen all others after these layers.

    Kinds whose pairs follow from the data pass. Above 32768 tokens blocks are counted, so that a
    single token may be missed.
    """
    patterns = [layer.pattern() for layer in layers]
    if None in patterns:  # one layer that sees all is enough
        return
    n, heads = layers[0].length, layers[0].heads
    blocks = [pattern.build(n, heads=heads) for pattern in patterns if pattern is not None]
    found = reach(blocks, len(blocks), exact=n <= MOST_TOKENS)
    seen, wanted = int(found.seen_keys[0]), int(found.wanted_keys[0])
    if seen < wanted:
        depth = "1 layer" if len(blocks) == 1 else f"{len(blocks)} layers"
        raise ValueError(
            f"pool is cls, and after {depth} of {patterns[0]} the class token has seen {seen} of"
            f" {wanted} {found.unit}: take model.pool=mean, or, of sparse attention, a mask that"
            " shows it all, as MASK|global:1"
        )
