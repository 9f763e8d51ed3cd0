"""One tidy CSV row per measurement: written at once, read back typed, never overwritten.

A file grows by whole lines. A run that was killed keeps every row it had written, and a line that
it left half-written is cut off when the file is opened again.
"""

import csv
import hashlib
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from experiments.common import rows
from experiments.common.files import write_whole

ROOT = Path(__file__).resolve().parents[2]
OK = "ok"


@dataclass(frozen=True)
class Row:
    """One measurement. The fields in order are the columns; None is an empty cell."""

    mask: str  # mask text, "dense" for no mask at all
    provider: str
    direction: str  # forward | backward
    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n_k: int
    head_dim: int
    dtype: str
    block_q: int  # 0 without a mask
    block_k: int
    density: float  # non-empty blocks / all blocks
    elements: float  # allowed (query, key) pairs / all pairs
    status: str  # ok, or the reason why there is no time
    error: float | None  # relative to float64
    ms_median: float | None
    ms_p20: float | None
    ms_p80: float | None
    tflops: float | None  # over the blocks that are computed
    extra_mib: float | None  # peak memory beyond the inputs
    extra_expected_mib: float | None  # what the results alone take
    device: str
    torch: str
    triton: str
    source: str  # digest of masks/ and sparseflash/
    commit: str
    date: str
    command: str
    v_dim: int  # head dim of v and out
    layout: str  # of q, k and v in memory: head_major | token_major
    ideal_ms: float | None  # the least time on this device (sparseflash.cost)

    @property
    def fraction(self) -> float | None:
        """The ideal time as a share of the measured one."""
        return self.ideal_ms / self.ms if self.ideal_ms and self.ms_median else None

    @property
    def ms(self) -> float:
        """The median time of a row that has one."""
        assert self.ms_median is not None, self
        return self.ms_median


FIELDS = rows.fields_of(Row)
# Columns that older files lack, and what their rows were: a text, or a column with the same value.
ADDED = {"v_dim": "{head_dim}", "layout": "head_major", "ideal_ms": ""}
# What a measurement is of. Peers do not change with our source: `source` counts for ours only.
KEY = (
    "mask provider direction batch heads kv_heads n_q n_k head_dim v_dim dtype layout "
    "block_q block_k device torch triton source"
).split()


def key_of(row: Row, *, own: bool) -> tuple[object, ...]:
    """The values that make two rows measurements of the same thing."""
    return tuple(getattr(row, name) for name in (KEY if own else KEY[:-1]))


class Records:
    """An append-only CSV file of `Row`; an older file is first given the columns that it lacks.

    Raises ValueError if the file holds other columns than `Row` has, or had.
    """

    def __init__(self, path: str | Path, *, fresh: bool = False):
        self.path = _free_name(Path(path)) if fresh else Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            rows.append(self.path, rows.line(FIELDS))
        else:
            rows.heal(self.path, FIELDS)
        self.rows = read(self.path)
        if columns(self.path) != FIELDS:
            self._upgrade()

    def append(self, row: Row) -> None:
        """Adds one row to the file."""
        rows.append(self.path, rows.row_line(row))
        self.rows.append(row)

    def find(self, row: Row, *, own: bool) -> Row | None:
        """The newest row that measures the same thing as `row` does, or None."""
        wanted = key_of(row, own=own)
        return next((r for r in reversed(self.rows) if key_of(r, own=own) == wanted), None)

    def _upgrade(self) -> None:
        """Writes all rows anew; a kill loses none."""
        lines = [rows.line(FIELDS), *(rows.row_line(row) for row in self.rows)]
        write_whole(self.path, lambda file: file.write("".join(lines).encode()), "csv")


def read(path: str | Path) -> list[Row]:
    """The rows of a CSV file, typed. ValueError if it is missing or its columns are not `Row`'s."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"no such file: {path}; measure first: python -m experiments.speed")
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        found = tuple(reader.fieldnames or ())
        if found != tuple(name for name in FIELDS if name in found or name not in ADDED):
            raise ValueError(
                f"{path} has other columns than this version writes "
                f"({', '.join(sorted(set(FIELDS) ^ set(found))) or 'order'}); "
                "move it away or name another file with csv=PATH"
            )
        old = {name: text for name, text in ADDED.items() if name not in found}
        lines = (
            {name: text.format(**line) for name, text in old.items()} | line for line in reader
        )
        return [rows.from_texts(Row, line) for line in lines]


def columns(path: Path) -> tuple[str, ...]:
    """The columns that a file has."""
    with open(path, newline="", encoding="utf-8") as file:
        return tuple(next(csv.reader(file), ()))


def _free_name(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that does not exist."""
    name, i = path, 1
    while name.exists():
        i += 1
        name = path.with_stem(f"{path.stem}-{i}")
    return name


# ---- where a measurement was made


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def device_name(device: str) -> str:
    """The name of the device, with the number of threads where it is a CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()} ({torch.get_num_threads()} threads)"


@cache
def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@cache
def versions() -> dict[str, str]:
    """Versions of torch and triton, digest of our source, commit (empty outside git)."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    return {
        "torch": torch.__version__,
        "triton": triton,
        "source": source_digest("masks", "sparseflash"),
        "commit": _commit(),
    }


@cache
def source_digest(*folders: str) -> str:
    """Twelve hex digits of the Python files of these folders of the project."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
