"""Times candidate tiles of the Triton kernels on this GPU: one CSV row a candidate and mask.

    python -m experiments.tune
    python -m experiments.tune 'kernels=[forward,forward partial]' head_dims=128

These are the measurements behind sparseflash/kernels/configs.py. A kernel's name with " partial"
behind it is tuned for masks that have partial blocks, one with " short" for masks of whole blocks
with few keys to a query.
"""

import time
from typing import Any

from experiments.bench.rows import TileRow
from experiments.bench.tiles import MASKS, PRODUCTS, SHAPES, compile_all, tune
from experiments.common.checks import check_options
from experiments.common.devices import find_device
from experiments.common.program import program
from experiments.common.records import Records


@program("tune")
def main(options: dict[str, Any], command: str) -> None:
    """Compiles, checks and times the candidates, and appends their rows to the CSV."""
    if find_device(None).type != "cuda":
        raise ValueError("experiments.tune needs a GPU, and torch finds none here")
    names = [f"{kernel} {kind}".strip() for kernel in PRODUCTS for kind in MASKS]
    choices = {"kernels": names, "head_dims": SHAPES}
    check_options(options, lists="kernels head_dims", whole="workers", choices=choices)
    records = Records(options["csv"], TileRow, allow_changes=options["allow_changes"])
    pairs = [(k, d) for k in options["kernels"] for d in options["head_dims"]]
    start = time.monotonic()
    reasons = compile_all(pairs, options["workers"])
    print(f"compiled {len(reasons)} candidates in {time.monotonic() - start:.0f} s", flush=True)
    for kernel, head_dim in pairs:
        for rows in tune(kernel, head_dim, reasons, command):
            for row in rows:
                records.append(row)
    print(f"rows: {records.path}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
