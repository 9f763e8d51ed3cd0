"""The versions of Triton that the kernels were tried with."""

import re

TESTED = ((3, 6), (3, 7), (3, 8), (3, 9))


def release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def is_tested(version: str) -> bool:
    return release(version) in TESTED
