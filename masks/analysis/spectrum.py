"""The spectral gap of a mask as a graph: how fast layers mix information."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from masks.analysis.components import block_components
from masks.analysis.segments import Segments, merged
from masks.analysis.symmetry import is_symmetric

DENSE = 512  # blocks: up to here the eigenvalues come from the dense matrix
LANCZOS = 200  # steps beyond, at most;
ENOUGH = 1e-3  # they end when 20 more change the gap by less than that share

Floats = NDArray[np.float64]


def second_eigenvalue(segments: Segments) -> float | None:
    """Second largest modulus of the eigenvalues of D**-1/2 A D**-1/2, with A the block graph.

    A[I, J] is 1 where block (I, J) is not empty in any slice, and D has the row sums. None unless
    A is symmetric. It is 1 where the graph falls apart. Beyond 512 blocks by Lanczos's method:
    from below, and to about 1e-3.
    """
    graph = merged(segments)
    grid = graph.grid
    if grid.block_q != grid.block_k or not is_symmetric(graph):
        return None
    n = grid.rows
    if n == 1:
        return 0.0
    if len(np.unique(block_components(graph))) > 1:
        return 1.0
    degree = np.bincount(graph.row, graph.length, n)
    top = np.sqrt(degree / degree.sum())  # the eigenvector of 1
    scale = 1 / np.sqrt(degree)
    begins = np.flatnonzero(np.append(True, np.diff(graph.row)))

    def times(x: Floats) -> Floats:
        before = np.append(0.0, np.cumsum(x * scale))
        return np.add.reduceat(before[graph.stop] - before[graph.first], begins) * scale

    if n <= DENSE:
        matrix = np.stack([times(unit) for unit in np.eye(n)])
        return float(np.abs(np.linalg.eigvalsh(matrix - np.outer(top, top))).max())
    return _lanczos(times, top)


def _lanczos(times: Callable[[Floats], Floats], top: Floats) -> float:
    """Largest modulus of an eigenvalue of a symmetric matrix, orthogonally to the vector `top`."""
    steps = min(LANCZOS, len(top) - 1)
    basis = np.zeros((steps + 1, len(top)))
    basis[0] = top
    x = np.random.default_rng(0).standard_normal(len(top))
    tri = np.zeros((steps, steps))
    found = 0.0
    for step in range(steps):
        q = basis[: step + 1]
        for _ in range(2):  # once is not enough against rounding
            x -= (q @ x) @ q
        norm = float(np.linalg.norm(x))
        if norm < 1e-9:  # the rest of the space holds nothing new
            return _largest(tri[:step, :step])
        basis[step + 1] = x / norm
        if step:
            tri[step, step - 1] = norm  # the lower half will do
        x = times(basis[step + 1])
        tri[step, step] = basis[step + 1] @ x
        if step % 20 == 19:
            before, found = found, _largest(tri[: step + 1, : step + 1])
            if found - before < ENOUGH * (1 - found):
                return found
    return _largest(tri)


def _largest(tri: Floats) -> float:
    return min(1.0, float(np.abs(np.linalg.eigvalsh(tri)).max(initial=0)))
