"""The attentions of the comparison behind one interface.

To add one, add a file here, which registers a subclass of `Attention`, and its options as
conf/attention/NAME.yaml. tests/experiments/lra/models/test_attention.py takes its definition.
"""

from importlib import import_module
from pkgutil import iter_modules

from experiments.lra.models.attention.base import KINDS, Attention, make_attention

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

NAMES = tuple(KINDS)

__all__ = ["KINDS", "NAMES", "Attention", "make_attention"]
