"""Run a study of the papers, or list them all.

    python -m experiments.study                                     # the list
    python -m experiments.study name=decode 'lengths=[65536]'       # measure, print tables, draw
    python -m experiments.study name=decode measure=false rows=docs/results/h200/decode.jsonl.gz
    python -m experiments.study name=decode --help                  # its options

Each attention passes a gate against float64 before it is timed. Rows that the file holds are not
measured again: the same command continues after the last one.
"""

import ast
import inspect
import shlex
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.common.config import choose, compose, make, store, words
from experiments.common.devices import find_device
from experiments.common.figures import save, style
from experiments.common.program import HydraException
from experiments.common.rows import OK, frame, read
from experiments.studies.runner import Run, about, defaults

FOLDER = Path(__file__).parent / "studies"


def main() -> None:
    """Run what the command line names; an error is one line."""
    given = sys.argv[1:]
    name = next((word.removeprefix("name=") for word in given if word.startswith("name=")), None)
    if not {*given} - {"--help", "-h"}:
        lines = [f"  {name:16} {about}" for name, about in studies().items()]
        return print("\n".join([(__doc__ or "").strip(), "", *lines]))
    try:
        choose("name", name, studies())
        study = import_module(f"experiments.studies.{name}")
        if {"--help", "-h"} & {*given}:
            return print(help_text(study))
        run(study, options(study, given), shlex.join(["python", "-m", "experiments.study", *given]))
    except (HydraException, ValueError, OSError) as error:
        text = words(error) if isinstance(error, HydraException) else error
        print(f"error: {text}", file=sys.stderr)
        sys.exit(2)


def studies() -> dict[str, str]:
    """Return the first sentence of each study by its name."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text())
        names = {getattr(node, "name", "") for node in tree.body}
        if {"Options", "tables"} <= names:
            found[path.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found


def help_text(study: ModuleType) -> str:
    """Return what a study is, its options as its source has them, and their values here."""
    sources = [inspect.getsource(c) for c in reversed(study.Options.__mro__[:-1])]
    return "\n\n".join([(study.__doc__ or "").strip(), *sources, f"Here: {options(study, [])}"])


def options(study: ModuleType, given: list[str]) -> Any:
    """Return the options of a study, with the defaults of its device."""
    device = next((word[7:] for word in given if word.startswith("device=")), None)
    own = defaults(study, find_device(device).type)
    store("study", own)
    return make(own, compose("study", given))


def run(study: ModuleType, options: Any, command: str) -> None:
    """Measure what the rows lack, print the tables of all rows and draw their figures."""
    if options.measure:
        collect = getattr(study, "collect", None)  # of a study that measures nothing itself
        collect(options) if collect else Run(study, options, command).go()
    rows = frame(read(options.rows, key=getattr(study, "KEY", ())))
    if not len(rows):
        raise ValueError(f"rows={options.rows} has no rows: measure first, without measure=false")
    if "status" in rows and OK not in set(rows.status):
        raise ValueError(f"rows={options.rows} has no result: {rows.status.iloc[-1]}")
    for name, table in study.tables(rows).items():
        print(f"\n{name}\n\n{table}")
    print(f"\n{about(rows)}\nrows: {options.rows}" if "device" in rows else "")
    if hasattr(study, "figures"):
        folder = Path(options.figures or options.rows.partition(".jsonl")[0])
        with style():
            for name, figure in study.figures(rows).items():
                folder.mkdir(parents=True, exist_ok=True)
                print("figure:", *save(figure, folder / name, option="figures"))
    if hasattr(study, "verdict"):
        text, status = study.verdict(options, rows)
        print(text)
        sys.exit(status)


if __name__ == "__main__":
    main()
