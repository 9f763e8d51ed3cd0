"""A table of embeddings whose gradient does not wait for the tokens that most places share."""

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
