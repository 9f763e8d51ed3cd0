"""`run.json`: the one file that says what a training run is and what it found.

The folder of a run holds

- `run.json`: what this page describes; written at the start, completed at the end.
- `journal.jsonl`: a JSON object a line as the run goes, {"kind", "step", "seconds", ...}: `train`
  lines (loss, accuracy, grad_norm, grad_norm_max, epoch, lr, tokens_per_s, memory_mib), `val` and
  `test` lines (loss, accuracy), and `start`, `resume` and `end`.
- `checkpoint.pt`: from where the same command continues.
- `weights.pt`: the best weights (of a language model the last ones), once the run has ended.

`run.json` has these keys. Floats have six digits.

- `settings`: all settings, with every default filled in. Those that change no result, such as
  `micro_batch`, may differ between sessions; here are those of the newest.
- `scaled`: {key: [recipe, small]}, what `scale=small` changed; {} otherwise.
- `task`: of classifiers `name`, `source`, `length`, `classes`, `baselines`, `examples` (train, val,
  test); of language models `name`, `tokenizer`, `vocab`, `train_tokens`
  and `bytes_per_token`.
- `data`: a digest of the data.
- `params`: the number of parameters.
- `mask`, `density`: the mask that the attention used, as text, and non-empty blocks / all blocks,
  the mean over the layers; null for an attention without a mask. Of language models also `pairs`,
  allowed pairs / those of the dense mask, and `mlp_density`, elements of the MLPs' weights / those
  of dense ones.
- `sessions`: an entry for each start and resumption: `date`, `step`, `device`, `processes`,
  `versions` (torch, triton, source, commit, dropout, dropout_hidden), `command`, `compiled`,
  `captured`, `started` (from which weights).
- `complete`: whether all steps were taken, or `stop_at` was reached.
- `reason`: why steps are left: "minutes", or the name of a signal; null otherwise.
- `result`: null until the weights were tested, then `steps`, `best_step`, `seconds`, `ms_per_step`
  (of the newest sessions on one device, in one way and version; null without a step), `memory_mib`,
  `data_mib` and `date`;
  of a classifier also `accuracy`, `loss` (of the test split), `val_accuracy` and `correct` (a bit
  for each test example, null for self-pretraining);
  of a language model `val_loss`, `val_tokens`, `train_loss`, `saved_mib`, `positions` (the loss at
  every position of a window) and `curve` ([step, mean training loss since the one before]).

An archive of runs (`*.jsonl`) has one run a line: `run.json` with two keys more, `run` (the name of
its folder) and `curves` ({kind: {"step": [...], "loss": [...], ...}}, the lines of its journal).
"""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from experiments.common.config import make
from experiments.common.files import (
    DamagedFile,
    read_json,
    read_json_lines,
    reading,
    rounded,
    write_text,
)
from experiments.common.provenance import code_version
from experiments.training.settings import Training

RUN, JOURNAL = "run.json", "journal.jsonl"
KEYS = "settings task data params mask density sessions complete reason result".split()
REMEDY = "delete it to recreate it"
SOURCES = ("masks", "sparseflash", "experiments")  # the code that a result depends on
S = TypeVar("S", bound=Training)


def read(folder: Path) -> dict[str, Any] | None:
    """Return `run.json` of a folder, or None if there is none.

    Raises:
        ValueError: the file cannot be read, or is not of a run.
    """
    path = folder / RUN
    if not path.exists():
        return None
    run = read_json(path, REMEDY)
    if missing := [key for key in KEYS if key not in run]:
        raise DamagedFile(f"{path} is not the file of a run (no {', '.join(missing)}): {REMEDY}")
    return run


def read_settings(folder: Path, kind: type[S]) -> S:
    """Return the settings of the run in a folder. Raises ValueError if it holds none."""
    run = read(folder)
    if run is None:
        raise ValueError(f"run={folder}: no {RUN} there; give the folder of a run")
    with reading(folder / RUN, "give the folder of a run"):
        return make(kind, run["settings"])


def write(folder: Path, run: Mapping[str, Any]) -> None:
    """Write `run.json`, whole or not at all."""
    found = {key: value if key == "settings" else rounded(value) for key, value in run.items()}
    write_text(folder / RUN, json.dumps(found, indent=1) + "\n", "runs")


def read_journal(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of a kind in the journal, by step."""
    path = folder / JOURNAL
    lines = read_json_lines(path, "move it away", cut=True) if path.exists() else []
    return last_lines(lines, kind)


def last_lines(lines: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the lines of a kind by step. Of a step that was taken twice the last line counts."""
    found = {line["step"]: line for line in lines if line["kind"] == kind}
    return [found[step] for step in sorted(found)]


def refuse_other_settings(folder: Path, old: Mapping[str, Any], settings: Training) -> None:
    """Raise ValueError if the steps in the folder were taken with other settings (`old`).

    A setting that older runs lack has its default there.
    """
    with reading(folder / RUN, f"move {folder}"):
        before = make(type(settings), old).identity()
    if found := differences(before, settings.identity()):
        raise ValueError(
            f"{folder} holds a run with other settings ({'; '.join(found)}): "
            "give this one a folder of its own with name=, or delete that one"
        )


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """Return what differs between two sets of settings, such as "model.dim 64 -> 32"."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return [
            text
            for key in {**old, **new}
            for text in differences(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))
        ]
    return [] if old == new else [f"{name} {old} -> {new}"]


@cache
def versions() -> dict[str, Any]:
    """Return what a result depends on beside the settings.

    `dropout`: which probabilities a seed drops; `dropout_hidden`: which hidden states.
    """
    from experiments.lra.models import blocks as hidden
    from sparseflash import dropout

    found = code_version(SOURCES)
    return found | {"dropout": dropout.VERSION, "dropout_hidden": hidden.VERSION}


def took(run: Mapping[str, Any]) -> str:
    """Return the steps of a run that was tested and their time, as in "9 of 9 steps in 0:00:01"."""
    result, steps = run["result"], run["settings"]["steps"]
    text, ms = f"{result['steps']} of {steps} steps in", result["ms_per_step"]
    time = timedelta(seconds=round(result["seconds"]))
    return f"{text} {time}" + (f", {ms:.3g} ms a step" if ms else "")


class Log:
    """journal.jsonl of a session. Silent in processes that do not lead.

    kept: bytes of the journal to keep from earlier sessions. The rest is about steps that are taken
        again.
    """

    def __init__(self, folder: Path, kept: int, leads: bool = True):
        self._file = None
        if not leads:
            return
        path = folder / JOURNAL
        path.touch()
        if path.stat().st_size < kept:
            raise ValueError(
                f"{path} is shorter than the checkpoint beside it says: "
                "delete that checkpoint to start over"
            )
        os.truncate(path, kept)
        self._file = open(path, "ab", buffering=0)

    def write(self, kind: str, step: int, **values: Any) -> None:
        if self._file is not None:
            line = json.dumps({"kind": kind, "step": step} | rounded(values))
            self._file.write(line.encode() + b"\n")

    def sync(self) -> int:
        """Flush the journal to the disk; return its size in bytes."""
        if self._file is None:
            return 0
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
