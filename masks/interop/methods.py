"""The conversions as methods of `BlockMask`; each module of `masks.interop` has one peer."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from masks.block_mask import BlockMask
    from masks.interop.fa4 import Fa4Mask
    from masks.interop.flashinfer import Bsr


class Conversions:
    """Other sizes and other libraries' forms of a `BlockMask`."""

    def crop(self: Any, n_q: int, n_k: int | None = None) -> "BlockMask":
        """The block mask of the first n_q queries and n_k keys (n_q unless given).

        Exact: blocks at the new ends are cut and classified anew. For a mask that is
        `prefix_stable` it equals the one built for that length. ValueError for more tokens than
        there are.
        """
        from masks.crop import crop

        return crop(self, n_q, n_k)

    def coarsen(self: Any, block_size: int | tuple[int, int]) -> "BlockMask":
        """The same mask in larger blocks, as if it had been built with them.

        ValueError for sizes that are no multiples of `block_size`, or above 256.
        """
        from masks.crop import coarsen

        return coarsen(self, block_size)

    def to_flex(
        self: Any,
        device: Any = None,
        mask_mod: Callable[..., Any] | None = None,
        *,
        limit_gib: float = 8,
    ) -> Any:
        """FlexAttention's BlockMask; see `masks.interop.flex.to_flex`."""
        from masks.interop.flex import to_flex

        return to_flex(self, device, mask_mod, limit_gib=limit_gib)

    @classmethod
    def from_flex(cls, flex_mask: Any) -> "BlockMask":
        """Of FlexAttention's BlockMask; see `masks.interop.flex.from_flex`."""
        from masks.interop.flex import from_flex

        return from_flex(flex_mask)

    def to_fa4(self: Any, device: Any = None, *, limit_gib: float = 8) -> "Fa4Mask":
        """FlashAttention-4's block lists; see `masks.interop.fa4.to_fa4`."""
        from masks.interop.fa4 import to_fa4

        return to_fa4(self, device, limit_gib=limit_gib)

    @classmethod
    def from_fa4(cls, forward: Any, n_q: int, n_k: int, **partial: Any) -> "BlockMask":
        """Of FlashAttention-4's block lists; see `masks.interop.fa4.from_fa4`."""
        from masks.interop.fa4 import from_fa4

        return from_fa4(forward, n_q, n_k, **partial)

    def to_bsr(
        self: Any, batch: int = 0, head: int = 0, device: Any = None, *, limit_gib: float = 8
    ) -> "Bsr":
        """FlashInfer's BSR of one slice; see `masks.interop.flashinfer.to_bsr`."""
        from masks.interop.flashinfer import to_bsr

        return to_bsr(self, batch, head, device, limit_gib=limit_gib)

    @classmethod
    def from_bsr(
        cls,
        indptr: Any,
        indices: Any,
        n_q: int,
        n_k: int,
        block_size: int | tuple[int, int],
        mask: Any = None,
    ) -> "BlockMask":
        """Of block-sparse rows; see `masks.interop.flashinfer.from_bsr`."""
        from masks.interop.flashinfer import from_bsr

        return from_bsr(indptr, indices, n_q, n_k, block_size, mask)

    def to_scipy(self: Any, batch: int = 0, head: int = 0, *, limit_gib: float = 8) -> Any:
        """SciPy's csr_array of the tokens of one slice; see `masks.interop.scipy.to_scipy`."""
        from masks.interop.scipy import to_scipy

        return to_scipy(self, batch, head, limit_gib=limit_gib)

    @classmethod
    def from_scipy(cls, matrix: Any, block_size: int | tuple[int, int] = 128) -> "BlockMask":
        """Of a SciPy sparse matrix of tokens; see `masks.interop.scipy.from_scipy`."""
        from masks.interop.scipy import from_scipy

        return from_scipy(matrix, block_size)
