"""The Long Range Arena table of training runs, as Markdown and text.

Accuracy by task and its averages, training speed-up and peak memory, densities of blocks, shortcuts
that an accuracy has to beat, and differences between attentions with their intervals. The values of
the paper (Dao et al. 2022) are in brackets.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean

import pandas as pd

from experiments.common.tables import MISSING, aligned, markdown
from experiments.lra import cells as of
from experiments.lra import published as lra
from experiments.lra.cells import Cell, Cells, Column, RowKey
from experiments.lra.runs import Run, unpacked

Lines = list[list[str]]
BASES = {lra.BASE: "from_standard", "flash": "from_flash"}  # what differences are relative to
CUT, VALIDATION, UNTRACED, UNTRAINED = "†", "‡", "§", "¶"
LEGEND = {
    "[x]": "the paper's value",
    "*": "which equals that of an earlier paper",
    CUT: "cut short: fewer steps than planned",
    VALIDATION: "best validation accuracy; the run was not tested",
    UNTRACED: "untraced: no commit holds the exact code of the run",
    UNTRAINED: "did not train: the last validation, which follows, is at the most frequent class",
    MISSING: "not run",
    "(n)": "seeds of both rows; s: the interval covers seeds, e: test examples",
}
TITLES = {
    "accuracy": "Accuracy (%), speed-up and memory",
    "from_standard": "Difference from the Transformer: points ± 95 % interval, paired",
    "from_flash": "From FlashAttention: points ± 95 % interval, paired",
}


def tables(frame: pd.DataFrame, steps: pd.DataFrame | None = None) -> dict[str, str]:
    """Return the tables of an archive of runs as Markdown: accuracy, from_standard and from_flash,
    those that the runs support.

    steps: rows of the study lra_speed. Their times and memory replace those of the runs.
    """
    runs = [unpacked(row) for row in frame.to_dict("records")]
    found = Table(runs, None if steps is None else steps.to_dict("records"))  # type: ignore[arg-type]
    return {name: markdown(lines) for name, lines in found.sections.items()}


class Table:
    """The cells of the table and its sections, lines by name. steps: as of `make_cells`."""

    def __init__(self, runs: Sequence[Run], steps: of.Steps | None = None):
        self.cells, self.notes = of.make_cells(runs, steps)
        self.rows = of.sorted_rows(row for row, _ in self.cells)
        self.columns = of.sorted_columns(column for _, column in self.cells)
        made = {"accuracy": self._accuracy()}
        made |= {name: self._differences(base) for base, name in BASES.items()}
        self.sections = {name: lines for name, lines in made.items() if len(lines) > 1}

    def _accuracy(self) -> Lines:
        more = ["average", "speed-up", "peak MiB"]
        lines, blank = [["", *of.heads(self.columns), *more]], [""] * len(more)
        for row in self.rows:
            cells = [self.cells.get((row, c)) for c in self.columns]
            papers = [of.paper_value(row, c) for c in self.columns]
            earlier = [(row.attention, c.task) in lra.EARLIER for c in self.columns]
            texts = list(map(accuracy_text, cells, papers, earlier))
            texts.append(_average_text(row, of.averaged(self.cells, row, self.columns)))
            texts.append(self._mean_speedup_text(row))
            peak = max((cell.memory_mib or 0 for cell in cells if cell), default=0)
            lines.append([row.text, *texts, f"{peak:.0f}" if peak else MISSING])
            lines += [line + blank for line in density_lines(cells)]
        return lines + [line + blank for line in baseline_lines(self.cells, self.columns)]

    def _mean_speedup_text(self, row: RowKey) -> str:
        value, count = of.mean_speedup(self.cells, row, self.columns)
        timed = {c.task for r, c in self.cells if r.attention == lra.BASE} & {*lra.TIMED}
        some = f" ({count} of {len(timed)})" if count < len(timed) else ""
        ours = MISSING if value is None else f"{value:.2f}x{some}"
        paper = lra.PAPER_SPEEDUP.get(row.attention)
        return ours if paper is None or row.label else f"{ours} [{paper:.1f}x]"

    def _differences(self, base: str) -> Lines:
        """Return a line for each row that has a difference from an attention in some column."""
        pairs = ((row, [self._difference(row, c, base) for c in self.columns]) for row in self.rows)
        body = [[row.text, *texts] for row, texts in pairs if {*texts} != {MISSING}]
        return [["", *of.heads(self.columns)], *body]

    def _difference(self, row: RowKey, column: Column, base: str) -> str:
        keys = row, RowKey(base, "", row.label)  # in the same recipe
        ours, other = (self.cells.get((key, column)) for key in keys)
        if ours is None or other is None or ours is other:
            return MISSING
        if (found := of.difference(ours.runs, other.runs)) is None:
            return MISSING
        half = "" if found.half is None else f" ± {found.half:.1f}"
        words = ", ".join(filter(None, (str(found.seeds), "+".join(found.covers))))
        mark = "" if ours.complete else CUT
        return f"{found.value:+.1f}{half} ({words}){mark}"

    def footnotes(self) -> list[str]:
        """Return the marks, the data in full, cut runs, and what was left out."""
        shown = " ".join(
            cell for lines in self.sections.values() for line in lines for cell in line
        )
        needs = {"[x]": "[", "(n)": "("}
        found = [
            f"{mark} {text}" for mark, text in LEGEND.items() if needs.get(mark, mark) in shown
        ]
        found += [f"{c.text}: {c.source}" for c in self.columns if "," in c.source]
        cut = [run for cell in self.cells.values() for run in cell.runs if not run.complete]
        planned = "{} {}: {} of {} steps".format
        found += [planned(CUT, r.place, r.steps, r.settings.get("steps", "?")) for r in cut]
        return found + of.unlike(self.cells) + self.notes

    def text(self) -> str:
        """Return all sections and notes, for a terminal."""
        parts = [f"{TITLES[name]}\n{aligned(lines)}" for name, lines in self.sections.items()]
        return "\n\n".join([*parts, "\n".join(self.footnotes())]) + "\n"


def accuracy_text(cell: Cell | None, paper: float | None = None, earlier: bool = False) -> str:
    """Return mean ± spread (seeds), marks and the paper's value, which may be an earlier one's."""
    text = MISSING
    if cell is not None and cell.accuracy is not None:
        text = f"{cell.accuracy:.1f}"
        if cell.spread is not None:
            text += f" ± {cell.spread:.1f} ({len(cell.accuracies)})"
        text += _marks(cell.complete, cell.tested) + ("" if cell.traced else UNTRACED)
        text += "" if cell.untrained is None else f" {UNTRAINED} {cell.untrained:.1f}"
    elif cell is not None:
        text = CUT
    return text if paper is None else f"{text} [{paper:.1f}{'*' * earlier}]"


def _average_text(row: RowKey, cells: dict[str, Cell]) -> str:
    """Return the mean without the missing tasks, and the paper's over the same ones."""
    if not cells:
        return MISSING
    text = f"{fmean(cell.accuracy or 0.0 for cell in cells.values()):.1f}"
    text += _marks(all(c.complete for c in cells.values()), all(c.tested for c in cells.values()))
    count, all_tasks = len(cells), len(lra.AVERAGED)
    text += f" ({count} of {all_tasks})" if count < all_tasks else ""
    if row.label or row.attention not in lra.PAPER_SPEEDUP:
        return text
    return f"{text} [{fmean(lra.PAPER[row.attention, task] for task in cells):.1f}]"


def _marks(complete: bool, tested: bool) -> str:
    return ("" if complete else CUT) + ("" if tested else VALIDATION)


def density_lines(cells: Sequence[Cell | None]) -> Lines:
    """Return the line of densities below a block-sparse row, if there is one."""
    known = [None if cell is None else cell.density for cell in cells]
    texts = ["" if density is None else f"{density:.1f}" for density in known]
    return [["  density of its blocks (%)", *texts]] if any(texts) else []


def baseline_lines(cells: Cells, columns: Iterable[Column]) -> Lines:
    """Return a line for each shortcut."""
    found: dict[str, dict[Column, float]] = {}
    for (_, column), cell in cells.items():
        for run in cell.runs:
            for name, value in run.baselines.items():
                found.setdefault(name, {})[column] = value
    columns = list(columns)
    return [
        [f"shortcut: {name}", *(f"{values[c]:.1f}" if c in values else "" for c in columns)]
        for name, values in found.items()
        if values.keys() & set(columns)
    ]
