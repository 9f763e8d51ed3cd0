"""Times one training step of every Long Range Arena task with every attention.

    python -m experiments.lra_speed
    python -m experiments.lra_speed tasks=[text] attentions=[standard,sparse] lengths=[]
    python -m experiments.lra_speed measure=false csv=docs/results/lra/speed.csv

The step is that of experiments.train (forward, backward, clip, AdamW; a CUDA graph on a GPU) at the
reference batch, on random tokens as long as the task's. Then the attention layer alone, and a sweep
over lengths with the same number of tokens a batch. One CSV row a measurement; what the CSV holds
already is not measured again. See docs/lra.md.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import matplotlib
import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.bench.warm import breaks_context
from experiments.common.devices import device_name
from experiments.common.provenance import code_version, now
from experiments.common.records import OK
from experiments.lra import published as lra
from experiments.lra.models.attention import NAMES
from experiments.lra.models.classifier import model_config
from experiments.lra.speed_case import StepCase, measure, planned_mode, random_task
from experiments.lra.speed_plot import draw_all
from experiments.lra.speed_rows import SWEEP, StepRecords, StepRow, read
from experiments.lra.speed_table import as_markdown, row_name, tables
from experiments.lra.speed_together import run_together
from experiments.lra.tasks.task import Task
from experiments.lra.training.config import Settings
from experiments.lra.training.device import lacks_memory

LENGTHS = {  # of the sweep, and tokens of its batches
    "cuda": ((1024, 2048, 4096, 8192, 16384, 32768, 65536), 131072),
    "cpu": ((256, 512, 1024), 2048),
}
TASKS = tuple(sorted(path.stem for path in Path(__file__).parent.glob("conf/task/*.yaml")))
SOURCES = ("masks", "sparseflash", "experiments/lra/models", "experiments/lra/training")


def plan(options: dict[Any, Any], device: str) -> list[StepCase]:
    """Every case of the options: tasks first, then the sweep from short to long.

    What is not given suits the device: on a CPU the five tasks of the table, and short sequences.

    Raises ValueError for a task or an attention that does not exist, and for a length that does
    not divide the tokens of a batch.
    """
    kind = torch.device(device).type
    lengths, tokens = LENGTHS[kind]
    lengths = lengths if options["lengths"] is None else sorted(options["lengths"])
    tokens = options["tokens"] or tokens
    tasks = [*lra.AVERAGED, *(lra.PATH if kind == "cuda" else ())]
    tasks = tasks if options["tasks"] is None else options["tasks"]
    attentions = options["attentions"] or list(lra.ATTENTIONS)
    for name, given, known in (
        ("tasks", tasks, TASKS),
        ("attentions", attentions, NAMES),
    ):
        if unknown := [value for value in given if value not in known]:
            raise ValueError(f"{name}={unknown}: choose from {', '.join(known)}")
    kinds = [
        (name, mask)
        for name in attentions
        for mask in (options["masks"] if name == "sparse" else [None])
    ]
    own = (*options["options"], f"device={device}")
    cases = [StepCase(t, name, mask, None, own) for t in tasks for name, mask in kinds]
    for length in lengths:
        if length < 1 or tokens % length:
            raise ValueError(f"lengths: {length} does not divide tokens={tokens}")
        sized = (*own, "scale=full", f"batch={tokens // length}")
        cases += [StepCase(SWEEP, name, mask, length, sized) for name, mask in kinds]
    return cases


def empty_row(case: StepCase, settings: Settings, task: Task, command: str) -> StepRow:
    """The row of a case before it is measured."""
    lengths = task.splits["train"].lengths
    changes = {name: value for name, value in settings.model.items() if value is not None}
    model = model_config(changes.pop("setting", "nystrom"), task.name, **changes)
    return StepRow(
        task=case.task,
        attention=case.attention,
        mask=case.mask or "",
        length=task.length,
        pair=2 if task.pair else 1,
        batch=settings.batch,
        mean_length=float(task.length if lengths is None else np.mean(lengths)),
        layers=model.layers,
        dim=model.dim,
        heads=model.heads,
        precision=settings.precision,
        mode=planned_mode(settings),
        ran="",
        status="",
        ms_median=None,
        ms_p20=None,
        ms_p80=None,
        tokens_per_s=None,
        peak_mib=None,
        attention_ms=None,
        device=device_name(settings.device),
        date=now(),
        command=command,
        **code_version(SOURCES),
    )


def run_case(
    settings: Settings,
    task: Task,
    row: StepRow,
    seconds: float,
    wait: Callable[[], None] = lambda: None,
) -> StepRow:
    """`row` filled in: with times, or with the status that says why there are none."""

    def tell(text: str) -> None:
        print(f"  {text}", flush=True)

    try:
        found = measure(settings, task, seconds, tell, wait)
    except Exception as error:
        kind = "out of memory" if lacks_memory(error) else "failed"
        return replace(row, status=f"{kind}: {_in_short(error)}")
    ms = found.times.median
    return replace(
        row,
        ran=found.mode,
        status=OK,
        ms_median=ms,
        ms_p20=found.times.p20,
        ms_p80=found.times.p80,
        tokens_per_s=1000 * row.batch * row.pair * row.length / ms,
        peak_mib=found.peak_mib,
        attention_ms=found.attention_ms,
    )


def _in_short(error: Exception) -> str:
    """The first two sentences: of a GPU, what was asked for and what it has."""
    text = " ".join(str(error).split()) or type(error).__name__
    return ". ".join(text.removeprefix("CUDA out of memory. ").split(". ")[:2])[:200]


def with_tasks(cases: Sequence[StepCase]) -> Iterator[tuple[StepCase, Settings, Task]]:
    """The cases with their settings and random data, which those of one task share."""
    task: Task | None = None
    made: object = None
    for case in cases:
        settings = case.settings()
        what = (case.task, case.length, settings.batch, settings.task.get("max_length"))
        if task is None or made != what:
            task, made = random_task(case, settings), what
        yield case, settings, task


def stands(row: StepRow) -> bool:
    """Whether a row need not be measured again: what failed for another reason than memory may."""
    return not row.status.startswith("failed")


def unmeasured(cases: Sequence[StepCase], records: StepRecords) -> list[StepCase]:
    found = []
    for case, settings, task in with_tasks(cases):
        known = records.find(empty_row(case, settings, task, ""))
        if known is None or not stands(known):
            found.append(case)
    return found


def run_cases(
    cases: Sequence[StepCase], records: StepRecords, seconds: float, command: str
) -> None:
    """Measures every case that `records` does not hold, and adds its row."""
    for i, (case, settings, task) in enumerate(with_tasks(cases), 1):
        row = empty_row(case, settings, task, command)
        known = records.find(row)
        if known is not None and stands(known):
            print(f"[{i:3}/{len(cases)}] {describe(known)}  (measured {known.date})", flush=True)
            continue
        row = run_case(settings, task, row, seconds)
        if known is None or known.status != row.status:  # the same failure need not stand twice
            records.append(row)
        print(f"[{i:3}/{len(cases)}] {describe(row)}", flush=True)
        if breaks_context(row.status):
            print("the device is lost to this process: run again for the rest", flush=True)
            break


def run_cases_together(
    cases: Sequence[StepCase],
    records: StepRecords,
    seconds: float,
    command: str,
    workers: int,
    limit_s: float,
) -> None:
    """`run_cases` for what `records` does not hold, in processes of their own."""
    missing = unmeasured(cases, records)
    measure = partial(measure_case, seconds, command)
    for i, (case, row) in enumerate(run_together(missing, measure, workers, limit_s), 1):
        if isinstance(row, str):
            print(f"[{i:3}/{len(missing)}] {case.task} {case.attention}: {row}", flush=True)
            continue
        known = records.find(row)
        if known is None or known.status != row.status:
            records.append(row)
        print(f"[{i:3}/{len(missing)}] {describe(row)}", flush=True)


def measure_case(seconds: float, command: str, case: StepCase, wait: Callable[[], None]) -> StepRow:
    """The row of a case, from nothing."""
    ((_, settings, task),) = with_tasks([case])
    return run_case(settings, task, empty_row(case, settings, task, command), seconds, wait)


def describe(row: StepRow) -> str:
    pair = "2 x " if row.pair == 2 else ""
    what = f"{row.task:15} {row_name(row):24} {row.batch} x {pair}{row.length}"
    if row.status != OK:
        return f"{what:60} {row.status}"
    peak = "" if row.peak_mib is None else f"  {row.peak_mib:7.0f} MiB"
    return f"{what:60} {row.ms:9.2f} ms{peak}  attention {row.attention_ms:.2f} ms  {row.ran}"


def main(config: DictConfig, command: str) -> None:
    """Measures what the configuration asks for; prints tables, writes them and the plots."""
    options = OmegaConf.to_container(config, resolve=True)
    assert isinstance(options, dict)
    path = Path(options["csv"])
    if options["measure"]:
        device = options["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
        cases = plan(options, device)
        seconds = options["seconds"] or (0.3 if device != "cpu" else 1.0)
        records = StepRecords(path)
        if options["workers"]:
            together = options["workers"], options["limit_s"]
            run_cases_together(cases, records, seconds, command, *together)
        else:
            run_cases(cases, records, seconds, command)
    found = read(path)
    table = path.with_suffix(".md")
    table.write_text(as_markdown(found), encoding="utf-8")
    print("\n" + tables(found) + "\n")
    plots = draw_all(found, options["plots"])
    print("\n".join(f"written: {place}" for place in (path, table, *plots)))


@hydra.main(version_base="1.3", config_path="conf", config_name="lra_speed")
def entry(config: DictConfig) -> None:
    matplotlib.use("Agg")  # no display is needed
    overrides = HydraConfig.get().overrides.task
    main(config, shlex.join(["python", "-m", "experiments.lra_speed", *overrides]))


if __name__ == "__main__":
    entry()
