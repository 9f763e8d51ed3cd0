"""Random regular graphs of token blocks, and those that are proved expanders.

Exphormer (Shirzad et al., arXiv 2303.06147) takes d / 2 random permutations and their inverses, a
multigraph, and draws again until the spectral gap is close to the largest one possible.
"""

import math

import numpy as np

from masks.algebra import Mask
from masks.checks import integer
from masks.leaves.draws import GOLDEN, HALF, Stream, Words, mix, permutation
from masks.leaves.graphs import Graph
from masks.registry import pattern
from masks.runs import Ints

__all__ = ["expander", "random_regular"]
SECTION = "Graphs of token blocks"  # of the gallery

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

    The graph is symmetric, and every block sees itself: n(degree + 1) of n x n are allowed. It is
    the union of degree / 2 permutations of the n key token blocks and of their inverses; a
    permutation sorts the blocks by hashes of (seed, layer, head), and where it repeats an edge or
    meets itself, two of its values change places. With n <= 2 * degree all pairs are allowed. Where
    n_q > n_k, query token block I is block I mod n.

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
