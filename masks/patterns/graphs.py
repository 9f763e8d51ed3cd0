"""Graphs of token blocks: butterflies, random blocks, random regular graphs, expanders.

Exphormer (Shirzad et al., arXiv 2303.06147) takes d / 2 random permutations and their inverses, a
multigraph, and draws again until the spectral gap is close to the largest one possible.
"""

import math

import numpy as np

from masks.algebra import Mask
from masks.checks import flag, integer
from masks.leaves.draws import GOLDEN, HALF, Drawn, Graph, Stream, Words, choose, mix, permutation
from masks.leaves.leaf import ByLength
from masks.leaves.token_blocks import TokenBlocks
from masks.patterns.columns import global_tokens
from masks.registry import Example, canonical, pattern
from masks.runs import Ints

__all__ = ["butterfly", "expander", "pixelfly", "random_blocks", "random_regular"]
SECTION = "Graphs of token blocks"  # of the gallery


@pattern(
    "butterfly(16)",
    "a hypercube: log2(n) layers see all; not together with causal alone",
    "n*(L + 1)*B**2",
    "2112.00029",
    also=(
        Example(
            "butterfly(16, levels=2)",
            "fewer strides: blocks in groups of four that never meet",
            "n*3*B**2",
            "2112.00029",
        ),
    ),
    written=1,
)
def butterfly(
    block: int | None = None, levels: int | None = None, *, size: int | None = None
) -> Mask:
    """Token blocks I = q // block and J = k // block with I == J, or I ^ J == 2**t and t < levels.

    Read as a graph of token blocks it is a hypercube with self loops: symmetric, and log2(n) layers
    connect everything. With fewer levels, groups of 2**levels blocks never see each other. A number
    that is not a power of two is cropped. In `butterfly & causal`, at any depth, a block only sees
    blocks whose number is its own with bits cleared, so add `local`.

    Args:
        block: tokens of a token block, >= 1; 128 unless `size` is given.
        levels: how many strides 1, 2, 4, ..; None takes all that the length holds.
        size: the number of token blocks instead, a power of two, at every length: a block has
            ceil(n / size) tokens, n the longer of n_q and n_k. This is `butterfly_size` of the
            published code, whose `n_factors` are the levels, 1 to log2(size).
    """
    levels = None if levels is None else integer("levels", levels, min=0)
    if size is not None:
        if block is not None:
            raise ValueError(f"block is {block} and size is {size}: give one of them")
        size = integer("size", size, min=1)
        if size & (size - 1):
            raise ValueError(f"size is {size}: give a power of two")
        if levels is not None and levels >= size.bit_length():
            raise ValueError(f"levels is {levels}: {size} blocks have {size.bit_length() - 1}")
        return ByLength(lambda grid: Butterfly(-(-max(grid.n_q, grid.n_k) // size), levels))
    block = 128 if block is None else integer("block", block, min=1)
    return canonical(Butterfly(block, levels), block=block)


@pattern(
    "pixelfly(16)", "the butterfly and a global block", "(n*(L + 3) - 2*L - 2)*B**2", "2112.00029"
)
def pixelfly(block: int = 128, levels: int | None = None, global_blocks: int = 1) -> Mask:
    """`butterfly(block, levels)`, and rows and columns of global token blocks at the beginning.

    The global part takes the place of the low-rank part in attention. The text is that of the
    union.

    Args:
        block, levels: as in `butterfly`.
        global_blocks: how many token blocks see all and are seen by all, >= 0.
    """
    block = integer("block", block, min=1)
    global_blocks = integer("global_blocks", global_blocks, min=0)
    return butterfly(block, levels) | global_tokens(global_blocks * block)


class Butterfly(TokenBlocks):
    levels: int | None

    def pairs(self, head: int, rows: Ints, n_cols: int) -> tuple[Ints, Ints]:
        held = int(max(rows[-1], n_cols - 1)).bit_length()
        levels = held if self.levels is None else min(self.levels, held)
        strides = np.append(0, 1 << np.arange(levels, dtype=np.int64))
        cols = np.sort(rows[:, None] ^ strides, axis=1)
        i, place = np.nonzero(cols < n_cols)
        return i, cols[i, place]


@pattern(
    "random_blocks(0.25, block=16)",
    "as many random blocks in every row",
    "n*4*B**2",
    "2007.14062",
    short="random",
    written=1,
)
def random_blocks(
    density: float | None = None,
    *,
    count: int | None = None,
    block: int = 128,
    causal: bool = False,
    seed: int = 0,
    per_head: bool = False,
    per_layer: bool = False,
    layer: int | None = None,
) -> Mask:
    """Return a uniformly drawn set of distinct key token blocks for every query token block.

    The draw is a hash of (seed, layer, head, row), free of global state: the same on every
    platform, and in every process of a distributed run. With n key token blocks every row has
    `count`, or max(1, round(density * n)) of them.

    Args:
        density: share of the key token blocks, in (0, 1]; at least one block is drawn.
        count: their number instead; `build` raises when the length holds fewer.
        block: tokens of a token block, >= 1.
        causal: row I draws from the I + 1 columns up to its own instead, their share or the count
            (all of them, where they are fewer), so that a longer sequence changes no draw. Token
            blocks on the diagonal stay whole: compose with `& causal()`.
        seed: 0 <= seed < 2**64.
        per_head: draw for every head; `build` then needs `heads=`.
        per_layer: draw for every layer; take `mask.layer(i)` before `build`.
        layer: the layer, where `per_layer`; `mask.layer(i)` gives it.
    """
    if (density is None) == (count is None):
        raise ValueError(f"density is {density} and count is {count}: give one of them")
    if density is not None:
        is_number = isinstance(density, int | float | np.floating) and not isinstance(density, bool)
        if not is_number or not 0 < density <= 1:
            raise ValueError(f"density is {density!r}: give a number in (0, 1]")
        density = float(density)
    count = None if count is None else integer("count", count, min=1)
    block, causal = integer("block", block, min=1), flag("causal", causal)
    stream = Stream.of(seed, per_head, per_layer, layer)
    return canonical(RandomBlocks(block, stream, density, count, causal), density=density)


class RandomBlocks(Drawn):
    density: float | None
    count: int | None
    causal: bool

    def pairs(self, head: int, rows: Ints, n_cols: int) -> tuple[Ints, Ints]:
        n = rows + 1 if self.causal else np.full(len(rows), n_cols)
        if self.count is None:
            count = np.maximum(1, np.rint((self.density or 0) * n).astype(np.int64))
        elif self.causal:
            count = np.minimum(self.count, n)
        elif self.count <= n_cols:
            count = np.full(len(rows), self.count)
        else:
            raise ValueError(
                f"{self} draws {self.count} key blocks of {self.block} tokens, but there are "
                f"{n_cols}: give a smaller count or block, or a density"
            )
        i, col = choose(self.source.keys(head, rows), count, n)
        if self.causal and n_cols <= rows[-1]:
            i, col = i[col < n_cols], col[col < n_cols]
        return i, col


ATTEMPTS = 100
DENSE = 512  # nodes up to which all eigenvalues are computed
STEPS = 64  # of the Lanczos iteration beyond
SLACK = 0.1  # that the spectral gap may lack


@pattern(
    "random_regular(4, 16)",
    "a random graph with as many neighbours for all",
    "n*(4 + 1)*B**2",
    "2303.06147",
    written=2,
)
def random_regular(
    degree: int,
    block: int = 128,
    *,
    seed: int = 0,
    per_head: bool = False,
    per_layer: bool = False,
    layer: int | None = None,
) -> Mask:
    """Return a random graph of token blocks in which every one has exactly `degree` neighbours.

    The graph is symmetric, and every block sees itself. It is the union of degree / 2 permutations
    of the n key token blocks and of their inverses. With n <= 2 * degree all pairs are allowed.
    Where n_q > n_k, query token block I is block I mod n.

    Args:
        degree: neighbours of a token block, even, >= 2.
        block: tokens of a token block, >= 1.
        seed, per_head, per_layer, layer: as in `random_blocks`.
    """
    stream = Stream.of(seed, per_head, per_layer, layer)
    return _regular(degree, 2, block, stream, -math.inf)


@pattern(
    "expander(4, 16)",
    "the same, drawn until it mixes well",
    "n*(4 + 1)*B**2",
    "2303.06147",
    written=2,
)
def expander(
    degree: int = 8,
    block: int = 128,
    *,
    seed: int = 0,
    per_head: bool = False,
    per_layer: bool = False,
    layer: int | None = None,
) -> Mask:
    """`random_regular`, drawn again until it expands as well as a graph of its degree can.

    The second smallest eigenvalue of the Laplacian is at least d - 2 sqrt(d - 1) - 0.1 with d the
    degree; no large graph has more than d - 2 sqrt(d - 1) (Alon and Boppana). So a few layers
    connect everything: about log(n) / log(d - 1). Up to 512 token blocks all eigenvalues are
    computed; beyond, 64 Lanczos steps find that one to some hundredths. `build` raises ValueError
    when none of 100 draws is good enough. With n <= max(10, 2 * degree) token blocks all pairs are
    allowed.

    Args:
        degree: neighbours of a token block, even, >= 4.
        block: tokens of a token block, >= 1.
        seed, per_head, per_layer, layer: as in `random_blocks`.
    """
    stream = Stream.of(seed, per_head, per_layer, layer)
    degree = integer("degree", degree, min=4)
    gap = degree - 2 * math.sqrt(degree - 1) - SLACK
    return _regular(degree, 4, block, stream, gap)


def _regular(degree: int, min_degree: int, block: int, stream: Stream, gap: float) -> Mask:
    degree, block = integer("degree", degree, min=min_degree), integer("block", block, min=1)
    if degree % 2:
        raise ValueError(f"degree is {degree}: give an even number")
    return RegularGraph(block, stream, degree, gap)


class RegularGraph(Graph):
    degree: int
    gap: float  # lower bound of the Laplacian's second eigenvalue; -inf for none

    def edges(self, head: int, n: int) -> tuple[Ints, Ints]:
        small = 10 if self.gap > -math.inf else 0
        if n <= max(small, 2 * self.degree):
            return np.triu_indices(n, 1)  # all of them
        for attempt in range(ATTEMPTS):
            word = mix(self.source.word(head) ^ np.uint64(attempt))
            neighbours = _union_of_permutations(n, self.degree // 2, word)
            if neighbours is None:
                continue
            if self.gap == -math.inf or spectral_gap(neighbours) >= self.gap:
                return np.repeat(np.arange(n), self.degree), neighbours.ravel()
        raise ValueError(
            f"{self} finds no graph of {n} token blocks with a spectral gap of {self.gap:.3f} in "
            f"{ATTEMPTS} draws: give another seed or degree"
        )


def _union_of_permutations(n: int, count: int, word: Words) -> Ints | None:
    """(n, 2 * count) neighbours of every node, all different; None where the draw gets stuck."""
    edges: set[tuple[int, int]] = set()
    permutations = []
    for t in range(count):
        key = mix(word ^ np.uint64(t))
        image = permutation(key, n).tolist()
        pending = []  # nodes whose edge is none: a loop, or one that exists
        for node in range(n):
            if not _add(edges, node, image[node]):
                pending.append(node)
        for node in pending:
            if not _exchange(edges, image, node, key, pending):
                return None
        permutations.append(image)
    forward = np.array(permutations)
    return np.concatenate([forward, np.argsort(forward, axis=1)]).T


def _exchange(
    edges: set[tuple[int, int]], image: list[int], node: int, key: Words, pending: list[int]
) -> bool:
    """Give `node` the image of another node that has an edge, so that both have new ones."""
    words = mix(mix(key ^ np.uint64(node)) + np.arange(64, dtype=np.uint64) * GOLDEN)
    for other in ((words >> HALF) * np.uint64(len(image)) >> HALF).tolist():
        a, b = image[node], image[other]
        if other in pending:
            continue
        edges.remove(_edge(other, b))
        if _add(edges, node, b):
            if _add(edges, other, a):
                image[node], image[other] = b, a
                return True
            edges.remove(_edge(node, b))
        edges.add(_edge(other, b))
    return False


def _edge(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)


def _add(edges: set[tuple[int, int]], a: int, b: int) -> bool:
    """Add the edge, if it is one and a new one."""
    edge = _edge(a, b)
    if a == b or edge in edges:
        return False
    edges.add(edge)
    return True


def spectral_gap(neighbours: Ints) -> float:
    """Return the Laplacian's second smallest eigenvalue of a regular graph without loops.

    Args:
        neighbours: (n, degree)
    """
    n, degree = neighbours.shape
    if n <= DENSE:
        matrix = np.zeros((n, n))
        np.put_along_axis(matrix, neighbours, 1, axis=1)
        return degree - float(np.linalg.eigvalsh(matrix)[-2])
    # Lanczos on the vectors orthogonal to the constant one, whose eigenvalue is the degree.
    basis, diagonal, beside = np.zeros((STEPS, n)), np.zeros(STEPS), np.zeros(STEPS - 1)
    vector = mix(np.arange(n, dtype=np.uint64)) / 2.0**64 - 0.5
    for step in range(STEPS):
        vector -= vector.mean()
        vector -= basis[:step].T @ (basis[:step] @ vector)
        length = np.linalg.norm(vector)
        if step:
            beside[step - 1] = length
        basis[step] = vector / length
        vector = basis[step][neighbours].sum(axis=1)
        diagonal[step] = basis[step] @ vector
    tridiagonal = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
    return degree - float(np.linalg.eigvalsh(tridiagonal)[-1])
