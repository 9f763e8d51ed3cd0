"""The versions of Triton that the kernels were tested with."""

import os
import re

TESTED = ((3, 6), (3, 7), (3, 8), (3, 9))
OVERRIDE = "SPARSEFLASH_UNTESTED_TRITON"


def release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def is_tested(version: str) -> bool:
    return release(version) in TESTED


def untested(version: str) -> str | None:
    """Return why kernels that use changing parts of Triton do not run with a version, or None."""
    oldest, newest = (".".join(map(str, numbers)) for numbers in (TESTED[0], TESTED[-1]))
    if release(version) < TESTED[0]:
        return (
            f"its kernels need Triton {oldest} or newer, this is {version};"
            " install torch 2.11 or newer, which brings it"
        )
    if is_tested(version) or os.environ.get(OVERRIDE) == "1":
        return None
    return (
        f"Triton {version} is not among the tested versions ({oldest} to {newest});"
        f" set {OVERRIDE}=1 and run python -m sparseflash.doctor, which tests it"
    )
