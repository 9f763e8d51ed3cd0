"""Block masks in the forms of other libraries, and back, exactly.

Each pair of functions has its library: FlexAttention, FlashAttention-4, FlashInfer and SciPy.
"""

from masks.interop.fa4 import from_fa4, to_fa4
from masks.interop.flashinfer import from_bsr, to_bsr
from masks.interop.flex import from_flex, to_flex
from masks.interop.scipy import from_scipy, to_scipy, to_scipy_blocks

__all__ = [
    "from_bsr",
    "from_fa4",
    "from_flex",
    "from_scipy",
    "to_bsr",
    "to_fa4",
    "to_flex",
    "to_scipy",
    "to_scipy_blocks",
]
