"""Write README.md and the pages of results from their templates and the published rows.

    make pages                            # or: python -m experiments.tools.pages

A page has a comment above each table, with the expression that makes it, and what is between is
edited in place:

    <!-- {{ tables("studies.io", "h200/io.jsonl.gz").sparsity }} -->

    | the table | that is written here |

Other pages have a template, docs/templates/PAGE.md for docs/PAGE.md, which is edited instead. CI
fails if a page differs from what the rows make. Expressions are Jinja2, in which these names insert
tables of the rows below docs/results:

    {{ tables("bench.tables", "h100/page.jsonl.gz").ratios }}
    {{ tables("bench.tables", "h100/page.jsonl.gz", where="head_dim == 64").density
       | columns("density", "`hopper`", Peer="FlashAttention-4") | lines("0.25|0.0625") }}
    {{ runs("lra/spt_text.jsonl.gz") | pivot(["attention"], "start", "accuracy") }}

- `tables(name, file, ..)` calls `experiments.NAME.tables(frame, ..)` with a frame of the rows of
  each file. It returns a dict of Markdown tables by name. `where` is a pandas query that chooses
  rows of the first file.
- `rows(file, where)` is that frame itself. `runs(file, where)` is a frame of training runs.
- `columns` and `lines` choose columns of a table by their heads or parts of heads (`columns("ms",
  new="old")` renames one), and lines by a regular expression that matches somewhere in the line.
- `pivot(down, across, value, digits)` makes a table of a frame: a line for each value of the fields
  `down`, a column for each of `across`, and the mean of `value` ± its standard deviation.
- `shares(down, head="part/whole")` makes a table of sums of counts, in percent.
"""

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from experiments.common import tables as common
from experiments.common.rows import frame, read
from experiments.common.tables import markdown, mean_std
from experiments.lra import published
from experiments.lra.runs import unpacked

ROOT = Path(__file__).parents[2]
# a comment, and below it the lines about a table, if there are any, and the table
TABLE = re.compile(r"(<!-- ({{.*}}) -->\n\n)((?:[^|\s].*\n)+\n(?=\|))?((?:\S.*\n)*)")
RESULTS, TEMPLATES = ROOT / "docs" / "results", ROOT / "docs" / "templates"


def main() -> None:
    """Write every page and print its path if it changed."""
    for path, text in pages().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"written: {path.relative_to(ROOT)}")


