"""Times one training step of every Long Range Arena task with every attention.

    python -m experiments.lra_speed
    python -m experiments.lra_speed tasks=[text] attentions=[standard,sparse] lengths=[]
    python -m experiments.lra_speed measure=false csv=docs/results/lra/speed.csv

The step is that of experiments.train: forward, backward, clip and AdamW, in a CUDA graph on a GPU,
at the reference batch, on random tokens as long as the task's. Then come the attention layer alone,
and a sweep over lengths with a fixed number of tokens a batch. Each measurement is one CSV row, and
rows that the CSV has are not measured again. See docs/guide/lra.md.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.bench.warm import breaks_context
from experiments.common.checks import check_options, choose, whole_number
from experiments.common.devices import set_defaults
from experiments.common.files import write_text
from experiments.common.program import program
from experiments.common.records import OK, Records, read
from experiments.lra import published as lra
from experiments.lra.speed.case import StepCase, measure_case
from experiments.lra.speed.plot import draw_all
from experiments.lra.speed.rows import SWEEP, StepRow
from experiments.lra.speed.table import as_markdown, row_name, tables
from experiments.lra.speed.together import run_together

LENGTHS = {  # of the sweep, and tokens of its batches
    "cuda": ((1024, 2048, 4096, 8192, 16384, 32768, 65536), 131072),
    "cpu": ((256, 512, 1024), 2048),
}
TASKS = tuple(sorted(path.stem for path in Path(__file__).parent.glob("conf/task/*.yaml")))


def plan(options: dict[str, Any], device: str) -> list[StepCase]:
    """Returns every case of the options: the tasks, then the sweep from short to long.

    Defaults depend on the device. A CPU has the five tasks of the table and short sequences.

    Raises ValueError for an unknown task or attention, and for a length that does not divide the
    tokens of a batch.
    """
    kind = device.partition(":")[0]
    lengths, tokens = LENGTHS[kind]
    lengths = lengths if options["lengths"] is None else sorted(options["lengths"])
    tokens = tokens if options["tokens"] is None else options["tokens"]
    whole_number("tokens", tokens)
    tasks = [*lra.AVERAGED, *(lra.PATH if kind == "cuda" else ())]
    tasks = tasks if options["tasks"] is None else options["tasks"]
    attentions = options["attentions"]
    attentions = list(lra.ATTENTIONS) if attentions is None else attentions
    for name, given, known in (("tasks", tasks, TASKS), ("attentions", attentions, lra.ATTENTIONS)):
        for value in given:
            choose(name, value, known)
    kinds = [
        (name, mask)
        for name in attentions
        for mask in (options["masks"] if name == "sparse" else [None])
    ]
    own = (*options["options"], f"device={device}")
    cases = [StepCase(t, name, mask, None, own) for t in tasks for name, mask in kinds]
    for length in lengths:
        whole_number("lengths", length)
        if tokens % length:
            raise ValueError(f"lengths: {length} does not divide tokens={tokens}")
        sized = (*own, "scale=full", f"batch={tokens // length}")
        cases += [StepCase(SWEEP, name, mask, length, sized) for name, mask in kinds]
    return cases


def unmeasured(cases: Sequence[StepCase], records: Records[StepRow]) -> list[StepCase]:
    """Returns the cases without a row, and those that failed for another reason than memory."""
    found = []
    for case in cases:
        known = records.find(case.row(""))
        if known is None or known.status.startswith("failed"):
            found.append(case)
        else:
            print(f"{describe(known)}  (measured {known.date})", flush=True)
    return found


def run_cases(
    cases: Sequence[StepCase],
    records: Records[StepRow],
    seconds: float,
    command: str,
    workers: int = 0,
    limit_s: float = 600,
) -> None:
    """Measures every case that `records` does not have, and adds its row.

    workers, limit_s: as in `run_together`. 0 workers prepare and time each case in turn.
    """
    missing = unmeasured(cases, records)
    measure = partial(measure_case, seconds, command)
    if workers:
        found = run_together(missing, measure, workers, limit_s)
    else:
        found: Iterator = ((case, measure(case)) for case in missing)
    for i, (case, row) in enumerate(found, 1):
        if isinstance(row, str):
            print(f"[{i:3}/{len(missing)}] {case.task} {case.attention}: {row}", flush=True)
            continue
        known = records.find(row)
        if known is None or known.status != row.status:  # a repeated failure adds no row
            records.append(row)
        print(f"[{i:3}/{len(missing)}] {describe(row)}", flush=True)
        if not workers and breaks_context(row.status):
            print("the device is lost to this process: run again for the rest", flush=True)
            break


def describe(row: StepRow) -> str:
    """Returns a row in a line."""
    pair = "2 x " if row.pair == 2 else ""
    what = f"{row.task:15} {row_name(row):24} {row.batch} x {pair}{row.length}"
    if row.status != OK:
        return f"{what:60} {row.status}"
    peak = "" if row.peak_mib is None else f"  {row.peak_mib:7.0f} MiB"
    return f"{what:60} {row.ms:9.2f} ms{peak}  attention {row.attention_ms:.2f} ms  {row.ran}"


@program("lra_speed")
def main(options: dict[str, Any], command: str) -> None:
    """Measures what the options ask for, prints tables, and writes them and the plots."""
    path = Path(options["csv"])
    whole_number("workers", options["workers"], 0)
    if options["measure"]:
        device = set_defaults(options, {"cuda": {"seconds": 0.3}, "cpu": {"seconds": 1.0}})
        check_options(options, positive="seconds limit_s")
        cases = plan(options, str(device))
        records = Records(path, StepRow, allow_changes=options["allow_changes"])
        together = options["workers"], options["limit_s"]
        run_cases(cases, records, options["seconds"], command, *together)
    found = read(path, StepRow)
    table = path.with_suffix(".md")
    write_text(table, as_markdown(found), "csv")
    print("\n" + tables(found) + "\n")
    plots = draw_all(found, options["plots"])
    print("\n".join(f"written: {place}" for place in (path, table, *plots)))


if __name__ == "__main__":
    main()
