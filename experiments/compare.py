"""Where a provider stands, from the CSV of experiments.speed alone.

    python -m experiments.speed grid=limits csv=runs/limits/limits.csv workers=12
    python -m experiments.compare csv=runs/limits/limits.csv

For each shape and direction: time, share of the ideal, ratio to each peer, and how much of
1 / density its speed-up over its own dense attention is. Then uneven masks beside even ones, small
blocks beside blocks of 128, and the worst and the mean of every comparison.
"""

from pathlib import Path
from typing import Any

from experiments.bench.reports.compare import report
from experiments.bench.rows import SpeedRow
from experiments.common.files import beside, write_text
from experiments.common.program import program
from experiments.common.records import read


@program("compare")
def main(options: dict[str, Any], command: str) -> None:
    """Prints the comparisons and writes them beside the CSV."""
    path = Path(options["csv"])
    text = report(read(path, SpeedRow), options["own"])
    out = path.with_name(f"{beside(path, '.txt').stem}-compared.txt")
    write_text(out, text + "\n", "csv")
    print(f"{text}\n\nwritten: {out}")


if __name__ == "__main__":
    main()
