"""Gluon under its newest names, on every supported version of Triton."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate

from sparseflash.kernels.common.versions import release

# Each line ends with the first version that has the newest name; the older names are those of 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # 3.7
aggregate = getattr(gluon, "aggregate", None) or _aggregate  # 3.8
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # 3.8
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global  # 3.8
_place = gl.shared_memory_descriptor
reinterpret = getattr(_place, "reinterpret", None) or _place._reinterpret  # 3.9

# ptxas loads delta while dQ is in registers. Triton 3.6 has another register allocation, and code
# that was measured.
HOISTS = gl.constexpr(release(triton.__version__) > (3, 6))
