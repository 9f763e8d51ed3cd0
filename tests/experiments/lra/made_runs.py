"""Folders of training runs with made-up journals and results."""

import json
from pathlib import Path

import numpy as np


def write_run(
    root: Path, task: str, attention: str, seed: int = 0, *, accuracy: float | None = 0.4,
    ms: float = 10.0, mask: str = "", name: str | None = None, source: str = "generated",
    steps: int = 1000, device: str = "GPU A", memory: float = 100.0, result: bool = True,
    folder: str = "", length: int = 2048, date: str = "2026-01-01T00:00:00+00:00",
    settings: dict | None = None, commit: str = "0123456789ab", more: dict | None = None,
) -> Path:  # fmt: skip
    """Write a run of 1000 planned steps whose accuracy rises to `accuracy` on both splits.

    result: False for a run that was killed. more: further entries of run.json and its result.
    """
    path = root / task / (folder or name or attention + mask.replace("/", "-")) / f"seed{seed}"
    path.mkdir(parents=True)
    baselines = {"majority": 0.175} | ({"root operator": 0.373} if task == "listops" else {})
    more = dict(more or {})
    config = {"attention": {"name": attention}, "mask": mask or None, "seed": seed, "name": name}
    session = {"date": date, "step": 0, "device": device, "processes": 1}
    lines, noise = [], np.random.default_rng(seed)
    for step in range(0, steps + 1, max(1, steps // 100)):
        share, jitter = (
            (accuracy or 0.4) * (1 - np.exp(-step / 250)),
            0.02 * noise.standard_normal(),
        )
        common = {"step": step, "seconds": step * ms / 1000, "memory_mib": memory}
        found = {"loss": 2.3 * (1 - share) + 3 * jitter, "accuracy": share + jitter}
        lines.append({"kind": "train"} | found | common)
        if step % max(1, steps // 10) == 0:
            lines.append({"kind": "val", "loss": 2.3 * (1 - share), "accuracy": share} | common)
    (path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = {
        "settings": config | {"steps": 1000} | (settings or {}),
        "task": {"name": task, "source": source, "length": length, "baselines": baselines},
        "params": 1000,
        "sessions": [session | {"versions": {"torch": "2.13.0", "commit": commit}}],
        "complete": result and steps == 1000,
        "reason": None,
        **{key: more.pop(key, usual) for key, usual in
           (("data", ""), ("mask", mask or None), ("density", None))},
    }  # fmt: skip
    found = {"steps": steps, "accuracy": accuracy, "val_accuracy": accuracy, "date": date}
    found |= {"seconds": steps * ms / 1000, "ms_per_step": ms, "memory_mib": memory}
    (path / "run.json").write_text(json.dumps(file | {"result": found | more if result else None}))
    return path
