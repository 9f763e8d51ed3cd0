"""Embeddings of tokens, a table or maps of waves, with which near numbers look alike; positions:
sinusoids, waves of rows and columns, and how learned ones move to a finer grid.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

COPIES = 32  # of each row


class Embedding(nn.Embedding):
    """torch's, with another gradient under torch.compile.

    A compiled gradient adds the entries of each token to its row by atomic adds, which wait for
    each other: three of five pixels of Pathfinder are black, and all padding is one token. So
    places next to each other add to copies of the row, and the copies are summed.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """float32 (..., n, dim) of tokens (..., n), int32 or int64."""
        if not (torch.compiler.is_compiling() and self.training):
            return super().forward(tokens)
        copy = torch.arange(tokens.shape[-1], dtype=torch.int32, device=tokens.device) % COPIES
        rows = self.weight.expand(COPIES, -1, -1).flatten(0, 1)
        return F.embedding(tokens + self.num_embeddings * copy, rows)


def waves(values: Tensor, longest: float, shortest: float, count: int) -> Tensor:
    """float32 (n, 2 count): sines, then cosines, of `count` wavelengths between the two."""
    lengths = longest * torch.logspace(0, 1, count, base=shortest / longest)
    angle = 2 * torch.pi * values[:, None] / lengths
    return torch.cat([angle.sin(), angle.cos()], 1)


def random_map(features: int, dim: int, std: float) -> nn.Parameter:
    """(features, dim): maps waves to vectors whose elements have the deviation `std`."""
    return nn.Parameter(std * (2 / features) ** 0.5 * torch.randn(features, dim))


class SmoothEmbedding(nn.Module):
    """The embedding of a pixel is a learned linear map of waves of its intensity.

    In a table every intensity has a vector of its own. The strokes of Pathfinder have other
    intensities at every size, which a model trained on another size has never met.

    vocab: intensities, 0 .. vocab - 1; std: of the vectors at first.
    """

    waves: Tensor

    def __init__(self, vocab: int, dim: int, std: float):
        super().__init__()
        features = waves(torch.arange(vocab), 4.0 * vocab, vocab / 32, 16)
        self.register_buffer("waves", features, persistent=False)
        self.weight = random_map(features.shape[1], dim, std)

    def forward(self, tokens: Tensor) -> Tensor:
        """float32 (..., dim) of integer tokens (...)."""
        # a map of the waves of every token: the gradient of a table waits for the adds to the few
        # rows that an image has most of
        with torch.autocast(tokens.device.type, enabled=False):
            return F.embedding(tokens, self.waves) @ self.weight


def sinusoids(length: int, dim: int) -> Tensor:
    """float32 (length, dim): sines in the first half of the features, cosines in the second.

    The wavelengths go from 2 pi to 20 000 pi, as in the Long Range Arena's encoder.
    """
    half = dim // 2
    frequency = torch.exp(-math.log(10_000.0) / max(half - 1, 1) * torch.arange(half))
    angle = torch.arange(length)[:, None] * frequency
    table = torch.zeros(length, dim)
    table[:, :half], table[:, half : 2 * half] = angle.sin(), angle.cos()
    return table


