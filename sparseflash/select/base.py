"""What selectors are made of: rules for how many blocks a row takes, the choice by scores, and the
base classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from masks.algebra import Mask
from masks.block_mask import BlockMask
from masks.checks import integer
from masks.tiles import EMPTY, FULL
from sparseflash.cache import cached
from sparseflash.checks import check_tensors, is_empty
from sparseflash.dynamic.selection import (
    Selection,
    built,
    heads_of,
    static_selection,
    to_device,
)
from sparseflash.kernels.common.device import kernels_of, on_nvidia


@dataclass(frozen=True)
class Rule:
    """How many blocks of a row are taken, the best first.

    count: `value` blocks;
    share: that share of the candidates, rounded up;
    mass: the fewest blocks whose probabilities sum to `value`;
    level: the blocks of a probability of at least `value`.
    `min_blocks` and `max_blocks` bound the number for mass and level.
    """

    kind: Literal["count", "share", "mass", "level"]
    value: float
    min_blocks: int = 1
    max_blocks: int | None = None

    @property
    def fixed(self) -> bool:
        """Whether the number of blocks is known without the scores."""
        return self.kind in ("count", "share")


class Candidates(NamedTuple):
    """The blocks that rows may take, on the device. An extent of 1 means the same for all."""

    codes: Tensor  # int32 (B, H, rows, cols): the code of a block once taken; EMPTY: not allowed
    bits: Tensor  # int32 (T, block_q, words)
    forced: Tensor | None  # int8 (B, H, rows, cols): taken before all others
    low: Tensor  # int32 (B, H, rows): the fewest blocks of a row
    high: Tensor  # int32 (B, H, rows): the most blocks of a row
    max_blocks: int  # the sum of `high`


def budget(name: str, value: Any) -> Rule:
    """Return the rule of a number of blocks, at least 1, or of a share of them in (0, 1]."""
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ValueError(f"{name} is {value}: give a share in (0, 1], or a number of blocks")
        return Rule("share", value)
    return Rule("count", integer(name, value, min=1))


@cached
def candidates_of(
    rule: Rule,
    within: Mask | BlockMask | None,
    always: Mask | BlockMask | None,
    n_q: int,
    n_k: int,
    block_size: tuple[int, int],
    heads: int | None,
    device: torch.device,
) -> Candidates:
    """Return the blocks of `within`, those of `always` first; only the first call copies to the
    device.

    heads: of q, None where neither mask differs from head to head.
    """
    shape = (1, 1, -(-n_q // block_size[0]), -(-n_k // block_size[1]))
    if within is None:
        host = np.full(shape, FULL, np.int32)
        codes = to_device(host, device)
        bits = codes.new_empty((0, block_size[0], -(-block_size[1] // 32)))
    else:
        given = (within, n_q, n_k, block_size, heads_of(within, heads))
        host = built(*given).codes()
        static = static_selection(*given, device)
        codes, bits = static.codes, static.bits
    taken, forced = np.zeros((1, 1, 1, 1), bool), None
    if always is not None:
        blocks = built(always, n_q, n_k, block_size, heads_of(always, heads))
        taken = blocks.codes() != EMPTY
        forced = to_device(taken.astype(np.int8), device)
    low, high = _bounds(rule, host != EMPTY, taken)
    on_device = (to_device(low, device), to_device(high, device))
    return Candidates(codes, bits, forced, *on_device, int(high.sum()))


def _bounds(rule: Rule, candidate: np.ndarray, forced: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the fewest and the most blocks of each row, int32 (B, H, rows), with forced ones."""
    candidates, forced = candidate.sum(-1), (candidate & forced).sum(-1)
    if rule.kind == "count":
        low = high = int(rule.value)
    elif rule.kind == "share":
        low = high = np.ceil(rule.value * candidates - 1e-9)
    else:
        low, high = rule.min_blocks, rule.max_blocks or candidates
    low = np.minimum(np.maximum(low, forced), candidates)
    high = np.minimum(np.maximum(high, low), candidates)
    return low.astype(np.int32), high.astype(np.int32)


LARGE = 3.0e38  # scores are clamped to it: forced blocks lie above, blocks not allowed below
MAX_COLS = 16384  # blocks of a row that the kernel holds


def choose(
    scores: Tensor, candidates: Candidates, rule: Rule, *, probabilities: bool = False
) -> Tensor:
    """Return the codes of the blocks that are taken, (B, H, rows, cols) in the dtype of the
    candidates.

    scores: (B, H, rows, cols). Among equal scores the first block wins.
    probabilities: the scores are probabilities already, up to a factor. Otherwise a softmax over
        the candidates of a row makes them so.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))  # float16 ends at 65504
    if on_nvidia(scores) and scores.shape[-1] <= MAX_COLS:
        return kernels_of("select").choose_blocks(scores, candidates, rule, probabilities)
    return choose_torch(scores, candidates, rule, probabilities)


def choose_torch(scores: Tensor, candidates: Candidates, rule: Rule, probabilities: bool) -> Tensor:
    """`choose` in plain torch."""
    candidate = candidates.codes != EMPTY
    scores = scores.nan_to_num(-LARGE).clamp(-LARGE, LARGE)
    order = scores.masked_fill(~candidate, -torch.inf)
    if candidates.forced is not None:
        order = order.masked_fill(candidate & (candidates.forced != 0), torch.inf)
    order = order.argsort(dim=-1, descending=True, stable=True)
    count = candidates.low
    if not rule.fixed:
        if probabilities:
            weight = scores.clamp(min=0).masked_fill(~candidate, 0)
        else:
            top = scores.masked_fill(~candidate, -LARGE).amax(-1, keepdim=True)
            weight = (scores - top).exp().masked_fill(~candidate, 0)
        p = weight / weight.sum(-1, keepdim=True).clamp(min=1e-30)
        if rule.kind == "mass":
            count = 1 + (p.gather(-1, order).cumsum(-1) < rule.value).sum(-1, dtype=torch.int32)
        else:
            count = (p >= rule.value).sum(-1, dtype=torch.int32)
        count = count.clamp(candidates.low, candidates.high)
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, place)
    return torch.where(rank < count[..., None], candidates.codes, EMPTY)


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
