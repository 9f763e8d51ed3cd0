"""Block-sparse FlashAttention in plain Triton; docs/internals/kernels.md has the maths."""
