"""GPT-2, and the three attentions of it: one set of parameters, one function."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import masks
from experiments.lra.models.attention.standard import softmax_attention
from masks import Mask
from sparseflash import (
    BlockSparseAttention,
    BlockSparseLinear,
    BlockSparseMLP,
    Rotary,
    attention,
    select,
)
from sparseflash.distributed import ContextParallel
from sparseflash.select import BlockSelector, Selector
from sparseflash.select.tokens import TokenSelector

LEARNED, ROTARY = POSITIONS = ("learned", "rotary")
ROUND = 64  # the embedding has a multiple of it as rows, as tensor cores take them
STD = 0.02  # of the initial weights, as in GPT-2
SELECTOR = re.compile(r"(moba|nsa|top_k)\((\d+), *(\d+)\)")
BLOCKS = (128, 64, 32, 16)  # block sizes of MoBA: the largest that divides a chunk


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model; `vocab` is at least that of the data."""

    layers: int
    dim: int
    heads: int
    vocab: int = 0
    mlp: dict[str, Any] | None = None  # options of a BlockSparseMLP; None: dense
    conv: int | None = None  # tokens of a causal convolution of the embeddings; None: none


# ---- attention


class Sparse(BlockSparseAttention):
    """`sparseflash.attention` under the mask.

    `packed`, set by the model before each call, holds the document lengths of every sequence.
    """

    packed: tuple[tuple[int, ...], ...] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: object = None) -> Tensor:
        mask = self.mask
        if self.packed is not None:
            documents = masks.documents(self.packed)
            if isinstance(mask, ContextParallel):
                mask, documents = None, mask.with_mask(mask.source & documents)  # type: ignore
            mask = documents if mask is None else mask & documents  # type: ignore[operator]
        if isinstance(mask, Selector):
            if isinstance(mask, TokenSelector) and q.is_cuda:
                mask = with_room(mask, q)
            mask = mask(q, k)
        return attention(q, k, v, mask, **self._options)  # type: ignore[arg-type]


