"""Base classes of the selectors."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from masks.algebra import Mask
from masks.block_mask import BlockMask
from sparseflash.checks import check_tensors, is_empty
from sparseflash.dynamic.selection import Selection, heads_of
from sparseflash.select.rules import Rule, candidates_of, choose


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
        """Return the selection for q (B, H, N_q, D) and k (B, H_kv, N_k, D), H a multiple of H_kv.

        Raises ValueError for inputs that do not fit each other or the selector.
        """
        check_tensors(q, k)
        if is_empty(q, k):
            extents = zip((q.shape[2], k.shape[2]), self.block_size, strict=True)
            shape = *q.shape[:2], *(-(-n // block) for n, block in extents)
            none = torch.zeros(shape, dtype=torch.bool, device=q.device)
            sizes = {"n_q": q.shape[2], "n_k": k.shape[2]}
            return Selection.from_layout(none, self.block_size, **sizes)
        return self.select(q, k)

    def select(self, q: Tensor, k: Tensor) -> Selection:
        """Return the selection for inputs that are checked."""
        raise NotImplementedError

    def candidates(self) -> Mask | BlockMask | None:
        """Return the pairs that a selection may have; None: all."""
        return self.within

    def summary(self, k: Tensor) -> Tensor:
        """Return (B, H_kv, key blocks, W), all that the choice has to know of each block of keys.

        Where ranks share a sequence, they send each other this instead of the keys.
        """
        raise NotImplementedError

    def select_rows(self, q: Tensor, summary: Tensor, rows: "OwnRows") -> Selection:
        """Return the selection of some query blocks, whose queries q has, among all keys."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.text or f"{type(self).__name__}(...)"


class OwnRows(Protocol):
    """Query blocks that one of several ranks has, of a sequence of n tokens."""

    n: int

    def positions(self, device: torch.device) -> Tensor:
        """Return (n_q,) int64, the places of the queries."""
        ...

    def of(self, mask: Mask | BlockMask, block_size: tuple[int, int]) -> BlockMask:
        """Return the rows of a mask of the whole sequence."""
        ...


@dataclass(frozen=True, repr=False, eq=False)
class BlockSelector(Selector):
    """Scores whole blocks, of which a row takes the best by its rule; `always` first.

    A subclass defines `scores`, and may say that its scores are probabilities already.
    """

    rule: Rule
    always: Mask | BlockMask | None
    probabilities = False

    def __post_init__(self) -> None:
        for name in ("within", "always"):
            mask = getattr(self, name)
            if not isinstance(mask, Mask | BlockMask | None):
                raise ValueError(f"{name} is {mask!r}: give a Mask, a BlockMask or None")

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, H, rows, cols), the higher the better."""
        raise NotImplementedError

    def compare(self, q: Tensor, summary: Tensor) -> Tensor:
        """Return the scores of queries (B, H, n, D) and the summary of all keys."""
        raise NotImplementedError

    def select(self, q: Tensor, k: Tensor) -> Selection:
        return self._selected(self.scores(q, k), q, k.shape[2], self.within, self.always)

    def select_rows(self, q: Tensor, summary: Tensor, rows: OwnRows) -> Selection:
        own = [
            None if m is None else rows.of(m, self.block_size) for m in (self.within, self.always)
        ]
        return self._selected(self.compare(q, summary), q, rows.n, *own)

    def _selected(
        self, scores: Tensor, q: Tensor, n_k: int, within: Mask | BlockMask | None,
        always: Mask | BlockMask | None,
    ) -> Selection:  # fmt: skip
        batch, heads, n_q, _ = q.shape
        extents = (n_q, n_k, self.block_size)
        built_with = heads_of(within, heads) or heads_of(always, heads)
        found = candidates_of(self.rule, within, always, *extents, built_with, q.device)
        for name, mask in (("within", found.codes), ("always", found.forced)):
            if mask is not None:
                check_slices(name, tuple(mask.shape[:2]), q)
        codes = choose(scores, found, self.rule, probabilities=self.probabilities)
        copies = batch * heads // (found.high.shape[0] * found.high.shape[1])
        return Selection(codes, found.bits, *extents, found.max_blocks * copies)


def check_slices(name: str, slices: tuple[int, ...], q: Tensor) -> None:
    """Raise ValueError for a mask whose (batch, heads) do not fit those of q."""
    wanted = tuple(q.shape[:2])
    if any(m not in (1, n) for m, n in zip(slices, wanted, strict=True)):
        raise ValueError(
            f"{name} has (batch, heads) {slices}, q {wanted}: each extent must be 1 or that of q"
        )


P = ParamSpec("P")
S = TypeVar("S", bound=Selector)


def selector(make: Callable[P, S]) -> Callable[P, S]:
    """Decorate a function that makes selectors: they print as the call that made them."""

    @wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> S:
        made = make(*args, **kwargs)
        words = [repr(x) for x in args] + [f"{name}={x!r}" for name, x in kwargs.items()]
        object.__setattr__(made, "text", f"{make.__name__}({', '.join(words)})")
        return made

    return call
