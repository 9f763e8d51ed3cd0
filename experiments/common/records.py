"""The one format of measurements: a dataclass is a kind of row, a CSV file holds rows of one kind.

To define a kind of row, subclass `Row`, or `TimedRow` if it has times:

    @dataclass(frozen=True, kw_only=True)
    class StepRow(TimedRow):
        task: str  # the fields are columns; None is an empty cell
        length: int
        peak_mib: float | None = None

        WHAT = ("task", "length")  # the fields that say what was measured, besides the mask
        SOURCES = ("masks", "sparseflash", "experiments/lra")  # what the digest `source` covers
        COMMAND = "python -m experiments.lra_speed"  # writes such rows

    records = Records("runs/steps.csv", StepRow)  # creates the file, or reads it
    row = StepRow(task="text", length=1024, mask="", density=None, **StepRow.origin("cpu", command))
    if records.find(row) is None:  # rows with equal keys measure the same thing
        records.append(replace(row, status=OK, ms_median=3.5))

`read(path, StepRow)` reads a file typed. Fields are str, int, float or bool, each `| None` or not.
A file grows by whole lines and is never overwritten. A killed run keeps every row it had written.
Several processes may write to one file.
"""

import csv
import dataclasses
import fcntl
import inspect
import io
import os
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Generic, TypeVar

from experiments.common import provenance
from experiments.common.files import read_text

OK = "ok"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement, with where it comes from: the last columns of every file."""

    mask: str  # resolved text, "dense" or empty where there is none
    density: float | None  # non-empty blocks / all blocks
    device: str
    torch: str
    triton: str
    source: str  # digest of the Python files of SOURCES
    commit: str  # "+changes" for changed files, "untraced" for rows that no commit can reproduce
    date: str
    command: str

    WHAT: ClassVar[Sequence[str]] = ()
    SOURCES: ClassVar[tuple[str, ...]] = ("masks", "sparseflash")
    COMMAND: ClassVar[str] = "python -m experiments.speed"

    @classmethod
    def origin(cls, device: str, command: str) -> dict[str, Any]:
        """Return the values of the last seven fields for a measurement made now on this device."""
        return provenance.origin(device, command, cls.SOURCES)

    @property
    def versions(self) -> tuple[str, ...]:
        """What ran: torch, triton and our source."""
        return self.torch, self.triton, self.source

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured, on what: rows with equal keys measure the same thing."""
        names = (*self.WHAT, "mask", "device")
        return (*(getattr(self, name) for name in names), *self.versions)


@dataclass(frozen=True, kw_only=True)
class TimedRow(Row):
    """A measurement of time in milliseconds: the median, the 20th and the 80th percentile of the
    calls.
    """

    status: str = ""  # ok, or the reason why there is no time
    ms_median: float | None = None
    ms_p20: float | None = None
    ms_p80: float | None = None
    calls: int | None = None  # that the times rest on

    @property
    def ms(self) -> float:
        """The median of a row that has one."""
        assert self.ms_median is not None, self
        return self.ms_median


@dataclass(frozen=True, kw_only=True)
class PeerRow(TimedRow):
    """A time of ours or of a peer, which does not change with our source but with its `version`."""

    @property
    def own(self) -> bool:
        """Whether the provider is one of ours."""
        raise NotImplementedError

    @property
    def versions(self) -> tuple[str, ...]:
        """What ran: torch, triton and our source, or the peer's version."""
        code = self.source if self.own else getattr(self, "version", "")
        return self.torch, self.triton, code


R = TypeVar("R", bound=Row)
T = TypeVar("T")


