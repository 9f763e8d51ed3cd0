"""Measures the making of block masks: ours, FlexAttention's, and the schedule on a device.

    python -m experiments.mask_build
    python -m experiments.mask_build 'mask=[causal,local:256]' 'seq_len=[16384,1048576]'

Every measurement has a process of its own with one core; one CSV row each.
See docs/guide/measuring.md.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from experiments.bench.build_case import BUILDERS
from experiments.bench.rows import BuildRow
from experiments.common.checks import as_list, choose, positive_number, whole_number
from experiments.common.devices import find_device
from experiments.common.program import program
from experiments.common.provenance import ROOT
from experiments.common.records import OK, Records

GIB = 2**30
EAGER_BYTES = 24  # a token pair, about: the mask and the int64 arrays that formulas make on the way
TOO_SLOW = "unsupported: more than"


def measure(row: BuildRow, device: torch.device, options: dict[str, Any]) -> BuildRow:
    """`row` filled in: with times, or with the status that says why there are none."""
    need = EAGER_BYTES * row.seq_len**2 if row.builder == "flex" else 0
    limit = (options["limit_gib"] or _free(device) / GIB / 2) * GIB
    if need > limit:
        return replace(row, status=f"unsupported: about {need / GIB:.0f} GiB for all pairs")
    case = {name: asdict(row)[name] for name in ("mask", "builder", "seq_len", "block")}
    case |= {"device": str(device), "seconds": options["seconds"]}
    command = [sys.executable, "-m", "experiments.bench.build_case", json.dumps(case)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=options["limit_s"],
        )
    except subprocess.TimeoutExpired:
        return replace(row, status=f"{TOO_SLOW} {options['limit_s']} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return replace(row, status=f"failed: {last[:200]}")
    found: dict[str, Any] = {"status": OK} | json.loads(done.stdout.splitlines()[-1])
    return replace(row, **found)


def verdict(row: BuildRow, ours: BuildRow | None) -> BuildRow:
    """`row`, with a status of its own if its blocks are not as many as ours."""
    if row.status != OK or ours is None or ours.nnz in (None, row.nnz):
        return row
    return replace(row, status=f"wrong result: {row.nnz} blocks, not {ours.nnz}")


def table(rows: Sequence[BuildRow]) -> str:
    """Masks and lengths down; time and memory of each builder across, and why cells are empty."""
    builders = list(dict.fromkeys(row.builder for row in rows))
    cells = {(row.mask, row.seq_len, row.block, row.builder): row for row in rows}
    head = ["mask", "tokens", "block", "runs", "tiles", "blocks"]
    lines = [[*head, *[f"{builder} ms (MiB)" for builder in builders]]]
    for mask, seq_len, block in dict.fromkeys(key[:3] for key in cells):
        found = [cells.get((mask, seq_len, block, builder)) for builder in builders]
        counts = next((row for row in found if row is not None and row.nnz is not None), None)
        line = [mask, str(seq_len), str(block)]
        for name in ("runs", "tiles", "nnz"):
            value = None if counts is None else getattr(counts, name)
            line.append("" if value is None else str(value))
        lines.append(line + [_cell(row) for row in found])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    ]
    reasons = {f"{row.builder}: {row.status}": None for row in rows if row.status != OK}
    return "\n".join(
        ["Median, one core; MiB are of the process beyond its imports.", *text, *reasons]
    )


@program("mask_build")
def main(options: dict[str, Any], command: str) -> None:
    """Measures what the configuration asks for and prints it as a table."""
    measure_all(options, command)


def measure_all(options: dict[str, Any], command: str) -> None:
    """As `main`."""
    torch.set_num_threads(1)
    device = find_device(options["device"])
    for name in ("seconds", "limit_s"):
        positive_number(name, options[name])
    for n in (*as_list(options["seq_len"]), options["block_size"]):
        whole_number("seq_len and block_size", n)
    builders = as_list(options["builders"]) or [
        name for name in BUILDERS if name != "schedule" or device.type == "cuda"
    ]
    for name in builders:
        choose("builders", name, BUILDERS)
    records = Records(
        options["csv"],
        BuildRow,
        fresh=options["fresh"],
        allow_changes=options["allow_changes"],
    )
    rows: list[BuildRow] = []
    for mask in as_list(options["mask"]):
        slow: dict[str, str] = {}  # builders that took too long for a shorter length
        for seq_len in sorted(as_list(options["seq_len"])):
            ours = None
            for builder in builders:
                place = "cpu" if builder in ("masks", "where") else str(device)
                row = BuildRow(
                    mask=mask,
                    density=None,
                    builder=builder,
                    seq_len=seq_len,
                    block=options["block_size"],
                    **BuildRow.origin(place, command),
                )
                known = records.find(row)
                if known is not None and known.status == OK:
                    row = known
                else:
                    skipped = replace(row, status=slow.get(builder, ""))
                    row = skipped if skipped.status else measure(row, device, options)
                    row = verdict(row, ours)
                    records.append(row)
                if row.status.startswith(TOO_SLOW):
                    slow[builder] = row.status
                ours = row if builder == "masks" else ours
                rows.append(row)
                print(f"{mask:45} {seq_len:8} {builder:14} {_cell(row) or row.status}", flush=True)
    print("\n" + table(rows) + f"\n\nrows: {records.path}")


def _cell(row: BuildRow | None) -> str:
    if row is None or row.status != OK or row.ms_median is None:
        return "" if row is None or row.status == OK else "-"
    memory = (row.peak_mib or 0) - (row.import_mib or 0)
    if row.device_mib is not None:
        memory = row.device_mib
    return f"{row.ms_median:.2f} ({memory:.0f})"


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
