"""What is measured: one class for each implementation of attention."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from experiments.bench.cases import DENSE
from experiments.bench.cost import DIRECTIONS
from experiments.common.figures import OTHER, Style
from experiments.common.provenance import version
from sparseflash.kernels.common.device import described, nvidia_capability

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Provider:
    """An implementation of attention. Subclasses define `prepare`, and what they cannot run.

    label: its name in tables and legends; style: its curve.
    """

    label: str
    style: Style = OTHER

    own: ClassVar[bool] = False  # whether it changes with our source
    package: ClassVar[str] = ""  # that it comes from; empty: torch, or this one
    install: ClassVar[str] = ""  # the command that installs the package
    modules: ClassVar[tuple[str, ...]] = ()  # that are imported
    dense_only: ClassVar[bool] = False  # it has no masks to skip blocks by

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions that are measured."""
        return DIRECTIONS

    def concerns(self, case: Any) -> bool:
        """Return whether a case is of interest for it, able to run it or not."""
        return not self.dense_only or case.mask == DENSE or case.causal

    def missing(self) -> str | None:
        """Return why its package cannot be imported, with the remedy, or None."""
        return why_missing(self.package, self.install, *self.modules)

    def unsupported(self, case: Any, device: torch.device, direction: str) -> str | None:
        """Return why it cannot run a case, or None."""
        return self.missing()

    def prepare(self, case: Any, device: torch.device) -> Attention:
        """Do all work that is needed once per mask. Return a function (q, k, v) -> out."""
        raise NotImplementedError

    def version(self) -> dict[str, str]:
        """Return the field `version` of its rows, which ours do not have."""
        return {} if self.own else {"version": version(self.package)}


@cache
def why_missing(package: str, install: str, *modules: str) -> str | None:
    """Return why the modules of a package cannot be imported, with the remedy, or None."""
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:  # its libraries fail in many ways where a part of them is missing
        return f"needs {package} ({type(error).__name__}: {error}): {install}"
    return None


def block_lists(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return int32 (..., lines), how many blocks of a line are kept, and (..., lines, longest),
    which; 0 after the last one.

    kept: bool (..., lines, blocks).
    """
    counts = kept.sum(-1, dtype=torch.int32)
    place = torch.arange(max(1, int(counts.max())), device=kept.device)
    index = torch.zeros(*counts.shape, len(place), dtype=torch.int32, device=kept.device)
    index[place < counts[..., None]] = kept.nonzero()[:, -1].int()
    return counts, index


def not_hopper(case: Any, device: torch.device, dtypes: tuple[str, ...]) -> str | None:
    """Return why a peer for Hopper and these data types cannot run a case, or None."""
    if device.type != "cuda":
        return f"needs a CUDA device, not {device}"
    if (capability := nvidia_capability(device)) != (9, 0):
        return f"measured on compute capability 9.0 only, and {described(capability)}"
    if case.dtype not in dtypes:
        return f"takes {' and '.join(dtypes)}, not {case.dtype}"
    return None
