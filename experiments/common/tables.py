"""Tables of rows: pivot a data frame, write it as Markdown or for a terminal."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

MISSING = "–"


def pivot(
    frame: pd.DataFrame, down: Sequence[str], across: str, cell: Callable[[pd.DataFrame], str]
) -> pd.DataFrame:
    """Return a table with a line for each value of the columns `down` and a column for each value
    of `across`, all in the order of the frame. `cell` makes the text of the rows that meet there.
    """
    groups: Any = frame.groupby([*down, across], sort=False, dropna=False)
    texts = {tuple(map(_plain, key)): cell(rows) for key, rows in groups}
    names = list(dict.fromkeys(map(_plain, frame[across])))
    lines = dict.fromkeys(key[:-1] for key in texts)
    body = [[*line, *(texts.get((*line, name), MISSING) for name in names)] for line in lines]
    return pd.DataFrame(body, columns=[*down, *names], dtype=object)


def markdown(table: Any, left: Sequence[int] = (0,)) -> str:
    """Return a data frame, or lists of texts, as Markdown, aligned right but for columns `left`."""
    head, *body = [[cell.replace("|", "\\|") for cell in line] for line in _lines(table)]
    rule = ["---" if i in left else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def aligned(table: Any, left: Sequence[int] = (0,)) -> str:
    """Return a data frame, or lists of texts, in columns of equal width for a terminal."""
    lines = _lines(table)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def short(value: float | None) -> str:
    """Return a number with three digits, in whole thousands apart: 0.123, 12.3, 1,230."""
    if _plain(value) is None:
        return MISSING
    text = f"{value:.3g}"
    return f"{float(text):,.0f}" if "e+" in text else text


def mean_std(values: Iterable[float], digits: int = 1) -> str:
    """Return the mean and the standard deviation of a sample, or its only value."""
    values = [value for value in values if _plain(value) is not None]
    if not values:
        return MISSING
    text = f"{statistics.mean(values):.{digits}f}"
    return f"{text} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text


def _lines(table: Any) -> list[list[str]]:
    if hasattr(table, "itertuples"):
        table = [table.columns, *table.itertuples(index=False)]
    return [[MISSING if _plain(cell) is None else str(cell) for cell in line] for line in table]


def _plain(value: Any) -> Any:
    """Return the value, and None for NaN, which is what a data frame makes of None."""
    return None if value is None or value != value else value