class WavePositions(nn.Module):
    """A position in a grid is that of its row plus that of its column, linear maps of waves.

    Half of the waves have lengths in pixels, 4 to 32, and half in sides of the image, 1/4 to 4. So
    the weights suit images of every size: neighbours stay neighbours, and a corner a corner.

    grid: (rows, columns); order: the row-major pixel of each token; row-major order where None;
    std: of positions at first.
    """

    row: Tensor
    column: Tensor
    row_waves: Tensor
    column_waves: Tensor

    def __init__(
        self,
        grid: tuple[int, int],
        dim: int,
        order: Sequence[int] | np.ndarray | None = None,
        std: float = 0.02,
    ):
        super().__init__()
        pixel = torch.tensor(_order(order, grid[0] * grid[1]))
        self.register_buffer("row", pixel // grid[1], persistent=False)
        self.register_buffer("column", pixel % grid[1], persistent=False)
        for name, n in zip(("row_waves", "column_waves"), grid, strict=True):
            place = torch.arange(n)
            both = [waves(place, 32.0, 4.0, 8), waves(place / n, 4.0, 0.25, 8)]
            self.register_buffer(name, torch.cat(both, 1), persistent=False)
        features = self.row_waves.shape[1]
        self.rows = random_map(features, dim, std / 2**0.5)
        self.columns = random_map(features, dim, std / 2**0.5)

    def forward(self) -> Tensor:
        """float32 (rows * columns, dim), in the order of the tokens."""
        with torch.autocast(self.rows.device.type, enabled=False):
            rows, columns = self.row_waves @ self.rows, self.column_waves @ self.columns
        return rows[self.row] + columns[self.column]


class AxialRotary(nn.Module):
    """Rotary embeddings (Su et al., arXiv 2104.09864) of images: rows turn the first half of the
    features, columns the second.

    The wavelengths go from 4 to 512 pixels, whatever the size of the image. The first `before`
    tokens are no pixels, and are not turned.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        grid: tuple[int, int],
        head_dim: int,
        order: Sequence[int] | np.ndarray | None = None,
        before: int = 0,
    ):
        super().__init__()
        pixel = torch.tensor(_order(order, grid[0] * grid[1]))
        lengths = 4.0 * torch.logspace(0, 1, head_dim // 4, base=512 / 4)
        angle = [2 * torch.pi * at[:, None] / lengths for at in (pixel // grid[1], pixel % grid[1])]
        angle = torch.cat(angle, 1).repeat_interleave(2, 1)  # features 2 i and 2 i + 1 are a pair
        angle = F.pad(angle, (0, 0, before, 0))
        sign = torch.tensor([-1.0, 1.0]).repeat(head_dim // 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", sign * angle.sin(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """x (B, N, heads, D), turned; the same shape and dtype. positions: (N,), all by default."""
        cos, sin = (t if positions is None else t[positions] for t in (self.cos, self.sin))
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # a flip of pairs, whose gradient is a flip: one of slices writes zeros and adds them
        swapped = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return (wide * cos[:, None] + swapped * sin[:, None]).to(x.dtype)


def upsample_positions(
    table: Tensor,
    from_grid: tuple[int, int],
    to_grid: tuple[int, int],
    *,
    from_order: Sequence[int] | np.ndarray | None = None,
    to_order: Sequence[int] | np.ndarray | None = None,
) -> Tensor:
    """Return the position table of a finer grid: each position is duplicated onto the pixels
    inside it.

    table: (rows * columns, dim), or one row more, which comes first and is kept (a CLS token).
    from_grid, to_grid: (rows, columns); each side of the second is a multiple of the first's.
    from_order, to_order: the row-major pixel of each token; row-major order where None.

    Raises ValueError where these do not fit together.
    """
    (rows, cols), (to_rows, to_cols) = from_grid, to_grid
    extra = table.shape[0] - rows * cols
    if to_rows % rows or to_cols % cols:
        raise ValueError(
            f"a grid of {to_rows} x {to_cols} is no multiple of {rows} x {cols}, side by side"
        )
    token_of = np.argsort(_order(from_order, rows * cols)).reshape(rows, cols)
    finer = token_of.repeat(to_rows // rows, axis=0).repeat(to_cols // cols, axis=1).reshape(-1)
    finer = finer[_order(to_order, to_rows * to_cols)]
    index = torch.from_numpy(finer).to(table.device)
    return torch.cat([table[:extra], table[extra:][index]])


def _order(order: Sequence[int] | np.ndarray | None, pixels: int) -> np.ndarray:
    if order is None:
        return np.arange(pixels)
    return np.asarray(order)
