"""The formulas by which the papers compare standard attention with FlashAttention.

All are for one head of one sequence: N queries, N keys, head dim d. Accesses count elements read
from or written to the GPU's main memory (HBM). M is the fast memory of one multiprocessor in
elements.

Dao et al., FlashAttention, arXiv 2205.14135 (Algorithms 0, 1, 3 and 4); Dao, FlashAttention-2,
arXiv 2307.08691.
"""

from experiments.bench.cost import Ceilings

DIRECTIONS = ("forward", "backward", "both")
PRODUCTS = {"forward": 2, "backward": 4}  # S, O; dV, dP, dQ, dK
STATISTICS = 2  # numbers kept for each query: its maximum and its sum


def flops(n: int, head_dim: int, direction: str = "forward", *, recompute: bool = True) -> int:
    """Floating-point operations of the matrix products, 2 N^2 d each.

    4 N^2 d forward. 8 N^2 d backward from stored probabilities; 10 if S is recomputed, as
    FlashAttention does. Both directions: 12 or 14.

    Raises ValueError for an unknown direction.
    """
    products = sum(PRODUCTS[part] for part in _parts(direction))
    products += recompute and direction != "forward"
    return 2 * products * n * n * head_dim


def standard_accesses(n: int, head_dim: int, direction: str = "forward") -> int:
    """Elements that standard attention moves: every product and softmax reads and writes HBM.

    Forward 4 N^2 + 4 N d: S written and read, P written and read; q, k, v and out.
    Backward 7 N^2 + 8 N d: P read twice, dP and dS written, dP read once, dS twice.

    Raises ValueError for an unknown direction.
    """
    matrices = {"forward": 4, "backward": 7}
    vectors = {"forward": 4, "backward": 8}
    parts = _parts(direction)
    return sum(matrices[p] * n * n + vectors[p] * n * head_dim for p in parts)


def flash_accesses(
    n: int, head_dim: int, sram: int, direction: str = "forward", *, density: float = 1.0
) -> float:
    """Elements that FlashAttention moves with `sram` elements of fast memory: order N^2 d^2 / M.

    The loops of the paper: each of N / B_c tiles of keys and values is loaded once, and meets
    every tile of queries. Forward it reads q, out and both statistics and writes the last three
    again; backward it reads q, out, dout, dq and both statistics and writes dq.

    Args:
        density: the share of tiles that are computed; the others are not loaded.

    Raises:
        ValueError: an unknown direction, or less fast memory than a tile needs.
    """
    passes = density * -(-n // paper_tiles(sram, head_dim)[1])
    total = 0.0
    for part in _parts(direction):
        if part == "forward":
            once, again = 2 * n * head_dim, 3 * n * head_dim + 2 * STATISTICS * n
        else:
            once, again = 4 * n * head_dim, 5 * n * head_dim + STATISTICS * n
        total += once + passes * again
    return total


def paper_tiles(sram: int, head_dim: int) -> tuple[int, int]:
    """Return the queries and keys of a tile in the paper: four tiles fill the fast memory, of M
    elements.

    B_c = M / 4d keys and B_r = min(B_c, d) queries, rounded up.

    Raises ValueError if M < 4 d, which does not hold a single key.
    """
    if sram < 4 * head_dim:
        raise ValueError(
            f"sram={sram} elements hold no tile of head_dim {head_dim}: "
            f"give at least 4 * head_dim = {4 * head_dim}"
        )
    keys = -(-sram // (4 * head_dim))
    return min(keys, head_dim), keys


def tile_bytes(block_q: int, block_k: int, head_dim: int, itemsize: int = 2) -> int:
    """Bytes on the chip for one step of the forward loop.

    Tiles of q, k and v in the dtype of the inputs; scores, the unscaled output, the maximum and
    the sum in float32.
    """
    inputs = (block_q + 2 * block_k) * head_dim * itemsize
    return inputs + 4 * block_q * (block_k + head_dim + STATISTICS)


def score_bytes(n: int, itemsize: int = 2) -> int:
    """Bytes of the N x N scores that standard attention stores."""
    return n * n * itemsize


def statistics_bytes(n: int) -> int:
    """Bytes of the float32 maximum and sum of every query, which FlashAttention stores instead.

    The LSE, which joins the two, takes half.
    """
    return 4 * STATISTICS * n


def intensity(operations: float, hbm_bytes: float) -> float:
    """Arithmetic intensity: operations a byte of HBM traffic."""
    return operations / hbm_bytes


def ridge(ceilings: Ceilings, dtype: str) -> float:
    """Return the intensity from which on the matrix products, not the memory, limit a device."""
    return ceilings.matmul_tflops[dtype] / ceilings.copy_tbs


def attainable_tflops(operations_a_byte: float, ceilings: Ceilings, dtype: str) -> float:
    """Return the roofline: the most TFLOP/s that a device reaches at an arithmetic intensity."""
    return min(ceilings.matmul_tflops[dtype], operations_a_byte * ceilings.copy_tbs)


def _parts(direction: str) -> tuple[str, ...]:
    if direction not in DIRECTIONS:
        raise ValueError(f"direction {direction!r}: choose from {', '.join(DIRECTIONS)}")
    return tuple(PRODUCTS) if direction == "both" else (direction,)
