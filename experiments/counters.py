"""Hardware counters of one call beside what it must cost (sparseflash.cost). Needs a GPU and ncu.

    python -m experiments.counters provider=hopper mask=random:0.125
    python -m experiments.counters direction=backward head_dim=64 heads=32

Nsight Compute replays every kernel of the call with cold caches and free clocks, so the times are
near those of experiments.speed but not the same.
"""

from typing import Any

from experiments.bench.counters import profile, report
from experiments.bench.grids import make_grid
from experiments.bench.providers import DIRECTIONS, find
from experiments.common.checks import choose
from experiments.common.devices import device_name
from experiments.common.program import program


@program("counters")
def main(options: dict[str, Any], command: str) -> None:
    """Profiles one call and prints its counters."""
    provider, direction = options.pop("provider"), options.pop("direction")
    find(provider)
    choose("direction", direction, DIRECTIONS)
    case = make_grid("cuda", **options).cases()[0]
    kernels = profile(case, provider, direction)
    print(f"{provider} {direction} {case}")
    print(report(kernels, case, direction, device_name("cuda")))


if __name__ == "__main__":
    main()
