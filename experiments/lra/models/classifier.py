"""The encoder of the Long Range Arena with its classification head."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.lra.models.attention import Attention, make_attention
from experiments.lra.models.attention.base import autocast_dtype, real_tokens
from experiments.lra.models.blocks import Block, Head, initialise, norm_eps
from experiments.lra.models.class_token import refuse_a_blind_class_token
from experiments.lra.models.config import ModelConfig, model_config
from experiments.lra.models.positions import AxialPositions, Rotary, WavePositions, sinusoids
from experiments.lra.models.waves import SmoothEmbedding

__all__ = ["Classifier", "ModelConfig", "model_config"]

GRID_POSITIONS = {"axial": AxialPositions, "waves": WavePositions}  # of rows and of columns


class Classifier(nn.Module):
    """Logits of the classes of a token sequence, or of a pair of them.

    vocab: rows of the embedding table; length: tokens of a padded sequence; grid: (rows, columns)
    of an image, for which the position table is upsampled with `upsample_positions`.
    attention: the name and the options of `make_attention`, as {"name": "local", "window": 64}.
    order: the row-major pixel of each token of an image; row-major order where None.

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
    ):
        super().__init__()
        if grid is not None and grid[0] * grid[1] != length:
            raise ValueError(f"a grid of {grid[0]} x {grid[1]} does not hold {length} tokens")
        config = model or ModelConfig()
        self.config, self.length, self.pair, self.grid = config, length, pair, grid
        cls = config.pool == "cls"
        self.states = length + cls  # what the attention sees
        std = config.embedding_std or 0.02
        own = config.embedding_std or (1.0 if config.setting == "google" else 0.02)
        if config.embedding == "smooth":
            if grid is None:
                raise ValueError("embedding is smooth: that takes images")
            self.embedding = SmoothEmbedding(vocab, config.dim, own)
        else:
            self.embedding = nn.Embedding(vocab, config.dim)
            nn.init.normal_(self.embedding.weight, std=own)
        self.cls = nn.Parameter(torch.zeros(1, 1, config.dim)) if cls else None
        if config.positions == "learned":
            self.positions = nn.Parameter(std * torch.randn(self.states, config.dim))
        elif config.positions in GRID_POSITIONS:
            if grid is None or cls:
                raise ValueError(
                    f"positions is {config.positions}: that takes images and pool=mean"
                )
            kind = GRID_POSITIONS[config.positions]
            self.add_module(config.positions, kind(grid, config.dim, order, std))
        else:
            self.register_buffer("positions", sinusoids(self.states, config.dim), persistent=False)
        if config.rotary and (grid is None or cls):
            raise ValueError("rotary is True: that takes images and pool=mean")
        self.rotary = Rotary(grid, config.head_dim, order) if grid and config.rotary else None
        self.dropout = nn.Dropout(config.dropout)
        options = dict(attention or {"name": "standard"})
        name = options.pop("name")
        self.blocks = nn.ModuleList(
            Block(
                config,
                make_attention(
                    name,
                    heads=config.heads,
                    head_dim=config.head_dim,
                    length=self.states,
                    dropout=config.attention_dropout,
                    layer=layer,
                    class_token=cls,
                    **options,
                ),
            )
            for layer in range(config.layers)
        )
        for layer in range(1, config.layers):
            self._attention(layer).share(self._attention(0))
        if cls:
            refuse_a_blind_class_token([self._attention(i) for i in range(config.layers)])
        first: dict[Hashable, int] = {}
        needs = [self._attention(layer).prepares() for layer in range(config.layers)]
        # of each layer, the first one whose attention prepares the same
        self.prepared_by = [first.setdefault(need, i) for i, need in enumerate(needs)]
        self.preparing = [i for i in sorted(set(self.prepared_by)) if needs[i] is not None]
        self.norm = nn.LayerNorm(config.dim, norm_eps(config))
        self.head = Head(config, classes, pair)
        if config.lm_head:
            self.hidden_token = nn.Parameter(0.02 * torch.randn(config.dim))
            self.lm_head = nn.Linear(config.dim, vocab)
        initialise(self, config)

    def forward(
        self, tokens: Tensor, lengths: Tensor | None = None, hidden: Tensor | None = None
    ) -> Tensor:
        """float32 logits (B, classes); with `hidden`, (B, M, vocab) of the hidden tokens.

        tokens: ids (B, length), any integer dtype; of pairs (B, 2, length).
        lengths: (B,), of pairs (B, 2): how many tokens count; None: all of them.
        hidden: int64 (B, M), the places whose tokens are hidden from the model, for a model with
            `lm_head` (no pairs). It is trained to predict them: masked-pixel pre-training.
        """
        if tokens.shape[-1] != self.length:
            raise ValueError(f"a sequence has {tokens.shape[-1]} tokens, the model {self.length}")
        if hidden is not None and not self.config.lm_head:
            raise ValueError("hidden tokens are predicted by a model with lm_head=True")
        pairs = tokens.flatten(0, 1) if self.pair else tokens
        prepared: dict[int, Any] = {}
        if lengths is not None:
            lengths = lengths.flatten() if self.cls is None else lengths.flatten() + 1
            if self.preparing:
                prepared = self.prepare(lengths)
        x = self.encode(pairs, lengths, hidden, prepared)
        if hidden is not None:
            places = (hidden + self.states - self.length)[:, :, None].expand(-1, -1, x.shape[2])
            return self.lm_head(self.norm(x.gather(1, places))).float()
        pooled = self._pool(x, lengths)
        return self.head(pooled.unflatten(0, (-1, 2)) if self.pair else pooled).float()

    @torch.compiler.disable()  # in forward alone, where all that follows stays one graph
    def prepare(self, lengths: Tensor) -> dict[int, Any]:
        """What attentions prepare, once for all layers that share it, by the first of these."""
        dtype = autocast_dtype(self.embedding.weight)
        return {layer: self._attention(layer).prepare(lengths, dtype) for layer in self.preparing}

    def _attention(self, layer: int) -> Attention:
        block = self.blocks[layer]
        assert isinstance(block, Block)
        return block.attention.attention

    def encode(
        self,
        tokens: Tensor,
        lengths: Tensor | None,
        hidden: Tensor | None = None,
        prepared: Mapping[int, Any] | None = None,
    ) -> Tensor:
        """The states (B, states, dim) before the last LayerNorm.

        lengths: how many states count; prepared: what `prepare` made of them.
        """
        x = self.embedding(tokens.int())
        if hidden is not None:
            mark = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
            mark = mark.scatter(1, hidden, True)
            x = torch.where(mark[:, :, None], self.hidden_token.to(x.dtype), x)
        if self.cls is not None:
            x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1)
        x = self.dropout(x + self._positions())
        for layer, block in zip(self.prepared_by, self.blocks, strict=True):
            x = block(x, (prepared or {}).get(layer, lengths), self.rotary)
        return x

    def _positions(self) -> Tensor:
        name = self.config.positions
        return getattr(self, name)() if name in GRID_POSITIONS else self.positions

    def _pool(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """(B, dim): the CLS state, or the mean over the padded length with padding as zeros."""
        if self.cls is not None:
            return self.norm(x[:, 0])
        x = self.norm(x)
        if lengths is None:
            return x.mean(1)
        return torch.where(real_tokens(lengths, x.shape[1])[:, :, None], x, 0).mean(1)
