"""The GPUs that kernels are compiled for, as far as compilers and backends ask."""

from typing import NamedTuple


class Chip(NamedTuple):
    """kind, arch, warp: Triton's name of the target; shared_bytes: what one program may take."""

    kind: str
    arch: int | str
    warp: int
    shared_bytes: int
    multiprocessors: int
    capability: tuple[int, int] | None  # None: no NVIDIA GPU


def _nvidia(arch: int, shared_kib: int, multiprocessors: int) -> Chip:
    return Chip("cuda", arch, 32, shared_kib * 1024, multiprocessors, divmod(arch, 10))


CHIPS = {
    "sm_80": _nvidia(80, 163, 108),  # A100
    "sm_89": _nvidia(89, 99, 142),  # L40S
    "sm_90a": _nvidia(90, 227, 132),  # H200
    "sm_100a": _nvidia(100, 227, 148),  # B200
    "sm_120a": _nvidia(120, 99, 170),  # RTX 5090
    "gfx942": Chip("hip", "gfx942", 64, 64 * 1024, 304, None),  # MI300X
}
HOPPER = "sm_90a"
