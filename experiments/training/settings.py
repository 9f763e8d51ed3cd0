"""The settings that all training runs share. Classifiers and language models add their own."""

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from experiments.common.config import Checked, choose, option

SCALES = ("auto", "full", "small")
COMPOSED = ("small", "by_task", "scaled")  # fields of a configuration that are no settings
SCHEDULES = ("onecycle", "cosine", "rsqrt", "constant")


@dataclass
class Training(Checked):
    """How a model is trained, and where."""

    scale: str = option("auto", "small: sizes for a CPU; auto: small on a CPU", choices=SCALES)
    seed: int = option(0, "of weights, dropout and the order of the examples", least=0)

    batch: int = option(32, "examples of a step, of all processes together", least=1)
    micro_batch: int | None = option(
        None, "examples at a time in a process, if memory is short; null: all", least=1, free=True
    )
    steps: int = option(1000, "optimizer steps", least=0)
    warmup: int = option(100, "steps of linear warm-up", least=0)
    lr: float = option(1e-3, "peak learning rate", above=0)
    schedule: str = option("cosine", "after the warm-up", choices=SCHEDULES)
    betas: list[float] = option([0.9, 0.999], "of AdamW", least=0, below=1)
    eps: float = option(1e-8, "of AdamW", above=0)
    weight_decay: float = option(0.0, "of AdamW", least=0)
    clip: float | None = option(None, "of the norm of the gradient; null: none", above=0)
    precision: str | None = option(
        None, "bf16 is autocast; null: bf16 on a GPU", choices=("bf16", "fp32")
    )

    eval_every: int = option(50, "steps between validations", least=1)
    log_every: int = option(50, "steps between lines of the journal", least=1, free=True)
    checkpoint_every: int | None = option(
        None, "steps; null: at validations, some time apart", least=1, free=True
    )
    minutes: float | None = option(
        None, "time limit; the run then writes a checkpoint and a result", above=0, free=True
    )
    keep: bool = option(True, "false: no checkpoint and weights of a complete run", free=True)

    context_parallel: int = option(
        1, "processes of torchrun that share each sequence; the attention is sparse or flash",
        least=1, free=True,
    )  # fmt: skip
    device: str | None = option(None, "cuda | cpu; null: cuda if there is a GPU", free=True)
    compile: Any = option(None, "torch.compile: true | false; null: on a GPU", free=True)
    graph: bool | None = option(None, "the step as a CUDA graph; null: on a GPU", free=True)
    deterministic: bool = option(
        False, "true: the same bits from run to run, with slower kernels", free=True
    )

    runs: str = option("runs/train", "folder of all runs", free=True)
    name: str | None = option(None, "part of the folder, for runs that differ in other settings")
    cache_dir: str = option("runs/data", "tokenised and generated data", free=True)

    # of a configuration: settings of scale=small; filled in: {key: [before, after]}, their changes
    small: dict[str, Any] = option({}, free=True)
    scaled: dict[str, Any] = option({}, free=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2:
            raise ValueError(f"betas={self.betas}: give two numbers, [0.9,0.999]")
        if self.micro_batch is not None and self.batch % self.micro_batch:
            raise ValueError(f"micro_batch={self.micro_batch} does not divide batch={self.batch}")
        if self.context_parallel > 1 and (self.compile or self.graph):
            raise ValueError(
                f"context_parallel={self.context_parallel} takes compile=false graph=false, the"
                " default there"
            )
        if self.name is not None and not re.fullmatch(r"[\w.+-]+", self.name):
            raise ValueError(f"name={self.name!r}: give a part of a folder's name, letters and -")

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        raise NotImplementedError

    def values(self) -> dict[str, Any]:
        """Return all settings as plain values."""
        return {name: value for name, value in asdict(self).items() if name not in COMPOSED}

    def identity(self) -> dict[str, Any]:
        """Return the settings that the result depends on, as plain values."""
        free = {each.name for each in fields(self) if each.metadata.get("free")}
        return {name: value for name, value in self.values().items() if name not in free}


def fill(
    values: dict[str, Any], section: Mapping[str, Any], given: Collection[str]
) -> dict[str, list[Any]]:
    """Take the values of `section` whose keys are not given; return {key: [old, new]}.

    given: the options of the command line, such as "steps" and "model.dim".
    """
    changed = {}
    for name, new in section.items():
        nested = isinstance(new, Mapping)
        if nested:
            values[name] = dict(values[name])
        place = values[name] if nested else values
        for key, value in (new if nested else {name: new}).items():
            full_key = f"{name}.{key}" if nested else name
            if full_key not in given and place.get(key) != value:
                changed[full_key] = [place.get(key), value]
                place[key] = value
    return changed


def given_keys(overrides: Collection[str]) -> set[str]:
    """Return the keys that the overrides of a command line set."""
    return {text.partition("=")[0].strip("+~").partition("@")[0] for text in overrides}


def on_device(
    values: dict[str, Any], small: Mapping[str, Any], given: Collection[str], *ways: str
) -> None:
    """Fill in what depends on the device: the scale, precision, compilation and CUDA graphs.

    ways: what `compile` may be beside true, false and null.
    """
    choose("compile", values["compile"], ("True", "False", "None", *ways))
    from experiments.common.devices import find_device  # imports torch

    values["device"] = str(find_device(values["device"]))
    on_gpu = values["device"].startswith("cuda")
    if values["scale"] == "auto":
        values["scale"] = "full" if on_gpu else "small"
    if values["scale"] == "small":
        values["scaled"] = fill(values, small, given)
    if values["precision"] is None:
        values["precision"] = "bf16" if on_gpu else "fp32"
    for name in ("compile", "graph"):
        alone = values["context_parallel"] == 1
        values[name] = on_gpu and (alone if values[name] is None else values[name])
