"""The layouts of DeepSpeed's sparse attention (deepspeed/ops/sparse_attention/sparsity_config.py).

Option names and defaults are those of its `SparsityConfig` classes; a block is 16 tokens. As in
DeepSpeed, masks are of whole blocks. So a unidirectional one is not causal inside the diagonal
blocks: add `& causal()`. In DeepSpeed the block must divide the length; here the last one may be
ragged. DeepSpeed draws random blocks from Python's global generator; here they are hashes of a
seed.
"""

from typing import Any

from masks.algebra import Mask
from masks.checks import choice, flag, integer
from masks.leaves.draws import Stream
from masks.presets.deepspeed_layouts import Fixed, Ranges, Sliding, Variable
from masks.registry import Example, pattern

__all__ = [
    "deepspeed_bigbird",
    "deepspeed_bslongformer",
    "deepspeed_fixed",
    "deepspeed_local_sliding_window",
    "deepspeed_variable",
]
SECTION = "Presets"  # of the gallery

DIRECTIONS = ("bidirectional", "unidirectional")
ONCE = Stream(0, False, False, None)  # of patterns that draw nothing


@pattern(
    Example(
        "deepspeed_fixed(4, 1)", "`FixedSparsityConfig`", "(n*(4 + n//4 - 1))*B**2", "DeepSpeed"
    ),
    written=2,
)
def deepspeed_fixed(
    num_local_blocks: int = 4,
    num_global_blocks: int = 1,
    *,
    attention: str = "bidirectional",
    horizontal_global_attention: bool = False,
    num_different_global_patterns: int = 1,
    block: int = 16,
) -> Mask:
    """`FixedSparsityConfig`: windows that do not overlap, and summary columns in each of them.

    The last `num_global_blocks` columns of every window of `num_local_blocks` are seen by all rows.
    Unidirectional, they are seen from the row of the first of them on, so that more than one has
    blocks above the diagonal. A short window at the end has its columns in their usual place if
    that exists, and else at its end. Of n x n blocks, with L local and G global ones and L dividing
    n, n(L + G(n/L - 1)) are allowed; unidirectional with G = 1, n(L + n/L) / 2.

    Args:
        num_local_blocks: blocks of a window, >= 1.
        num_global_blocks: >= 1, a divisor of `num_local_blocks`.
        attention: "bidirectional" or "unidirectional".
        horizontal_global_attention: the global blocks also see all; bidirectional only.
        num_different_global_patterns: above 1, head h has the h-th last group of global blocks
            modulo this number (`different_layout_per_head` there).
        block: tokens of a block, >= 1.
    """
    size = integer("num_local_blocks", num_local_blocks, min=1)
    count = integer("num_global_blocks", num_global_blocks, min=1, max=size)
    if size % count:
        raise ValueError(f"num_global_blocks is {count}: give a divisor of {size}")
    groups = integer("num_different_global_patterns", num_different_global_patterns, min=1)
    if groups > size // count:
        raise ValueError(
            f"num_different_global_patterns is {groups}: give at most {size // count}, "
            f"for {count} blocks each have to fit into {size}"
        )
    causal, horizontal = _direction(attention, horizontal_global_attention)
    block = integer("block", block, min=1)
    return Fixed(block, ONCE, size, count, causal, horizontal, groups)


@pattern(Example("deepspeed_variable(1)", "`VariableSparsityConfig`", "", "DeepSpeed"))
def deepspeed_variable(
    num_random_blocks: int = 0,
    local_window_blocks: tuple[int, ...] = (4,),
    global_block_indices: tuple[int, ...] = (0,),
    global_block_end_indices: tuple[int, ...] | None = None,
    *,
    attention: str = "bidirectional",
    horizontal_global_attention: bool = False,
    block: int = 16,
    seed: int = 0,
    different_layout_per_head: bool = False,
) -> Mask:
    """`VariableSparsityConfig`: windows of given sizes, global columns, random blocks.

    The quirks of DeepSpeed are kept. Random blocks are drawn among all columns, unidirectional or
    not, and may repeat other ones. A unidirectional range of global columns begins with its first
    row, above the diagonal.

    Args:
        num_random_blocks: of every row, >= 0; `build` raises when there are fewer columns.
        local_window_blocks: blocks of the windows, the last of which repeats.
        global_block_indices: columns that all rows see; unidirectional, the rows from the same
            number on. Columns beyond the length are left out.
        global_block_end_indices: makes them ranges; each ends before this number.
        attention, horizontal_global_attention, block: as in `deepspeed_fixed`.
        seed: of the random blocks, as in `random_blocks`.
        different_layout_per_head: draw them for every head.
    """
    causal, horizontal = _direction(attention, horizontal_global_attention)
    stream = Stream.of(seed, different_layout_per_head, False, None)
    windows = _numbers("local_window_blocks", local_window_blocks, min=1)
    if not windows:
        raise ValueError("local_window_blocks is (): give one size at least")
    ranges = _ranges(global_block_indices, global_block_end_indices)
    random = integer("num_random_blocks", num_random_blocks, min=0)
    block = integer("block", block, min=1)
    return Variable(block, stream, random, ranges, causal, windows, horizontal)


