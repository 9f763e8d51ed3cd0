"""The settings of a run of a language model, complete and checked."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.common.config import compose, make, option, store
from experiments.common.files import digest
from experiments.lm.model import LEARNED, POSITIONS, SELECTOR, STD, Sizes, resolve
from experiments.lm.questions import asks, synthetic
from experiments.training import run_file
from experiments.training.settings import Training, given_keys, on_device
from sparseflash.select import Selector

PROVIDERS = ("sparse", "standard", "sdpa")
PLANS = ("same", "contexts", "masks", "equal_time", "mlp", "mlp_time")
TIMED = {"equal_time": "masks", "mlp_time": "mlp"}  # and the plans with the times of their steps
LAYERS = "layers"  # of compile: every block by itself
# newer settings and their defaults, with which a run keeps the folder that it has had
ADDED = {"layers": None, "conv": None, "init_std": STD, "stop_at": None}
MLP = {"mlp": None, "mlp_block": 64, "mlp_rank": 0}  # dense MLPs
ADDED |= MLP


MODELS = {
    "micro": Sizes(2, 64, 1),
    "tiny": Sizes(2, 128, 4),
    "small": Sizes(4, 256, 4),
    "gpt2": Sizes(12, 768, 12, 50_257),
    "gpt2-medium": Sizes(24, 1024, 16, 50_257),
}


@dataclass
class Settings(Training):
    """One run. Its folder is RUNS/MODEL-PROVIDER[-MASK]-CONTEXT-DIGEST/seedSEED."""

    model: str = option("gpt2", "sizes", choices=MODELS)
    layers: int | None = option(None, "of the model; null: of its size", least=1)
    provider: str = option("sparse", "of attention", choices=PROVIDERS)
    mask: str | None = option(None, "text, such as moba(64,3) or nsa(4,32); made causal")
    mlp: str | None = option(None, "mask of block-sparse MLPs, such as butterfly(64, 2)")
    mlp_block: int = option(64, "features of a block of it", choices=("16", "32", "64", "128"))
    mlp_rank: int = option(0, "of a dense matrix that is added to each weight", least=0)
    packed: bool = option(False, "true: a token attends to its own document only")
    context: int = option(1024, "tokens of a window", least=1)
    vocab: int | None = option(None, "ids of the embedding; null: of the model or data", least=1)
    positions: str = option(LEARNED, "of tokens", choices=POSITIONS)
    dropout: float = option(0.0, "probability, in training", least=0, below=1)
    conv: int | None = option(
        None, "tokens of a causal convolution of the embeddings; null: none", least=2
    )
    init_std: float = option(STD, "of the initial weights", above=0)

    data: str = option(
        "stdlib",
        "stdlib | packages | a folder of text, or of nanoGPT's bins | questions, such as mqar:16",
    )
    tokenizer: str = option("bytes", "bytes | bpe:SIZE (needs the package tokenizers)")
    pattern: str = option("*", "names of the files of a folder")

    batch: int = option(64, "windows of a step, of all processes together", least=1)
    lr: float = option(6e-4, "peak learning rate", above=0)
    betas: list[float] = option([0.9, 0.95], "of AdamW", least=0, below=1)
    weight_decay: float = option(0.1, "of AdamW", least=0)
    clip: float | None = option(1.0, "of the norm of the gradient; null: none", above=0)
    compile: Any = option(
        None, "torch.compile: true | layers (one for all blocks) | false; null: on a GPU", free=True
    )
    log_every: int = option(10, "steps between lines of the journal", least=1)
    eval_every: int = option(100, "steps between validations", least=1, free=True)
    val_tokens: int = option(2**20, "of the validation text", least=1)
    stop_at: float | None = option(None, "accuracy on questions that ends the run", above=0, most=1)
    runs: str = option("runs/lm", "folder of all runs", free=True)

    plan: str | None = option(None, "the comparison that the run is part of", choices=PLANS)
    case: str | None = option(None, "what the table of the plan calls it")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.steps:
            raise ValueError("steps=0: give a number at least 1")
        if self.val_tokens < self.context:
            raise ValueError(f"val_tokens={self.val_tokens}: give {self.context} (context) or more")
        if asks(self.data):
            synthetic(self.data, self.context)  # refuses an amount
            if self.packed or self.context_parallel > 1 or self.plan:
                raise ValueError(
                    f"data={self.data} takes packed=false, context_parallel=1 and plan=null"
                )
        elif self.stop_at is not None:
            raise ValueError(f"stop_at={self.stop_at} is for questions: give data=mqar or another")
        if self.mlp is None and self.mlp_rank:
            raise ValueError(f"mlp_rank={self.mlp_rank} is of block-sparse MLPs: give mlp=MASK")
        mask = resolve(self.mask)
        if self.context_parallel > 1 and (self.provider != "sparse" or isinstance(mask, Selector)):
            raise ValueError(
                f"context_parallel={self.context_parallel} takes provider=sparse and a mask that is"
                f" no selection, got provider={self.provider} mask={self.mask}"
            )
        if isinstance(mask, Selector) and (self.provider != "sparse" or self.packed):
            raise ValueError(f"mask={self.mask} needs provider=sparse and packed=false")

    @property
    def sizes(self) -> Sizes:
        """The sizes of the model, with the vocabulary of `vocab` where it is given."""
        sizes = MODELS[self.model]
        layers, vocab = self.layers or sizes.layers, self.vocab or sizes.vocab
        mlp = {"mask": self.mlp, "block_size": self.mlp_block, "rank": self.mlp_rank}
        own = {"mlp": None if self.mlp is None else mlp, "conv": self.conv}
        return replace(sizes, layers=layers, vocab=vocab, **own)

    @property
    def folder(self) -> Path:
        """The folder of the run: other settings, another folder."""
        words = [self.name or self.model, self.provider, self.mask or "", str(self.context)]
        text = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-") for word in words if word)
        own = {
            name: value
            for name, value in self.identity().items()
            if name != "seed" and not (name in ADDED and value == ADDED[name])
        }
        return Path(self.runs, f"{text[:80]}-{digest(own)[:6]}", f"seed{self.seed}")


store("lm", Settings)


def make_settings(options: Mapping[str, Any], given: Sequence[str] = ()) -> Settings:
    """Return the settings of the keys of conf/lm.yaml.

    given: the overrides of the command line, which scale=small leaves alone.
    Raises ValueError for a value out of range.
    """
    values = dict(options)
    on_device(values, values.pop("small"), given_keys(given), LAYERS)
    if values["packed"]:  # the host makes the blocks of each batch
        values["compile"] = values["graph"] = False
    if SELECTOR.fullmatch(str(values["mask"])):  # torch.compile traces no selectors
        values["compile"] = False
    settings = make(Settings, values)
    if settings.plan in TIMED:
        return replace(settings, steps=_steps_in_time(settings))
    return settings


def compose_settings(overrides: Sequence[str]) -> Settings:
    """Return the settings of a command line of experiments.lm, inside a program or outside."""
    return make_settings(compose("lm", overrides), overrides)


def _steps_in_time(settings: Settings) -> int:
    """Return as many steps as take the time of the dense run of the plan, at the own speed."""
    own = replace(settings, plan=TIMED[str(settings.plan)])
    ms, places = [], []
    for run in (replace(own, mask="dense", case="dense", **MLP), own):
        found = run_file.read(run.folder)
        if found is None or not found["complete"]:
            raise ValueError(
                f"plan={settings.plan} needs the time of a step of {run.case!r}: run"
                f" plan={own.plan} first, with the same options ({run.folder} is not complete)"
            )
        ms.append(found["result"]["ms_per_step"])
        places.append(tuple(found["sessions"][-1][name] for name in ("device", "processes")))
    if len({*places}) > 1 or None in ms:
        ran = ", the other on ".join(f"{device} x {count}" for device, count in places)
        raise ValueError(
            f"plan={settings.plan} compares times of one device, and the dense run has its own on"
            f" {ran}: run plan={own.plan} again on one device, in another folder with name="
        )
    return max(1, round(settings.steps * ms[0] / ms[1]))
