"""What the compilers made of the kernels, as Markdown."""

from collections.abc import Sequence

from experiments.bench.compile_matrix.rows import CompileRow
from experiments.common.records import OK
from experiments.common.text_table import MISSING, markdown


def tables(rows: Sequence[CompileRow]) -> str:
    """One table of all kernels, and one of every variant that spills or is not as it should be."""
    versions = list(dict.fromkeys(row.triton for row in sorted(rows, key=lambda r: r.triton)))
    parts = ["## Kernels", _EXPLAINED, _kernels(rows, versions)]
    parts += ["## Variants that spill", _spills(rows, versions)]
    if faults := [
        f"- {_name(row)}, Triton {row.triton}: {f}" for row in rows for f in row.faults()
    ]:
        parts += ["## Beyond the limits", "\n".join(faults)]
    return "\n\n".join(parts) + "\n"


_EXPLAINED = """Each cell: most registers of a thread / most spilled bytes of a variant (stores and
loads); *n* serialised: variants whose `wgmma` wait for one another."""


def _kernels(rows: Sequence[CompileRow], versions: Sequence[str]) -> str:
    groups: dict[tuple[str, str, str], list[CompileRow]] = {}
    for row in rows:
        if row.status == OK:
            groups.setdefault((row.target, row.backend, row.kernel), []).append(row)
    lines = [["target", "backend", "kernel", "variants", "shared KiB", *versions]]
    for (target, backend, kernel), members in sorted(groups.items()):
        shared = max(row.shared_bytes or 0 for row in members) / 1024
        count = str(max(sum(r.triton == v for r in members) for v in versions))
        cells = [_worst([r for r in members if r.triton == v]) for v in versions]
        lines.append([target, backend, kernel, count, f"{shared:.0f}", *cells])
    return markdown(lines, left=(0, 1, 2))


def _worst(rows: Sequence[CompileRow]) -> str:
    if not rows:
        return MISSING
    registers, spills = (
        max(getattr(r, f) or 0 for r in rows) for f in ("registers", "spilled_bytes")
    )
    serialized = sum(bool(row.serialized) for row in rows)
    return f"{registers} / {spills}" + (f", {serialized} serialised" if serialized else "")


def _spills(rows: Sequence[CompileRow], versions: Sequence[str]) -> str:
    variants: dict[str, dict[str, CompileRow]] = {}
    for row in rows:
        if row.status == OK:
            variants.setdefault(_name(row), {})[row.triton] = row
    lines = [["variant", *versions]]
    for name, found in variants.items():
        if any(row.spilled_bytes or row.serialized for row in found.values()):
            cells = [_spilled(found.get(version)) for version in versions]
            lines.append([name, *cells])
    return markdown(lines)


def _spilled(row: CompileRow | None) -> str:
    if row is None:
        return MISSING
    return f"{row.spilled_bytes}" + (", serialised" if row.serialized else "")


def _name(row: CompileRow) -> str:
    return f"{row.target} {row.backend} {row.kernel}: {row.label}"
