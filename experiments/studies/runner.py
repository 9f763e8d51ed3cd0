"""The runner of studies: cases x ways x rounds, each gated, timed and kept.

A study is a module of this folder. It defines

    Options                 its options, a dataclass with those of `runner.Options`; `both` gives
                            one default on a GPU and another on a CPU
    KEY                     the fields of a row that say what was measured; with "round" in rounds
    cases(run)              what to measure: fields of rows, or objects whose `row()` gives them
    ways(case, run)         what to measure of a case: fields such as provider and direction; none
                            where it is one thing
    opened(case, run)       makes the inputs; a function that measures one row: its further fields
    tables(frame)           Markdown tables of rows by name
    figures(frame)          figures of rows by name, if there are any
    verdict(options, frame) a text and an exit status, where the study has one

A row that raises says why: ValueError and NotImplementedError mean "unsupported", and `WrongResult`
a result that is not timed.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from itertools import product
from types import ModuleType
from typing import Any

from tqdm import tqdm

from experiments.bench import step
from experiments.bench.gate import WrongResult
from experiments.bench.step import breaks_context, free
from experiments.common.config import choose
from experiments.common.devices import find_device
from experiments.common.rows import OK, SOURCES, Found, Row, Rows, found, gpu, last_versions

MAY_BE_0 = ("pages", "dropout", "outliers", "fall")  # options; other numbers are above 0
SHARES = ("densities", "density", "outliers", "dropout")  # at most 1
UNSTABLE = 0.15  # range of the rounds / median, above which a cell is no result


@dataclass(kw_only=True)
class Options:
    """The options of every study."""

    name: str  # the study
    device: str | None = None  # null: cuda where there is one, else cpu
    seconds: float = 0.1  # of repeats a measurement
    rounds: int = 1  # repeats of each case, each beginning with another provider
    measure: bool = True  # false: tables and figures only
    rows: str = "runs/studies/${name}.jsonl"  # added to; what it holds is not measured again
    figures: str | None = None  # folder; null: the name of the rows without .jsonl
    allow_changes: bool = False  # true: add rows under docs though code differs from the commit

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, bool) or not isinstance(one, int | float):
                    continue
                if one < (name not in MAY_BE_0) * 1e-9 or (one > 1 and name in SHARES):
                    what = "a share above 0, at most 1" if name in SHARES else "a number above 0"
                    raise ValueError(f"{name}={value}: give {what}")


def both(cuda: Any, cpu: Any) -> Any:
    """Return the field of an option with another default on a GPU than on a CPU."""
    return field(default_factory=lambda: deepcopy(cpu), metadata={"cuda": cuda, "cpu": cpu})


def defaults(study: ModuleType, kind: str) -> Any:
    """Return the options of a study with their defaults for "cuda" or "cpu"."""
    own = {f.name: f.metadata[kind] for f in fields(study.Options) if kind in f.metadata}
    return study.Options(name=study.__name__.rpartition(".")[2], **own)


class Unmasked(Rows):
    """Rows whose mask follows from the rest of what was measured, which says it only then."""

    def key_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return super().key_of({**row, "mask": None})


class Run:
    """One call of a study: its options, the device and the rows that there are."""

    def __init__(self, study: ModuleType, options: Any, command: str):
        self.study, self.options, self.command = study, options, command
        self.device = find_device(options.device)
        self.cases = list(study.cases(self))  # refuses options before a file is written
        sources, kind = getattr(study, "SOURCES", SOURCES), getattr(study, "ROWS", Rows)
        self.rows = kind(options.rows, study.KEY, sources, allow_changes=options.allow_changes)
        self.origin = self.rows.origin(self.device, command)
        self.kept: dict[Any, Any] = {}  # what a study keeps from round to round

    def go(self) -> list[Row]:
        """Measure what the file of rows lacks, unless the GPU is lost; what differs between rounds
        by more than `UNSTABLE` once more. Return the rows that there are.

        Each round takes all cases, every other one backwards: what a case gains or loses by its
        place, by the clock or the temperature, shows as the range of the rounds.
        """
        rounds = self.options.rounds if "round" in self.study.KEY else 1
        todo = [
            (case, self.wanted(case, number))
            for number in range(1, rounds + 1)
            for case in self.cases[:: 1 if number % 2 else -1]
        ]
        if not any(rows for _, rows in todo):
            raise ValueError("these options leave nothing to measure")
        if self._measure(todo) and (again := self.unstable(todo)):
            print(f"again: rounds differ by more than {100 * UNSTABLE:.0f} %")
            self._measure(again, again=True)
        return [known for _, rows in todo for row in rows if (known := self.rows.find(row))]

    def _measure(self, todo: list[tuple[Any, list[Row]]], again: bool = False) -> bool:
        """Measure these rows of cases; return whether nothing is left."""
        names = dict.fromkeys((*self.study.KEY, "mask"))
        every = [row for _, rows in todo for row in rows]
        differ = [n for n in names if len({str(row.get(n)) for row in every}) > 1]
        with tqdm(total=len(every), unit="row", disable=None) as bar:  # a terminal alone shows it
            for case, rows in todo:
                lacking = [row for row in rows if again or self.lacks(row)]
                for row in self.measured(case, lacking):
                    known = self.rows.find(row)
                    if again or known is None or known["status"] != row["status"]:
                        self.rows.append(row)
                    bar.write(self.line(row, differ))
                    if breaks_context(row["status"]):
                        print("the device is lost to this process: repeat the command to go on")
                        return False
                bar.update(len(rows))
        return True

    def unstable(self, todo: list[tuple[Any, list[Row]]]) -> list[tuple[Any, list[Row]]]:
        """Return the rows whose rounds differ by more than `UNSTABLE`."""
        times: dict[Any, list[float]] = {}
        cell = lambda row: self.rows.key_of(row | {"round": None})  # noqa: E731
        for row in (row for _, rows in todo for row in rows):
            known = self.rows.find(row) or {}
            if known.get("ms_median"):
                times.setdefault(cell(row), []).append(known["ms_median"])
        shaky = {at for at, ms in times.items() if spread(ms) > UNSTABLE}
        return [(case, [row for row in rows if cell(row) in shaky]) for case, rows in todo if shaky]

    def wanted(self, case: Any, number: int = 1) -> list[Row]:
        """Return the rows of a case in a round before they are measured, in their order."""
        ways = self.study.ways(case, self) if hasattr(self.study, "ways") else [{}]
        facts = case if isinstance(case, dict) else case.row()
        facts = {"mask": "", "density": None, "round": number} | facts
        if "round" not in self.study.KEY:
            del facts["round"]
        ways = in_turn(ways, number - 1, self.study.KEY[0])
        return [facts | way | self.origin for way in ways]

    def lacks(self, row: Row) -> bool:
        """Return whether a row has neither a time nor a reason that stays."""
        status = (self.rows.find(row) or {"status": "failed"})["status"]
        return status.startswith("failed") or "install" in status

    def measured(self, case: Any, rows: Sequence[Row]) -> Iterator[Row]:
        """Yield each row with its numbers, or with the status that says why there are none."""
        one: Any = None
        for row in rows:
            row = row | self.rows.origin(self.device, self.command)  # with the clocks before
            try:
                one = one or self.study.opened(case, self)
                found = {"status": OK, **one(row)}
            except Exception as error:  # one failure is a result, not the end of the run
                found = {"status": step.why(error)}
                found |= {"error": error.error} if isinstance(error, WrongResult) else {}
                if one is None:  # what cannot be opened has no row with a time
                    one = lambda row, found=found: found  # noqa: E731
            clocks = {f"{n}_after": mhz for n, mhz in gpu(self.device).items() if "mhz" in n}
            yield row | found | clocks
        del one
        free(self.device)

    def line(self, row: Row, names: Sequence[str]) -> str:
        """Return a row as one line of text: the fields that differ, and numbers."""
        what = "  ".join(str(row[name]) for name in names if row.get(name) not in (None, ""))
        numbers = {n: row.get(n) for n in ("ms_median", "error", "peak_mib", "rmse", "tflops")}
        text = "  ".join(f"{name} {x:.4g}" for name, x in numbers.items() if x is not None)
        text += f"  warning: {row['warning']}" if row.get("warning") else ""
        return f"{what}  {text if row['status'] == OK else row['status']}"


def spread(times: Sequence[float]) -> float:
    """Return the range of times as a share of their median."""
    return (max(times) - min(times)) / statistics.median(times) if times else 0.0


def grid(options: Any = None, same: str = "", **fields: Any) -> list[Found]:
    """Return a case for each combination of the fields that are lists, the first one slowest.

    same: further fields, which are options of these names.
    """
    fields |= {name: getattr(options, name) for name in same.split()}
    axes = [value if isinstance(value, list) else [value] for value in fields.values()]
    return [Found(zip(fields, values, strict=True)) for values in product(*axes)]


def choices(options: Any, **known: Iterable[str]) -> None:
    """Raise ValueError unless each option named is one of the known values, or a list of them."""
    for name, values in known.items():
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            choose(name, value, values)


def pair(name: str, text: str) -> tuple[int, int]:
    """Return the numbers of a text such as 64:8. Raises ValueError for another one."""
    first, colon, second = text.partition(":")
    if not (colon and first.isdecimal() and second.isdecimal() and int(first) * int(second)):
        raise ValueError(f"{name}={text}: give two numbers, such as 64:8")
    return int(first), int(second)


def in_turn(ways: Sequence[Row], number: int, name: str) -> list[Row]:
    """Return what to measure in a round: each begins with another `name` than the one before."""
    names = list(dict.fromkeys(way.get(name) for way in ways))
    first = number % max(1, len(names))
    order = [*names[first:], *names[:first]]
    return sorted(ways, key=lambda way: order.index(way.get(name)))


def latest(frame: Any, shared: str, cell: Sequence[str]) -> list[Found]:
    """Return the last row of each `cell`, of those that are as the last row in the fields `shared`.

    cell: names of fields.
    """
    rows = found(frame)
    same = [row for row in rows if all(row.get(n) == rows[-1].get(n) for n in shared.split())]
    return list({tuple(row.get(name) for name in cell): row for row in same}.values())


def timed(frame: Any, key: Sequence[str], shared: str = "device") -> Any:
    """Return the rows with a result, of the newest versions of what they measure in all rounds,
    that are as the last row in the fields `shared`.
    """
    rows = last_versions(frame[frame.status == OK], key)
    return rows[(rows[shared.split()] == rows[shared.split()].iloc[-1]).all(axis=1)]


def about(frame: Any) -> str:
    """Return where rows come from in one line: devices, versions, commits, dates and rounds."""
    rows = found(frame)

    def several(name: str) -> str:
        return ", ".join(sorted({str(row[name]) for row in rows if row.get(name)}))

    commits, gpus = ({row[name] for row in rows if row[name]} for name in ("commit", "gpu"))
    text = f"{several('device')}; torch {several('torch')}; "
    text += f"{len(gpus)} GPUs; " if len(gpus) > 1 else ""
    dates = sorted({row.date[:10] for row in rows if row.date})  # what was left out has none
    text += several("commit") if len(commits) < 3 else f"{len(commits)} commits"
    return f"{text}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; {len(rows)} rows"
