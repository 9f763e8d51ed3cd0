"""The diagonals of tiles that the gradient of a bias is summed along."""

STEPS = 8  # tiles of a diagonal that one program of backward_bias adds


def near_diagonals(
    n_q: int, n_k: int, block: int, far: tuple[int, ...], radius: int
) -> tuple[int, int, int]:
    """Return the first diagonal of tiles of `block` tokens with one near the main diagonal, how
    many such diagonals there are, and in how many parts each is summed.

    far: the tiles that are near or far, queries x keys: those of backward_q.
    """
    n_tiles, middle = cdiv(n_q, block), n_k - n_q
    reach = radius + sum(far) - block
    first = max((middle - reach) // block + 1, 1 - n_tiles)
    end = min(cdiv(middle + reach, block), cdiv(n_k, block))
    return first, end - first, cdiv(n_tiles, STEPS)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