@pattern(Example("deepspeed_bigbird()", "`BigBirdSparsityConfig`", "", "DeepSpeed"))
def deepspeed_bigbird(
    num_random_blocks: int = 1,
    num_sliding_window_blocks: int = 3,
    num_global_blocks: int = 1,
    *,
    attention: str = "bidirectional",
    block: int = 16,
    seed: int = 0,
    different_layout_per_head: bool = False,
) -> Mask:
    """`BigBirdSparsityConfig`: the first rows and columns, a window, and random blocks.

    The quirks of DeepSpeed are kept. There are no global blocks at the end. The window has
    2 * (num_sliding_window_blocks // 2) + 1 blocks. Random blocks may repeat other ones, so at most
    6n - 6 of n x n blocks are allowed by default. Unidirectional, row I draws from I + 1 columns.
    With more than one random block that fails in DeepSpeed, and raises an error here.

    Args:
        num_random_blocks: of every row, >= 0.
        num_sliding_window_blocks: >= 1.
        num_global_blocks: >= 0.
        attention: "bidirectional", or "unidirectional": nothing above the diagonal.
        block, seed, different_layout_per_head: as in `deepspeed_variable`.

    Raises:
        ValueError: a bad argument; or, in `build`, fewer blocks than one of these numbers.
    """
    stream = Stream.of(seed, different_layout_per_head, False, None)
    random = integer("num_random_blocks", num_random_blocks, min=0)
    if attention == "unidirectional" and random > 1:
        raise ValueError(
            f"num_random_blocks is {random}: the first row has one column, "
            "so give at most 1 for unidirectional attention"
        )
    count = integer("num_global_blocks", num_global_blocks, min=0)
    ranges = ((0, count),) if count else ()
    least = max(random, count)
    return _sliding(num_sliding_window_blocks, attention, block, ranges, stream, random, least)


@pattern(
    Example(
        "deepspeed_bslongformer()", "`BSLongformerSparsityConfig`", "(5*n - 6)*B**2", "DeepSpeed"
    )
)
def deepspeed_bslongformer(
    num_sliding_window_blocks: int = 3,
    global_block_indices: tuple[int, ...] = (0,),
    global_block_end_indices: tuple[int, ...] | None = None,
    *,
    attention: str = "bidirectional",
    block: int = 16,
) -> Mask:
    """`BSLongformerSparsityConfig`: a window, and global rows and columns.

    Of n x n blocks 5n - 6 are allowed by default. The window is that of `deepspeed_bigbird`.

    Args:
        num_sliding_window_blocks: >= 1; `build` raises when there are fewer blocks.
        global_block_indices, global_block_end_indices: as in `deepspeed_variable`; rows as well.
        attention: "bidirectional", or "unidirectional": nothing above the diagonal.
        block: tokens of a block, >= 1.
    """
    ranges = _ranges(global_block_indices, global_block_end_indices)
    return _sliding(num_sliding_window_blocks, attention, block, ranges)


@pattern(
    Example(
        "deepspeed_local_sliding_window()",
        "`LocalSlidingWindowSparsityConfig`",
        "(2*n - 1)*B**2",
        "DeepSpeed",
    )
)
def deepspeed_local_sliding_window(
    num_sliding_window_blocks: int = 3, *, attention: str = "unidirectional", block: int = 16
) -> Mask:
    """`LocalSlidingWindowSparsityConfig`: a window, which unlike the others ends at the diagonal.

    With w = num_sliding_window_blocks // 2, n(w + 1) - w(w + 1)/2 of n x n blocks are allowed, and
    n(2w + 1) - w(w + 1) when bidirectional.

    Args:
        num_sliding_window_blocks: >= 1; `build` raises when there are fewer blocks.
        attention: "unidirectional" or "bidirectional".
        block: tokens of a block, >= 1.
    """
    return _sliding(num_sliding_window_blocks, attention, block, ())


def _sliding(
    window: Any,
    attention: Any,
    block: Any,
    ranges: Ranges,
    stream: Stream = ONCE,
    random: int = 0,
    least: int = 0,
) -> Sliding:
    """A layout with a window, for at least `least` blocks."""
    causal, _ = _direction(attention, False)
    window = integer("num_sliding_window_blocks", window, min=1)
    block = integer("block", block, min=1)
    return Sliding(block, stream, random, ranges, causal, window, max(window, least))


def _direction(attention: Any, horizontal: Any) -> tuple[bool, bool]:
    """(whether it is unidirectional, whether global blocks see all)"""
    causal = choice("attention", attention, DIRECTIONS) == "unidirectional"
    if flag("horizontal_global_attention", horizontal) and causal:
        raise ValueError("horizontal_global_attention is True: it needs attention='bidirectional'")
    return causal, horizontal


def _numbers(name: str, values: Any, *, min: int) -> tuple[int, ...]:
    if not isinstance(values, tuple | list):
        raise ValueError(f"{name} is {values!r}: give a tuple of integers")
    return tuple(integer(f"one of {name}", value, min=min) for value in values)


def _ranges(first: Any, stop: Any) -> Ranges:
    """The ranges of global blocks."""
    starts = _numbers("global_block_indices", first, min=0)
    if stop is None:
        return tuple((x, x + 1) for x in starts)
    stops = _numbers("global_block_end_indices", stop, min=0)
    if len(starts) != len(stops) or any(a >= b for a, b in zip(starts, stops, strict=False)):
        raise ValueError(
            f"global_block_end_indices is {stops}: give one number for each of {starts}, above it"
        )
    return tuple(zip(starts, stops, strict=True))
