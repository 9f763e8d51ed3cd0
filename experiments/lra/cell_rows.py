"""The cells of the table as rows of a CSV."""

from dataclasses import dataclass

from experiments.lra import published as lra
from experiments.lra.cells import Cell, Cells, Column, RowKey, speedup
from experiments.lra.runs import PRETRAINED
from experiments.lra.table_statistics import BASES, cell_difference


@dataclass(frozen=True)
class CellRow:
    """A cell of the table as a row of the CSV. None is an empty cell."""

    attention: str
    mask: str  # as the settings name it; empty for the default
    resolved_mask: str
    density: float | None  # non-empty blocks / all blocks, %
    name: str
    task: str
    source: str
    accuracy: float | None  # mean over the seeds, %
    spread: float | None  # standard deviation
    runs: int
    split: str  # of the accuracy: test | val
    complete: bool | None
    traced: bool | None  # whether a commit holds the code of the runs
    paper: float | None
    ms_per_step: float | None
    speedup: float | None
    memory_mib: float | None
    held_out: float  # the share of train that chose the checkpoint, not the test split
    from_standard: float | None  # difference from the Transformer, points
    from_standard_half: float | None  # half of its 95 % interval
    from_standard_covers: str  # s: seeds, e: test examples
    from_flash: float | None  # difference from FlashAttention
    from_flash_half: float | None
    from_flash_covers: str
    batch: int | None
    train_examples: int | None
    test_examples: int | None
    steps: int | None  # the fewest of the runs
    seconds: float | None  # the longest
    device: str


def paper_value(row: RowKey, column: Column) -> float | None:
    """The paper's value. On Path-X and Path-256 its recipe starts from Pathfinder-64."""
    usual = ("", PRETRAINED) if column.task in lra.PATH else ("",)
    return lra.PAPER.get((row.attention, column.task)) if row.label in usual else None


def cell_row(cells: Cells, row: RowKey, column: Column) -> CellRow:
    """Returns the row of a cell, also of one without runs."""
    cell = cells.get((row, column), Cell())
    times = cell.ms_by_place
    differences = [cell_difference(cells, row, column, base) for base in BASES]
    standard, flash = (found or (None, None, 0, "") for found in differences)
    run = cell.runs[0] if cell.runs else None
    examples = run.examples if run else ()
    return CellRow(
        attention=row.attention,
        mask=row.mask,
        resolved_mask=cell.resolved_mask,
        density=cell.density,
        name=row.label,
        task=column.task,
        source=column.source,
        accuracy=cell.accuracy,
        spread=cell.spread,
        runs=len(cell.runs),
        split="" if cell.accuracy is None else "test" if cell.tested else "val",
        complete=cell.complete if cell.runs else None,
        traced=cell.traced if cell.runs else None,
        paper=paper_value(row, column),
        ms_per_step=next(iter(times.values()), None),
        speedup=speedup(cells, row, column),
        memory_mib=cell.memory_mib,
        held_out=column.held_out,
        from_standard=standard[0],
        from_standard_half=standard[1],
        from_standard_covers=standard[3],
        from_flash=flash[0],
        from_flash_half=flash[1],
        from_flash_covers=flash[3],
        batch=run.batch if run else None,
        train_examples=examples[0] if examples else None,
        test_examples=examples[-1] if examples else None,
        steps=min((run.steps for run in cell.runs), default=None),
        seconds=max((run.seconds for run in cell.runs), default=None),
        device=" and ".join(dict.fromkeys(run.device for run in cell.runs)),
    )
