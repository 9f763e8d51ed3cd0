"""Tables of texts, for a terminal and for Markdown."""

from collections.abc import Sequence

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
    """The same as a Markdown table whose first line is the head."""
    head, *body = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    rule = ["---" if i in left else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))
