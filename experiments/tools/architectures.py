"""Compare every architecture of transformers through sparseflash with its own attention.

    python -m experiments.tools.architectures
    python -m experiments.tools.architectures --rows new.jsonl llama gemma3 'qwen.*'
    python -m experiments.tools.architectures --page docs/support.md

Each model type is built small with random weights, in float32 on the CPU, in a process of its own.
It runs forward, with padding, in generation with both caches, with an image, and backward, with
eager (or sdpa) attention and through `use(model)`. One line of JSON is written for each; model
types that have one already are left out. See docs/support.md.
"""

import argparse
import json
import linecache
import logging
import os
import re
import resource
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from experiments.common.provenance import commit, now
from experiments.common.tables import markdown
from experiments.tools.small_models import build, inputs, with_image
from sparseflash.integrations.transformers import NAME, use

ROWS = Path("docs/results/cpu/architectures.jsonl")
PACKAGES = tuple(str(Path(__file__).parents[2] / name) for name in ("sparseflash", "masks"))
CLOSE, SECONDS, GIBIBYTES = 2e-4, 300, 10
Row = dict[str, Any]
Outputs = dict[str, Tensor]
Step = Callable[[], Any]


def main() -> None:
    """Measure what is asked for, and print the summary of all rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", default=[".*"], help="model types (expressions)")
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of the rows")
    parser.add_argument("--page", type=Path, help="page whose tables are made from the rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept = arguments.rows.read_text().splitlines() if arguments.rows.exists() else []
    done = {row["architecture"]: row for row in map(json.loads, kept)}
    wanted = [k for k in CONFIG_MAPPING if any(re.fullmatch(p, k) for p in arguments.kinds)]
    about = {"transformers": transformers.__version__, "torch": torch.__version__}
    about |= {"commit": commit(), "date": now()[:10]}
    build("llama")  # imported once, before processes are forked
    with arguments.rows.open("a") as file:
        for kind in (kind for kind in wanted if kind not in done):
            done[kind] = apart(kind) | about
            file.write(json.dumps(done[kind]) + "\n")
            file.flush()
            print(f"{kind}: {done[kind]['verdict']} {done[kind].get('reason', '')}", flush=True)
    rows = [done[kind] for kind in sorted(done)]
    arguments.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = tables(rows)
    if arguments.page is not None:
        text = arguments.page.read_text()
        for name, table in made.items():  # between <!-- rows: NAME --> and <!-- end -->
            place = rf"(<!-- rows: {name} -->\n).*?(\n<!-- end -->)"
            text = re.sub(place, lambda m, new=table: m[1] + new + m[2], text, flags=re.DOTALL)
        arguments.page.write_text(text)
    print("\n\n".join(made.values()))


def apart(kind: str) -> Row:
    """Return the row of a model type, measured in a process with a limit of time and memory."""
    context = get_context("fork")  # torch and transformers are imported once
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(kind, theirs))
    process.start()
    theirs.close()
    failure = f"took more than {SECONDS} s"
    try:
        if ours.poll(SECONDS):
            return ours.recv()
    except EOFError:
        failure = "the process died"
    finally:
        process.kill()
        process.join()
    return {"architecture": kind, "verdict": "not tried", "reason": failure}


def _child(kind: str, pipe: Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    logging.disable()
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (GIBIBYTES << 30, GIBIBYTES << 30))
    pipe.send(measure(kind))


def measure(kind: str) -> Row:
    """Return the row of a model type."""
    row: Row = {"architecture": kind, "verdict": "not tried"}
    try:
        model = build(kind)
        row["model"] = type(model).__name__
        use(model)
    except Exception as error:
        if is_ours(error):
            return row | {"verdict": "refused", "reason": line_of(error)}
        return row | {"reason": f"cannot be built: {line_of(error)}"}
    failures = []
    for own, given in product(("eager", "sdpa"), inputs(model)):
        expected = run(model, own, lambda given=given: model(**given))
        if not isinstance(expected, Exception):
            break
        failures.append(expected)
    else:
        return row | {"reason": f"no inputs: {line_of(failures[0])}"}
    if (effect := effect_of_attention(model, given, expected)) is None:
        return row | {"reason": "it never calls AttentionInterface"}
    if effect < 100 * CLOSE:
        return row | {"reason": f"its attention changes the output by {effect} only"}
    compared = {name: compare(model, own, step) for name, step in steps(model, given)}
    results = {name: result for name, result in compared.items() if result is not None}
    row |= {"own": own, "effect": effect, "steps": results}
    texts = [result for result in results.values() if isinstance(result, str)]
    numbers = [result for result in results.values() if not isinstance(result, str)]
    if foreign := [text for text in texts if text.startswith("foreign")]:
        return row | {"verdict": "foreign", "reason": foreign[0]}
    if (largest := max(numbers, default=0.0)) >= CLOSE:
        return row | {"verdict": "wrong", "reason": f"differs by {largest}"}
    if isinstance(forward := results.get("forward"), str):
        return row | {"verdict": "refused", "reason": forward}
    return row | ({"verdict": "equal"} if numbers else {"reason": "it fails with sdpa, too"})


def run(model: PreTrainedModel, attention: str, step: Step) -> Outputs | Exception:
    """Return the tensors of numbers in what a step gives, by their place in it, or its error."""
    found: Outputs = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            found[name] = value.detach()
        elif isinstance(value, (dict, tuple, list)):
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                if key != "attentions":  # weights, which sparseflash does not have
                    walk(inner, f"{name}.{key}")

    transformers.set_seed(0)
    try:
        model.set_attn_implementation(attention)
        with torch.no_grad():
            walk(step(), "")
    except Exception as error:
        return error
    return found


def steps(model: PreTrainedModel, given: dict[str, Tensor]) -> Iterator[tuple[str, Step]]:
    """Yield what is compared: a name, and what to run."""
    yield "forward", lambda: model(**given)
    yield "gradients", lambda: gradients(model, given)
    tokens = given.get("input_ids")
    if tokens is not None and tokens.ndim == 2:
        for side, hidden in {"left": slice(0, 7), "right": slice(-7, None)}.items():
            real = torch.ones_like(tokens)
            real[1, hidden] = 0
            yield f"padding on the {side}", partial(padded, model, given, real)
        if model.can_generate():
            start = {name: x for name, x in given.items() if name != "decoder_input_ids"}
            real = torch.ones_like(tokens)
            real[1, :7] = 0
            for cache in ("dynamic", "static"):
                arguments = start | {"attention_mask": real, "cache_implementation": cache}
                yield f"generate, {cache} cache", partial(generate, model, arguments)
    try:
        with torch.no_grad():
            image = with_image(model)
    except Exception:  # what the image should look like is not known
        return
    if image is not None:
        yield "image", lambda: model(**image)


def padded(model: PreTrainedModel, given: dict[str, Tensor], real: Tensor) -> Outputs:
    """Return the outputs of the tokens that are no padding."""
    found = model(**given, attention_mask=real)
    tensors = {name: x for name, x in found.items() if isinstance(x, Tensor)}
    return {name: x[real.bool()] for name, x in tensors.items() if x.shape[:2] == real.shape}


def generate(model: PreTrainedModel, arguments: dict[str, Any]) -> Any:
    """Return the logits of four tokens, chosen greedily."""
    return model.generate(  # pyright: ignore
        **arguments, max_new_tokens=4, min_new_tokens=4, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    ).logits  # fmt: skip


def gradients(model: PreTrainedModel, given: dict[str, Tensor]) -> Outputs:
    """Return the gradients of a sum of the first output, in training."""
    model.zero_grad()
    model.train()
    try:
        with torch.enable_grad():
            values = model(**given).values()
            out = next(x for x in values if isinstance(x, Tensor) and x.requires_grad)
            (out * torch.linspace(-1, 1, out.numel()).view_as(out)).mean().backward()
    finally:
        model.eval()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compare(model: PreTrainedModel, own: str, step: Step) -> float | str | None:
    """Return the largest difference, the text of a refusal or of a foreign error, or None where
    the model's own attention fails or nothing is compared."""
    expected = run(model, own, step)
    if isinstance(expected, Exception) or not expected:
        return None
    found = run(model, NAME, step)
    if isinstance(found, Exception) and is_ours(found):
        return f"refused: {line_of(found)}"
    if not isinstance(found, Exception) and (gap := distance(expected, found)) < CLOSE:
        return gap
    sdpa = run(model, "sdpa", step)  # it may be causal where eager is not, and fail where we do
    if isinstance(found, Exception):
        if isinstance(sdpa, Exception) and line_of(sdpa) == line_of(found):
            return None
        frame = traceback.extract_tb(found.__traceback__)[-1]
        return f"foreign: {line_of(found)} ({Path(frame.filename).name}:{frame.lineno})"
    return gap if isinstance(sdpa, Exception) else min(gap, distance(sdpa, found))


