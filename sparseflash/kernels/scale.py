"""How the scale of the softmax comes to the kernels: as the factor of exponents in base 2."""

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def scale_log2(scale: float) -> float:
    """Return the factor of the scores in base 2."""
    return scale * LOG2E
