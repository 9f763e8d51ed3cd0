"""The rows that compilations write, and their limits."""

from dataclasses import dataclass

from experiments.bench.compile_matrix.chips import CHIPS
from experiments.common.records import OK, Row

SPILLS = {"hopper": 256, "fp8": 256, "triton": 256}  # bytes of 16-bit kernels


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
        spills, limit = self.spilled_bytes or 0, SPILLS[self.backend]
        if spills > limit and "float32" not in self.label:
            faults.append(f"it spills {spills} bytes, above {limit}")
        return faults
