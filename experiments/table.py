"""Print the Long Range Arena table of training runs, and write it as Markdown and CSV.

    python -m experiments.table
    python -m experiments.table 'runs=[runs/train,other/*/train]' out=runs/lra/table
    python -m experiments.table runs=runs/train/image archive=docs/results/lra/runs/image.jsonl.gz

Runs are folders of experiments.train, or archives of them. See docs/guide/lra.md.
"""

from pathlib import Path
from typing import Any

from experiments.common.checks import as_list
from experiments.common.program import program
from experiments.common.rows import read
from experiments.lra.runs import read_runs, write_archive
from experiments.lra.table import Table


@program("table")
def main(options: dict[str, Any], command: str) -> None:
    runs = read_runs(as_list(options["runs"]))
    steps = read(options["speed"]) if options["speed"] else None
    table = Table(runs, steps, options["whole"])
    paths = table.write(Path(options["out"]))
    if options["archive"]:
        paths.append(Path(options["archive"]))
        write_archive(runs, paths[-1])
    print(table.text())
    print("\n".join(f"written: {path}" for path in paths))


if __name__ == "__main__":
    main()
