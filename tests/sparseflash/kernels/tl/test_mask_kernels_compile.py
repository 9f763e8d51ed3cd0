"""The kernels that make masks and lists, compiled by the installed Triton: they fit registers."""

import json

import pytest

from tests.processes import in_a_new_process

pytest.importorskip("triton")
EXPECTED = {
    "document_spans", "diffusion_spans", "tree_spans", "classify_blocks", "number_blocks",
    "fill_tiles", "count_blocks", "place_lists", "fill_lists", "cut_lists", "cut_bits", "_cut",
}  # fmt: skip
CODE = """
import json
import torch
from experiments.tools.compile_matrix.offline import CHIPS, compiled_by
import masks
from sparseflash.lengths import blocks_of
from sparseflash.packed import kernels as packed
from sparseflash.schedule import schedule_for
from sparseflash.select import kernels as select
from sparseflash.tiles.kernels import cut_schedule
from sparseflash.tiles.tile_spec import TileSpec

n, offsets = 512, torch.tensor([[0, 100, 512]])

def launch():
    prefixes = (None, None), (3, None), (None, offsets[:, 1:])
    for shared, prefix in zip((True, True, False, False), (*prefixes, prefixes[0])):
        for offsets_k in (None, offsets):
            packed.document_spans(offsets, offsets_k, n, n, n, 0, shared, *prefix)
    for interleaved in (False, True):
        packed.diffusion_spans(offsets, n, 32, interleaved)
    packed.tree_spans(offsets, offsets, n)
    for spans, columns, *blocks in (
        (1, False, 256, 48), (2, False, 256, 48), (3, False, 256, 48), (1, True, 256, 48),
        (2, False, 128, 128),
    ):
        made = torch.zeros(spans, 2, 1, n, dtype=torch.int32)
        packed.span_blocks(made, n, *blocks, 9, columns)
    codes = torch.zeros(1, 4, 4, dtype=torch.int32)
    select.block_lists(codes, 1, 16, (True, True))
    causal = blocks_of(masks.causal(), n, 1, torch.device("cpu"))
    select.cut_blocks(*causal[:5], offsets[0].int())
    for block, tiles in ((128, ((128, 128), (64, 64))), (256, ((64, 128), (128, 64)))):
        for mask, kv_heads in ((masks.causal(), 1), (masks.random_blocks(0.5, per_head=True), 4)):
            schedule = schedule_for(mask, n, n, 1, 4, "cpu", block)
            for by_rows, (major, minor) in zip((True, False), tiles):
                spec = TileSpec(by_rows, major, minor, n, n, 1, 4, kv_heads, 132)
                cut_schedule(schedule, spec)

for kernel in compiled_by(launch, CHIPS["sm_90a"]):
    print(json.dumps([kernel.name, kernel.report()]))
"""


@pytest.mark.slow
def test_kernels_compile_without_spills():
    made = [json.loads(line) for line in in_a_new_process("-c", CODE).splitlines()]
    assert {name for name, _ in made} == EXPECTED
    assert [(name, report) for name, report in made if report["spilled_bytes"]] == []
    assert all(report["registers"] > 0 for _, report in made)
