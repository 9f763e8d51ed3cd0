"""Masks from text, and in the forms that the tests look at."""

import re

import numpy as np
import scipy.sparse

import masks
from experiments.lra import masks as lra
from masks import Mask

B = 16  # tokens of a token block
LONG = 1 << 20  # tokens


def mask_of(expression: str) -> Mask:
    """Python with the names of `masks`, and of the patterns of the Long Range Arena."""
    others = {name: getattr(lra, name) for name in lra.__all__}
    return eval(expression, {**vars(masks), **others, "np": np, "scipy": scipy})


def rows(table: str) -> list[list[str]]:
    """Lines `a  =>  b` of a text; a line that begins with => goes on with the one before."""
    lines = re.sub(r"\n +=>", "  =>", table.strip()).split("\n")
    return [line.split("  =>  ") for line in lines]


def dense(mask: Mask, n_q: int, n_k: int | None = None) -> np.ndarray:
    """bool (n_q, n_k)"""
    return mask.build(n_q, n_k, 32).to_dense()[0, 0]


def graph(
    mask: Mask, n: int, heads: int | None = None, *, block: int = B, cols: int | None = None
) -> np.ndarray:
    """bool (heads or 1, n, cols or n), of token blocks"""
    return mask.build(n * block, (cols or n) * block, block, heads=heads).layout()[0] > 0


def kinds(mask: Mask, n: int, block_size: int) -> tuple[int, int, int]:
    """(full blocks, partial blocks, bit tiles)"""
    blocks = mask.build(n, block_size=block_size)
    lengths = np.diff(blocks.starts, append=blocks.grid.size)
    full, partial = (lengths[kind].sum() for kind in (blocks.tiles == -1, blocks.tiles >= 0))
    return int(full), int(partial), len(blocks.bits)
