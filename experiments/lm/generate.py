"""Continues a text with the model of a run of experiments.lm: docs/guide/language_models.md.

    python -m experiments.lm.generate run=FOLDER prompt=import tokens=200
    python -m experiments.lm.generate run=FOLDER 'prompt="def main("' temperature=0

Prints the prompt and the text as it comes, and the speed on stderr.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from experiments.common.config import check, option
from experiments.common.devices import device_name, find_device
from experiments.common.program import program
from experiments.lm.model import LanguageModel
from experiments.lm.run import make_model
from experiments.lm.settings import NEXT, Settings
from experiments.lm.text import Codec, load_codec
from experiments.training.device import DTYPES, autocast
from experiments.training.run_file import read, read_settings
from experiments.training.state import load_weights, refuse_shapes, weights_file
from sparseflash import BlockSparseAttention, Rotary, attention, decode
from sparseflash.select import Selection
from sparseflash.select.tokens import TokenSelector

UNDECODED = "\N{REPLACEMENT CHARACTER}"  # what the start of a character is decoded to
LONGEST = 4  # bytes of a character, and so the most tokens
REMEDY = "give the folder of a run of experiments.lm"
BLOCK_Q = 16  # of a selection for one query: the least that a mask may have


@dataclass
class Options:
    run: str | None = option(None, "the folder of a run of experiments.lm")
    prompt: str | None = option(None, "how the text begins")
    tokens: int = option(200, "to generate; fewer where the document ends", least=1)
    temperature: float = option(1.0, "divides the logits; 0: the most probable token", least=0)
    top_k: int | None = option(
        None, "draws from so many of the most probable tokens; null: from all", least=1
    )
    seed: int = option(0, "of the draws", least=0)
    device: str | None = option(None, "cuda | cpu; null: cuda if there is a GPU")
    cache_dir: str | None = option(None, "of the tokenizer; null: as in the run")

    def __post_init__(self) -> None:
        check(self)
        if self.run is None:
            raise ValueError("run=FOLDER is missing: give the folder of a run of experiments.lm")
        if not self.prompt:
            raise ValueError("prompt is empty: give the text that the model continues")


@program("generate", Options, "experiments.lm.generate")
def main(options: Options, command: str) -> None:
    """Load the run, and print what it generates."""
    device, count, prompt = find_device(options.device), options.tokens, str(options.prompt)
    model, codec, settings = load_run(Path(str(options.run)), options.cache_dir)
    ids = encode(codec, prompt, count, settings.context)
    pick = Sampler(codec.vocab, options.temperature, options.top_k, options.seed, device)
    times, held = [time.perf_counter()], list[int]()
    print(prompt, end="", flush=True)
    for token in islice(generate(model.to(device), ids, pick, str(settings.precision)), count):
        times.append(time.perf_counter())
        if token == codec.end:
            break
        held.append(token)
        text = codec.decode(held)
        if not text.endswith(UNDECODED) or len(held) == LONGEST:  # whole characters
            print(text, end="", flush=True)
            held.clear()
    print(codec.decode(held))
    first, *steps = (after - before for before, after in pairwise(times))
    speed = f"prompt of {len(ids)} tokens {first:.2g} s; {len(steps) + 1} tokens"
    if steps:
        step = median(steps)
        speed += f", {1 / step:.3g} tokens/s ({1e3 * step:.3g} ms each, median)"
    print(f"{speed}; {device_name(device)}", file=sys.stderr)


# ---- the model of a run


def load_run(folder: Path, cache_dir: str | None) -> tuple[LanguageModel, Codec, Settings]:
    """Return the model of a run with its last weights, on the CPU, its tokenizer and its settings.

    cache_dir: where its tokenizer is; None: where the run put it.
    Raises ValueError if the folder has no weights of a decoder of text.
    """
    settings, run = read_settings(folder, Settings), read(folder) or {}
    if settings.objective != NEXT:
        raise ValueError(f"run={folder}: model={settings.model} fills in hidden tokens; {REMEDY}")
    if not run["task"]["vocab"]:
        raise ValueError(
            f"run={folder}: data={settings.data} has ids without a tokenizer, which cannot read a "
            "prompt; give a run of text"
        )
    path = weights_file(folder)
    if path is None:
        raise ValueError(f"run={folder}: no weights there; {REMEDY} that has keep=true")
    weights, _, about = load_weights(path, REMEDY)
    codec = load_codec(settings.tokenizer, about["data"], cache_dir or settings.cache_dir)
    model, _ = make_model(replace(settings, packed=False), codec)  # the text is one document
    refuse_shapes(path, weights, model.state_dict(), REMEDY)
    model.load_state_dict(weights)
    return model.eval(), codec, settings


def encode(codec: Codec, prompt: str, tokens: int, context: int) -> list[int]:
    """Return the ids of a prompt. Raises ValueError if there is no room for more tokens."""
    ids = codec.encode(prompt)
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
    dtype = DTYPES[precision] if device.type == "cuda" else torch.float32
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


# ---- caches


class Cache:
    """Keys and values of one sequence in a layer, which `attend` adds to and reads.

    The first call has the prompt, each further one a token.

    Args:
        layer: its mask is taken as in training, for windows of `room` tokens.
    """

    def __init__(self, layer: BlockSparseAttention, room: int):
        self.mask: Any = layer.mask
        self.heads, self.room, self.length = layer.heads, room, 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: object = None) -> Tensor:
        """`BlockSparseAttention.attend` for tokens that follow those in the cache."""
        start, mask = self.length, self.mask
        if not start:
            self.k, self.v = (t.new_zeros(1, t.shape[1], self.room, t.shape[3]) for t in (k, v))
            self.lengths = torch.zeros(1, dtype=torch.int32, device=k.device)
        self.length = end = start + q.shape[2]
        self.lengths.fill_(end)
        self.k[:, :, start:end], self.v[:, :, start:end] = k, v
        moba = isinstance(mask, TokenSelector)
        if start:
            mask = self._picked(q, mask) if moba else mask
            return decode(q, self.k, self.v, mask, lengths=self.lengths)
        if moba:
            return attention(q, k, v, mask(q, k))
        heads = self.heads if mask.per_head else None
        return attention(q, k, v, mask.build(self.room, heads=heads).crop(q.shape[2]))

    def _picked(self, q: Tensor, moba: TokenSelector) -> Selection:
        """Return the token's own chunk, and the whole ones whose mean keys have the best scores."""
        chunk, (_, block) = moba.chunk, moba.block_size
        own = (self.length - 1) // chunk
        means = self.k[:, :, : own * chunk].unflatten(2, (own, chunk)).float().mean(3)
        scores = (q.float() * means).sum(3)  # no matmul, which autocast rounds
        best = scores.topk(min(moba.k - 1, own)).indices.unsqueeze(2)
        chunks = -(-self.room // chunk)
        picked = torch.zeros(*q.shape[:3], chunks, dtype=torch.bool, device=q.device)
        picked.scatter_(3, best, True)[..., own] = True
        picked = picked.repeat_interleave(chunk // block, 3)[..., : -(-self.room // block)]
        most = q.shape[1] * moba.k * (chunk // block)
        sizes = {"n_q": 1, "n_k": self.room, "max_blocks": most}
        return Selection.from_layout(picked, (BLOCK_Q, block), **sizes)


class Later(nn.Module):
    """`Rotary` for tokens that follow those in a cache."""

    def __init__(self, rotary: Rotary, cache: Cache):
        super().__init__()
        self.rotary, self.cache = rotary, cache

    def forward(self, x: Tensor) -> Tensor:
        return self.rotary(x, self.cache.length)


@contextmanager
def caches(layers: Sequence[BlockSparseAttention], room: int) -> Iterator[None]:
    """Within it, the layers attend through caches of their own."""
    rotaries = [layer.rotary for layer in layers]
    for layer in layers:
        cache = Cache(layer, room)
        layer.attend = cache.attend  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(layer.rotary, Rotary):
            layer.rotary = Later(layer.rotary, cache)
    try:
        yield
    finally:
        for layer, rotary in zip(layers, rotaries, strict=True):
            del layer.attend
            layer.rotary = rotary


if __name__ == "__main__":
    main()
