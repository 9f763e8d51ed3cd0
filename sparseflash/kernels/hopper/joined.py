"""Products of 80, 96 and 192 columns.

Tensors of Triton have powers of two as extents, so a product of 96 columns is one of 64 and one of
32 (`columns.py`). wgmma may have 96 columns, and the forward is 3 to 8 % faster with one (H100). So
the two are joined in the PTX: same left operand, registers and panels of V one behind the other.
"""

import hashlib
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from triton import knobs

_PRODUCT = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k16\.(?P<types>[\w.]+) "
    r"\{(?P<sums>[^}]*)\}, \{(?P<left>[^}]*)\}, (?P<right>%\w+), (?P<rest>[^;]*);"
)
_MOVE = re.compile(r"\s*mov\.b32\s+(%\w+), (%\w+)$")
_TARGET = re.compile(r"\s*(?:@!?%\w+\s+)?[\w.:]+\s+(\{[^}]*\}|%\w+)")
_ASSIGN = re.compile(r"\s*(?:or|add|cvt)\.[\w.]+\s+(%\w+), (%\w+)(?:, (-?\d+))?;")
_BOUNDARY = re.compile(r"wgmma\.wait_group|\bbar\.|\bbra\b|^\$L__BB")  # of straight code
_PAIRS = {80: (64, 16), 96: (64, 32), 192: (128, 64)}
Group = list[tuple[int, re.Match[str]]]  # products up to a commit, and their lines


def is_joined(columns: int) -> bool:
    """Whether a product of so many columns is two that can be joined."""
    return columns in _PAIRS


def join_products(ptx: str, columns: Collection[int]) -> str:
    """PTX with the two products of every one of 80, 96 or 192 columns joined; as it was where two
    of them cannot be joined, since ptxas would make the others wait for each other.

    Left operands are in registers. A group that is left without products is complete at once, so
    that what waits for the two groups need not change.
    """
    lines = ptx.split("\n")
    wanted = {_PAIRS[n] for n in columns}
    for first, second in pairwise(_groups(lines)):
        if (int(first[0][1]["n"]), int(second[0][1]["n"])) not in wanted:
            continue
        start, end = first[0][0], second[0][0]
        while start and not _BOUNDARY.search(lines[start - 1]):
            start -= 1
        pairs = list(zip(first, second, strict=False))
        left = _left_operands(lines, start, second[-1][0] + 1)
        if (
            len(first) != len(second)
            or any(map(_BOUNDARY.search, lines[start:end]))
            or not all(left[i] == left[j] and _alike(a, b) for (i, a), (j, b) in pairs)
            or not _has_panels(lines[: first[0][0]], first[0][1])
        ):
            return ptx
        for (i, a), (j, b) in pairs:
            product = (
                f"wgmma.mma_async.sync.aligned.m64n{int(a['n']) + int(b['n'])}k16.{a['types']}"
            )
            sums = f"{a['sums']},{b['sums']}"
            lines[i] = ""
            lines[j] = f"\t{product} {{{sums}}}, {{{b['left']}}}, {a['right']}, {b['rest']};"
    return "\n".join(lines)


def _groups(lines: list[str]) -> list[Group]:
    groups: list[Group] = []
    found: Group = []
    for i, line in enumerate(lines):
        if match := _PRODUCT.search(line):
            found.append((i, match))
        elif "wgmma.commit_group" in line or "wgmma.mma_async" in line:
            if found:
                groups.append(found)
            found = []
    return groups


def _left_operands(lines: list[str], start: int, end: int) -> dict[int, list[str]]:
    """Return what the left operands of products hold, in code without branches from line `start`
    on: the registers of which they are copies, and how often those have been assigned.
    """
    values: dict[str, str] = {}
    assigned: Counter[str] = Counter()
    found: dict[int, list[str]] = {}

    def value(register: str) -> str:
        return values.get(register, f"{register} {assigned[register]}")

    for i in range(start, end):
        if match := _PRODUCT.search(lines[i]):
            found[i] = [value(register) for register in match["left"].split(",")]
            continue
        for statement in lines[i].split(";"):
            move = _MOVE.match(statement)
            copied = value(move[2]) if move else None
            target = _TARGET.match(statement)
            for register in re.findall(r"%\w+", target[1]) if target else ():
                assigned[register] += 1
                values.pop(register, None)
            if move and copied:
                values[move[1]] = copied
    return found


def _has_panels(lines: list[str], product: re.Match[str]) -> bool:
    """Whether the right operand of a product lies in several panels, and its descriptor tells how
    far they are from each other: so it serves for more columns. lines: the code before it.
    """
    bits, register = 0, product["right"]
    for line in reversed(lines):  # an address, and numbers that are added to it: in 64 or 32 bits
        match = _ASSIGN.match(line)
        if match is None or match[1] != register:
            continue
        bits |= int(match[3] or 0)
        register = match[2]
    panel = {1: 64, 2: 32, 3: 16}.get(bits >> 62 & 3, 0)  # columns: swizzles 128, 64, 32 bytes
    return 0 < panel < int(product["n"]) and bits >> 16 & 0x3FFF > 0  # the distance


def _alike(a: re.Match[str], b: re.Match[str]) -> bool:
    return all(a[name] == b[name] for name in ("types", "rest"))


_DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
VERSION = int(_DIGEST[:8], 16)  # of this file, which is no part of a kernel's source
_lock = threading.RLock()  # there is one hook for all threads


@contextmanager
def joined_products(columns: Collection[int]) -> Iterator[None]:
    """Join the products of so many columns in what is compiled meanwhile, unless a hook of
    the user's is in place or Triton knows none: the results are the same.

    Such a kernel needs VERSION as a parameter: Triton 3.6 finds a compiled kernel by its parameters
    and its source alone.
    """
    with _lock:
        if getattr(knobs.runtime, "add_stages_inspection_hook", _lock) is not None:
            yield
            return
        knobs.runtime.add_stages_inspection_hook = partial(_hook, columns)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            knobs.runtime.add_stages_inspection_hook = None


def _hook(columns: Collection[int], *args: Any) -> tuple[str, str] | None:
    if not args:  # what tells such kernels from others, from Triton 3.7 on
        key = f"{sorted(columns)} {_DIGEST}"
        return key, key
    stages = args[1]
    make_ptx = stages["ptx"]
    stages["ptx"] = lambda source, metadata: join_products(make_ptx(source, metadata), columns)
    return None
