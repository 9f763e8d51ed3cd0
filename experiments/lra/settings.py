"""The settings of a run of the Long Range Arena, complete and checked."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import masks
from experiments.common.config import compose, make, option, store
from experiments.common.files import digest
from experiments.lra.models.attention import KINDS
from experiments.lra.models.blocks import ModelConfig
from experiments.lra.tasks.task import PATHFINDER
from experiments.training.settings import Training, fill, given_keys, on_device

IMAGES = ("image", *PATHFINDER)  # tasks
PRETRAIN = ("masked",)
WITHOUT_NAME = ("mask", "block_size", "padding", "backend")  # named otherwise, or of no effect


@dataclass
class Settings(Training):
    """One run.

    Its folder is RUNS/LABEL[-RECIPE][-PRETRAIN][-small]/ATTENTION[-MASK][-FORMS][-NAME]/seedSEED.
    """

    task: dict[str, Any] = option({})  # a file of conf/task
    attention: dict[str, Any] = option({})  # a file of conf/attention
    recipe: str = option("nystrom")  # a file of conf/recipe
    label: str = option("${task.name}", "of the task, in the name of the folder")
    model: ModelConfig = option(ModelConfig())
    mask: str | None = option(
        None, "text of the mask of attention=sparse; null: butterfly and local blocks"
    )
    block_size: int | None = option(
        None, "tokens of the blocks of the mask, 16 to 256; null: by the length", free=True
    )
    eval_batch: int | None = option(
        None, "examples of a validation; null: as in training", least=1, free=True
    )
    val_examples: int | None = option(
        None, "drawn once from the validation split; null: all", least=1
    )
    stop_at: float | None = option(
        None, "validation accuracy that ends the run, for a curriculum", above=0, most=1
    )
    init_from: str | None = option(
        None, "folder or weights.pt of another run; positions are upsampled to a finer grid"
    )
    init_head: str | None = option(
        None, "a new head on the weights of init_from", choices=("fresh",)
    )
    pretrain: str | None = option(
        None, "masked: predict hidden tokens instead of the class", choices=PRETRAIN
    )
    mask_share: float = option(0.5, "of the tokens, which pretrain=masked hides", above=0, below=1)
    data_dir: str = option("data", "the folder of the official folders", free=True)
    data_seed: int = option(0, "of generated data", least=0)
    data_only: bool = option(
        False, "true: make the data in cache_dir, and train nothing", free=True
    )

    by_task: dict[str, Any] = option({}, free=True)  # of a recipe: settings by the name of the task

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.steps and not self.init_from:
            raise ValueError("steps=0 tests the weights of init_from: give it, or at least 1 step")
        if self.init_head is not None and not self.init_from:
            raise ValueError(f"init_head={self.init_head} needs init_from=FOLDER")
        if not re.fullmatch(r"[\w.+-]+", self.label):
            raise ValueError(f"label={self.label!r}: give a part of a folder's name, letters and -")
        self.model.refuse_grid(self.task["name"] in IMAGES)
        for key in ("mask", "block_size"):
            if (value := getattr(self, key)) is not None and self.attention["name"] != "sparse":
                name = self.attention["name"]
                raise ValueError(f"{key}={value} is for attention=sparse; {name} takes none")
        if self.mask is not None:
            masks.parse(self.mask)
        if self.block_size is not None:
            masks.dense().build(256, block_size=self.block_size)  # refuses another size

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        task = [self.label]
        task += [] if self.recipe == "nystrom" else [self.recipe]
        task += [self.pretrain] if self.pretrain else []
        task += [] if self.scale == "full" else [self.scale]
        attention = [self.attention["name"]]
        if self.mask is not None:
            words = re.sub(r"[^A-Za-z0-9.]+", "-", self.mask).strip("-")[:40].strip("-")
            attention += [words, digest({"mask": self.mask})[:6]]
        attention += [text.replace("=", "-") for text in forms(self.attention, self.task)]
        attention += [self.name] if self.name else []
        return Path(self.runs, "-".join(task), "-".join(attention), f"seed{self.seed}")

    def identity(self) -> dict[str, Any]:
        """Return the settings that the result depends on, as plain values."""
        found = super().identity()
        if self.init_from and Path(self.init_from).is_relative_to(self.runs):  # both may move
            found["init_from"] = str(Path(self.init_from).relative_to(self.runs))
        return found

    def data(self) -> dict[str, Any]:
        """Return the arguments of `load_task`."""
        places = {"data_dir": self.data_dir, "cache_dir": self.cache_dir}
        return self.task | places | {"seed": self.data_seed}

    @property
    def sizes(self) -> ModelConfig:
        """The sizes of the model."""
        return replace(self.model, lm_head=self.pretrain is not None)

    def kind(self) -> dict[str, Any]:
        """Return the attention with its mask, as the model takes it."""
        given = {"mask": self.mask, "block_size": self.block_size}
        return self.attention | {key: value for key, value in given.items() if value is not None}


def forms(attention: Mapping[str, Any], task: Mapping[str, Any]) -> list[str]:
    """Return what of the attention, or of the padding, is not the default: "scale=1.0"."""
    kind = KINDS.get(attention["name"])
    options = {} if kind is None else kind.options
    found = [
        f"{name}={attention[name]}"
        for name, option in options.items()
        if attention.get(name) not in (None, option.default) and name not in WITHOUT_NAME
    ]
    return found + ["black-padding"] * bool(task.get("pad_black"))


store("train", Settings)  # for `compose_settings`


def make_settings(config: Mapping[str, Any], given: Sequence[str] = ()) -> Settings:
    """Return the settings of a configuration of conf/train.yaml.

    Args:
        given: the overrides of the command line ("steps=100"). What the recipe has for the task
            and what scale=small changes leave them alone.

    Raises:
        ValueError: an option does not exist, or its value is out of range.
    """
    values: dict[str, Any] = dict(config)
    small, by_task = values.pop("small"), values.pop("by_task")
    keys, name = given_keys(given), values["task"].get("name")
    recipe = dict(by_task.get(name) or by_task.get("default") or {})
    pretraining = recipe.pop("pretraining", {})
    fill(values, recipe, keys)
    if values["pretrain"]:
        fill(values, pretraining, keys)
    on_device(values, small, keys)
    return make(Settings, values)


def compose_settings(overrides: Sequence[str]) -> Settings:
    """Return the settings of a command line of experiments.train, inside a program or outside.

    Raises:
        ValueError: as `make_settings`.
        HydraException: a key or a group does not exist.
    """
    return make_settings(compose("train", overrides), overrides)
