"""The settings of a run: checked, complete, and scaled down where there is no GPU."""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

import masks
from experiments.common.checks import whole_number
from experiments.common.files import digest
from experiments.lra.training.optim import SCHEDULES

SCALES = ("auto", "full", "small")
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
PRETRAIN = ("masked_pixels",)
INIT_HEAD = ("fresh",)
COUNTS = "batch eval_every log_every".split()  # at least 1
OPTIONAL_COUNTS = "micro_batch eval_batch val_examples checkpoint_every".split()
# What may change from one session of a run to the next: it changes no result but by rounding.
FREE = (
    "device micro_batch eval_batch log_every checkpoint_every minutes compile graph tensorboard "
    "runs name data_dir cache_dir data_only"
).split()


@dataclass(frozen=True)
class Settings:
    """One run; the fields are the keys of conf/train.yaml, with every default filled in."""

    task: dict[str, Any]
    attention: dict[str, Any]
    model: dict[str, Any]
    label: str  # of the task and its recipe, in the names of folders
    recipe: str
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
    scaled: dict[str, tuple[Any, Any]] = field(default_factory=dict, compare=False)

    @property
    def folder(self) -> Path:
        """Where the run keeps its files: runs/TASK/ATTENTION/seedN."""
        task = [self.label]
        task += [self.pretrain] if self.pretrain else []
        task += [] if self.scale == "full" else [self.scale]
        attention = [self.attention["name"]]
        if self.mask is not None:
            words = re.sub(r"[^A-Za-z0-9.]+", "-", self.mask).strip("-")[:40].strip("-")
            attention += [words, digest({"mask": self.mask})[:6]]
        attention += [self.name] if self.name else []
        return Path(self.runs, "-".join(task), "-".join(attention), f"seed{self.seed}")

    def lasting(self) -> dict[str, Any]:
        """The settings that the result depends on, as plain values."""
        values = dataclasses.asdict(self)
        return {name: values[name] for name in values if name not in (*FREE, "scaled")}

    @property
    def digest(self) -> str:
        return digest(self.lasting())


def make_settings(config: DictConfig | Mapping[str, Any], given: Sequence[str] = ()) -> Settings:
    """The settings of a configuration of conf/train.yaml.

    Args:
        given: the overrides of the command line ("steps=100"), which scale=small leaves alone.

    Raises:
        ValueError: a value that is none, with the choices.
    """
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    values: dict[str, Any] = dict(config)
    small = values.pop("small", None) or {}
    cuda = torch.cuda.is_available()
    values["device"] = values["device"] or ("cuda" if cuda else "cpu")
    on_gpu = device_type(values["device"]) == "cuda"
    _choose("scale", values["scale"], SCALES)
    if values["scale"] == "auto":
        values["scale"] = "full" if on_gpu else "small"
    values["scaled"] = {}
    if values["scale"] == "small":
        values["scaled"] = _scale(values, small, {_key(text) for text in given})
    if values["precision"] is None:
        values["precision"] = "bf16" if on_gpu else "fp32"
    for name in ("compile", "graph"):
        values[name] = on_gpu if values[name] is None else bool(values[name]) and on_gpu
    _check(values)
    for name in ("name", "label", "mask"):  # name=3 is a number to Hydra
        values[name] = None if values[name] is None else str(values[name])
    values["betas"] = tuple(values["betas"])
    values["attention"] = _attention(values["attention"], values["mask"])
    return Settings(**values)


def compose_settings(overrides: Sequence[str]) -> Settings:
    """The settings of a command line of experiments.train, inside a program of Hydra or outside.

    Raises:
        ValueError: a value that is none, with the choices.
        HydraException: a key or a group that does not exist.
    """
    if GlobalHydra.instance().is_initialized():
        return make_settings(compose("train", list(overrides)), overrides)
    with initialize_config_module("experiments.conf", version_base="1.3"):
        return make_settings(compose("train", list(overrides)), overrides)


def _key(override: str) -> str:
    """The key that an override of the command line sets."""
    return override.partition("=")[0].strip("+~").partition("@")[0]


def _scale(
    values: dict[str, Any], small: Mapping[str, Any], given: set[str]
) -> dict[str, tuple[Any, Any]]:
    """Puts the values of `small` in place, but for what is given; returns {key: (old, new)}."""
    changed = {}
    for name, new in small.items():
        inner = new if isinstance(new, Mapping) else {None: new}
        for key, value in inner.items():
            place = name if key is None else f"{name}.{key}"
            if place in given:
                continue
            if key is None:
                old, values[name] = values[name], value
            else:
                values[name] = dict(values[name])
                old, values[name][key] = values[name].get(key), value
            if old != value:
                changed[place] = (old, value)
    return changed


def _check(values: Mapping[str, Any]) -> None:
    for name in (*COUNTS, *OPTIONAL_COUNTS):
        value = values[name]
        if value is None and name in OPTIONAL_COUNTS:
            continue
        whole_number(name, value)
    for name in ("steps", "warmup", "seed", "data_seed"):
        whole_number(name, values[name], least=0)
    for name in ("lr", "eps", "clip", "minutes", "stop_at"):
        value = values[name]
        if value is None and name in ("clip", "minutes", "stop_at"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{name}={value!r}: give a number above 0")
    if values["stop_at"] is not None and values["stop_at"] > 1:
        raise ValueError(f"stop_at={values['stop_at']!r}: give an accuracy, such as 0.9")
    betas = values["betas"]
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ValueError(f"betas={betas!r}: give two numbers, [0.9,0.999]")
    _choose("schedule", values["schedule"], SCHEDULES)
    _choose("precision", values["precision"], PRECISIONS)
    for name, choices in (("pretrain", PRETRAIN), ("init_head", INIT_HEAD)):
        if values[name] is not None:
            _choose(name, values[name], choices)
    if values["steps"] == 0 and not values["init_from"]:
        raise ValueError("steps=0 tests the weights of init_from: give it, or at least 1 step")
    if values["init_head"] and not values["init_from"]:
        raise ValueError(f"init_head={values['init_head']} is for init_from=FOLDER")
    if not 0 < values["mask_share"] < 1:
        raise ValueError(f"mask_share={values['mask_share']!r}: give a share between 0 and 1")
    micro = values["micro_batch"]
    if micro is not None and values["batch"] % micro:
        raise ValueError(f"micro_batch={micro} does not divide batch={values['batch']}")
    for name in ("name", "label"):
        if values[name] is not None and not re.fullmatch(r"[\w.+-]+", str(values[name])):
            raise ValueError(f"{name}={values[name]!r}: it names a folder; use letters, digits, -")


def _attention(attention: Mapping[str, Any], mask: str | None) -> dict[str, Any]:
    """The attention with its mask; ValueError for text that is no mask, or one that nobody uses."""
    found = dict(attention)
    if mask is None:
        return found
    if found["name"] != "sparse":
        raise ValueError(f"mask={mask} is for attention=sparse; {found['name']} takes none")
    masks.parse(mask)
    return found | {"mask": mask}


def _choose(name: str, value: Any, choices: Sequence[str] | Mapping[str, Any]) -> None:
    if value not in choices:
        close = difflib.get_close_matches(str(value), list(choices), 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"{name}={value!r}: choose from {', '.join(choices)}{hint}")


def device_type(name: str) -> str:
    """cpu or cuda; ValueError for another name, and for a GPU that is not there."""
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r}: choose from cpu, cuda, cuda:1 ...")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: torch finds no GPU here; use device=cpu")
    return kind
