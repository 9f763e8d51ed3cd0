"""Against FlexAttention: `create_block_mask` with formulas written from the definitions alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import masks
from masks import interop

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

LENGTHS = ((512, 512), (300, 450), (150, 500))
SQUARE = ((512, 512), (450, 450))
CANVAS = (18, 20)  # of the masks on an image, and of the long ones:
LONG = 4096
LONG_CANVAS = (64, 64)


@dataclass(frozen=True)
class Case:
    """A mask by name, and the formula of its definition, each for lengths (n_q, n_k)."""

    name: str
    make: Callable[[int, int], masks.Mask]
    formula: Callable[[int, int], Callable[..., Any]]
    lengths: tuple[tuple[int, int], ...] = LENGTHS


CASES: list[Case] = []


def case(name: str, make: Callable[..., Any], lengths=LENGTHS):
    """Decorator of (n_q, n_k) -> mask_mod."""

    def register(formula):
        CASES.append(Case(name, make, formula, lengths))
        return formula

    return register


def plain(name: str, mask: Callable[[], Any], formula: Callable[..., Any]) -> None:
    """A case that does not depend on the lengths: formula(q, k)."""
    case(name, lambda n_q, n_k: mask())(lambda n_q, n_k: lambda b, h, q, k: formula(q, k))


def canvas_of(n: int) -> tuple[int, int]:
    return LONG_CANVAS if n == LONG else CANVAS


def on_image(name: str, make: Callable[[tuple[int, int]], Any], formula) -> None:
    """A case on an image: formula((height, width), (row, column) of q, (row, column) of k)."""
    n = CANVAS[0] * CANVAS[1]

    def mod(n_q, n_k):
        canvas = canvas_of(n_q)

        def mask_mod(b, h, q, k):
            places = [(x // canvas[1], x % canvas[1]) for x in (q, k)]
            return formula(canvas, *places)

        return mask_mod

    case(name, lambda n_q, n_k: make(canvas_of(n_q)), ((n, n),))(mod)


def one_of(x, numbers):
    return sum((x == number for number in numbers[1:]), x == numbers[0]) > 0


def power_of_two(d):
    return (d > 0) & (d & (d - 1) == 0)


plain("dense", lambda: masks.dense(), lambda q, k: (q >= 0) | (k >= 0))
plain("causal", lambda: masks.causal(), lambda q, k: q >= k)
plain("local", lambda: masks.local(100, 30), lambda q, k: (q - k <= 100) & (k - q <= 30))
plain("sliding", lambda: masks.sliding(128), lambda q, k: (q - k >= 0) & (q - k < 128))
plain(
    "global_tokens",
    lambda: (masks.sliding(60) | masks.global_tokens(20)) & masks.causal(),
    lambda q, k: ((q - k < 60) | (k < 20) | (q < 20)) & (q >= k),
)
plain(
    "butterfly",
    lambda: masks.butterfly(64) - masks.local(10),
    lambda q, k: (
        ((((q // 64) ^ (k // 64)) & (((q // 64) ^ (k // 64)) - 1)) == 0)
        & ~((q - k <= 10) & (k - q <= 10))
    ),
)
plain("dilated", lambda: masks.dilated(90, 4), lambda q, k: (abs(q - k) <= 90) & ((q - k) % 4 == 0))
plain(
    "power_of_two",
    lambda: masks.power_of_two() & masks.causal(),
    lambda q, k: (q == k) | power_of_two(q - k),
)
plain("diagonals", lambda: masks.diagonals((7, -40)), lambda q, k: (q - k == 7) | (k - q == 40))
plain(
    "strided",
    lambda: masks.strided(48),
    lambda q, k: (q >= k) & ((q - k < 48) | ((q - k) % 48 == 0)),
)
plain(
    "fixed",
    lambda: masks.fixed(48, 5),
    lambda q, k: (q >= k) & ((q // 48 == k // 48) | (k % 48 >= 43)),
)
plain("sinks", lambda: masks.sinks(37), lambda q, k: k < 37)
plain("global_rows", lambda: masks.global_rows(70), lambda q, k: q < 70)
plain(
    "global_at",
    lambda: masks.global_at((3, 77, 200)),
    lambda q, k: one_of(q, (3, 77, 200)) | one_of(k, (3, 77, 200)),
)
plain("prefix_lm", lambda: masks.prefix_lm(75), lambda q, k: (k < 75) | (q >= k))
plain(
    "streaming",
    lambda: masks.streaming(4, 90),
    lambda q, k: (q >= k) & ((k < 4) | (q - k < 90)),
)
plain(
    "vertical_slash",
    lambda: masks.vertical_slash((0, 50, 51, 260), (0, 1, 2, 130)),
    lambda q, k: (q >= k) & (one_of(k, (0, 50, 51, 260)) | one_of(q - k, (0, 1, 2, 130))),
)
plain("block_diagonal", lambda: masks.block_diagonal(50), lambda q, k: q // 50 == k // 50)
plain("block_causal", lambda: masks.block_causal(50), lambda q, k: q // 50 >= k // 50)
plain(
    "longnet",
    lambda: masks.longnet(120, 3, 1),
    lambda q, k: (q // 120 == k // 120) & (q % 120 % 3 == 1) & (k % 120 % 3 == 1),
)
plain(
    "longformer",
    lambda: masks.longformer(65, global_tokens=(0, 9)),
    lambda q, k: (abs(q - k) <= 32) | one_of(q, (0, 9)) | one_of(k, (0, 9)),
)
# Windows as others count them.
plain(  # transformers: sliding_window_overlay(window) and causal
    "sliding", lambda: masks.sliding(64), lambda q, k: (k > q - 64) & (k <= q)
)
plain("local", lambda: masks.local(64), lambda q, k: abs(q - k) <= 64)  # and bidirectional
plain(  # attention-gym: generate_sliding_window(window)
    "sliding", lambda: masks.sliding(64 + 1), lambda q, k: (q >= k) & (q - k <= 64)
)


@case("local", lambda n_q, n_k: masks.local(70, 20, align="bottom_right"))
def flash_attention_window(n_q, n_k):
    """window_size=(70, 20): both ends included, the last query faces the last key."""
    return lambda b, h, q, k: (k >= q + n_k - n_q - 70) & (k <= q + n_k - n_q + 20)


@case("causal", lambda n_q, n_k: masks.causal(align="bottom_right"))
def flash_attention_causal(n_q, n_k):
    return lambda b, h, q, k: k <= q + n_k - n_q


def cuts(n: int) -> list[int]:
    """Lengths of documents: some in one block, some over several, one of them a single token."""
    lengths = [1, 31, 32, 100, 7, 161]
    while sum(lengths) < n:
        lengths.append(90 + len(lengths))
    lengths[-1] -= sum(lengths) - n
    return lengths


def numbers(lengths: list[int]):
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


@case("documents", lambda n_q, n_k: masks.documents(cuts(n_q)) & masks.causal(), SQUARE)
def documents(n_q, n_k):
    number = numbers(cuts(n_q))
    return lambda b, h, q, k: (number[q] == number[k]) & (q >= k)


@case("shared_prefix", lambda n_q, n_k: masks.shared_prefix(40, cuts(n_q - 40)), SQUARE)
def shared_prefix(n_q, n_k):
    number = numbers([40, *cuts(n_q - 40)])
    return lambda b, h, q, k: (number[k] == 0) | (number[q] == number[k])


@case("random_blocks", lambda n_q, n_k: masks.random_blocks(0.3, block=32, per_head=True))
def random_blocks(n_q, n_k):
    """No formula: the blocks drawn, as a table."""
    drawn = masks.random_blocks(0.3, block=32, per_head=True).build(n_q, n_k, 32, heads=2)
    table = torch.from_numpy(drawn.layout()[0] != 0)
    return lambda b, h, q, k: table[h, q // 32, k // 32]


def window_start(place, extent: int, kernel: int):
    """First key of the window: shifted at the borders, so that it always has `kernel` keys."""
    return (place - kernel // 2).clamp(0, extent - kernel)


def natten(kernel: int):
    def formula(canvas, q, k):
        starts = [window_start(x, extent, kernel) for x, extent in zip(q, canvas, strict=True)]
        inside = [(x >= start) & (x < start + kernel) for x, start in zip(k, starts, strict=True)]
        return inside[0] & inside[1]

    return formula


def dilated_natten(kernel: int, dilation: int):
    """The same among the tokens whose coordinates leave the same remainders."""

    def formula(canvas, q, k):
        allowed = True
        for x, y, extent in zip(q, k, canvas, strict=True):
            rest = x % dilation
            count = (extent - rest + dilation - 1) // dilation
            start = torch.minimum((x // dilation - kernel // 2).clamp(min=0), count - kernel)
            inside = (y // dilation >= start) & (y // dilation < start + kernel)
            allowed = allowed & inside & (y % dilation == rest)
        return allowed

    return formula


def tile_window(tile: int, window: int):
    """Tiles around the query's own, moved inwards at the borders."""

    def formula(canvas, q, k):
        allowed = True
        for x, y, extent in zip(q, k, canvas, strict=True):
            start = window_start(x // tile, extent // tile, window)
            allowed = allowed & (y // tile >= start) & (y // tile < start + window)
        return allowed

    return formula


on_image("neighborhood", lambda canvas: masks.neighborhood(canvas, 7), natten(7))
on_image("neighborhood", lambda canvas: masks.neighborhood(canvas, 4), natten(4))
on_image(
    "neighborhood",
    lambda canvas: masks.neighborhood(canvas, 3, dilation=4),
    dilated_natten(3, 4),
)
on_image(
    "local_2d",
    lambda canvas: masks.local_2d(canvas, 3),
    lambda canvas, q, k: (abs(q[0] - k[0]) <= 3) & (abs(q[1] - k[1]) <= 3),
)
on_image(
    "axial",
    lambda canvas: masks.axial(canvas),
    lambda canvas, q, k: (q[0] == k[0]) | (q[1] == k[1]),
)
on_image("sliding_tiles", lambda canvas: masks.sliding_tiles(canvas, 2, 3), tile_window(2, 3))

PARAMETERS = [pytest.param(c, id=f"{i}-{c.name}") for i, c in enumerate(CASES)]


def both(case: Case, n_q: int, n_k: int, block_size: tuple[int, int]):
    """Our block mask and theirs."""
    mask = case.make(n_q, n_k)
    heads = 2 if mask.per_head else None
    theirs = flex.create_block_mask(
        case.formula(n_q, n_k), None, heads, n_q, n_k, device="cpu", BLOCK_SIZE=block_size
    )
    return mask.build(n_q, n_k, block_size, heads=heads), theirs


def check_kinds(ours: masks.BlockMask, theirs: Any) -> None:
    """The same blocks are empty, partial and full, but at ragged ends, where theirs are partial."""
    layout = np.zeros((ours.heads, ours.rows, ours.cols), np.uint8)
    for code, counts, columns in (
        (1, theirs.kv_num_blocks, theirs.kv_indices),
        (2, theirs.full_kv_num_blocks, theirs.full_kv_indices),
    ):
        for head, row in np.ndindex(*layout.shape[:2]):
            count = int(counts[0, head, row])
            layout[head, row, columns[0, head, row, :count].tolist()] = code

    expected = ours.layout()[0]
    ragged = np.zeros(expected.shape, bool)
    ragged[:, -1, :] |= ours.n_q % ours.block_size[0] != 0
    ragged[:, :, -1] |= ours.n_k % ours.block_size[1] != 0
    expected[ragged & (expected == 2)] = 1
    assert np.array_equal(expected, layout)


@pytest.mark.parametrize("case", PARAMETERS)
def test_the_same_mask(case: Case):
    sizes = ((64, 64), (128, 32), (32, 48))
    for (n_q, n_k), block_size in zip(case.lengths, sizes, strict=False):
        ours, theirs = both(case, n_q, n_k, block_size)
        check_kinds(ours, theirs)
        tokens = flex.create_mask(theirs.mask_mod, None, ours.heads, n_q, n_k, device="cpu")
        assert np.array_equal(ours.to_dense(), tokens.numpy())
    assert interop.from_flex(theirs) == ours


@pytest.mark.parametrize("case", PARAMETERS)
def test_the_same_long_mask(case: Case):
    check_kinds(*both(case, LONG, LONG, (128, 128)))
