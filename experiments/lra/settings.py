"""The settings of a run: checked, complete, and scaled down where there is no GPU."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

import masks
from experiments.common.checks import check_options, choose, flag_or_null, share
from experiments.common.devices import find_device
from experiments.common.files import digest, read_yaml, reading
from experiments.lra.models.config import ModelConfig, model_config
from experiments.lra.tasks.task import PATHFINDER
from experiments.training.optim import SCHEDULES
from experiments.training.settings import PRECISIONS, check_training

CONFIG = "config.yaml"
SCALES = ("auto", "full", "small")
COUNTS = {  # the least value of whole numbers
    **dict.fromkeys("batch eval_every log_every".split(), 1),
    **dict.fromkeys("micro_batch eval_batch val_examples checkpoint_every".split(), 1),
    **dict.fromkeys("steps warmup seed data_seed".split(), 0),
}
POSITIVE = "lr eps clip minutes stop_at"  # numbers above 0
PATHS = "runs init_from data_dir cache_dir"
FLAGS = {  # or null
    "": "deterministic tensorboard data_only",
    "model": "rotary causal",
    "task": "generate",
}
OPTIONAL = (
    "micro_batch eval_batch val_examples checkpoint_every clip minutes stop_at pretrain init_head"
    " init_from"
)
CHOICES = {
    "scale": SCALES,
    "schedule": SCHEDULES,
    "precision": PRECISIONS,
    "pretrain": ("masked", "causal"),
    "init_head": ("fresh",),
}
IMAGES = ("image", *PATHFINDER)  # tasks
# What may change between sessions of a run: it changes no result except by rounding.
FREE = (
    "device block_size micro_batch eval_batch log_every checkpoint_every minutes compile graph"
    " deterministic tensorboard runs name data_dir cache_dir data_only"
).split()


@dataclass(frozen=True)
class Settings:
    """One run; the fields are the keys of conf/train.yaml, with every default filled in."""

    task: dict[str, Any]
    attention: dict[str, Any]
    model: dict[str, Any]
    label: str  # of the task, in the names of folders
    recipe: str  # a file of conf/recipe
    scale: str  # full | small
    mask: str | None
    seed: int
    data_seed: int
    batch: int
    micro_batch: int | None
    eval_batch: int | None
    steps: int
    warmup: int
    lr: float
    schedule: str
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float | None
    eval_every: int
    val_examples: int | None
    checkpoint_every: int | None
    log_every: int
    minutes: float | None
    stop_at: float | None
    precision: str  # bf16 | fp32
    compile: bool
    graph: bool
    device: str
    init_from: str | None
    init_head: str | None
    pretrain: str | None
    mask_share: float
    name: str | None
    runs: str
    data_dir: str
    cache_dir: str
    data_only: bool
    tensorboard: bool | None
    deterministic: bool = False  # not in the files of older runs, as what follows
    block_size: int | None = None
    scaled: dict[str, tuple[Any, Any]] = field(default_factory=dict, compare=False)

    @property
    def folder(self) -> Path:
        """The folder of the run, as conf/train.yaml has it at `runs`."""
        task = [self.label]
        task += [] if self.recipe == "nystrom" else [self.recipe]
        task += [self.pretrain] if self.pretrain else []
        task += [] if self.scale == "full" else [self.scale]
        attention = [self.attention["name"]]
        if self.mask is not None:
            words = re.sub(r"[^A-Za-z0-9.]+", "-", self.mask).strip("-")[:40].strip("-")
            attention += [words, digest({"mask": self.mask})[:6]]
        attention += [self.name] if self.name else []
        return Path(self.runs, "-".join(task), "-".join(attention), f"seed{self.seed}")

    def data(self) -> dict[str, Any]:
        """The arguments of `load_task`."""
        places = {"data_dir": self.data_dir, "cache_dir": self.cache_dir}
        return self.task | places | {"seed": self.data_seed}

    def values(self) -> dict[str, Any]:
        """All settings as plain values."""
        values = dataclasses.asdict(self) | {"betas": list(self.betas)}
        del values["scaled"]
        return values

    def identity(self) -> dict[str, Any]:
        """The settings that the result depends on, as plain values."""
        return {name: value for name, value in self.values().items() if name not in FREE}


FIELDS = {field.name: field.default for field in dataclasses.fields(Settings)}
del FIELDS["scaled"]


def make_settings(config: DictConfig | Mapping[str, Any], given: Sequence[str] = ()) -> Settings:
    """The settings of a configuration of conf/train.yaml.

    Args:
        given: the overrides of the command line ("steps=100"). What the recipe has for the task
            and what scale=small changes leave them alone.

    Raises:
        ValueError: a key does not exist, or a value is not one of the choices, which it lists.
    """
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    values: dict[str, Any] = dict(config)
    small, by_task = values.pop("small", None) or {}, values.pop("by_task")
    check_fields(values)
    for section in ("task", "attention", "model"):
        if not isinstance(values[section], Mapping):
            raise ValueError(f"{section}={values[section]!r}: give its settings, {section}.NAME=..")
    keys = {_key(text) for text in given}
    choose(f"recipe={values['recipe']} with task", values["task"]["name"], by_task)
    recipe = dict(by_task[values["task"]["name"]])
    pretraining = recipe.pop("pretraining", {})
    _fill(values, recipe, keys)
    if values["pretrain"]:
        _fill(values, pretraining, keys)
    values["device"] = str(find_device(values["device"]))
    on_gpu = values["device"].startswith("cuda")
    choose("scale", values["scale"], SCALES)
    if values["scale"] == "auto":
        values["scale"] = "full" if on_gpu else "small"
    scaled = _fill(values, small, keys) if values["scale"] == "small" else {}
    check_fields(values)
    if values["precision"] is None:
        values["precision"] = "bf16" if on_gpu else "fp32"
    for name in ("compile", "graph"):
        flag_or_null(name, values[name])
        values[name] = on_gpu and values[name] in (None, True)
    _check(values)
    for name in ("name", "label", "mask"):  # Hydra reads name=3 as a number
        values[name] = None if values[name] is None else str(values[name])
    values["betas"] = tuple(values["betas"])
    values["attention"] = _attention(values["attention"], values["mask"], values["block_size"])
    return Settings(**values, scaled=scaled)


def model_sizes(settings: Settings) -> ModelConfig:
    """The sizes of the model of a run."""
    return model_config(**settings.model, lm_head=settings.pretrain is not None)


def compose_settings(overrides: Sequence[str]) -> Settings:
    """The settings of a command line of experiments.train, inside a Hydra program or outside.

    Raises:
        ValueError: as `make_settings`.
        HydraException: a key or a group does not exist.
    """
    if GlobalHydra.instance().is_initialized():
        return make_settings(compose("train", list(overrides)), overrides)
    with initialize_config_module("experiments.conf", version_base="1.3"):
        return make_settings(compose("train", list(overrides)), overrides)


def read_settings(path: Path) -> Settings:
    """The settings of a run from its config.yaml. Raises ValueError if it cannot be read."""
    remedy = "give the folder of a run"
    values = read_yaml(path, remedy)
    with reading(path, remedy):
        check_fields(values)
        _check(values)
        values["betas"] = tuple(values["betas"])
        return Settings(**values)


def check_fields(values: Mapping[Any, Any]) -> None:
    """Raises ValueError unless the keys are the settings of a run, those with a default or not."""
    if unknown := sorted(str(name) for name in values.keys() - FIELDS.keys()):
        choose("setting", unknown[0], sorted(FIELDS))
    needed = {name for name, default in FIELDS.items() if default is dataclasses.MISSING}
    if missing := sorted(needed - values.keys()):
        raise ValueError(f"the setting {', '.join(missing)} is missing")


def _key(override: str) -> str:
    """The key that an override of the command line sets."""
    return override.partition("=")[0].strip("+~").partition("@")[0]


def _fill(
    values: dict[str, Any], section: Mapping[str, Any], given: set[str]
) -> dict[str, tuple[Any, Any]]:
    """Takes the values of `section` whose keys are not given; returns {key: (old, new)}."""
    changed = {}
    for name, new in section.items():
        nested = isinstance(new, Mapping)
        if nested:
            values[name] = dict(values[name])
        place = values[name] if nested else values
        for key, value in (new if nested else {name: new}).items():
            full_key = f"{name}.{key}" if nested else name
            if full_key not in given and place.get(key) != value:
                changed[full_key] = (place.get(key), value)
                place[key] = value
    return changed


def _check(values: dict[str, Any]) -> None:
    kinds = {"least": COUNTS, "positive": POSITIVE, "paths": PATHS, "choices": CHOICES}
    check_options(values, optional=OPTIONAL, **kinds)
    check_training(values)
    for section, names in FLAGS.items():
        place = values[section] if section else values
        for name in names.split():
            flag_or_null(f"{section}.{name}" if section else name, place.get(name))
    _check_model(values)
    if (values["stop_at"] or 0) > 1:
        raise ValueError(f"stop_at={values['stop_at']!r}: give an accuracy, such as 0.9")
    if not values["steps"] and not values["init_from"]:
        raise ValueError("steps=0 tests the weights of init_from: give it, or at least 1 step")
    if values["init_head"] is not None and not values["init_from"]:
        raise ValueError(f"init_head={values['init_head']} needs init_from=FOLDER")
    causal = bool(values["model"].get("causal"))
    if values["pretrain"] is not None and causal != (values["pretrain"] == "causal"):
        raise ValueError(
            f"pretrain={values['pretrain']} with model.causal={str(causal).lower()}: a causal model"
            " takes pretrain=causal, and others take pretrain=masked"
        )
    share("mask_share", values["mask_share"])
    if not values["mask_share"]:
        raise ValueError("mask_share=0 hides no token: give a share between 0 and 1")
    for name in ("name", "label"):
        value = values[name]
        if value is not None and not re.fullmatch(r"[\w.+-]+", str(value)):
            raise ValueError(f"{name}={value!r} is part of a folder's name: use letters, digits, -")


def _check_model(values: dict[str, Any]) -> None:
    """Raises ValueError for a model that cannot be made, before there are data for it."""
    known = ModelConfig.__dataclass_fields__.keys() - {"lm_head"}  # which pretrain= sets
    for name in values["model"].keys() - known:
        choose("setting of the model", name, sorted(known))
    try:
        model_config(**values["model"]).refuse_grid(values["task"]["name"] in IMAGES)
    except ValueError as error:
        raise ValueError(f"model.{error}") from None


def _attention(
    attention: Mapping[str, Any], mask: str | None, block_size: int | None
) -> dict[str, Any]:
    """Return the attention with its mask. Raises ValueError for one that is wrong or not used."""
    given = {"mask": mask, "block_size": block_size}
    given = {key: value for key, value in given.items() if value is not None}
    for key, value in given.items():
        if attention["name"] != "sparse":
            name = attention["name"]
            raise ValueError(f"{key}={value} is for attention=sparse; {name} takes none")
    if mask is not None:
        masks.parse(mask)
    if block_size is not None:
        masks.dense().build(256, block_size=block_size)  # refuses another size
    return {**attention, **given}
