"""`run.json`: the one file that says what a training run is and what it found.

The folder of a run holds

- `run.json`: what this page describes; written at the start, completed at the end.
- `journal.jsonl`: a JSON object a line as the run goes, {"kind", "step", ...}: `train` lines
  (loss, accuracy, grad_norm, grad_norm_max, epoch, lr, seconds, tokens_per_s, memory_mib), `val`
  and `test` lines (loss, accuracy, seconds), and `start`, `resume`, `end`, which say when.
- `checkpoint.pt`: from where the same command continues.
- `weights.pt`: the best weights (of a language model the last ones), once the run has ended.

`run.json` has these keys. Floats have six digits.

- `settings`: all settings, with every default filled in. Those in `FREE` may differ between
  sessions; here are those of the newest.
- `scaled`: {key: [recipe, small]}, what `scale=small` changed; {} otherwise.
- `task`: of classifiers `name`, `source`, `length`, `classes`, `baselines`, `examples` (train, val,
  test) and perhaps `manifest`; of language models `name`, `tokenizer`, `vocab`, `train_tokens`,
  `bytes_per_token` and `manifest`.
- `data`: a digest of the data.
- `params`: the number of parameters.
- `mask`, `density`: the mask that the attention used, as text, and non-empty blocks / all blocks,
  the mean over the layers; null for an attention without a mask. Of language models also `pairs`,
  allowed pairs / those of the dense mask.
- `sessions`: an entry for each start and resumption: `date`, `step`, `device`, `processes`,
  `versions` (torch, triton, source, commit, dropout, dropout_hidden), `command`, `compiled`,
  `captured`, `started` (from what).
- `complete`: whether all steps were taken, or `stop_at` was reached.
- `reason`: why steps are left: "minutes", or the name of a signal; null otherwise.
- `result`: null until the weights were tested, then
  of a classifier `accuracy`, `loss` (of the test split), `val_accuracy`, `best_step`, `steps`,
  `seconds`, `ms_per_step`, `memory_mib`, `data_mib`, `correct` (a bit for each test example, null
  for self-pretraining) and `date`;
  of a language model `val_loss`, `train_loss`, `val_tokens`, `positions` (the loss at every
  position of a window), `steps`, `seconds`, `ms_per_step`, `peak_mib`, `saved_mib` and `date`.

An archive of runs (`*.jsonl`) has one run a line: `run.json` with two keys more, `run` (the name of
its folder) and `curves` ({kind: {"step": [...], "loss": [...], ...}}, the lines of its journal).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.common.files import DamagedFile, read_json, write_text

RUN = "run.json"
KEYS = "settings task data params sessions complete reason result".split()
REMEDY = "delete it to recreate it"


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


def write(folder: Path, run: Mapping[str, Any]) -> None:
    """Write `run.json`, whole or not at all."""
    write_text(folder / RUN, json.dumps(rounded(run), indent=1) + "\n", "runs")


def rounded(values: Any) -> Any:
    """Return the values with floats rounded to six digits, as JSON can hold them."""
    if isinstance(values, float):
        return float(f"{values:.6g}")
    if isinstance(values, Mapping):
        return {str(key): rounded(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [rounded(value) for value in values]
    return values


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """Return what differs between two sets of settings, such as "model.dim 64 -> 32"."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = {**old, **new}
        return [
            text
            for key in keys
            for text in differences(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))
        ]
    return [] if old == new else [f"{name} {old} -> {new}"]
