"""The GPUs that kernels are compiled for, as far as compilers and backends ask."""

from typing import NamedTuple

from sparseflash.kernels.configs import Family


class Chip(NamedTuple):
    """kind, arch, warp: Triton's name of the target; shared_bytes: what one program may take."""

    kind: str
    arch: int | str
    warp: int
    family: Family
    shared_bytes: int
    multiprocessors: int

    @property
    def tma(self) -> bool:
        return self.family not in ("ampere", "cdna")


CHIPS = {
    "sm_80": Chip("cuda", 80, 32, "ampere", 163 * 1024, 108),  # A100
    "sm_89": Chip("cuda", 89, 32, "ampere", 99 * 1024, 142),  # L40S
    "sm_90a": Chip("cuda", 90, 32, "hopper", 227 * 1024, 132),  # H200
    "sm_100a": Chip("cuda", 100, 32, "blackwell", 227 * 1024, 148),  # B200
    "sm_120a": Chip("cuda", 120, 32, "geforce", 99 * 1024, 170),  # RTX 5090
    "gfx942": Chip("hip", "gfx942", 64, "cdna", 64 * 1024, 304),  # MI300X
}
HOPPER = "sm_90a"
