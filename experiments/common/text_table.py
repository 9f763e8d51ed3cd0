"""Tables of texts, for a terminal and for Markdown."""

import re
from collections.abc import Callable, Mapping, Sequence

MISSING = "–"


def aligned(lines: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Cells in columns, to the right but for those columns named in `left`."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown(lines: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return the same as a Markdown table whose first line is the head."""
    head, *body = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    rule = ["---" if i in left else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def short(value: float | None) -> str:
    """Return a number with three digits, in whole thousands apart: 0.123, 12.3, 1,230."""
    if value is None:
        return MISSING
    text = f"{value:.3g}"
    return f"{float(text):,.0f}" if "e+" in text else text


def fill(page: str, tables: Mapping[str, Callable[[], str]], rows: str = "") -> str:
    """Return a page with what stands between `<!-- rows: NAME -->` and `<!-- end -->` made by a
    table.

    rows: the end of a file's path, for a page with tables of several files; then the line is
        `<!-- rows: NAME PATH -->`, and those of other files stay.

    Raises ValueError for a name that is no table, and for a page without one.
    """

    def table(found: re.Match[str]) -> str:
        if found[2] not in tables:
            raise ValueError(f"<!-- rows: {found[2]} -->: choose from {', '.join(tables)}")
        return f"{found[1]}\n{tables[found[2]]()}\n{found[3]}"

    place = f" {re.escape(rows)}" if rows else ""
    pattern = rf"(<!-- rows: (\w+){place} -->)\n.*?(<!-- end -->)"
    filled, count = re.subn(pattern, table, page, flags=re.DOTALL)
    if not count:
        line = f"<!-- rows: NAME{' ' * bool(rows)}{rows} -->"
        raise ValueError(f"the page has no line {line} with <!-- end --> after it")
    return filled
