"""Block masks in the forms of other libraries, and back, exactly.

FlexAttention and SciPy go both ways, FlashAttention-4 and FlashInfer take a mask.
"""

from masks.interop.fa4 import to_fa4
from masks.interop.flashinfer import to_bsr
from masks.interop.flex import from_flex, to_flex
from masks.interop.scipy import from_scipy, to_scipy, to_scipy_blocks

__all__ = [
    "from_flex",
    "from_scipy",
    "to_bsr",
    "to_fa4",
    "to_flex",
    "to_scipy",
    "to_scipy_blocks",
]
