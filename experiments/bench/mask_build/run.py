"""Time and memory of making block masks: each measurement in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from experiments.bench.mask_build.named_masks import BY_FORMULA, formula
from experiments.bench.rows import BuildRow
from experiments.common.devices import free_memory
from experiments.common.provenance import ROOT
from experiments.common.records import OK, Records
from experiments.common.text_table import aligned

GIB = 2**30
EAGER_BYTES = 24  # a token pair, about: the mask and the int64 arrays that formulas make on the way
TOO_SLOW = "unsupported: more than"


def measure(row: BuildRow, device: torch.device, options: dict[str, Any]) -> BuildRow:
    """`row` filled in: with times, or with the status that says why there are none."""
    if row.builder in BY_FORMULA:
        try:  # before a process is started
            formula(row.mask, row.seq_len, np.asarray, np.clip)
        except ValueError as refusal:
            return replace(row, status=f"unsupported: {refusal}")
    need = EAGER_BYTES * row.seq_len**2 if row.builder == "flex" else 0
    limit = (options["limit_gib"] or free_memory(device) / GIB / 2) * GIB
    if need > limit:
        return replace(row, status=f"unsupported: about {need / GIB:.0f} GiB for all pairs")
    case = {name: asdict(row)[name] for name in ("mask", "builder", "seq_len", "block")}
    case |= {"device": str(device), "seconds": options["seconds"]}
    command = [sys.executable, "-m", "experiments.bench.mask_build.child", json.dumps(case)]
    where = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}}
    limit_s = options["limit_s"]
    try:
        done = subprocess.run(command, **where, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return replace(row, status=f"{TOO_SLOW} {limit_s} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return replace(row, status=f"failed: {last[:200]}")
    found: dict[str, Any] = {"status": OK} | json.loads(done.stdout.splitlines()[-1])
    if found["status"] == OK and "density" not in found:
        found["density"] = found["nnz"] / (-(-row.seq_len // row.block)) ** 2
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
        values = (getattr(counts, name, None) for name in ("runs", "tiles", "nnz"))
        numbers = ["" if value is None else str(value) for value in values]
        lines.append([mask, str(seq_len), str(block), *numbers, *map(_cell, found)])
    reasons = {f"{row.builder}: {row.status}": None for row in rows if row.status != OK}
    title = "Median, one core; MiB are of the process beyond its imports."
    return "\n".join([title, aligned(lines), *reasons])


def run(
    masks: Sequence[str],
    lengths: Sequence[int],
    builders: Sequence[str],
    device: torch.device,
    options: dict[str, Any],
    records: Records[BuildRow],
    command: str,
) -> list[BuildRow]:
    """The row of every mask, length and builder, measured now or found in `records`."""
    rows: list[BuildRow] = []
    for mask in masks:
        slow: dict[str, str] = {}  # builders that took too long for a shorter length
        for seq_len in sorted(lengths):
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
                    row = replace(row, status=slow.get(builder, ""))
                    row = verdict(row if row.status else measure(row, device, options), ours)
                    records.append(row)
                if row.status.startswith(TOO_SLOW):
                    slow[builder] = row.status
                ours = row if builder == "masks" else ours
                rows.append(row)
                print(f"{mask:45} {seq_len:8} {builder:14} {_cell(row) or row.status}", flush=True)
    return rows


def _cell(row: BuildRow | None) -> str:
    if row is None or row.status != OK or row.ms_median is None:
        return "" if row is None or row.status == OK else "-"
    memory = (row.peak_mib or 0) - (row.import_mib or 0)
    if row.device_mib is not None:
        memory = row.device_mib
    return f"{row.ms_median:.2f} ({memory:.0f})"
