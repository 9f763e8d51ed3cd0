"""The Long Range Arena."""

import experiments.lra.masks  # noqa: F401  registers the patterns of its code
