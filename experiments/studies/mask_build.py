"""Time and memory of making block masks: ours, FlexAttention's, and the schedule on a device.

Each measurement has a process of its own with one core. All builders of a mask must find equally
many blocks.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from experiments.common.devices import free_memory
from experiments.common.provenance import ROOT
from experiments.common.rows import OK, Found, Row, found, last_versions
from experiments.common.tables import MISSING, markdown
from experiments.studies import runner
from experiments.studies.mask_builders import BUILDERS, GALLERY, SIZED, make
from experiments.studies.runner import Run, choices, grid

KEY = ("builder", "seq_len", "block")
SOURCES = ("masks", "sparseflash")
GIB = 2**30
EAGER_BYTES = 24  # a token pair, about: the mask and the int64 arrays that formulas make on the way
TOO_SLOW = "unsupported: more than"
STRUCTURED = "local:256+butterfly:128+global:64"


@dataclass(kw_only=True)
class Options(runner.Options):
    name: str = "mask_build"
    seconds: float = 0.5
    # texts that masks.parse reads, "documents & causal", "neighborhood", or "gallery": all of it
    mask: list[str] = field(
        default_factory=lambda: [
            *("causal", "local:256", "dilated:2048:4", STRUCTURED, f"({STRUCTURED})*causal"),
            *("documents & causal", "neighborhood", "random:0.01"),
        ]
    )
    lengths: list[int] = field(default_factory=lambda: [4096, 16384, 65536, 262144, 1048576])
    block: int = 128  # tokens of a block
    builders: list[str]
    limit_s: float = 120.0  # give up a measurement after this
    limit_gib: float | None = None  # skip what needs more memory; null: half of what is free


DEFAULTS = {
    "cuda": Options(builders=[*BUILDERS]),
    "cpu": Options(builders=[name for name in BUILDERS if name != "schedule"]),
}


def cases(run: Run) -> list[Found]:
    """Return each mask at each length. Raise ValueError for one that cannot be made."""
    o = run.options
    choices(o, builders=BUILDERS)
    gallery = [*GALLERY, *(name for name in SIZED if name != "neighborhood")]  # in squares only
    names = gallery if o.mask == ["gallery"] else o.mask
    found = grid(mask=names, seq_len=sorted(o.lengths), block=o.block)
    for case in found:
        make(case.mask, case.seq_len)
    return found


def ways(case: Found, run: Run) -> list[Row]:
    """Return the builders. What FlexAttention builds does not depend on our source."""
    names = run.options.builders
    return [{"builder": b} | ({"version": ""} if b.startswith("flex") else {}) for b in names]


def opened(case: Found, run: Run) -> Callable[[Row], Row]:
    """Return what measures a builder in a process of its own."""
    options, counts = run.options, {}
    for known in run.rows.rows:
        if all(known[name] == case[name] for name in ("mask", "seq_len", "block")):
            counts |= {name: known[name] for name in ("nnz", "density") if known.get(name)}

    def one(row: Row) -> Row:
        if any(_as_slow(known, row) for known in run.rows.rows):
            return {"status": f"{TOO_SLOW} {options.limit_s:g} s for fewer tokens"}
        need = EAGER_BYTES * case.seq_len**2 if row["builder"] == "flex" else 0
        limit = (options.limit_gib or free_memory(run.device) / GIB / 2) * GIB
        if need > limit:
            raise ValueError(f"about {need / GIB:.0f} GiB for all pairs")
        task = case | {"builder": row["builder"], "device": str(run.device)}
        task |= {"seconds": options.seconds, "bytes": int(limit)}
        command = [sys.executable, "-m", "experiments.studies.mask_builders", json.dumps(task)]
        where = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=where, capture_output=True, text=True,
                timeout=options.limit_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"status": f"{TOO_SLOW} {options.limit_s:g} s"}
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
        made = json.loads(done.stdout.splitlines()[-1])
        found = {name: made[name] for name in ("nnz", "density") if name in made}
        counts.update(found | counts)  # those of the first builder
        if found.get("nnz") != counts.get("nnz"):
            made["status"] = f"wrong result: {made['nnz']} blocks, not {counts['nnz']}"
        return {"density": counts.get("density")} | made

    return one


def _as_slow(known: Row, row: Row) -> bool:
    """Return whether a builder took too long for fewer tokens."""
    same = all(known.get(name) == row[name] for name in ("mask", "builder", "block", "device"))
    return same and known["seq_len"] < row["seq_len"] and known["status"].startswith(TOO_SLOW)


def tables(frame: Any) -> dict[str, str]:
    """Return the milliseconds of each builder, with MiB beyond its imports, and what failed."""
    rows = found(last_versions(frame, KEY))
    builders = list(dict.fromkeys(row.builder for row in rows))
    by_case: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        by_case.setdefault((row.mask, row.seq_len, row.block), {})[row.builder] = row
    head = ["mask", "tokens", "block", "runs", "tiles", "blocks"]
    lines = [[*head, *(f"{name}, ms (MiB)" for name in builders)]]
    for (mask, n, block), of in by_case.items():
        counts = next((row for row in of.values() if row.nnz is not None), {})
        counted = (counts.get(name) for name in ("runs", "tiles", "nnz"))
        numbers = [MISSING if value is None else f"{value:.0f}" for value in counted]
        cells = [_cell(of[name]) if name in of else "" for name in builders]
        lines.append([f"`{mask}`", str(n), str(block), *numbers, *cells])
    reasons = dict.fromkeys((row.builder, row.status) for row in rows if row.status != OK)
    made = {"builders": markdown(lines)}
    if reasons:
        made["not_measured"] = markdown([["builder", "why"], *map(list, reasons)], left=(0, 1))
    return made


def _cell(row: Any) -> str:
    if row.status != OK:
        return MISSING
    memory = row.device_mib
    if memory is None:
        memory = (row.peak_mib or 0) - (row.import_mib or 0)
    return f"{row.ms_median:.2f} ({memory:.0f})"
