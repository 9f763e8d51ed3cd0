"""What attention costs: the least of one call, and the formulas of the papers.

`call` counts the work and least traffic of a shape and a mask, and the ideal time on a device;
see docs/guide/measuring.md. `formulas` holds the counts by which standard attention and
FlashAttention are compared; see docs/guide/how_it_works.md.
"""

from sparseflash.ceilings import CEILINGS, Ceilings, ceilings, measure_ceilings
from sparseflash.cost.call import Cost, Ideal, Shape, cost, ideal
from sparseflash.cost.formulas import (
    attainable_tflops,
    flash_accesses,
    flops,
    intensity,
    paper_tiles,
    ridge,
    score_bytes,
    standard_accesses,
    statistics_bytes,
    tile_bytes,
)

__all__ = [
    "CEILINGS",
    "Ceilings",
    "Cost",
    "Ideal",
    "Shape",
    "attainable_tflops",
    "ceilings",
    "cost",
    "flash_accesses",
    "flops",
    "ideal",
    "intensity",
    "measure_ceilings",
    "paper_tiles",
    "ridge",
    "score_bytes",
    "standard_accesses",
    "statistics_bytes",
    "tile_bytes",
]