def pages() -> dict[Path, str]:
    """Return the text of every page with tables of rows, by its path."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True,
        trim_blocks=True,
    )  # fmt: skip
    made.globals |= {"tables": tables, "rows": rows, "runs": runs}
    made.filters |= {"columns": columns, "lines": lines, "pivot": pivot, "shares": shares}
    found = {}
    for template in sorted(TEMPLATES.rglob("*.md")):
        name = template.relative_to(TEMPLATES).as_posix()
        found[ROOT / "docs" / name] = made.get_template(name).render()

    def table(match: re.Match[str]) -> str:
        text = made.from_string(match[2]).render().strip()
        about = text.count("\n\n")  # 1: lines about the table
        if about > 1:
            raise ValueError(f"{match[2]} makes more than a table: write a template")
        old = f"{match[3] or ''}{match[4]}"
        is_table = (block.rpartition("\n\n")[2][:1] == "|" for block in (text, old.rstrip()))
        same = len({*is_table}) == 1 and about == old.rstrip().count("\n\n")
        return f"{match[1]}{text}\n" + f"\n{old}" * (not same)  # other text is not replaced

    for page in (ROOT / "README.md", *sorted(RESULTS.glob("*.md"))):
        if page not in found:
            found[page], count = TABLE.subn(table, page.read_text())
            if count != found[page].count("<!-- {{"):
                raise ValueError(
                    f"{page}: give each <!-- {{{{ .. }}}} --> a line, and a blank one below"
                )
    return found


def tables(name: str, *files: str, where: str = "") -> dict[str, str]:
    """Return the tables that `experiments.NAME` makes of rows."""
    frames = [rows(file, "" if i else where) for i, file in enumerate(files)]
    return import_module(f"experiments.{name}").tables(*frames)


def rows(file: str | Sequence[str], where: str = "") -> pd.DataFrame:
    """Return the rows of files or folders below docs/results that a pandas query chooses."""
    given = [RESULTS / each for each in ([file] if isinstance(file, str) else file)]
    paths = [sorted(path.iterdir()) if path.is_dir() else [path] for path in given]
    found = frame([row for path in chain(*paths) for row in read(path)])
    return found.query(where) if where else found


def runs(file: str | Sequence[str], where: str = "") -> pd.DataFrame:
    """Return a line for each training run of archives that a query chooses, shares in percent."""
    names = "label mask density seed steps accuracy val_accuracy pretraining complete held_out"
    names += " ms_per_step length"
    lines = []
    for row in rows(file).to_dict("records"):
        run = unpacked(row)
        task, start = run.settings.get("task") or {}, run.settings.get("init_from")
        line = {name: getattr(run, name) for name in names.split()}
        lines.append(line | {
            "task": published.LABELS.get(run.task, run.task),
            "attention": published.ATTENTIONS.get(run.attention, run.attention),
            "last": 100 * run.of("val")[-1]["accuracy"] if run.of("val") else None,
            "contour": task.get("difficulty"),
            "strokes": str(task.get("strokes") or "").strip("[]"),
            "pixels": str(task.get("order") or "row").partition(":")[0],
            "run": re.sub(r"^c\d+-", "", run.settings.get("name") or ""),
            "start": "tokens" if run.pretraining else "pretrained" if start else "scratch",
            "order": (published.order(published.LABELS, run.task), run.length,
                      published.order(published.ATTENTIONS, run.attention), run.mask,
                      task.get("difficulty") or 14),
        })  # fmt: skip
    found = pd.DataFrame(lines).sort_values("order", kind="stable")
    return found.query(where) if where else found


def columns(text: str, *names: str, **renamed: str) -> str:
    """Return Markdown tables with these columns in this order.

    names: heads, or what the heads of several columns contain.
    """

    def change(head: str, body: list[str]) -> list[str]:
        heads, wanted = _cells(head), []
        for name in names:
            found = [name] if name in heads else [text for text in heads if name in text]
            if not found:
                raise ValueError(f"no column {name}: choose from {', '.join(heads)}")
            wanted += found
        places = [heads.index(name) for name in (*wanted, *renamed.values())]
        chosen = [[_cells(line)[i] for i in places] for line in body]
        return [f"| {' | '.join(line)} |" for line in ([*wanted, *renamed], *chosen)]

    return _each_table(text, change)


def lines(text: str, pattern: str) -> str:
    """Return Markdown tables with the lines that match a regular expression."""

    def change(head: str, body: list[str]) -> list[str]:
        return [head, body[0], *(line for line in body[1:] if re.search(pattern, line))]

    return _each_table(text, change)


def _each_table(text: str, change: Callable[[str, list[str]], list[str]]) -> str:
    """Return a text with the lines of each of its tables changed."""

    def one(found: re.Match[str]) -> str:
        head, *body = found[0].splitlines()
        return "\n".join(change(head, body)) + "\n" * found[0].endswith("\n")

    return re.sub(r"(?:^\|.*(?:\n|$))+", one, text, flags=re.MULTILINE)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def pivot(
    frame: pd.DataFrame, down: Sequence[str], across: str, value: str, digits: int = 1
) -> str:
    """Return a frame as a Markdown table: the mean of a value, ± the standard deviation if any."""
    return markdown(common.pivot(frame, down, across, lambda group: mean_std(group[value], digits)))


def shares(frame: Any, down: Sequence[str], **ratios: str) -> str:
    """Return sums of counts as a Markdown table: a column for each "part/whole", in percent."""
    found = frame.groupby(list(down), sort=False).sum(numeric_only=True)
    for head, ratio in ratios.items():
        part, whole = ratio.split("/")
        found[head] = (100 * found[part] / found[whole]).map("{:.1f}".format)
    return markdown(found[[*ratios]].reset_index().astype(str), left=range(len(down)))


if __name__ == "__main__":
    main()