def with_room(selector: TokenSelector, q: Tensor) -> TokenSelector:
    """Return the selector with room for all blocks that q (B, H, N, D) may pick, those of its
    own chunk and the ones before it. Then no step waits for the GPU to count them, and a CUDA
    graph holds it.
    """
    batch, heads, n, _ = q.shape
    block_q, block_k = selector.block_size
    chunks = sum(-(-end // selector.chunk) for end in range(block_q, n + block_q, block_q))
    return replace(selector, capacity=batch * heads * chunks * (selector.chunk // block_k))


class Explicit(BlockSparseAttention):
    """What the attentions with a token mask share: the mask as a bool tensor.

    `packed`, set by the model before each call, holds the document number of every token (B, N).
    """

    packed: Tensor | None = None

    def __init__(self, *sizes: int, **options: Any):
        super().__init__(*sizes, **options)
        self.causal = str(self.mask) == str(masks.causal())  # a text in `attend` breaks a graph

    def allowed(self, q: Tensor) -> Tensor | None:
        """Bool (B or 1, H or 1, N, N): the pairs that may attend; None: all."""
        n = q.shape[2]
        allowed = self._pairs(n, q.device)
        if self.packed is not None:
            same = (self.packed[:, :, None] == self.packed[:, None, :])[:, None]
            allowed = same if allowed is None else allowed & same
        return allowed

    def _pairs(self, n: int, device: torch.device) -> Tensor | None:
        if self.mask is None:
            return None
        if self.causal:
            return torch.ones(n, n, dtype=torch.bool, device=device).tril()
        kept = self.__dict__.get("_kept")  # not a buffer: it is no part of a checkpoint
        if kept is None or kept.shape[-1] != n or kept.device != device:
            assert isinstance(self.mask, Mask)
            kept = torch.from_numpy(self.mask.build(n, heads=self.heads).to_dense()).to(device)
            self.__dict__["_kept"] = kept
        return kept


class Standard(Explicit):
    """Matrix product, softmax, matrix product, with the scores in memory."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: object = None) -> Tensor:
        return softmax_attention(q, k, v, self.allowed(q), self._options["dropout_p"])


class Sdpa(Explicit):
    """torch's scaled_dot_product_attention, which picks its own kernel."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: object = None) -> Tensor:
        causal = self.packed is None and self.causal
        allowed = None if causal else self.allowed(q)
        p = self._options["dropout_p"]
        return F.scaled_dot_product_attention(q, k, v, allowed, dropout_p=p, is_causal=causal)


ATTENTIONS: dict[str, type[BlockSparseAttention]] = {
    "sparse": Sparse,
    "standard": Standard,
    "sdpa": Sdpa,
}


def resolve(text: str | None) -> Mask | Selector:
    """Return the causal mask of a text; None: every earlier pair.

    moba(chunk, k), nsa(k, block) and top_k(k, block) are selectors; every query takes its own block
    or chunk among the k. Raises ValueError for a text that is no mask.
    """
    if text is not None and (found := SELECTOR.fullmatch(text)):
        first, second = int(found[2]), int(found[3])
        if found[1] == "moba":
            block = next((size for size in BLOCKS if first % size == 0), None)
            if block is None or not second:
                raise ValueError(f"mask={text}: give a multiple of 16, and at least 1 of them")
            return select.moba(first, second, block)
        if found[1] == "nsa":
            return select.nsa(first, second, second)
        return select.top_k(first, block_size=second, within=masks.causal(), always=masks.local(0))
    if text is not None and re.match(r"\s*(moba|nsa|top_k)\b", text):
        raise ValueError(f"mask={text}: give moba(CHUNK, K), nsa(K, BLOCK) or top_k(K, BLOCK)")
    if text is None or text == "dense":
        return masks.causal()
    mask = masks.parse(text)
    parts = mask.parts if mask.kind == "&" else (mask,)
    return mask if masks.causal() in parts else mask & masks.causal()


# ---- the model


class Block(nn.Module):
    """x + attention(LN(x)), then x + MLP(LN(x)), with GELU."""

    def __init__(self, sizes: Sizes, attention: BlockSparseAttention, dropout: float):
        super().__init__()
        dim, self.mlp = sizes.dim, None
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = attention
        if sizes.mlp is None:
            self.widen, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        else:
            self.mlp = BlockSparseMLP(dim, activation="gelu_tanh", **sizes.mlp)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        y = self.norm_mlp(x)
        if self.mlp is not None:
            return x + self.dropout(self.mlp(y))
        return x + self.dropout(self.narrow(F.gelu(self.widen(y), approximate="tanh")))


class LanguageModel(nn.Module):
    """Token and position embeddings, pre-LN blocks, LayerNorm, and the embedding as the head.

    Args:
        vocab: ids of the data. The embedding has more rows where `sizes` or rounding say so.
        context: tokens of a window.
        end: the id that ends a document, for packed windows, in which a token attends to its own
            document only; None: windows are not packed.
        decode: two more layers answer question i from the vector at its place and an embedding
            of i.
    """

    def __init__(
        self,
        sizes: Sizes,
        vocab: int,
        context: int,
        attention: str,
        mask: Mask | Selector,
        *,
        dropout: float = 0.0,
        end: int | None = None,
        positions: str = LEARNED,
        init_std: float = STD,
        decode: bool = False,
    ):
        super().__init__()
        kind = ATTENTIONS[attention]
        self.sizes, self.context, self.end = sizes, context, end
        self.shared: ContextParallel | None = None  # where several processes share a window
        rows = -(-max(vocab, sizes.vocab) // ROUND) * ROUND
        self.tokens = nn.Embedding(rows, sizes.dim)
        self.positions = nn.Embedding(context, sizes.dim) if positions == LEARNED else None
        self.dropout = nn.Dropout(dropout)
        # over each feature of the last tokens, as before the attention of Zoology's models
        self.conv = None
        if sizes.conv is not None:
            dims = sizes.dim, sizes.dim, sizes.conv
            self.conv = nn.Conv1d(*dims, groups=sizes.dim, padding=sizes.conv - 1)
        options: dict[str, Any] = {"mask": mask, "dropout": dropout}
        options["rotary"] = Rotary() if positions == ROTARY else None
        layers = [kind(sizes.dim, sizes.heads, layer=i, **options) for i in range(sizes.layers)]
        self.blocks = nn.ModuleList(Block(sizes, layer, dropout) for layer in layers)
        self.norm = nn.LayerNorm(sizes.dim)
        self.asked, self.decoder = None, nn.Sequential()
        if decode:  # as in MAD
            dim = sizes.dim
            layer = lambda: (nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU())  # noqa: E731
            self.asked = nn.Embedding(context, dim)
            self.decoder = nn.Sequential(*layer(), *layer())
        self.apply(partial(_initialise, init_std))
        with torch.no_grad():  # as in GPT-2: what adds to the residual stream starts smaller
            for block in self.layers:
                narrow = block.narrow if block.mlp is None else block.mlp.down
                for layer in (block.attention.out, narrow):
                    layer.weight.div_((2 * sizes.layers) ** 0.5)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, places: Tensor | None = None
    ) -> Tensor:
        """Logits (B, N, rows) of tokens (B, N), or with targets the cross-entropies (B, N): of the
        own tokens where the window is shared. With places (B, M) the logits there alone.
        """
        x = self._embed(tokens)
        if self.shared is not None:
            x = self.shared.shard(x)
            if targets is not None:
                targets = self.shared.shard(targets)
        return self._run(x, targets, Block.forward, LanguageModel._head, places)

    def by_layer(self) -> Callable[..., Tensor]:
        """`forward` with a block and the head compiled: one compilation serves all blocks.

        Nothing is fused across blocks.
        """
        block = torch.compile(Block.forward, dynamic=False)
        head = torch.compile(LanguageModel._head, dynamic=False)

        def forward(
            tokens: Tensor, targets: Tensor | None = None, places: Tensor | None = None
        ) -> Tensor:
            return self._run(self._embed(tokens), targets, block, head, places)

        return forward

    def _run(
        self,
        x: Tensor,
        targets: Tensor | None,
        block: Callable[..., Tensor],
        head: Callable[..., Tensor],
        places: Tensor | None = None,
    ) -> Tensor:
        x = self.dropout(x)
        for each in self.blocks:
            x = block(each, x)
        if places is not None:
            x = x.gather(1, places[:, :, None].expand(-1, -1, x.shape[2]))
            if self.asked is not None:
                x = self.decoder(x + self.asked.weight[: x.shape[1]])
        return head(self, x, targets)

    def _head(self, x: Tensor, targets: Tensor | None) -> Tensor:
        logits = F.linear(self.norm(x), self.tokens.weight)
        if targets is None:
            return logits
        losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return losses.view(targets.shape)

    @property
    def layers(self) -> list[Block]:
        """The blocks."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def _embed(self, tokens: Tensor) -> Tensor:
        x, place = self.tokens(tokens), torch.arange(tokens.shape[1], device=tokens.device)
        if self.end is not None:
            starts, ids = document_starts(tokens, self.end)
            self._pack(ids)
            place = place - starts
        if self.conv is not None:
            x = x + self.conv(x.mT)[:, :, : x.shape[1]].mT
        return x if self.positions is None else x + self.positions(place)

    def _pack(self, ids: Tensor) -> None:
        """Tells every attention which tokens form a document."""
        lengths = None
        for block in self.layers:
            layer = block.attention
            if isinstance(layer, Explicit):
                layer.packed = ids
            elif isinstance(layer, Sparse):
                if lengths is None:  # of the documents of every sequence, on the host
                    lengths = tuple(tuple(torch.bincount(row).tolist()) for row in ids.cpu())
                layer.packed = lengths


def document_starts(tokens: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Return the first place of each token's document, and the document's number: int64 (B, N)
    each.

    The token `end` belongs to the document that it ends.
    """
    first = torch.zeros_like(tokens, dtype=torch.bool)
    first[:, 1:] = tokens[:, :-1] == end
    place = torch.arange(tokens.shape[1], device=tokens.device)
    return (place * first).cummax(1).values, first.cumsum(1)


def shares(model: LanguageModel) -> tuple[float | None, float]:
    """Density of the blocks, and allowed pairs / pairs of the causal mask, means over the layers.

    A selector picks blocks of its own for each input, so its density is None.
    """
    n, used = model.context, [block.attention for block in model.layers]
    if isinstance(selector := used[0].mask, Selector):
        if isinstance(selector, TokenSelector):
            size, k = selector.chunk, selector.k
        else:
            assert isinstance(selector, BlockSelector)
            size, k = selector.block_size[1], int(selector.rule.value)
        return None, picked_pairs(n, size, k) / (n * (n + 1) / 2)
    found = [
        layer.mask.stats(n, heads=layer.heads) for layer in used if isinstance(layer.mask, Mask)
    ]
    whole = (n + 1) / (2 * n)
    return fmean(s.block_density for s in found), fmean(s.element_density / whole for s in found)


def mlp_density(model: LanguageModel) -> float:
    """Return the elements of the MLPs' weights, low ranks included, / those of dense ones."""
    layers = [m for m in model.modules() if isinstance(m, BlockSparseLinear)]
    kept = sum(p.numel() for layer in layers for p in layer.parameters() if p.ndim > 1)
    return kept / sum(m.in_features * m.out_features for m in layers) if layers else 1.0


def picked_pairs(n: int, chunk: int, k: int) -> int:
    """Pairs of a selector: of each query its own chunk up to itself, and k - 1 whole ones before
    it.
    """
    return sum(q % chunk + 1 + chunk * min(k - 1, q // chunk) for q in range(n))


def _initialise(std: float, module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, BlockSparseLinear):  # outputs have the variance of a dense layer's
        nn.init.normal_(module.weight, std=std * module.mask.density**-0.5)
    if isinstance(module, nn.Linear | BlockSparseLinear) and module.bias is not None:
        nn.init.zeros_(module.bias)