class Records(Generic[R]):
    """An append-only CSV file of rows of one kind; `rows` are those that it holds.

    fresh: write to the next free name (speed-2.csv) instead of adding to an existing file.
    allow_changes: publish rows although files have changed since the last commit.

    Raises ValueError if the file has another name than .csv, other columns or a damaged row, or
    if it lies under docs and its rows would not come from a commit.
    """

    def __init__(
        self, path: str | Path, kind: type[R], *, fresh: bool = False, allow_changes: bool = False
    ):
        self.path = _free_name(Path(path)) if fresh else Path(path)
        if self.path.suffix == ".gz":
            raise ValueError(f"{path} is compressed, rows cannot be added: gunzip it first")
        if self.path.suffix != ".csv":
            raise ValueError(f"csv={path}: give a path that ends in .csv")
        if not allow_changes:
            provenance.check_published(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _begin(self.path, _line(columns(kind)))
        except OSError as error:
            raise ValueError(
                f"cannot write {self.path} ({error.strerror}); name another file with csv=PATH"
            ) from None
        self.rows = read(self.path, kind)
        with open(self.path, newline="") as file:
            head = tuple(next(csv.reader(file)))
        if head != columns(kind):  # an added row would not fit
            _refuse_columns(self.path, columns(kind), head)

    def append(self, row: R) -> None:
        """Add one row to the file."""
        _append(self.path, _line(_cells(row)))
        self.rows.append(row)

    def find(self, row: R) -> R | None:
        """Return the newest row with the same key, or None."""
        return next((r for r in reversed(self.rows) if r.key == row.key), None)


def read(path: str | Path, kind: type[T]) -> list[T]:
    """Return the rows of a CSV file, typed; a last line without an end, as a kill leaves it, is
    skipped.

    The file may be compressed. Columns with a default may be missing.

    Raises ValueError with file, line and remedy if the file is missing or does not fit the kind.
    """
    path = Path(path)
    remedy = "name another CSV file"
    if not path.exists() and issubclass(kind, Row):
        remedy = f"measure first: {kind.COMMAND}"
    text = read_text(path, remedy)
    reader = csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""), strict=True)
    names, found, types_ = columns(kind), [], typing.get_type_hints(kind)
    try:
        head = tuple(next(reader, ()))
        defaults = {
            f.name
            for f in dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
            if f.default is not dataclasses.MISSING
        }
        if set(head) - set(names) or set(names) - set(head) - defaults:
            _refuse_columns(path, names, head)
        for cells in reader:
            if len(cells) != len(head):
                raise ValueError(f"{len(cells)} cells instead of {len(head)}")
            texts = zip(head, cells, strict=True)
            found.append(kind(**{name: _typed(name, types_[name], cell) for name, cell in texts}))
    except (csv.Error, ValueError) as error:
        if str(error).startswith(str(path)):
            raise
        place = f"{path}, line {reader.line_num}"
        raise ValueError(f"{place}: {error}; correct or delete that line") from None
    return found


def _refuse_columns(path: Path, names: Iterable[str], head: Iterable[str]) -> None:
    differ = ", ".join(sorted(set(names) ^ set(head))) or "the order"
    raise ValueError(
        f"{path} has other columns than this version writes ({differ}); "
        "move it away or name another file with csv=PATH"
    )


def last_versions(rows: Iterable[R]) -> list[R]:
    """Return the rows of the last versions of what they measure, all its rounds; earlier ones
    go.
    """

    def what(row: R) -> tuple[object, ...]:
        names = (*row.WHAT, "mask", "device")
        return tuple(getattr(row, name) for name in names if name != "round")

    rows = list(rows)
    last = {what(row): row.versions for row in rows}
    return [row for row in rows if row.versions == last[what(row)]]


def torches(rows: Iterable[Row]) -> str:
    """Every version of torch that the rows were measured with."""
    return ", ".join(sorted({row.torch for row in rows}))


def columns(kind: type) -> tuple[str, ...]:
    """Return the columns of a kind of row: its own fields, then those of its bases, `Row`'s
    last.
    """
    names = {field.name for field in dataclasses.fields(kind)}
    bases = map(inspect.get_annotations, kind.__mro__)
    return tuple(dict.fromkeys(name for own in bases for name in own if name in names))


def as_csv(rows: Iterable[Any], kind: type) -> str:
    """Return a whole CSV file as text, for derived tables: any dataclass will do."""
    return _line(columns(kind)) + "".join(_line(_cells(row)) for row in rows)


def _cells(row: Any) -> list[str]:
    return [_text(getattr(row, name)) for name in columns(type(row))]


def _line(cells: Iterable[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return " ".join(str(value).split())  # one row is one line


def _typed(name: str, kind: Any, text: str) -> Any:
    if isinstance(kind, types.UnionType):
        if text == "":
            return None
        kind = typing.get_args(kind)[0]
    try:
        return {"True": True, "False": False}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"{name}={text!r} must be of type {kind.__name__}") from None


def _append(path: Path, text: str) -> None:
    """Add whole lines with a single write, so that a kill cannot mix two rows."""
    with _alone(path) as file:
        file.write(text.encode())
        os.fsync(file.fileno())


def _begin(path: Path, head: str) -> None:
    """Cuts off a last line without an end, as a killed run or a full disk leaves it; writes the
    head of an empty file.
    """
    with _alone(path) as file:
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        if not path.stat().st_size:
            file.write(head.encode())
            os.fsync(file.fileno())


@contextmanager
def _alone(path: Path) -> Iterator[IO[bytes]]:
    """Yield the file to append to, while no other process does."""
    with open(path, "ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        yield file


def _free_name(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that does not exist."""
    name, i = path, 1
    while name.exists():
        i += 1
        name = path.with_stem(f"{path.stem}-{i}")
    return name
