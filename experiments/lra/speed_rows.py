"""One row per measured training step of the Long Range Arena, in an append-only CSV file."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.common import rows
from experiments.common.records import OK

SWEEP = "sweep"  # the task of rows that differ in their length alone


@dataclass(frozen=True)
class StepRow:
    """One measurement. The fields in order are the columns; None is an empty cell."""

    task: str  # of the Long Range Arena, or "sweep"
    attention: str
    mask: str  # of block-sparse attention; empty: its own for the length
    length: int  # tokens of an example as padded
    pair: int  # 2 where an example is a pair of sequences, else 1
    batch: int  # examples of a step
    mean_length: float  # tokens that count of a sequence, in the mean
    layers: int
    dim: int
    heads: int
    precision: str  # bf16 | fp32
    mode: str  # how the step was to run: eager, graph, compile, compile+graph
    ran: str  # how it did, where the compiler or the device refused
    status: str  # ok, or the reason why there is no time
    ms_median: float | None  # a step: forward, backward, clip, optimiser
    ms_p20: float | None
    ms_p80: float | None
    tokens_per_s: float | None  # padded tokens
    peak_mib: float | None  # of the whole step, weights and optimiser state included
    attention_ms: float | None  # forward and backward of one attention layer alone
    device: str
    torch: str
    triton: str
    source: str  # digest of everything that a step runs
    commit: str
    date: str
    command: str

    @property
    def ms(self) -> float:
        """The median time of a row that has one."""
        assert self.ms_median is not None, self
        return self.ms_median

    @property
    def work(self) -> tuple[object, ...]:
        """What rows must share to be compared."""
        return tuple(getattr(self, name) for name in WORK)

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two rows measurements of the same thing."""
        return tuple(getattr(self, name) for name in KEY)


FIELDS = rows.fields_of(StepRow)
WORK = "task length pair batch layers dim heads precision device".split()
KEY = [*WORK, *"attention mask mode torch triton source".split()]


class StepRecords:
    """An append-only CSV file of `StepRow`. ValueError if the file holds other columns."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            rows.heal(self.path, FIELDS)
        else:
            rows.append(self.path, rows.line(FIELDS))
        self.rows = read(self.path)

    def append(self, row: StepRow) -> None:
        """Adds one row to the file."""
        rows.append(self.path, rows.row_line(row))
        self.rows.append(row)

    def find(self, row: StepRow) -> StepRow | None:
        """The newest row that measures the same thing as `row` does, or None."""
        return next((found for found in reversed(self.rows) if found.key == row.key), None)


def read(path: str | Path) -> list[StepRow]:
    """The rows of a CSV file. ValueError if it is missing or has other columns than `StepRow`."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"no such file: {path}; measure first: python -m experiments.lra_speed")
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != FIELDS:
            raise ValueError(
                f"{path} has other columns than this version writes: "
                "move it away or name another file with csv=PATH"
            )
        return [rows.from_texts(StepRow, line) for line in reader]


def newest(found: Sequence[StepRow]) -> list[StepRow]:
    """Of rows that measure the same thing with other versions, sources or modes, the last one."""
    return list({(row.work, row.attention, row.mask): row for row in found}.values())


def measured(found: Sequence[StepRow]) -> list[StepRow]:
    return [row for row in found if row.status == OK]
