"""Windows of a corpus on the device, and what a model learns from one."""

import warnings

import numpy as np
import torch
from torch import Tensor, nn

from experiments.training.evaluate import Sums

SHARES = (0.8, 0.9)  # BERT: 80 % of the hidden tokens are masked, 10 % random, 10 % as they were


class Windows:
    """Windows of `context` + 1 tokens, each begins where the one before has its last.

    count: how many windows of the corpus are used, from the start; None: all.
    """

    def __init__(
        self, ids: np.ndarray, context: int, device: torch.device, count: int | None = None
    ):
        self.context = context
        self.count = (len(ids) - 1) // context
        if count is not None:
            self.count = min(self.count, count)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # mapped files are read-only
            flat = torch.from_numpy(ids[: self.count * context + 1].view(np.int16))
        self.ids = flat.to(device)  # int16: kernels of torch do not take uint16
        self._places = torch.arange(context + 1, device=device)

    def __len__(self) -> int:
        return self.count

    @property
    def bytes(self) -> int:
        return self.ids.numel() * self.ids.element_size()

    def batch(self, rows: Tensor) -> tuple[Tensor, None, Tensor]:
        """Tokens and the token after each, int64 (rows, context), of the windows `rows`."""
        found = self.ids[(rows * self.context)[:, None] + self._places].long() & 0xFFFF
        return found[:, :-1], None, found[:, 1:]


def refuse_short(ids: np.ndarray, context: int, name: str) -> None:
    """Raise ValueError unless the tokens have a window."""
    if len(ids) <= context:
        raise ValueError(
            f"{name} has {len(ids)} tokens, and a window of context={context} needs {context + 1}: "
            "give more text, or a shorter context"
        )


def next_token(model: nn.Module, batch: tuple, weights: Tensor | None) -> Sums:
    """Return the sums of the cross-entropy of every next token, of nothing, and of the tokens."""
    tokens, _, targets = batch
    return _sums(model(tokens, targets), weights)


class MaskedTokens:
    """Hides a share of the tokens of every window, which the model predicts (BERT).

    Args:
        mask_id: the id that stands for a hidden token; smaller ids are tokens.
    """

    def __init__(self, share: float, mask_id: int):
        self.share, self.mask_id = share, mask_id

    def __call__(self, model: nn.Module, batch: tuple, weights: Tensor | None) -> Sums:
        tokens = batch[0]
        count = max(1, round(self.share * tokens.shape[1]))
        noise = torch.rand(tokens.shape, device=tokens.device)
        places = noise.topk(count, sorted=False).indices
        targets = tokens.gather(1, places)
        draw = torch.rand(places.shape, device=tokens.device)
        other = torch.randint(self.mask_id, places.shape, device=tokens.device)
        shown = torch.where(draw < SHARES[1], other, targets)
        shown = torch.where(draw < SHARES[0], self.mask_id, shown)
        return _sums(model(tokens.scatter(1, places, shown), targets, places), weights)


def _sums(losses: Tensor, weights: Tensor | None) -> Sums:
    """losses (windows, tokens); weights: of the windows."""
    nothing = torch.zeros((), device=losses.device)
    if weights is None:
        count = torch.full((), float(losses.numel()), device=losses.device)
        return losses.sum(), nothing, count
    losses = losses * weights[:, None]
    return losses.sum(), nothing, weights.sum() * losses.shape[1]
