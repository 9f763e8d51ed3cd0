"""What TMA copies in and out of a tile whose head dim is padded.

Shared memory holds a tile in panels of 32 or 64 columns, each with all rows. A panel of which
nothing is multiplied is not copied: writing its zeros took 3 to 22 % of a forward at head dim 192.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.kernels.hopper.gluon import async_load, async_store


@gluon.constexpr_function
def tile_layout(layout):
    """Return the layout of (rows, columns) in shared memory, for that of a descriptor."""
    return gl.NVMMASharedLayout(layout.swizzle_byte_width, layout.element_bitwidth, rank=2)


@gluon.constexpr_function
def copies(block, columns):
    """How many blocks of a descriptor, (1, 1, rows, panel), there are for so many columns."""
    return -(-columns // block.shape[3])


@gluon.constexpr_function
def copied_bytes(block, columns):
    """Their bytes, for the barrier that waits for them."""
    return copies(block, columns) * block.nbytes


@gluon.jit
def _panel(place, i: gl.constexpr, PANEL: gl.constexpr):
    return place if PANEL == place.shape[3] else place.slice(i * PANEL, PANEL, 3)


@gluon.jit
def load_rows(desc, b, h, row, place, full, COLUMNS: gl.constexpr):
    """Rows of a tensor (B, H, N, D) into place [1, 1, rows, padded head dim]."""
    PANEL: gl.constexpr = desc.block_shape[3]
    for i in gl.static_range(copies(desc.block_type, COLUMNS)):
        async_load(desc, [b, h, row, i * PANEL], full, _panel(place, i, PANEL))


@gluon.jit
def store_rows(desc, b, h, row, place, COLUMNS: gl.constexpr):
    """Rows of a tensor (B, H, N, D) out of place [1, 1, rows, padded head dim]."""
    PANEL: gl.constexpr = desc.block_shape[3]
    for i in gl.static_range(copies(desc.block_type, COLUMNS)):
        async_store(desc, [b, h, row, i * PANEL], _panel(place, i, PANEL))