def distance(expected: Outputs, found: Outputs) -> float:
    """Return the largest difference relative to the largest value of its tensor."""
    if {n: x.shape for n, x in expected.items()} != {n: x.shape for n, x in found.items()}:
        return float("inf")
    pairs = [(x, found[n]) for n, x in expected.items() if x.numel() and x.isfinite().all()]
    noise = 1e-3 * max((x.abs().max().item() for x, _ in pairs), default=0.0) + 1e-6
    gaps = [(x - y).abs().max().item() / max(x.abs().max().item(), noise) for x, y in pairs]
    return float(f"{max(gap if gap == gap else float('inf') for gap in [0.0, *gaps]):.2g}")


def effect_of_attention(
    model: PreTrainedModel, given: dict[str, Tensor], expected: Outputs
) -> float | None:
    """Return what changes where attention gives 0; None where it is not called."""
    calls = Counter()

    def nothing(_: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any):
        calls["attend"] += 1
        return value.new_zeros(*query.shape[:3], value.shape[-1]).transpose(1, 2).contiguous(), None

    AttentionInterface.register("nothing", nothing)
    AttentionMaskInterface.register("nothing", sdpa_mask)
    found = run(model, "nothing", lambda: model(**given))
    if not calls:
        return None
    return None if isinstance(found, Exception) else distance(expected, found)


