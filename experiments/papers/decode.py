"""Time and bandwidth of decoding: a few new queries against a long cache.

    python -m experiments.papers.decode
    python -m experiments.papers.decode 'lengths=[65536]' 'n_q=[1]' 'pages=[0,16,64]' rounds=3
    python -m experiments.papers.decode measure=false csv=PATH

Ours, torch's SDPA by each of its kernels, and FlashInfer where it is installed. Each passes a gate
against float64 first. On a GPU the calls are one CUDA graph over several caches, as layers of a
model are, so that no cache is in the L2. Rows hold the bytes that must be read, their bandwidth,
and its share of that of a copy on the same device in the same run. Rows that the CSV holds are not
measured again: the same command continues a run that stopped. See docs/guide/decoding.md.
"""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from experiments.bench.cases import DTYPES
from experiments.common.checks import check_options
from experiments.common.devices import set_defaults
from experiments.common.program import program
from experiments.common.records import Records, read
from experiments.papers.attention.resume import resumed, tell
from experiments.papers.decoding.cases import SELECTED, Step
from experiments.papers.decoding.measure import groups, measured
from experiments.papers.decoding.providers import DEFAULTS as PROVIDERS_OF
from experiments.papers.decoding.providers import PROVIDERS
from experiments.papers.decoding.report import describe, tables
from experiments.papers.rows import DecodeRow

STREAMING = "sliding({}) | global_tokens(64) & causal()"
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "lengths": [2**i for i in range(12, 18)], "n_q": [1, 4, 16], "pages": [0, 16], "heads": 32,
        "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "chosen": 4096, "seconds": 0.04,
        "minutes": 9.0,
    },
    "cpu": {
        "lengths": [1024, 4096], "n_q": [1, 16], "pages": [0, 16], "heads": 8, "kv_heads": 2,
        "head_dim": 64, "dtype": "float32", "chosen": 512, "seconds": 0.1, "minutes": 4.0,
    },
}  # fmt: skip
SIZES = ("batch", "heads", "kv_heads", "head_dim", "chosen")


@program("decode", "experiments.papers.decode")
def main(options: dict[str, Any], command: str) -> None:
    """Measures what the options ask for, and prints tables of the file of rows."""
    path = Path(options["csv"])
    if options["measure"]:
        device = set_defaults(options, DEFAULTS)
        steps = planned(options)
        providers = options["providers"] or PROVIDERS_OF[device.type]
        wanted = groups(steps, providers, options["rounds"], device, command)
        if not wanted:
            names = ", ".join(providers)
            raise ValueError(f"providers={names}: none takes these masks and pages; give others")
        records = Records(path, DecodeRow, allow_changes=options["allow_changes"])
        each = (
            (group.rows, partial(measured, group.step, device, options["seconds"]))
            for group in wanted
        )
        count = sum(len(group.rows) for group in wanted)
        tell(resumed(each, records, options["minutes"]), count, describe)
    print("\n" + tables(read(path, DecodeRow)))


def planned(options: dict[str, Any]) -> list[Step]:
    """The steps of the options, short caches first; ValueError for options out of range.

    Without `masks`: no mask, a window with sinks, and chosen blocks. Four queries then take no mask
    alone, and only a single query takes chosen blocks.
    """
    check_options(
        options,
        lists="lengths n_q pages masks providers",
        optional="masks providers",
        whole=f"{' '.join(SIZES)} n_q rounds",
        least={"chosen": 64, "lengths": 64, "pages": 0},
        positive="seconds minutes",
        choices={"dtype": DTYPES, "providers": PROVIDERS},
    )
    streaming = STREAMING.format(options["chosen"])
    texts = [str(text) for text in options["masks"]] or ["dense", streaming, SELECTED]
    sizes = {name: options[name] for name in (*SIZES, "dtype")}
    found = []
    for n, text, n_q, page in product(
        sorted(options["lengths"]), texts, options["n_q"], options["pages"]
    ):
        few = n_q == 1 or text == "dense" or (n_q == max(options["n_q"]) and text == streaming)
        if options["masks"] or few:
            found.append(Step(mask=text, page=page, n_q=n_q, n=n, **sizes))
            found[-1].check()
    return found


if __name__ == "__main__":
    main()
