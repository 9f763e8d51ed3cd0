"""The settings of a run of a language model, complete and checked."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common.checks import check_options, choose, flag_or_null
from experiments.common.devices import find_device, free_memory
from experiments.common.files import digest, read_yaml, reading
from experiments.lm.attention import ATTENTIONS, resolve
from experiments.lm.model import MODELS, POSITIONS, Sizes
from experiments.lm.windows import MASKED, NEXT
from experiments.training.optim import SCHEDULES
from experiments.training.settings import PRECISIONS, check_training
from sparseflash.select import Selector

COUNTS = {
    **dict.fromkeys("context batch steps log_every eval_every val_tokens".split(), 1),
    **dict.fromkeys("micro_batch checkpoint_every vocab max_mib".split(), 1),
    **dict.fromkeys("seed warmup".split(), 0),
}
POSITIVE = "lr eps clip minutes"
PATHS = "runs cache_dir"
OPTIONAL = "micro_batch checkpoint_every vocab max_mib clip minutes"
# What may change between sessions of a run, and does not change its result but by rounding.
FREE = "device micro_batch eval_every checkpoint_every minutes compile graph".split()
FREE += "deterministic runs cache_dir keep".split()
# What two runs of a table may differ in beside the columns of their rows.
RECIPE = "lr warmup schedule betas eps weight_decay clip dropout vocab mask_share val_tokens"
LAYERS = "layers"  # of compile: every block by itself


@dataclass(frozen=True)
class Settings:
    """One run; the fields are keys of conf/lm.yaml, with every default filled in."""

    model: str
    provider: str
    mask: str | None
    packed: bool
    objective: str
    mask_share: float
    context: int
    vocab: int | None
    positions: str
    data: str
    tokenizer: str
    pattern: str
    max_mib: int | None
    seed: int
    batch: int  # windows of a step, of all processes together
    micro_batch: int | None
    steps: int
    warmup: int
    lr: float
    schedule: str
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float | None
    dropout: float
    log_every: int
    eval_every: int
    val_tokens: int
    checkpoint_every: int | None
    minutes: float | None
    precision: str
    compile: bool | str
    graph: bool
    device: str
    keep: bool
    name: str | None
    runs: str
    cache_dir: str
    deterministic: bool = False  # not in the files of older runs

    @property
    def sizes(self) -> Sizes:
        """The sizes of the model, with the vocabulary of `vocab` where it is given."""
        sizes = MODELS[self.model]
        causal = self.objective == NEXT
        return dataclasses.replace(sizes, vocab=self.vocab or sizes.vocab, causal=causal)

    @property
    def folder(self) -> Path:
        """The folder of the run: other settings, another folder."""
        words = [self.name or self.model, self.provider, self.mask or "", str(self.context)]
        text = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-") for word in words if word)
        own = digest({k: v for k, v in self.identity().items() if k != "seed"})[:6]
        return Path(self.runs, f"{text[:80]}-{own}", f"seed{self.seed}")

    def values(self) -> dict[str, Any]:
        """All settings as plain values."""
        return dataclasses.asdict(self) | {"betas": list(self.betas)}

    def identity(self) -> dict[str, Any]:
        """The settings that the result depends on, as plain values."""
        return {name: value for name, value in self.values().items() if name not in FREE}

    @property
    def recipe(self) -> str:
        """The settings that no other column of a row has, as options."""
        return " ".join(f"{name}={self.values()[name]}" for name in RECIPE.split())


FIELDS = [field.name for field in dataclasses.fields(Settings)]


def make_settings(options: Mapping[str, Any]) -> Settings:
    """The settings of the keys of conf/lm.yaml. Raises ValueError for a value out of range."""
    values = {name: options[name] for name in FIELDS}
    device = find_device(values["device"])
    on_gpu = device.type == "cuda"
    values["device"] = str(device)
    small = {} if on_gpu else options["small"]
    full = options["full"]
    for name in full:  # sizes that go by the device where none are given
        if values[name] is None:
            values[name] = small.get(name, full[name])
    choose("model", values["model"], MODELS)
    if values["objective"] is None:
        values["objective"] = NEXT if MODELS[values["model"]].causal else MASKED
    if values["precision"] is None:
        values["precision"] = "bf16" if on_gpu else "fp32"
    for name in ("compile", "graph"):
        others = [LAYERS] if name == "compile" else []
        flag_or_null(name, values[name], *others)
        values[name] = on_gpu and (True if values[name] is None else values[name])
    if values["packed"]:  # the host makes the blocks of each batch
        values["compile"] = values["graph"] = False
    if str(values["mask"]).startswith("moba"):  # torch.compile traces no selectors
        values["compile"] = False
    for name in ("mask", "name", "data", "tokenizer", "pattern"):
        values[name] = None if values[name] is None else str(values[name])
    _check(values)
    values["betas"] = tuple(values["betas"])
    settings = Settings(**values)
    mask = resolve(settings.mask, causal=settings.sizes.causal)
    if isinstance(mask, Selector) and (settings.provider != "sparse" or settings.packed):
        raise ValueError(f"mask={settings.mask} needs provider=sparse and packed=false")
    return settings


def read_settings(path: Path) -> Settings:
    """The settings of a run from its config.yaml. Raises ValueError if it cannot be read."""
    remedy = "give the folder of a run of experiments.lm"
    values = read_yaml(path, remedy)
    with reading(path, remedy):
        values["betas"] = tuple(values["betas"])
        settings = Settings(**values)
        _check(values)
        return settings


def _check(values: dict[str, Any]) -> None:
    choices = {
        "provider": ATTENTIONS,
        "objective": (NEXT, MASKED),
        "positions": POSITIONS,
        "schedule": SCHEDULES,
        "precision": PRECISIONS,
    }
    kinds = {"least": COUNTS, "positive": POSITIVE, "paths": PATHS, "choices": choices}
    check_options(values, optional=OPTIONAL, **kinds)
    check_training(values)
    flag_or_null("deterministic", values["deterministic"])
    for name in ("mask_share", "dropout"):
        share = values[name]
        if not isinstance(share, int | float) or not 0 <= share < 1:
            raise ValueError(f"{name}={share!r}: give a share between 0 and 1")
    if values["packed"] and values["objective"] == MASKED:
        raise ValueError("packed=true: documents are packed for objective=next only")


def refuse_memory(settings: Settings, device: Any, world: int) -> None:
    """Raises ValueError if the activations that a step must keep exceed the free memory.

    Counts the least: the inputs of the matrix products, and the scores of standard attention.
    """
    sizes, n = settings.sizes, settings.context
    size = min(settings.micro_batch or settings.batch, max(1, settings.batch // world))
    wide = 2 if settings.precision == "bf16" else 4
    least = size * sizes.layers * n * sizes.dim * 12 * wide
    scores = 0
    if settings.provider == "standard":
        scores = size * sizes.layers * sizes.heads * n * n * wide
    free = free_memory(device)
    if least + scores > free:
        why = f", {scores / 2**30:.3g} of them for scores of standard attention" if scores else ""
        raise ValueError(
            f"context={n} needs {(least + scores) / 2**30:.3g} GiB or more for {size} windows at "
            f"a time{why}, and {free / 2**30:.3g} GiB are free: give a smaller micro_batch or "
            "context" + (", or provider=sparse" if scores else "")
        )
