"""Write README.md and the pages of results from their templates and the published rows.

    make pages                            # or: python -m experiments.tools.pages

A template is docs/templates/PAGE.md and makes docs/PAGE.md; docs/templates/README.md makes
README.md. CI fails if a page differs from what its template and the rows make. Edit the template,
never the page. Templates are Jinja2, in which these names insert tables of the rows below
docs/results:

    {{ tables("bench.tables", "h100/page.jsonl.gz", "head_dim == 128").density }}
    {{ tables("bench.tables", "h100/page.jsonl.gz", "head_dim == 128 and n_q == 16384").masks
       | columns("mask", "density", "FlashAttention-4") | lines("causal|sliding") }}
    {{ runs("lra/spt_text.jsonl.gz") | pivot("attention", "start", "accuracy", "{:.1f}") }}

- `tables(name, file, where)` calls `experiments.NAME.tables(frame)`, which returns a dict of
  Markdown tables by name. The frame has the rows of `file`, or those that the pandas query `where`
  chooses.
- `rows(file, where)` is that frame itself. `runs(file, where)` is a frame of training runs.
- `columns` and `lines` choose columns of a table by their heads (`columns("ms", new="old")` renames
  one), and lines by a regular expression that matches somewhere in the line.
- `pivot(down, across, value, format)` makes a table of a frame: a line for each value of `down`, a
  column for each of `across`, and the only value in each cell.
"""

import re
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from experiments.common.records import read
from experiments.common.text_table import MISSING, markdown

ROOT = Path(__file__).parents[2]
RESULTS, TEMPLATES = ROOT / "docs" / "results", ROOT / "docs" / "templates"
Tables = dict[str, Any]


def main() -> None:
    """Write every page and print its path if it changed."""
    for path, text in pages().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"written: {path.relative_to(ROOT)}")


def pages() -> dict[Path, str]:
    """Return the text of every page that a template makes, by its path."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True
    )
    made.globals |= {"tables": tables, "rows": rows, "runs": runs}
    made.filters |= {"columns": columns, "lines": lines, "pivot": pivot}
    found = {}
    for template in sorted(TEMPLATES.rglob("*.md")):
        name = template.relative_to(TEMPLATES).as_posix()
        page = ROOT / name if name == "README.md" else ROOT / "docs" / name
        found[page] = made.get_template(name).render()
    return found


def tables(name: str, file: str, where: str = "") -> Tables:
    """Return the tables that `experiments.NAME` makes of rows."""
    if name in OLD:
        return OLD[name](file, where)
    return import_module(f"experiments.{name}").tables(rows(file, where))


def rows(file: str, where: str = "") -> pd.DataFrame:
    """Return the rows of a file below docs/results, or those that a pandas query chooses."""
    from experiments.common.rows import frame

    found = frame(RESULTS / file)
    return found.query(where) if where else found


def columns(table: str, *names: str, **renamed: str) -> str:
    """Return a Markdown table with these columns in this order."""
    head, rule, *body = map(_cells, table.splitlines())
    wanted = {**{name: name for name in names}, **renamed}
    places = [head.index(name) for name in wanted.values()]
    chosen = [[line[i] for i in places] for line in (rule, *body)]
    return "\n".join(f"| {' | '.join(line)} |" for line in ([*wanted], *chosen))


def lines(table: str, pattern: str) -> str:
    """Return a Markdown table with the lines that match a regular expression."""
    head, rule, *body = table.splitlines()
    return "\n".join([head, rule, *(line for line in body if re.search(pattern, line))])


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def pivot(frame: pd.DataFrame, down: str, across: str, value: str, form: str = "{}") -> str:
    """Return a frame as a Markdown table. Raises ValueError for two values in one cell."""
    cells = frame.set_index([down, across])[value].dropna()
    if not cells.index.is_unique:
        raise ValueError(f"{cells.index[cells.index.duplicated()][0]} have several {value}")
    heads = list(dict.fromkeys(frame[across]))
    body = [
        [
            str(name),
            *(form.format(cells[name, h]) if (name, h) in cells else MISSING for h in heads),
        ]
        for name in dict.fromkeys(frame[down])
    ]
    return markdown([["", *map(str, heads)], *body])


def runs(file: str, where: str = "") -> pd.DataFrame:
    """Return a line for each training run of an archive, accuracies in percent."""
    from experiments.lra.published import ATTENTIONS
    from experiments.lra.runs import read_runs

    names = (
        "task label attention mask density seed steps accuracy val_accuracy pretraining complete"
        " ms_per_step seconds memory_mib device date"
    ).split()
    found = read_runs(str(RESULTS / file))
    frame = pd.DataFrame([{name: getattr(run, name) for name in names} for run in found])
    frame["name"] = frame.attention.map(lambda name: ATTENTIONS.get(name, name))
    frame["contour"] = [str((r.settings.get("task") or {}).get("difficulty") or "") for r in found]
    frame["start"] = [
        "pixels" if r.pretraining else "pretrained" if r.settings.get("init_from") else "scratch"
        for r in found
    ]
    return frame.query(where) if where else frame


# Modules whose `tables` does not take a frame yet, and what takes its place.


class _Made(dict):
    """Tables that are made when they are asked for."""

    def __init__(self, makers: Any):
        self.makers = makers

    def __missing__(self, name: str) -> str:
        return self.makers[name]()


def _old(module: str, kind: str, name: str) -> Callable[[str, str], Tables]:
    """Return what reads rows of an older kind, and gives them to a function of a module."""

    def make(file: str, where: str) -> Tables:
        home, _, cls = kind.rpartition(".")
        found = read(RESULTS / file, getattr(import_module(f"experiments.{home}"), cls))
        if where:
            chosen = set(pd.DataFrame([asdict(row) for row in found]).query(where).index)
            found = [row for i, row in enumerate(found) if i in chosen]
        made = getattr(import_module(f"experiments.{module}"), name)
        if isinstance(made, dict):
            return _Made({key: lambda make=make: make(found) for key, make in made.items()})
        return _Made(made(found))

    return make


def _lra_table(file: str, where: str) -> Tables:
    from experiments.lra.runs import read_runs
    from experiments.lra.table import TITLES, Table

    steps = rows(where).to_dict("records") if where else None
    table = Table(read_runs(str(RESULTS / file)), steps, bool(where))
    made = {name: markdown(lines, left) for name, (lines, left) in table.sections.items()}
    return made | {TITLES[name]: text for name, text in made.items()}


OLD: dict[str, Callable[[str, str], Tables]] = {
    "lra.table": _lra_table,
}


if __name__ == "__main__":
    main()
