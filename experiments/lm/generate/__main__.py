"""Continues a text with the model of a run of experiments.lm: docs/guide/language_models.md.

    python -m experiments.lm.generate run=FOLDER prompt=import tokens=200
    python -m experiments.lm.generate run=FOLDER 'prompt="def main("' temperature=0

Prints the prompt and the text as it comes, and the speed on stderr.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise, takewhile
from pathlib import Path
from statistics import median
from typing import Any

from experiments.common.checks import check_options, is_number
from experiments.common.devices import device_name, find_device
from experiments.common.program import program
from experiments.lm.generate.run import Sampler, encode, generate, load_run
from experiments.lm.tokens import Codec

UNDECODED = "\N{REPLACEMENT CHARACTER}"  # what the start of a character is decoded to
LONGEST = 4  # bytes of a character, and so the most tokens


@program("generate", "experiments.lm.generate")
def main(options: dict[str, Any], command: str) -> None:
    """Loads the run, and prints what it generates."""
    _check(options)
    device, count = find_device(options["device"]), options["tokens"]
    model, codec, settings = load_run(Path(options["run"]), options["cache_dir"])
    ids = encode(codec, options["prompt"], count, settings.context)
    temperature, top_k, seed = (options[name] for name in ("temperature", "top_k", "seed"))
    pick = Sampler(codec.vocab, temperature, top_k, seed, device)
    times = [time.perf_counter()]
    print(options["prompt"], end="", flush=True)
    tokens = _timed(generate(model.to(device), ids, pick, settings.precision), times)
    tokens = takewhile(lambda token: token != codec.end, islice(tokens, count))
    for text in _texts(tokens, codec):
        print(text, end="", flush=True)
    print()
    print(_summary(len(ids), times, device_name(device)), file=sys.stderr)


def _check(options: dict[str, Any]) -> None:
    if options["run"] is None:
        raise ValueError("run=FOLDER is missing: give the folder of a run of experiments.lm")
    prompt, temperature = options["prompt"], options["temperature"]
    if not isinstance(prompt, str):
        raise ValueError(f"prompt={prompt!r}: give a text; 'prompt=\"...\"' holds any")
    if not is_number(temperature) or not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature!r}: give a number, at least 0")
    check_options(options, optional="top_k", whole="tokens top_k", least={"seed": 0})


def _timed(tokens: Iterable[int], times: list[float]) -> Iterator[int]:
    """The tokens; `times` gets the time at which each came."""
    for token in tokens:
        times.append(time.perf_counter())
        yield token


def _texts(tokens: Iterable[int], codec: Codec) -> Iterator[str]:
    """The text of the tokens, in whole characters as far as they are."""
    held: list[int] = []
    for token in tokens:
        held.append(token)
        text = codec.decode(held)
        if not text.endswith(UNDECODED) or len(held) == LONGEST:
            yield text
            held.clear()
    yield codec.decode(held)


def _summary(prompt: int, times: list[float], device: str) -> str:
    """The speed in a line; times: of the start, and of each token."""
    first, *steps = (after - before for before, after in pairwise(times))
    text = f"prompt of {prompt} tokens {first:.2g} s; {len(steps) + 1} tokens"
    if steps:
        step = median(steps)
        text += f", {1 / step:.3g} tokens/s ({1e3 * step:.3g} ms each, median)"
    return f"{text}; {device}"


if __name__ == "__main__":
    main()