def line_of(error: BaseException) -> str:
    """Return the error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def is_ours(error: BaseException) -> bool:
    """Return whether sparseflash or masks raised it on purpose."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    clear = isinstance(error, (ValueError, TypeError, NotImplementedError))
    raised = linecache.getline(frame.filename, frame.lineno or 0).strip().startswith("raise")
    return clear and raised and frame.filename.startswith(PACKAGES)


def tables(rows: list[Row]) -> dict[str, str]:
    """Return two tables of Markdown: verdicts by reason, and results by step."""
    verdicts = Counter((row["verdict"], reason_of(row)) for row in rows)
    done = [(name, result) for row in rows for name, result in row.get("steps", {}).items()]
    equal = Counter(name for name, result in done if not isinstance(result, str))
    refused = Counter(name for name, result in done if isinstance(result, str))
    steps = [(name, str(equal[name]), str(refused[name])) for name in dict(done)]
    found = [(verdict, why, str(count)) for (verdict, why), count in sorted(verdicts.items())]
    return {
        "architectures": markdown([("verdict", "reason", "model types"), *found], (0, 1)),
        "steps": markdown([("step", "equal", "refused"), *steps]),
    }


def reason_of(row: Row) -> str:
    """Return the reason in words that several model types share."""
    known = {  # part of the reason: words
        "goes through AttentionInterface": "attention of their own",
        "never calls": "no attention through the interface",
        "position_bias": "`position_bias`, a bias of positions",
        "is a bias": "a mask that carries a bias",
        "the model made a mask of": "a mask of other lengths than the keys",
        "changes the output by": "attention does not reach the output",
        "ImportError": "needs a package that was not installed",
        "cannot be built": "cannot be built small by the program's rules",
        "no inputs": "needs inputs that the program does not make",
    }
    reason = row.get("reason", "")
    return next((words for part, words in known.items() if part in reason), reason[:60])


if __name__ == "__main__":
    main()
