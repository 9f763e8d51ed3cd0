"""Products of 80, 96 and 192 columns.

Tensors of Triton have powers of two as extents, so a product of 96 columns is one of 64 and one of
32 (`columns.py`). wgmma may have 96 columns, and the forward is 3 to 8 % faster with one (H100). So
the two are joined in the PTX: same left operand, panels of V one behind the other.
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
    r"\{(?P<sums>[^}]*)\}, (?P<left>\{[^}]*\}|%\w+), (?P<right>%\w+), (?P<rest>[^;]*);"
)
_MOVE = re.compile(r"\s*mov\.b(?:32|64)\s+(?P<target>%\w+), (?P<source>%\w+)$")
_COMPUTE = re.compile(  # what makes a descriptor of an address
    r"\s*(?P<name>(?:add|and|bfe|cvt|or|shr)\.[\w.]+)\s+(?P<target>%\w+), (?P<sources>[%\w, -]+)$"
)
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

    Left operands are in registers, or in shared memory that a descriptor tells of. Nobody writes
    there between the two products: the first one would read it then. A group that is left without
    products is complete at once, so that what waits for the two groups need not change.
    """
    lines = ptx.split("\n")
    wanted = {_PAIRS[n] for n in columns}
    for first, second in pairwise(_groups(lines)):
        if not _is_pair(first[0][1], second[0][1], wanted):
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
            lines[j] = f"\t{product} {{{sums}}}, {b['left']}, {a['right']}, {b['rest']};"
    return "\n".join(lines)


def _is_pair(a: re.Match[str], b: re.Match[str], wanted: Collection[tuple[int, int]]) -> bool:
    """Whether two products are to be joined, and not only one after the other: products out of
    shared memory alone are scores, too, and dQ.
    """
    if (int(a["n"]), int(b["n"])) not in wanted:
        return False
    registers = [x["left"][0] == "{" for x in (a, b)]
    return all(registers) or (not any(registers) and _majors(a) == _majors(b))


def _majors(a: re.Match[str]) -> list[str]:
    """Which of the operands are transposed."""
    return a["rest"].split(", ")[3:]


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
    """What the left operands of products hold, in code without branches from line `start` on: the
    registers of which they are copies, or out of which they are computed, and how often those have
    been assigned.
    """
    values: dict[str, str] = {}
    numbers: dict[str, str] = {}  # of what is computed: the same for the same
    assigned: Counter[str] = Counter()
    found: dict[int, list[str]] = {}

    def value(register: str) -> str:
        return values.get(register, f"{register} {assigned[register]}")

    for i in range(start, end):
        if match := _PRODUCT.search(lines[i]):
            found[i] = [value(register) for register in re.findall(r"%\w+", match["left"])]
            continue
        for statement in lines[i].split(";"):
            held = None  # by the target
            if made := _MOVE.match(statement):
                held = value(made["source"])
            elif made := _COMPUTE.match(statement):
                sources = re.sub(r"%\w+", lambda register: value(register[0]), made["sources"])
                held = numbers.setdefault(f"{made['name']} {sources}", f"#{len(numbers)}")
            target = _TARGET.match(statement)
            for register in re.findall(r"%\w+", target[1]) if target else ():
                assigned[register] += 1
                values.pop(register, None)
            if made and held:
                values[made["target"]] = held
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
_lock = threading.RLock()  # there is one hook for all threads


@contextmanager
def joined_products(columns: Collection[int]) -> Iterator[None]:
    """What is compiled meanwhile has its products of so many columns joined, unless a hook of the
    user's is in place or Triton knows none: the results are the same.

    Such a kernel needs a parameter of its own for it: Triton 3.6 finds a compiled kernel by its
    parameters and its source alone.
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
