"""Tables of measured training steps: steps by task, layers alone, and times by length."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from experiments.common.figures import token_text
from experiments.common.records import OK
from experiments.common.text_table import MISSING, aligned, markdown
from experiments.lra import published as lra
from experiments.lra.speed.rows import SWEEP, StepRow, measured, newest

LONG = 4096  # tokens from which block-sparse is compared with the fastest other attention
Quantity = Callable[[StepRow], float | None]


def step_ms(row: StepRow) -> float | None:
    return row.ms_median


def layer_ms(row: StepRow) -> float | None:
    return row.attention_ms


def gain(row: StepRow, rows: Iterable[StepRow], of: Quantity = step_ms) -> float | None:
    """Returns the standard Transformer's time at the same work / that of the row."""
    base = next((r for r in rows if r.attention == lra.BASE and r.work == row.work), None)
    ours, theirs = of(row), None if base is None else of(base)
    return theirs / ours if ours and theirs else None


def mean_gain(
    own: Iterable[StepRow], rows: Sequence[StepRow], of: Quantity = step_ms
) -> tuple[float | None, int]:
    """Returns the geometric mean of the gains over the five tasks, and the number of tasks."""
    found = [gain(row, rows, of) for row in own if row.task in lra.AVERAGED]
    found = [value for value in found if value is not None]
    return lra.geometric_mean(found), len(found)


def row_name(row: StepRow) -> str:
    label = lra.ATTENTIONS.get(row.attention, row.attention)
    return f"{label}, {row.option}" if row.option else label


def names(rows: Iterable[StepRow]) -> list[str]:
    """Returns the names of the rows in the order of the paper's table."""
    order = sorted(rows, key=lambda r: (lra.order(lra.ATTENTIONS, r.attention), r.option))
    return list(dict.fromkeys(map(row_name, order)))


def by_task(rows: Sequence[StepRow], of: Quantity, memory: bool) -> list[list[str]]:
    """Attentions down, tasks across: ms (speed-up) MiB, and the geometric mean of the five."""
    tasks = sorted({row.task for row in rows}, key=partial(lra.order, lra.LABELS))
    columns = [(t, next(r for r in rows if r.task == t)) for t in tasks]
    lines = [["", *[f"{lra.LABELS.get(t, t)} {_size(row)}" for t, row in columns], "mean"]]
    for name in names(rows):
        own = {row.task: row for row in rows if row_name(row) == name}
        cells = [_cell(own.get(task), rows, of, memory) for task in tasks]
        lines.append([name, *cells, _mean_text(own.values(), rows, of)])
    return lines


def _size(row: StepRow) -> str:
    pair = "2 x " if row.pair == 2 else ""
    return f"({row.batch} x {pair}{token_text(row.length)})"


def _cell(row: StepRow | None, rows: Sequence[StepRow], of: Quantity, memory: bool) -> str:
    if row is None:
        return MISSING
    if row.status != OK:
        return row.status.partition(":")[0]
    value, factor = of(row), gain(row, rows, of)
    if value is None:
        return MISSING
    text = f"{value:.3g}" + ("" if factor is None else f" ({factor:.2f}x)")
    return text + (f" {row.peak_mib:.0f}" if memory and row.peak_mib is not None else "")


def _mean_text(own: Iterable[StepRow], rows: Sequence[StepRow], of: Quantity) -> str:
    mean, count = mean_gain(own, rows, of)
    if mean is None:
        return MISSING
    some = "" if count == len(lra.AVERAGED) else f" ({count} of {len(lra.AVERAGED)})"
    return f"{mean:.2f}x{some}"


def by_length(rows: Sequence[StepRow], of: Quantity, memory: bool) -> list[list[str]]:
    """Attentions down, lengths of the sweep across."""
    lengths = sorted({row.length for row in rows})
    lines = [["", *map(token_text, lengths)]]
    for name in names(rows):
        own = {row.length: row for row in rows if row_name(row) == name}
        lines.append([name, *[_cell(own.get(n), rows, of, memory) for n in lengths]])
    return lines


def fastest(rows: Sequence[StepRow]) -> list[str]:
    """Compares block-sparse with the fastest other attention at each length of the sweep."""
    found = []
    for length in sorted({row.length for row in rows if row.length >= LONG}):
        here = [row for row in measured(rows) if row.length == length]
        ours = min((r for r in here if r.attention == "sparse"), key=lambda r: r.ms, default=None)
        others = min((r for r in here if r.attention != "sparse"), key=lambda r: r.ms, default=None)
        if ours and others:
            found.append(
                f"{token_text(length)}: {row_name(ours)} {ours.ms:.3g} ms, the fastest other "
                f"{row_name(others)} {others.ms:.3g} ms, {others.ms / ours.ms:.2f}x"
            )
    return found


def tables(
    rows: Sequence[StepRow], *, draw=aligned, title: str = "{title}", note: str = "{note}"
) -> str:
    """Returns every table that the rows support, a set for each device and precision."""
    rows, parts = newest(rows), []

    def add_notes(notes: Iterable[str]) -> None:
        parts.append("\n".join(note.format(note=text) for text in notes if text))

    for device, precision in dict.fromkeys((row.device, row.precision) for row in rows):
        here = [r for r in rows if (r.device, r.precision) == (device, precision)]
        tasks = [row for row in here if row.task != SWEEP]
        sweep = [row for row in here if row.task == SWEEP]
        for chosen, make, where in ((tasks, by_task, ""), (sweep, by_length, " by length")):
            step = f"a training step{where}, ms (speed-up) peak MiB"
            layer = f"one attention layer, forward and backward{where}, ms (speed-up)"
            for what, of, memory in ((step, step_ms, True), (layer, layer_ms, False)):
                if any(of(row) is not None for row in chosen):
                    head = title.format(title=f"{device}, {precision}: {what}")
                    parts.append(f"{head}\n{draw(make(chosen, of, memory))}")
        add_notes(fastest(sweep))
    add_notes(dict.fromkeys(map(mask_text, sorted(rows, key=lambda r: r.length))))
    failed = [row for row in rows if row.status != OK]
    add_notes(f"{row_name(r)}, {r.task}, {token_text(r.length)}: {r.status}" for r in failed)
    return "\n\n".join(filter(None, parts))


def mask_text(row: StepRow) -> str:
    """Returns the mask of a block-sparse row with its density. Empty for other rows."""
    if row.density is None:
        return ""
    return f"{row_name(row)} at {row.length} tokens: {row.mask}, density {100 * row.density:.1f} %"


def as_markdown(rows: Sequence[StepRow]) -> str:
    return tables(rows, draw=markdown, title="### {title}\n", note="- {note}") + "\n"
