"""What this machine runs, and whether it runs it right: the text that a bug report asks for.

    python -m sparseflash.doctor [--device cuda:0]

Prints versions, devices, the backends with the reasons for the choice, and a test
of about ten seconds. Exits with 1 if the test fails.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

import masks
from sparseflash.attention import attention, explain
from sparseflash.backends.protocol import DIRECTIONS
from sparseflash.backends.registry import reasons
from sparseflash.kernels.common.versions import OVERRIDE
from sparseflash.problem import Options, describe
from sparseflash.testing import make_qkv, oracle, relative_error

PACKAGES = ("sparseflash", "torch", "triton", "numpy", "einops")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TRITON_INTERPRET", "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS",
    "SPARSEFLASH_PATTERNS", OVERRIDE,
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
        for line in _backends(device):
            print("  " + line)
        print("  test, forward and backward against float64:", flush=True)
        for result in self_test(device):
            passed.append(result.ok)
            said = result.failure or f"error {result.error:.1e}, limit {LIMIT[result.dtype]:.0e}"
            word = "ok    " if result.ok else "FAILED"
            print(f"    {word} {result.backend}, {result.case}: {said} ({result.seconds:.1f} s)")
    good = "the test passed"
    print(f"\n{good if all(passed) else 'the test FAILED: please report all of the above'}")
    return 0 if all(passed) else 1


def _machine() -> Iterator[str]:
    """Versions and the environment."""
    yield f"{platform.platform()}, Python {platform.python_version()}"
    yield ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    yield f"torch is {f'built for ROCm {torch.version.hip}' if torch.version.hip else build}"
    yield f"installed in {Path(masks.__file__).parents[1]}"
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


def _devices() -> list[torch.device]:
    """Return the CPU and every GPU of torch.cuda, where backends run."""
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [torch.device("cpu"), *gpus]


def _about(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    about = torch.cuda.get_device_properties(device)
    kind = about.gcnArchName if torch.version.hip else f"capability {about.major}.{about.minor}"
    return f"{about.name}, {kind}, {about.total_memory / 2**30:.0f} GiB"


def _backends(device: torch.device) -> list[str]:
    """Return what `explain` says of a usual call."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = make_qkv(1, 2, 256, 256, 128, dtype=dtype, device=device)
    lines = explain(q, k, v, masks.local(64)).splitlines()
    return [f"backends for {str(dtype).removeprefix('torch.')}, head dim 128:", *lines]


LIMIT = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}  # of a relative error


class Result(NamedTuple):
    """How one backend did on one case, forward and backward."""

    case: str
    backend: str
    dtype: torch.dtype
    error: float  # the largest relative error of out, dq, dk and dv
    seconds: float  # with compiling
    failure: str  # why there is no error, or ""

    @property
    def ok(self) -> bool:
        return not self.failure and self.error < LIMIT[self.dtype]


# Odd lengths, partial blocks, shared heads, and queries with nothing to attend to.
CASES = {  # mask, tokens, head dim, key heads
    "dense": (None, 256, 64, 2),
    "causal window": (masks.local(100) & masks.causal(), 333, 128, 1),
    "butterfly, empty rows": (masks.butterfly(32) - masks.global_tokens(40), 500, 96, 2),
}


def self_test(device: torch.device) -> Iterator[Result]:
    """Run every case on every backend of a device; a backend that cannot run is left out."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, (mask, n, head_dim, kv_heads) in CASES.items():
        q, k, v = make_qkv(
            1, 2, n, n, head_dim, kv_heads=kv_heads, dtype=dtype, device=device, requires_grad=True
        )
        allowed, key = None, None
        if mask is not None:
            allowed, key = torch.from_numpy(mask.build(n).to_dense()).to(device), mask.key
        expected, _ = oracle(q, k, v, allowed)
        dout = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(device)
        wanted = expected, *torch.autograd.grad(expected, (q, k, v), dout.double())
        problem = describe(q, k, v, key, Options(None, 0.0, False, "auto"), True)
        refused = [reasons(problem, direction) for direction in DIRECTIONS]
        for backend in refused[0]:
            if any(why_not[backend] for why_not in refused):
                continue
            start = time.perf_counter()
            try:
                out = attention(q, k, v, mask, backend=backend)
                got = out, *torch.autograd.grad(out, (q, k, v), dout.to(dtype))
                error = max(relative_error(a, b) for a, b in zip(got, wanted, strict=True))
                failure = ""
            except Exception as raised:  # whatever a compiler or a driver says goes into the report
                error, failure = float("inf"), f"{type(raised).__name__}: {raised}"
            seconds = time.perf_counter() - start
            yield Result(name, backend, dtype, error, seconds, failure)


if __name__ == "__main__":
    sys.exit(main())
