"""Measuring what a file of rows lacks, within a time, and what programs print of it."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from experiments.bench.warm import breaks_context
from experiments.common.checks import as_list
from experiments.common.files import beside, read_text, write_text
from experiments.common.provenance import ROOT
from experiments.common.records import Records, TimedRow, read
from experiments.common.text_table import fill

R = TypeVar("R", bound=TimedRow)
Group = tuple[Sequence[R], Callable[[list[R]], Iterable[R]]]
LEFT_OUT = "left out"  # the status of a call that would take too long
Tables = Mapping[str, Callable[[], str]]


def resumed(groups: Iterable[Group[R]], records: Records[R], minutes: float | None) -> Iterator[R]:
    """Every row, measured or known; ends early after `minutes`, or when the GPU is lost.

    groups: rows before they are measured, which are measured together, and what measures them.
    Rows with a time or a reason are not measured again; those that failed are, and those left out,
    because the limit of time may be another.
    """
    end = time.monotonic() + 60 * minutes if minutes else None
    for rows, measure in groups:
        found = [records.find(row) or row for row in rows]
        if any(not row.status or row.status.startswith(("failed", LEFT_OUT)) for row in found):
            if end and time.monotonic() > end:
                return
            found = list(measure(found))
            for row in found:
                known = records.find(row)
                if known is None or known.status != row.status:
                    records.append(row)
        yield from found
        if any(breaks_context(row.status) for row in found):
            return


def tell(rows: Iterable[R], wanted: int, describe: Callable[[R], str]) -> None:
    """Prints each row as it comes, and how many of those wanted are left."""
    count = 0
    for row in rows:
        count += 1
        print(describe(row), flush=True)
    if count < wanted:
        left = wanted - count
        print(f"{left} measurements are left: the same command goes on with them", flush=True)


def check_places(options: dict[str, Any], path: Path) -> None:
    """Makes the folder of figures and reads the pages, before anything is measured."""
    Path(options["plots"]).mkdir(parents=True, exist_ok=True)
    Pages(options["pages"], path)


def publish(
    path: Path,
    kind: type[R],
    tables: Callable[[list[R]], str],
    draw: Callable[[list[R], Path], Sequence[Path]],
    options: dict[str, Any],
    named: Callable[[list[R]], Tables],
) -> None:
    """Writes and prints the tables of a file of rows, draws its figures, and fills pages.

    named: the tables that a page may hold. A line `<!-- rows: NAME FOLDER/FILE -->` of a page takes
        one of this file, and `<!-- end -->` ends it.
    """
    pages = Pages(options["pages"], path)
    rows = read(path, kind)
    if not rows:
        raise ValueError(f"{path} holds no rows; measure first: {kind.COMMAND}")
    text, written = tables(rows), [path, *draw(rows, Path(options["plots"]))]
    print("\n" + text)
    if ROOT / "docs" not in path.resolve().parents:  # there pages hold the tables
        table = beside(path, ".md")
        write_text(table, text, "csv")
        written.append(table)
    written += pages.fill(named(rows))
    print("\n".join(f"written: {place}" for place in written))


class Pages:
    """Markdown pages whose tables of one file are filled.

    Raises ValueError for a page that cannot be read, or has no table of the file.
    """

    def __init__(self, pages: Any, csv: Path):
        self.rows = f"{csv.resolve().parent.name}/{csv.name.removesuffix('.gz')}"
        self.paths = [Path(page) for page in as_list(pages)]
        for page in self.paths:
            text = read_text(page, "name another page", f"pages={page}")
            if f" {self.rows} -->" not in text:
                raise ValueError(f"pages={page}: it has no line <!-- rows: NAME {self.rows} -->")

    def fill(self, tables: Tables) -> list[Path]:
        """Fills the pages as they are now. Raises ValueError for a name that is no table."""
        for page in self.paths:
            text = page.read_text(encoding="utf-8")
            write_text(page, fill(text, tables, self.rows), "pages")
        return self.paths
