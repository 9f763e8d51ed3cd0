"""Safe and online softmax, and softmax fused with top-k, over vocabularies and batches.

    python -m experiments.papers.softmax                 # Triton on a GPU, tiles in torch on a CPU
    python -m experiments.papers.softmax vocabularies=[1000,100000] batches=[4000]
    python -m experiments.papers.softmax k=[5,10,15,30] vocabularies=[25000] batches=[4000]

One row an algorithm and shape: error, time, and the bandwidth that its memory accesses make. A copy
and torch.softmax stand beside them. Prints the tables of docs/results/softmax.md and draws them.
"""

from itertools import product
from pathlib import Path
from typing import Any

import torch

from experiments.common.checks import check_options, positive_number
from experiments.common.devices import free_memory, set_defaults
from experiments.common.figures import file_name, save, style
from experiments.common.program import program
from experiments.common.progress import progress
from experiments.common.records import Records, read
from experiments.common.text_table import aligned
from experiments.papers.attention.resume import Pages
from experiments.papers.softmax.algorithms import ALGORITHMS
from experiments.papers.softmax.measure import IMPLEMENTATIONS, Case, check_implementation, run
from experiments.papers.softmax.report import by_device, draw, larger_k_table, table, tables
from experiments.papers.softmax.rows import SoftmaxRow

CPU_GIB = 0.4  # larger shapes take a CPU minutes
DEFAULTS = {
    "cuda": {"implementation": "triton", "seconds": 0.1},
    "cpu": {"implementation": "blocks", "seconds": 0.2},
}


@program("softmax", "experiments.papers.softmax")
def main(options: dict[str, Any], command: str) -> None:
    """Measures what the configuration asks for, prints it as tables and draws it."""
    pages, out = Pages(options["pages"], Path(options["csv"])), Path(options["out"])
    out.mkdir(parents=True, exist_ok=True)
    rows = _measured(options, command) if options["measure"] else read(options["csv"], SoftmaxRow)
    if not rows:
        raise ValueError(f"{options['csv']} has no rows: measure first, without measure=false")
    for device, some in by_device(rows).items():
        print(device)
        for topk in (False, True):
            print(aligned(table(some, topk=topk), left=()) + "\n")
        if len(larger := larger_k_table(some)) > 1:
            print(aligned(larger, left=()) + "\n")
        with style():
            for path in save(draw(some), out / file_name("softmax", device), ["png"]):
                print(f"plot: {path}")
    print(f"rows: {options['csv']}")
    for path in pages.fill(tables(rows)):
        print(f"page: {path}")


def _measured(options: dict[str, Any], command: str) -> list[SoftmaxRow]:
    """The rows of what the options ask for, those in the CSV as they are."""
    device = set_defaults(options, DEFAULTS)
    sizes, implementation = "batches vocabularies k", options["implementation"]
    check_options(
        options,
        lists=f"{sizes} algorithms",
        optional="algorithms",
        whole=sizes,
        positive="seconds",
        choices={"implementation": IMPLEMENTATIONS, "algorithms": ALGORITHMS},
    )
    check_implementation(implementation, device)
    algorithms = options["algorithms"] or list(ALGORITHMS)
    cases = _cases(options, device)
    records = Records(options["csv"], SoftmaxRow, allow_changes=options["allow_changes"])
    rows = []
    for case in progress(cases, len(cases), "shapes"):
        rows += run(case, algorithms, implementation, device, options["seconds"], records, command)
    return rows


def _cases(options: dict[str, Any], device: torch.device) -> list[Case]:
    """The shapes that fit; tells which do not."""
    batches, vocabularies, ks = (options[name] for name in ("batches", "vocabularies", "k"))
    for k in ks:
        if k > max(vocabularies):
            raise ValueError(f"k={k}: at most the largest of vocabularies={vocabularies}")
    limit = options["limit_gib"]
    if limit is None:
        limit = CPU_GIB if device.type == "cpu" else free_memory(device) / 2**31
    positive_number("limit_gib", limit)
    cases = [Case(b, v, k) for b, v, k in product(batches, vocabularies, ks) if k <= v]
    for case in cases:
        if case.nbytes > limit * 2**30:
            need = f"{case.nbytes / 2**30:.2g} GiB are above limit_gib={limit:.3g}"
            print(f"left out: batch {case.batch}, V {case.vocabulary}: {need}")
    fitting = [case for case in cases if case.nbytes <= limit * 2**30]
    if not fitting:
        raise ValueError(f"limit_gib={limit:.3g}: no shape fits; give more, or smaller shapes")
    return fitting


if __name__ == "__main__":
    main()
