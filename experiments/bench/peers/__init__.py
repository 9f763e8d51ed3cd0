"""What is measured beside ours: kernels of other libraries where installed, and papers' methods."""
