"""The model of a run, and the tokens that it generates."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from experiments.common.files import read_json, table
from experiments.lm.generate.cache import caches
from experiments.lm.model import LanguageModel
from experiments.lm.prepare import make_model
from experiments.lm.result import MANIFEST
from experiments.lm.settings import Settings, read_settings
from experiments.lm.tokens import Codec, load_codec
from experiments.lm.windows import NEXT
from experiments.lra.settings import CONFIG
from experiments.training.device import autocast
from experiments.training.settings import PRECISIONS
from experiments.training.state import CHECKPOINT, load, refuse_shapes

REMEDY = "give the folder of a run of experiments.lm"


def load_run(folder: Path, cache_dir: str | None) -> tuple[LanguageModel, Codec, Settings]:
    """The model of a run with its last weights, on the CPU, its tokenizer and its settings.

    cache_dir: where its tokenizer is; None: where the run put it.
    Raises ValueError if the folder has no weights of a decoder of text.
    """
    if not (folder / CONFIG).exists():
        raise ValueError(f"run={folder}: no {CONFIG} there; {REMEDY}")
    settings = read_settings(folder / CONFIG)
    if settings.objective != NEXT:
        raise ValueError(f"run={folder}: model={settings.model} fills in hidden tokens; {REMEDY}")
    path = folder / CHECKPOINT
    if not path.exists():
        raise ValueError(f"run={folder}: no {CHECKPOINT} there; {REMEDY} that has keep=true")
    state = load(path, REMEDY, ("model", "data"))
    manifest = read_json(folder / MANIFEST, REMEDY, lambda found: [table(entry) for entry in found])
    if any("tokens" in entry for entry in manifest):
        raise ValueError(
            f"run={folder}: data={settings.data} has ids without a tokenizer, which cannot read a "
            "prompt; give a run of text"
        )
    codec = load_codec(settings.tokenizer, state["data"], cache_dir or settings.cache_dir)
    model, _ = make_model(replace(settings, packed=False), codec)  # the text is one document
    refuse_shapes(path, state["model"], model.state_dict(), REMEDY)
    model.load_state_dict(state["model"])
    return model.eval(), codec, settings


def encode(codec: Codec, prompt: str, tokens: int, context: int) -> list[int]:
    """The ids of a prompt. Raises ValueError if there are none, or no room for more tokens."""
    ids = codec.encode(prompt)
    if not ids:
        raise ValueError("prompt is empty: give the text that the model continues")
    if codec.end in ids:
        raise ValueError(f"prompt={prompt!r} has the end of a document: give the text after it")
    if len(ids) + tokens > context:
        most = context - len(ids)
        remedy = f"give tokens={most} or fewer" if most > 0 else "give a shorter prompt"
        raise ValueError(
            f"tokens={tokens}: the prompt has {len(ids)}, and the context of the run {context}: "
            + remedy
        )
    return ids


@torch.no_grad()
def generate(
    model: LanguageModel, ids: list[int], pick: Callable[[Tensor], int], precision: str
) -> Iterator[int]:
    """Tokens after the ids, as many as the window of the model has room for.

    Args:
        pick: the next token, from the logits (rows,).
        precision: of the run, taken on a GPU; a CPU computes in float32.
    """
    device = model.tokens.weight.device
    dtype = PRECISIONS[precision] if device.type == "cuda" else torch.float32
    start, new = 0, torch.tensor([ids], device=device)
    with caches([block.attention for block in model.layers], model.context):
        while (end := start + new.shape[1]) <= model.context:
            last = torch.full((1, 1), new.shape[1] - 1, device=device)
            with autocast(device, dtype):
                logits = model(new, places=last, start=start)
            yield (token := pick(logits[0, 0]))
            start, new = end, torch.full((1, 1), token, device=device)


class Sampler:
    """Draws a token from the softmax of its logits (rows,), of which the first `vocab` count.

    Args:
        temperature: divides the logits; 0 takes the largest.
        top_k: draws from so many of the largest; None: from all.
    """

    def __init__(
        self, vocab: int, temperature: float, top_k: int | None, seed: int, device: torch.device
    ):
        self.vocab, self.temperature, self.top_k = vocab, temperature, top_k
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        best = logits[: self.vocab].double().topk(min(self.top_k or self.vocab, self.vocab))
        if not self.temperature:
            return int(best.indices[0])
        p = ((best.values - best.values[0]) / self.temperature).softmax(0)
        return int(best.indices[torch.multinomial(p, 1, generator=self.generator)])
