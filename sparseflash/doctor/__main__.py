"""What this machine runs, and whether it runs it right: the text that a bug report asks for.

    python -m sparseflash.doctor [--device cuda:0]

Prints versions, devices, cache folders, the backends with the reasons for the choice, and a test
of about ten seconds. Exits with 1 if the test fails.
"""

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from runpy import run_path

import torch

import masks
from sparseflash.attention import explain
from sparseflash.doctor.self_test import LIMIT, self_test
from sparseflash.testing import make_qkv

PACKAGES = ("sparseflash", "torch", "triton", "numpy", "einops")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TRITON_INTERPRET", "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS",
    "SPARSEFLASH_PATTERNS",
)  # fmt: skip


def main(words: list[str] | None = None) -> int:
    """Print the report; 0 if the test passed, else 1."""
    about = "Reports versions, devices and backends, and tests them."
    parser = argparse.ArgumentParser(prog="python -m sparseflash.doctor", description=about)
    devices = {str(device): device for device in _devices()}
    parser.add_argument("--device", choices=devices, help="the device to test; all by default")
    chosen = parser.parse_args(words).device
    for line in _machine():
        print(line)
    passed = []
    for device in [devices[chosen]] if chosen else devices.values():
        print(f"\n{device}: {_about(device)}")
        if device.type not in ("cpu", "cuda"):
            print(f"  no backend runs on {device.type}; move the tensors to the CPU")
            continue
        for line in _backends(device):
            print("  " + line)
        print("  test, forward and backward against float64:", flush=True)
        for result in self_test(device):
            passed.append(result.ok)
            said = result.failure or f"error {result.error:.1e}, limit {LIMIT[result.dtype]:.0e}"
            word = "ok    " if result.ok else "FAILED"
            print(f"    {word} {result.backend}, {result.case}: {said} ({result.seconds:.1f} s)")
    if not passed:
        print("\nnothing was tested")
    else:
        good = "the test passed"
        print(f"\n{good if all(passed) else 'the test FAILED: please report all of the above'}")
    return 0 if all(passed) else 1


def _machine() -> Iterator[str]:
    """Versions, folders and the environment."""
    yield f"{platform.platform()}, Python {platform.python_version()}"
    yield ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    yield f"torch is {f'built for ROCm {torch.version.hip}' if torch.version.hip else build}"
    yield f"installed in {Path(masks.__file__).parents[1]}"
    for name, folder in _folders():
        yield f"cache of {name}: {folder} ({_state(folder)})"
    for name in VARIABLES:
        if name in os.environ:
            yield f"{name}={os.environ[name]}"


def _version(package: str) -> str:
    if package == "torch":
        return torch.__version__  # with its build, which the metadata of some wheels lack
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _folders() -> Iterator[tuple[str, Path]]:
    """Where compiled kernels are kept."""
    try:
        from triton import knobs

        yield "Triton", Path(knobs.cache.dir)
    except ImportError:
        pass
    # the file alone: the package around it takes seconds to import
    file = Path(torch.__path__[0], "_inductor", "runtime", "cache_dir_utils.py")
    yield "torch.compile", Path(run_path(str(file))["cache_dir"]())


def _state(folder: Path) -> str:
    existing = folder
    while not existing.exists():
        existing = existing.parent
    return ("" if folder.exists() else "not made yet, ") + (
        "writable" if os.access(existing, os.W_OK) else "NOT WRITABLE"
    )


def _devices() -> list[torch.device]:
    """Return the CPU, every GPU of torch.cuda, and an accelerator of another kind if torch sees
    one.
    """
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    other = torch.accelerator.current_accelerator(check_available=True)
    return devices + ([other] if other is not None and other.type != "cuda" else [])


def _about(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if device.type != "cuda":
        return "not supported"
    about = torch.cuda.get_device_properties(device)
    kind = about.gcnArchName if torch.version.hip else f"capability {about.major}.{about.minor}"
    return f"{about.name}, {kind}, {about.total_memory / 2**30:.0f} GiB"


def _backends(device: torch.device) -> list[str]:
    """Return what `explain` says of a usual call."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = make_qkv(1, 2, 256, 256, 128, dtype=dtype, device=device)
    lines = explain(q, k, v, masks.local(64)).splitlines()
    return [f"backends for {str(dtype).removeprefix('torch.')}, head dim 128:", *lines]


if __name__ == "__main__":
    sys.exit(main())
