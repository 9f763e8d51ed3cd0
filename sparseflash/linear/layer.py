"""Linear layers and MLPs whose weights have the blocks that a mask allows."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from masks import BlockMask, Mask, dense, parse
from masks.checks import choice, flag, integer
from sparseflash.checks import is_number
from sparseflash.linear.operator import ACTIVATIONS, BLOCKS, activated, check_mask, linear, mlp


class BlockSparseLinear(nn.Module):
    """A linear layer (.., in_features) to (.., out_features) whose weight has some blocks.

    Args:
        in_features, out_features: multiples of block_size.
        mask: which blocks of output x input features there are. A `masks.Mask` or its text is built
            for the square of the shorter side and stretched over the longer one, so a butterfly or
            a band runs from corner to corner. A `masks.BlockMask` of out_features x in_features is
            taken as it is. None: all blocks. A block that allows any pair is there whole.
        block_size: 16, 32, 64 or 128 features; 128, or that of a BlockMask, by default.
        bias: whether there is one.
        rank: of a dense low-rank matrix `up` x `down` that is added to the weight; 0 for none.
            With `masks.butterfly` this is Pixelated Butterfly (Dao et al., arXiv 2112.00029).
        device, dtype: of the parameters, as in `torch.nn.Linear`.

    Attributes:
        weight: (blocks, b, b); bias: (out_features,) or None; down: (rank, in_features) and up:
            (out_features, rank), or None.
        blocks: int32 (blocks, 2), the row and the column of each block. It is in the state dict,
            and a state dict of other blocks is refused.
        mask: the `masks.BlockMask`.
    """

    weight: Tensor
    bias: Tensor | None
    down: Tensor
    up: Tensor
    blocks: Tensor

    def __init__(
        self, in_features: int, out_features: int, *, mask: Mask | BlockMask | str | None = None,
        block_size: int | None = None, bias: bool = True, rank: int = 0,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        self.in_features = integer("in_features", in_features, min=1)
        self.out_features = integer("out_features", out_features, min=1)
        self.rank = integer("rank", rank, min=0)
        self.mask = weight_mask(mask, out_features, in_features, block_size)
        self.block_size = self.mask.block_size[0]
        places = self._places()
        blocks = torch.empty(places.shape, dtype=places.dtype, device=device)
        self.register_buffer("blocks", blocks)
        shapes: dict[str, tuple[int, ...]] = {}
        shapes["weight"] = (len(places), self.block_size, self.block_size)
        shapes |= {"bias": (out_features,)} if bias else {}
        shapes |= {"down": (rank, in_features), "up": (out_features, rank)} if rank else {}
        for name in ("weight", "bias", "down", "up"):
            made = torch.empty(shapes[name], device=device, dtype=dtype) if name in shapes else None
            self.register_parameter(name, None if made is None else nn.Parameter(made))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight as `torch.nn.Linear` does, but by the inputs that each output has.

        So the output has the same variance at every density. `up` is 0 at first.
        """
        self.blocks.copy_(self._places())  # after `to_empty` they are anything
        count = np.count_nonzero(self.mask.layout()[0, 0], axis=1)  # of the blocks of each row
        bound = torch.from_numpy((count.clip(min=1) * self.block_size) ** -0.5).to(self.weight)
        self.weight.uniform_(-1, 1).mul_(bound[self.blocks[:, 0].long(), None, None])
        if self.bias is not None:
            self.bias.uniform_(-1, 1).mul_(bound.repeat_interleave(self.block_size))
        if self.rank:
            self.down.uniform_(-1, 1).mul_(self.in_features**-0.5)
            self.up.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """(.., out_features) from x (.., in_features)."""
        out = linear(x, self.weight, self.mask, self.bias)
        return out + F.linear(F.linear(x, self.down), self.up) if self.rank else out

    @classmethod
    def from_dense(
        cls, dense: nn.Linear, *, mask: Any = None, density: float | None = None,
        block_size: int | None = None,
    ) -> "BlockSparseLinear":  # fmt: skip
        """Return a layer with blocks of the weight of a dense one, and its bias.

        mask: as in the class. density: instead, the share of the blocks, in (0, 1], that are kept:
        those with the largest norms.
        """
        if not isinstance(dense, nn.Linear):
            raise ValueError(f"dense is a {type(dense).__name__}; pass a torch.nn.Linear")
        weight, size = dense.weight.detach(), (dense.out_features, dense.in_features)
        share = density is None or (is_number(density) and 0 < density <= 1)
        if (mask is None) == (density is None) or not share:
            raise ValueError(
                f"mask is {mask!r}, density {density!r}: pass one, a density in (0, 1]"
            )
        if density is not None:
            block = weight_mask(None, *size, block_size).block_size[0]
            norms = _cut(weight, block).float().square().sum((2, 3))
            kept = norms.flatten().topk(max(1, round(density * norms.numel()))).indices
            layout = torch.zeros_like(norms).flatten().index_fill(0, kept, 1)
            mask = BlockMask.from_layout(layout.view_as(norms).bool(), block)
        layer = cls(
            *size[::-1], mask=mask, block_size=block_size, bias=dense.bias is not None,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        with torch.no_grad():
            layer.weight.copy_(_cut(weight, layer.block_size)[layer.blocks.long().unbind(1)])
            if layer.bias is not None:
                layer.bias.copy_(dense.bias)
        return layer

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        """Return a dense layer of the same values, 0 where there are no blocks."""
        made = nn.Linear(
            self.in_features, self.out_features, self.bias is not None,
            self.weight.device, self.weight.dtype,
        )  # fmt: skip
        made.weight.zero_()
        _cut(made.weight, self.block_size)[self.blocks.long().unbind(1)] = self.weight
        if self.rank:
            made.weight += self.up @ self.down
        if self.bias is not None:
            made.bias.copy_(self.bias)
        return made

    def _load_from_state_dict(self, state_dict, prefix, *further):
        given, places = state_dict.get(prefix + "blocks"), self._places()
        if given is None or given.is_meta or torch.equal(given.to(places), places):
            return super()._load_from_state_dict(state_dict, prefix, *further)
        further[-1].append(
            f"{prefix}blocks: the {len(given)} blocks of the state dict are not the"
            f" {len(places)} of this layer; make the layer with the mask of that one"
        )

    def _places(self) -> Tensor:
        return torch.from_numpy(np.argwhere(self.mask.layout()[0, 0]).astype(np.int32))

    def extra_repr(self) -> str:
        text = f"{self.in_features}, {self.out_features}, block_size={self.block_size}"
        text += f", density={self.mask.density:.3g}, bias={self.bias is not None}"
        return text + (f", rank={self.rank}" if self.rank else "")


class BlockSparseMLP(nn.Module):
    """Two block-sparse linear layers and an activation between: (.., dim) to (.., dim).

    The products compute the activation and its gradient, which saves passes over memory.

    Args:
        dim, hidden: features of the input and the output, and between; hidden is 4 * dim by
            default.
        mask: as in `BlockSparseLinear`, for both layers; or a pair of masks, of hidden x dim and of
            dim x hidden features.
        block_size, bias, rank, device, dtype: as in `BlockSparseLinear`. With rank > 0 the
            activation is a pass of its own.
        activation: "gelu", "gelu_tanh" (that of GPT-2) or "silu".
        gate: whether a third layer, of the same blocks as the first, is multiplied by the activated
            features; with "silu" this is the MLP of Llama.

    Attributes:
        up, down: the layers. With a gate `up` has 2 * hidden features, those that are activated
            first.
    """

    def __init__(
        self, dim: int, hidden: int | None = None, *, mask: Any = None,
        block_size: int | None = None, activation: str = "gelu", gate: bool = False,
        bias: bool = True, rank: int = 0, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        self.activation = choice("activation", activation, ACTIVATIONS)
        self.gate, dim = flag("gate", gate), integer("dim", dim, min=1)
        hidden = 4 * dim if hidden is None else integer("hidden", hidden, min=1)
        pair = mask if isinstance(mask, tuple) else (mask, mask)
        if len(pair) != 2:
            raise ValueError(f"mask has {len(pair)} parts; pass one mask, or those of both layers")
        first = weight_mask(pair[0], hidden, dim, block_size)
        if gate:
            layout = first.layout()[0, 0]
            first = BlockMask.from_layout(np.concatenate([layout, layout]), first.block_size)
        options: dict[str, Any] = {"bias": bias, "rank": rank, "device": device, "dtype": dtype}
        self.up = BlockSparseLinear(dim, first.n_q, mask=first, **options)
        second = weight_mask(pair[1], dim, hidden, block_size)
        self.down = BlockSparseLinear(hidden, dim, mask=second, **options)

    def forward(self, x: Tensor) -> Tensor:
        """(.., dim) from x (.., dim)."""
        if self.up.rank:
            return self.down(activated(self.up(x), self.activation, self.gate))
        first, second = ((m.weight, m.mask, m.bias) for m in (self.up, self.down))
        return mlp(x, first, second, self.activation, self.gate)


def weight_mask(mask: Any, out_features: int, in_features: int, block: int | None) -> BlockMask:
    """Return the block mask of a weight; ValueError for one that does not fit."""
    mask = parse(mask) if isinstance(mask, str) else dense() if mask is None else mask
    if isinstance(mask, Mask):
        block, sizes = 128 if block is None else block, (out_features, in_features)
        if block not in BLOCKS or any(n % block for n in sizes):
            raise ValueError(
                f"block_size is {block!r}; pass one of {BLOCKS} that divides {sizes}, out_features"
                " and in_features"
            )
        square = mask.build(min(sizes), block_size=block, heads=2)  # 2 if they differ
        layout = square.layout()[0, 0]
        row, col = (np.arange(n // block) * len(layout) // (n // block) for n in sizes)
        stretched = BlockMask.from_layout(layout[np.ix_(row, col)], block)
        mask = stretched if square.batch * square.heads == 1 else square  # which is refused
    check_mask(mask)
    if block not in (None, mask.block_size[0]):
        raise ValueError(f"block_size is {block}, but the mask has {mask.block_size}; leave it out")
    if (mask.n_q, mask.n_k) != (out_features, in_features):
        raise ValueError(
            f"mask is for {mask.n_q} x {mask.n_k} features, the weight has {out_features} x"
            f" {in_features}; build it with mask.build(out_features, in_features, block_size=b)"
        )
    return mask


def _cut(weight: Tensor, block: int) -> Tensor:
    """Return (rows, cols, block, block), a view of weight (out, in)."""
    return weight.unflatten(1, (-1, block)).unflatten(0, (-1, block)).transpose(1, 2)
