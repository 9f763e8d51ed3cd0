"""What all selectors share: the call, its checks, and the choice among scored blocks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from masks.algebra import Mask
from masks.block_mask import BlockMask, block_sizes
from masks.checks import integer
from sparseflash.select.choose import Rule, choose, frame
from sparseflash.select.selection import Selection


@dataclass(frozen=True, repr=False, eq=False)
class Selector:
    """Picks blocks by looking at q and k: `selection = selector(q, k)`.

    Make one with the functions of `sparseflash.select`. It keeps to the blocks of the mask
    `within`, and within those to its pairs; no gradient flows through the choice.
    """

    text: str  # the call that makes it
    block_size: tuple[int, int]
    within: Mask | BlockMask | None

    @torch.no_grad()
    def __call__(self, q: Tensor, k: Tensor) -> Selection:
        """The selection for q (B, H, N_q, D) and k (B, H_kv, N_k, D), H a multiple of H_kv.

        Raises:
            ValueError: inputs that do not fit together, or not to the selector.
        """
        check_inputs(q, k)
        return self.select(q, k)

    def select(self, q: Tensor, k: Tensor) -> Selection:
        """What the call does once the inputs are checked."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False, eq=False)
class BlockSelector(Selector):
    """One that scores whole blocks: a row takes the best, by its rule."""

    rule: Rule
    always: Mask | BlockMask | None
    probabilities = False  # whether `scores` are such already

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, H, rows, cols), the higher the better."""
        raise NotImplementedError

    def select(self, q: Tensor, k: Tensor) -> Selection:
        batch, heads, n_q, _ = q.shape
        extents = (n_q, k.shape[2], self.block_size)
        keep = frame(self.rule, self.within, self.always, *extents, heads, q.device)
        for name, mask in (("within", keep.codes), ("always", keep.forced)):
            if mask is not None and any(
                m not in (1, n) for m, n in zip(mask.shape[:2], (batch, heads), strict=True)
            ):
                raise ValueError(
                    f"{name} has (batch, heads) {tuple(mask.shape[:2])}, q {(batch, heads)}: "
                    "each extent must be 1 or that of q"
                )
        codes = choose(self.scores(q, k), keep, self.rule, probabilities=self.probabilities)
        most = keep.most * (batch * heads // (keep.high.shape[0] * keep.high.shape[1]))
        return Selection(codes, keep.bits, *extents, most)


def check_inputs(q: Tensor, k: Tensor) -> None:
    """ValueError for q and k that do not belong together."""
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


def check_masks(**named: Any) -> None:
    """ValueError for what is no mask and not None."""
    for name, mask in named.items():
        if not isinstance(mask, Mask | BlockMask | None):
            raise ValueError(f"{name} is {mask!r}: give a Mask, a BlockMask or None")


def check_blocks(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """(block_q, block_k) as `Mask.build` takes them."""
    sizes = block_sizes(block_size)
    for size in sizes:
        if size % 16 or not 16 <= size <= 256:
            raise ValueError(f"block_size is {block_size!r}: give multiples of 16, 16 to 256")
    return sizes


def budget(name: str, value: Any) -> Rule:
    """The rule of a number of blocks, at least 1, or of a share of them in (0, 1]."""
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ValueError(f"{name} is {value}: give a share in (0, 1], or a number of blocks")
        return Rule("share", value)
    return Rule("count", integer(name, value, least=1))


def fraction(name: str, value: Any) -> float:
    """A probability in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name} is {value!r}: give a number in (0, 1]")
    return float(value)


def limits(least: Any, most: Any) -> tuple[int, int | None]:
    """The bounds of a rule that adapts itself to the row."""
    least = integer("least", least, least=1)
    return least, None if most is None else integer("most", most, least=least)


def extent_text(block_size: tuple[int, int]) -> int | tuple[int, int]:
    """The shortest way to write a block size."""
    return block_size[0] if block_size[0] == block_size[1] else block_size
