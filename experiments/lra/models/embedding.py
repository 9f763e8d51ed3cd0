"""Embeddings of tokens: a table, or maps of waves, with which near numbers look alike."""

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
