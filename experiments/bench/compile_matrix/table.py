"""What the compilers made of the kernels, as Markdown."""

from collections.abc import Callable, Sequence
from typing import Any

from experiments.bench.compile_matrix.chips import CHIPS
from experiments.bench.compile_matrix.rows import CompileRow
from experiments.common.records import OK
from experiments.common.text_table import MISSING, markdown

_EXPLAINED = """Each cell: most registers of a thread / most spilled bytes of a variant (stores and
loads); *n* serialised: variants whose `wgmma` wait for one another."""

GLUON = "hopper"  # the backend whose kernels are for sm_90a and 16 bits only


def tables(rows: Sequence[CompileRow]) -> str:
    """All tables, and what is beyond the limits."""
    parts = ["## GPUs", _EXPLAINED, gpus(rows), "## Kernels", kernels(rows)]
    parts += ["## Variants that spill", spills(rows)]
    if faults := [
        f"- {_name(row)}, Triton {row.triton}: {f}" for row in rows for f in row.faults()
    ]:
        parts += ["## Beyond the limits", "\n".join(faults)]
    return "\n\n".join(parts) + "\n"


def page_tables(rows: Sequence[CompileRow]) -> dict[str, Callable[[], str]]:
    """The tables of docs/results/compile_matrix.md, by the names that the page has for them."""
    hopper = [row for row in rows if row.backend == GLUON]
    return {
        "gpus": lambda: gpus(rows),
        "kernels": lambda: kernels(hopper),
        "spills": lambda: spills(hopper),
    }


def gpus(rows: Sequence[CompileRow]) -> str:
    """A line for each GPU and backend; float32 apart, for the limit on spills is for 16 bits."""
    versions, lines = _versions(rows), [["GPU", "backend", "variants", "shared KiB", "limit"]]
    lines[0] += versions
    groups = _grouped(rows, lambda row: (row.target, row.backend, "float32" in row.label))
    for (target, backend, exact), found in sorted(groups.items(), key=lambda g: g[0]):
        limit = f"{CHIPS[target].shared_bytes / 1024:.0f}"
        portable = backend != GLUON
        name = f"{backend}, {'float32' if exact else '16 bits'}" if portable else backend
        lines.append([target, name, *_counts(found, versions), limit, *_cells(found, versions)])
    return markdown(lines, left=(0, 1))


def kernels(rows: Sequence[CompileRow]) -> str:
    """A line for each kernel of a backend and a GPU."""
    versions, lines = _versions(rows), [["GPU", "backend", "kernel", "variants", "shared KiB"]]
    lines[0] += versions
    compiled = [row for row in rows if row.status == OK]
    groups = _grouped(compiled, lambda row: (row.target, row.backend, row.kernel))
    for names, found in sorted(groups.items(), key=lambda g: g[0]):
        lines.append([*names, *_counts(found, versions), *_cells(found, versions)])
    return markdown(lines, left=(0, 1, 2))


def spills(rows: Sequence[CompileRow]) -> str:
    """Spilled bytes of every variant that spills or is serialised with some version."""
    versions = _versions(rows)
    lines = [["variant", *versions]]
    for name, found in _grouped([row for row in rows if row.status == OK], _name).items():
        if any(row.spilled_bytes or row.serialized for row in found):
            of = {row.triton: row for row in found}
            lines.append([name, *(_spilled(of.get(version)) for version in versions)])
    return markdown(lines)


def _versions(rows: Sequence[CompileRow]) -> list[str]:
    return sorted({row.triton for row in rows})


def _grouped(rows: Sequence[CompileRow], key: Callable[[CompileRow], Any]) -> dict[Any, list]:
    groups: dict[Any, list[CompileRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _counts(rows: Sequence[CompileRow], versions: Sequence[str]) -> list[str]:
    """The most variants of a version, and the most shared memory in KiB."""
    variants = max(sum(row.triton == version for row in rows) for version in versions)
    return [str(variants), f"{max(row.shared_bytes or 0 for row in rows) / 1024:.0f}"]


def _cells(rows: Sequence[CompileRow], versions: Sequence[str]) -> list[str]:
    return [_worst([row for row in rows if row.triton == version]) for version in versions]


def _worst(rows: Sequence[CompileRow]) -> str:
    if not rows:
        return MISSING
    registers, spilled = (
        max(getattr(r, f) or 0 for r in rows) for f in ("registers", "spilled_bytes")
    )
    serialized, failed = sum(bool(r.serialized) for r in rows), sum(r.status != OK for r in rows)
    notes = f", {serialized} serialised" if serialized else ""
    return f"{registers} / {spilled}{notes}" + (f", {failed} failed" if failed else "")


def _spilled(row: CompileRow | None) -> str:
    if row is None:
        return MISSING
    return f"{row.spilled_bytes}" + (", serialised" if row.serialized else "")


def _name(row: CompileRow) -> str:
    return f"{row.target} {row.backend} {row.kernel}: {row.label}"
