"""Base classes of the selectors, and the checks that they share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from masks.algebra import Mask
from masks.block_mask import BlockMask
from masks.checks import block_sizes
from sparseflash.select.candidates import candidates_of
from sparseflash.select.choose import choose
from sparseflash.select.rules import Rule
from sparseflash.select.selection import Selection


@dataclass(frozen=True, repr=False, eq=False)
class Selector:
    """Picks blocks by looking at q and k: `selection = selector(q, k)`.

    The functions of `sparseflash.select` make selectors. A selector picks only blocks of the mask
    `within`, and in those only its pairs. No gradient flows through the choice.
    """

    text = ""  # the call that made it
    block_size: tuple[int, int]
    within: Mask | BlockMask | None

    @torch.no_grad()
    def __call__(self, q: Tensor, k: Tensor) -> Selection:
        """The selection for q (B, H, N_q, D) and k (B, H_kv, N_k, D), H a multiple of H_kv.

        Raises ValueError for inputs that do not fit each other or the selector.
        """
        check_inputs(q, k)
        return self.select(q, k)

    def select(self, q: Tensor, k: Tensor) -> Selection:
        """The selection for inputs that are checked."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False, eq=False)
class BlockSelector(Selector):
    """Scores whole blocks, of which a row takes the best by its rule."""

    rule: Rule
    always: Mask | BlockMask | None
    probabilities = False  # whether the scores are probabilities already

    def __post_init__(self) -> None:
        for name in ("within", "always"):
            mask = getattr(self, name)
            if not isinstance(mask, Mask | BlockMask | None):
                raise ValueError(f"{name} is {mask!r}: give a Mask, a BlockMask or None")

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, H, rows, cols), the higher the better."""
        raise NotImplementedError

    def select(self, q: Tensor, k: Tensor) -> Selection:
        batch, heads, n_q, _ = q.shape
        extents = (n_q, k.shape[2], self.block_size)
        found = candidates_of(self.rule, self.within, self.always, *extents, heads, q.device)
        for name, mask in (("within", found.codes), ("always", found.forced)):
            if mask is not None and any(
                m not in (1, n) for m, n in zip(mask.shape[:2], (batch, heads), strict=True)
            ):
                raise ValueError(
                    f"{name} has (batch, heads) {tuple(mask.shape[:2])}, q {(batch, heads)}: "
                    "each extent must be 1 or that of q"
                )
        codes = choose(self.scores(q, k), found, self.rule, probabilities=self.probabilities)
        copies = batch * heads // (found.high.shape[0] * found.high.shape[1])
        return Selection(codes, found.bits, *extents, found.max_blocks * copies)


P = ParamSpec("P")
S = TypeVar("S", bound=Selector)


def selector(make: Callable[P, S]) -> Callable[P, S]:
    """Decorates a function that makes selectors: they print as the call that made them."""

    @wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> S:
        made = make(*args, **kwargs)
        words = [_shown(x) for x in args] + [f"{name}={_shown(x)}" for name, x in kwargs.items()]
        object.__setattr__(made, "text", f"{make.__name__}({', '.join(words)})")
        return made

    return call


def _shown(value: object) -> str:
    return type(value).__name__ if isinstance(value, nn.Module) else repr(value)


def check_inputs(q: Tensor, k: Tensor) -> None:
    """Raises ValueError where q and k do not fit each other."""
    for name, t in (("q", q), ("k", k)):
        if not isinstance(t, Tensor) or t.ndim != 4 or not t.is_floating_point() or 0 in t.shape:
            found = f"{t.dtype} {tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(f"{name} is {found}: give floats (batch, heads, length, head dim)")
    if q.device != k.device or q.dtype != k.dtype:
        raise ValueError(
            f"q is {q.dtype} on {q.device}, k {k.dtype} on {k.device}: bring them together"
        )
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]) or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}: give them one batch and head dim, "
            "and q a multiple of the heads of k"
        )


def check_blocks(block_size: Any) -> tuple[int, int]:
    """(block_q, block_k) as `Mask.build` takes them."""
    sizes = block_sizes(block_size)
    for size in sizes:
        if size % 16 or not 16 <= size <= 256:
            raise ValueError(f"block_size is {block_size!r}: give multiples of 16, 16 to 256")
    return sizes
