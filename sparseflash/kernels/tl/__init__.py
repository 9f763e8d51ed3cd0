"""Block-sparse FlashAttention in plain Triton; the maths is in docs/kernels.md."""
