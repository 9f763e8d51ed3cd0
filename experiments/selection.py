"""Measures what selecting blocks costs beside the attention that it saves.

    python -m experiments.selection
    python -m experiments.selection seq_len=4096 'selectors=["top_k(4)","moba(512, 3)"]'

For each selector, one CSV row per step: the selection from q and k, its schedule, attention forward
and backward with the schedule made beforehand, and the whole chain. `share` is
(selection + schedule) / attention forward. On a GPU, every step but backward is also captured in a
CUDA graph and its replay timed: the difference is what the host takes that the GPU does not hide.
"""

from typing import Any

from experiments.bench.cases import DTYPES
from experiments.bench.rows import SelectRow
from experiments.bench.selectors import default_selectors, describe, parse, run
from experiments.common.checks import as_list, check_options, choose, whole_number
from experiments.common.devices import set_defaults
from experiments.common.program import program
from experiments.common.records import Records
from sparseflash.testing import make_qkv

DEFAULTS = {
    "cuda": {"batch": 2, "heads": 16, "seq_len": 32768, "head_dim": 128, "dtype": "bfloat16"},
    "cpu": {"batch": 1, "heads": 4, "seq_len": 1024, "head_dim": 64, "dtype": "float32"},
}


@program("selection")
def main(options: dict[str, Any], command: str) -> None:
    """Measures what the configuration asks for, prints it and appends it to the CSV."""
    device = set_defaults(options, {"cuda": {"seconds": 0.15}, "cpu": {"seconds": 0.5}})
    shape: dict[str, Any] = dict(DEFAULTS[device.type])
    shape |= {name: options[name] for name in shape if options[name] is not None}
    kv_heads = options["kv_heads"]
    shape["kv_heads"] = shape["heads"] if kv_heads is None else kv_heads
    dtype = shape.pop("dtype")
    choose("dtype", dtype, DTYPES)
    for name, value in shape.items():
        whole_number(name, value)
    check_options(options, positive="density seconds")
    batch, heads, seq_len, head_dim, kv_heads = shape.values()
    selectors = [parse(text) for text in as_list(options["selectors"])]
    qkv = make_qkv(
        batch, heads, seq_len, seq_len, head_dim,
        kv_heads=kv_heads, dtype=DTYPES[dtype], device=device,
    )  # fmt: skip
    records = Records(options["csv"], SelectRow, allow_changes=options["allow_changes"])
    sizes = options["density"], seq_len, heads, kv_heads, head_dim
    for selector in selectors or default_selectors(*sizes):
        if (module := getattr(selector, "module", None)) is not None:
            module.to(device)
        rows = run(selector, qkv, dtype, options["seconds"], command)
        for row in rows:
            records.append(row)
        print(describe(rows), flush=True)


if __name__ == "__main__":
    main()
