"""Speed of a few cells beside their peers, and what fell since rows of an earlier run.

    python -m experiments.study name=regression                # rows to compare with later
    python -m experiments.study name=regression against=EARLIER.jsonl.gz

Cells are lines of conf/regression.yaml: a case of another study, which makes its inputs, gates and
times it. Each run measures all of them, as only times of one process are comparable. A cell is
compared by its time over those of peers that both files have in the same version, else by its time
alone. Exit status 1: a cell fell by more than `fall`, or has no result any more.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sparseflash
from experiments.bench import run as speed
from experiments.bench.cases import Case
from experiments.bench.provider import Attention, Provider
from experiments.bench.providers import PROVIDERS, SparseFlash
from experiments.common.config import CONF, make
from experiments.common.devices import device_name
from experiments.common.files import read_yaml
from experiments.common.rows import OK, Row, found, read
from experiments.common.tables import markdown, short
from experiments.studies import decode, picks, runner
from experiments.studies.runner import UNSTABLE, Run, both, choices, defaults, spread

KEY = "provider direction cell process round".split()
SHAPE = "mask batch heads kv_heads n_q n_k n head_dim v_dim dtype layout block_q block_k".split()
STUDIES = {"speed": speed, "picks": picks, "decode": decode}
SHAKY = f"unstable: rounds differ by more than {100 * UNSTABLE:.0f} %"
Place = tuple[Any, ...]


@dataclass(kw_only=True)
class Options(runner.Options):
    against: str | None = None  # rows of an earlier run on such a device; null: no comparison
    fall: float = both(0.04, 0.2)  # the share of its speed that a cell may lose
    cells: list[str] | None = None  # by name; null: all
    rounds: int = both(3, 2)
    seconds: float = both(0.1, 0.02)


@dataclass(frozen=True)
class Calls(Provider):
    """Many calls of another provider as one: in small calls their time is that of the host."""

    of: str = ""
    compiled: bool = False
    directions = ("forward",)  # pyright: ignore[reportAssignmentType]

    def version(self) -> dict[str, str]:
        return PROVIDERS[self.of].version()

    def unsupported(self, case: Case, device: torch.device, direction: str) -> str | None:
        return PROVIDERS[self.of].unsupported(case, device, direction)

    def prepare(self, case: Case, device: torch.device) -> Attention:
        attend = PROVIDERS[self.of].prepare(case, device)
        if self.compiled:
            torch._dynamo.reset()  # or later rounds would be over its recompilation limit
            attend = torch.compile(attend, dynamic=False)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return [attend(q, k, v) for _ in range(50)][-1]

        return run


class Dropout(SparseFlash):
    """Dropout of so few probabilities that results pass the gate; any p has the same kernel."""

    def prepare(self, case: Case, device: torch.device) -> Attention:
        options: Any = {"backend": self.backend, "dropout_p": 2**-16, "seed": 0}
        attend: Any = sparseflash.attention
        return lambda q, k, v: attend(q, k, v, case.blocks, **options)


PROVIDERS |= {
    "auto": SparseFlash("SparseFlash", backend="auto"),
    "dropout": Dropout("dropout", backend="auto"),
    **{f"{of}_calls": Calls(of, of=of) for of in ("auto", "sdpa", "flex")},
    **{f"{of}_compiled": Calls(of, of=of, compiled=True) for of in ("auto", "sdpa")},
}


class Cell(NamedTuple):
    """A line of the file: a case of a study, and what that study takes for its run."""

    name: str
    over: str | None  # the cell that takes the place of peers
    study: ModuleType
    case: Any
    run: Any

    def row(self) -> Row:
        facts = self.case if isinstance(self.case, dict) else self.case.row()
        return {"cell": self.name, "over": self.over} | facts


def cases(run: Run) -> list[Cell]:
    """Return the cells. Raise ValueError for earlier rows that have none of them."""
    o, kind = run.options, run.device.type
    lines: Any = read_yaml(CONF / "regression.yaml", "it has cells by device")[kind]
    if o.cells:
        choices(o, cells=[line["cell"] for line in lines])
    cells = []
    for line in lines:
        own = {"device": str(run.device), "seconds": o.seconds} | line
        name, over, study = own.pop("cell"), own.pop("over", None), own.pop("study", "speed")
        if name in (o.cells or [name]):
            study = STUDIES[study]
            usual: Any = speed.Options if study is speed else defaults(study, kind)
            options = make(usual, own)
            part = SimpleNamespace(options=options, device=run.device, kept={})
            cells += [Cell(name, over, study, case, part) for case in study.cases(part)]
    if o.against:
        wanted = [place_of(cell.row() | way) for cell in cells for way in ways(cell, run)]
        earlier(o.against, device_name(run.device), wanted)
    return cells


def ways(cell: Cell, run: Run) -> list[Row]:
    """Return those of the study; all providers but its first are peers."""
    own = [{"direction": "forward"} | way for way in cell.study.ways(cell.case, cell.run)]
    return [way | {"peer": way["provider"] != own[0]["provider"]} for way in own]


def opened(cell: Cell, run: Run) -> Callable[[Row], Row]:
    return cell.study.opened(cell.case, cell.run)


@dataclass
class Result:
    """A cell in one run: its time, those of what it is over, and why others have none."""

    over: str | None = None
    ms: float = 0.0
    status: str = "not measured"
    others: dict[str, float] = field(default_factory=dict)  # by name and version
    lacking: dict[str, str] = field(default_factory=dict)


def place_of(row: Row) -> Place:
    """Return what rows must share to be compared."""
    return (row["cell"], row["direction"], *(row.get(name) for name in SHAPE))


def results(rows: Any) -> dict[Place, Result]:
    """Return the cells of the last process among rows."""
    rows, rounds, made = found(rows), {}, {}
    for row in rows:
        if row.cell and row.process == rows[-1].process:
            rounds.setdefault((place_of(row), row.provider), {})[row.round] = row
    for (place, name), same in rounds.items():
        row, times = same[max(same)], [row.ms_median for row in same.values() if row.status == OK]
        ms, status = statistics.median(times or [0.0]), SHAKY if spread(times) > UNSTABLE else OK
        status = next((row.status for row in same.values() if row.status != OK), status)
        cell = made.setdefault(place, Result(row.over))
        if not row.peer:
            cell.ms, cell.status = ms, status
        elif status == OK:
            version = row.torch if row.version == "" else row.version
            cell.others[f"{name} {version or ''}".strip()] = ms
        if status != OK:
            cell.lacking[name] = status
    ours = {place[:2]: cell.ms for place, cell in made.items() if cell.status == OK}
    for place, cell in made.items():
        if ms := ours.get((cell.over, place[1])):
            cell.others[str(cell.over)] = ms
    return made


def earlier(path: str, device: str, places: Iterable[Place]) -> dict[Place, Result]:
    """Return the cells of a file. Raise ValueError if nothing can be compared with them."""
    rows = read(path, "python -m experiments.study name=regression", KEY)
    if rows and (other := rows[-1].get("device")) != device:
        raise ValueError(f"against={path} is of another device, {other}, not {device}: name others")
    before = results(rows)
    if not before.keys() & {*places}:
        raise ValueError(f"against={path} has none of these cells: name rows of this study")
    return before


def tables(frame: Any) -> dict[str, str]:
    """Return the cells of the last run, forward / backward: ms, that over the times of others, and
    what has none.
    """
    lines = [["cell", "ms", "time over that of", "without a time"]]
    for name, same in groupby(results(frame).items(), lambda found: found[0][0]):
        cells, over, why = {place[1]: cell for place, cell in same}, {}, {}
        for direction, cell in cells.items():
            for other, ms in cell.others.items():
                peer = other if other == cell.over else other.partition(" ")[0]
                over.setdefault(peer, {})[direction] = f"{cell.ms / ms:.2f}"
            why |= cell.lacking
        ms = " / ".join(short(cell.ms or None) for cell in cells.values())
        ratios = ", ".join(
            f"{other}: {' / '.join(each.values())}"
            + f" ({next(iter(each))})" * (len(each) < len(cells))
            for other, each in over.items()
        )
        reasons = "; ".join(f"{other}: {status}" for other, status in why.items())
        lines.append([name, ms, ratios, reasons])
    return {"regression": markdown(lines, (0, 2, 3))}


def verdict(options: Options, frame: Any) -> tuple[str, int]:
    """Return how the speed of each cell changed, and the exit status: 1 if one fell."""
    if not options.against:
        return "", 0
    now, fell = results(frame), []
    before = earlier(options.against, frame.device.iloc[-1], now)
    lines = [["cell", "direction", "ms before", "ms now", "compared by", "speed, %", ""]]
    for place, new in now.items():
        old, ms = before.get(place, Result()), new.ms or float("inf")
        same = [name for name in new.others if name in old.others]
        gains = [old.ms / old.others[name] * new.others[name] / ms for name in same]
        gain = statistics.median(gains or [old.ms / ms]) - 1
        said = new.status if new.status != OK else "fell" if gain < -options.fall else ""
        if old.status != OK:
            said = f"before: {old.status}"
        elif said not in ("", SHAKY):
            fell.append(" ".join(place[:2]))
        times = (short(ms or None) for ms in (old.ms, new.ms))
        lines.append([*place[:2], *times, ", ".join(same) or "time", f"{100 * gain:+.1f}", said])
    text = f"fell by more than {100 * options.fall:g} %, or failed: {', '.join(fell) or 'none'}"
    return f"{markdown(lines, (0, 1, 4, 6))}\n\n{text}", int(bool(fell))
