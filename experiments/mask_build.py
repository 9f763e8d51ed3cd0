"""Measures the making of block masks: ours, FlexAttention's, and the schedule on a device.

    python -m experiments.mask_build
    python -m experiments.mask_build 'mask=[causal,local:256]' 'seq_len=[16384,1048576]'

Every measurement has a process of its own with one core; one CSV row each. See docs/measuring.md.
"""

import csv
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.bench.build_case import BUILDERS
from experiments.common.records import OK, ROOT, device_name, now, versions

GIB = 2**30
EAGER_BYTES = 24  # a token pair, about: the mask and the int64 arrays that formulas make on the way
OURS = ("masks", "where", "schedule")
TOO_SLOW = "unsupported: more than"


@dataclass(frozen=True)
class Row:
    """One measurement. The fields in order are the columns; None is an empty cell."""

    mask: str
    builder: str
    seq_len: int
    block: int
    status: str  # ok, or the reason why there is no time
    ms_first: float | None = None  # in a new process; flex_compiled compiles here
    ms_median: float | None = None
    ms_p20: float | None = None
    ms_p80: float | None = None
    import_mib: float | None = None  # peak resident memory before it,
    peak_mib: float | None = None  # and with it
    device_mib: float | None = None  # peak on the GPU
    runs: int | None = None
    tiles: int | None = None
    nnz: int | None = None  # non-empty blocks
    device: str = ""
    torch: str = ""
    source: str = ""
    commit: str = ""
    date: str = ""
    command: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """What a measurement is of; peers do not change with our source."""
        own = self.source if self.builder in OURS else ""
        return self.mask, self.builder, self.seq_len, self.block, self.device, self.torch, own


COLUMNS = [field.name for field in fields(Row)]
INTEGERS, TEXTS = {"seq_len", "block", "runs", "tiles", "nnz"}, {"mask", "builder", "status"}
TEXTS |= set(COLUMNS[COLUMNS.index("device") :])


def measure(row: Row, device: torch.device, options: dict[str, Any]) -> Row:
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


def verdict(row: Row, ours: Row | None) -> Row:
    """`row`, with a status of its own if its blocks are not as many as ours."""
    if row.status != OK or ours is None or ours.nnz in (None, row.nnz):
        return row
    return replace(row, status=f"wrong result: {row.nnz} blocks, not {ours.nnz}")


def read(path: Path) -> list[Row]:
    """The rows of a CSV file. ValueError if its columns are not `Row`'s."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != COLUMNS:
            raise ValueError(f"{path} has other columns than this version writes: move it away")
        lines: list[dict[str, Any]] = list(reader)
    return [Row(**{name: _typed(name, text) for name, text in line.items()}) for line in lines]


def append(path: Path, row: Row) -> None:
    """Add a row to the file, which begins with the names of the columns."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        writer.writerow(_text(getattr(row, name)) for name in COLUMNS)


def table(rows: Sequence[Row]) -> str:
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


def main(config: DictConfig, command: str) -> None:
    """Measures what the configuration asks for and prints it as a table."""
    options: Any = OmegaConf.to_container(config, resolve=True)
    torch.set_num_threads(1)
    device = torch.device(options["device"] or ("cuda" if torch.cuda.is_available() else "cpu"))
    builders = _list(options["builders"]) or [
        name for name in BUILDERS if name != "schedule" or device.type == "cuda"
    ]
    for name in builders:
        if name not in BUILDERS:
            raise ValueError(f"no builder {name!r}; choose from {', '.join(BUILDERS)}")
    path = _free_name(Path(options["csv"])) if options["fresh"] else Path(options["csv"])
    known = {row.key: row for row in read(path) if row.status == OK}
    facts: Any = {name: versions()[name] for name in ("torch", "source", "commit")}
    rows: list[Row] = []
    for mask in _list(options["mask"]):
        slow: dict[str, str] = {}  # builders that took too long for a shorter length
        for seq_len in sorted(_list(options["seq_len"])):
            ours = None
            for builder in builders:
                place = device_name("cpu" if builder in ("masks", "where") else str(device))
                row = Row(mask, builder, seq_len, options["block_size"], "", device=place, **facts)
                row = replace(row, date=now(), command=command)
                if row.key in known:
                    row = known[row.key]
                else:
                    skipped = replace(row, status=slow.get(builder, ""))
                    row = skipped if skipped.status else measure(row, device, options)
                    row = verdict(row, ours)
                    append(path, row)
                if row.status.startswith(TOO_SLOW):
                    slow[builder] = row.status
                ours = row if builder == "masks" else ours
                rows.append(row)
                print(f"{mask:45} {seq_len:8} {builder:14} {_cell(row) or row.status}", flush=True)
    print("\n" + table(rows) + f"\n\nrows: {path}")


def _cell(row: Row | None) -> str:
    if row is None or row.status != OK or row.ms_median is None:
        return "" if row is None or row.status == OK else "-"
    memory = (row.peak_mib or 0) - (row.import_mib or 0)
    if row.device_mib is not None:
        memory = row.device_mib
    return f"{row.ms_median:.2f} ({memory:.0f})"


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())


def _typed(name: str, text: str) -> Any:
    if name in TEXTS:
        return text
    return None if text == "" else int(text) if name in INTEGERS else float(text)


def _free_name(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that does not exist."""
    name, i = path, 1
    while name.exists():
        i += 1
        name = path.with_stem(f"{path.stem}-{i}")
    return name


@hydra.main(version_base="1.3", config_path="conf", config_name="mask_build")
def entry(config: DictConfig) -> None:
    overrides = HydraConfig.get().overrides.task
    main(config, shlex.join(["python", "-m", "experiments.mask_build", *overrides]))


if __name__ == "__main__":
    entry()
