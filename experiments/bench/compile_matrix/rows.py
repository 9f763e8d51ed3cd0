"""The rows that compilations write, and their limits."""

from dataclasses import dataclass

from experiments.bench.compile_matrix.chips import CHIPS, HOPPER
from experiments.common.records import OK, Row

MEASURED = "3.6."  # the Triton that the speed of the Hopper kernels was measured with


@dataclass(frozen=True, kw_only=True)
class CompileRow(Row):
    """A kernel compiled for a target: experiments.compile_matrix."""

    target: str
    backend: str
    label: str  # the first call that launches it
    kernel: str
    variant: str  # digest of all that it was compiled for, its source apart
    status: str  # ok, or why it was not compiled
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int | None = None
    wgmma: int | None = None  # instructions in the PTX
    serialized: bool | None = None  # whether ptxas waits after every wgmma
    idle_barriers: int | None = None  # whose memory Triton hands out again

    WHAT = ("target", "backend", "label", "kernel", "variant")
    COMMAND = "python -m experiments.compile_matrix"

    @property
    def most_spills(self) -> int:
        """Bytes that a 16-bit kernel may spill, stores and loads: what today's do, rounded up."""
        if self.backend == "triton":  # on Hopper tiles were chosen by their speed
            return 1792 if self.target == HOPPER else 256
        if self.backend == "decode":  # no GPU has run it yet: its tiles were not chosen
            return 640
        return 320 if self.triton.startswith(MEASURED) else 704

    def faults(self) -> list[str]:
        """What the kernel was not to do."""
        if self.status != OK:
            return [self.status]
        faults = []
        if self.serialized:
            faults.append("its wgmma are serialised")
        if self.idle_barriers:
            faults.append(f"{self.idle_barriers} barriers lie in memory that is handed out again")
        shared, limit = self.shared_bytes or 0, CHIPS[self.target].shared_bytes
        if shared > limit:
            faults.append(f"it takes {shared} bytes of shared memory, above {limit}")
        spills, limit = self.spilled_bytes or 0, self.most_spills
        if spills > limit and "float32" not in self.label:
            faults.append(f"it spills {spills} bytes, above {limit}")
        return faults
