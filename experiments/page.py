"""Makes the tables of speed on the first page, and in the results, from measured rows.

    make page                                  # measure on this GPU, then this program and the plot
    python -m experiments.page csv=docs/results/h200/page.csv 'into=[README.md]'

A table stands between `<!-- rows: density -->` or `<!-- rows: masks -->` and `<!-- end -->`.
"""

from pathlib import Path
from typing import Any

from experiments.bench.reports.page import TABLES, fill
from experiments.bench.rows import SpeedRow
from experiments.common.checks import as_list
from experiments.common.program import program
from experiments.common.records import read


@program("page")
def main(options: dict[str, Any], command: str) -> None:
    """Fills the pages, or prints the tables where none is given."""
    rows = read(options["csv"], SpeedRow)
    if triton := options["triton"]:
        rows = [row for row in rows if row.triton == str(triton)]
    if not rows:
        raise ValueError(f"{options['csv']} has no row of triton={options['triton']}")
    for name in as_list(options["into"]):
        page = Path(name)
        try:
            text = page.read_text()
        except OSError as error:
            raise ValueError(f"cannot read into={name} ({error.strerror})") from None
        page.write_text(fill(text, rows))
        print(f"filled: {page}")
    if not options["into"]:
        print("\n\n".join(filter(None, (table(rows) for table in TABLES.values()))))


if __name__ == "__main__":
    main()
