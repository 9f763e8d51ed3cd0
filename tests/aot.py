"""What ptxas makes of the Hopper kernels, on a machine without a GPU.

`python tests/aot.py '{"head_dim": 64}' ...` makes the launches that a call of the hopper backend
makes, with Triton's launcher stopped after the compilation, and prints a line of JSON for each
kernel: registers, spills, shared memory, and whether its wgmmas were serialised. The arguments are
keywords of `Problem`, a JSON object for each problem. Without TRITON_INTERPRET.
"""

import json
import re
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

import masks
from sparseflash.backends import hopper
from sparseflash.backends.protocol import Saved, Walk
from sparseflash.problem import Options, describe
from sparseflash.schedule import schedule_for
from sparseflash.testing import make_qkv
from sparseflash.tiles.lists import tile_lists

SMS, SHARED = 132, 232_448  # of an H200: multiprocessors, bytes for one program


@dataclass(frozen=True)
class Problem:
    head_dim: int = 128
    v_head_dim: int | None = None
    dtype: str = "bfloat16"
    mask: str | None = "causal"  # None: dense
    block_size: tuple[int, int] = (128, 128)
    n: int = 1024
    kv_heads: int = 2
    dropout_p: float = 0.0
    backward: bool = True
    deterministic: bool = False


def ptxas() -> Path | None:
    """The assembler that comes with Triton, or None."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    return path if path.exists() else None


class Driver:
    """As much of a driver as the compilation asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def compiled(problem: Problem) -> list:
    """The kernels that forward and backward of a problem launch."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(Driver())  # pyright: ignore[reportArgumentType]
    kernels, run = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))

    properties = SimpleNamespace(multi_processor_count=SMS)
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True),
        mock.patch("torch.cuda.device", lambda device: nullcontext()),
        mock.patch("torch.cuda.get_device_properties", lambda device: properties),
        mock.patch("torch.cuda.is_current_stream_capturing", lambda: False),
    ):
        launch(problem)
    return kernels


def launch(problem: Problem) -> None:
    heads, n = 4, problem.n
    q, k, v = make_qkv(
        1, heads, n, n, problem.head_dim, kv_heads=problem.kv_heads,
        dtype=getattr(torch, problem.dtype), v_head_dim=problem.v_head_dim,
    )  # fmt: skip
    schedule = None
    if problem.mask is not None:
        mask = masks.parse(problem.mask).build(n, block_size=problem.block_size)
        schedule = schedule_for(mask, n, n, 1, heads, "cpu")
    seed = torch.zeros(1, dtype=torch.int64) if problem.dropout_p else None
    options = Options(problem.head_dim**-0.5, problem.dropout_p, problem.deterministic, "hopper")
    described = describe(q, k, v, problem.mask, options, True)

    def walk(specs):
        return Walk(schedule, tuple(tile_lists(schedule, spec, "cpu") for spec in specs))

    forward = hopper.plan_forward(described, schedule)
    out, lse = forward(q, k, v, seed, walk(forward.specs))
    if problem.backward:
        backward = hopper.plan_backward(described, schedule)
        saved = Saved(q, k, v, out, lse, seed)
        backward(torch.zeros_like(out), None, saved, walk(backward.specs))


def report(kernel) -> dict:
    """Registers and spills of a compiled kernel as ptxas tells them."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(kernel.asm["ptx"])
        done = subprocess.run(
            [str(ptxas()), "-v", "--gpu-name=sm_90a", str(source), "-o", f"{folder}/kernel.o"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    log = done.stderr + done.stdout

    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        return int(found.group(1)) if found else 0

    return {
        "name": kernel.metadata.name,
        "registers": number(r"Used (\d+) registers"),
        "spilled_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        "shared_bytes": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "serialized": "instructions are serialized" in log,
        "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
        "idle_barriers": idle_barriers(kernel.asm["ttgir"]),
    }


def idle_barriers(ttgir: str) -> list[str]:
    """Barriers that no partition of warps uses: Triton hands their memory out again."""
    # what is passed on to the other partitions, and all of the one that sees every name
    used = re.search(r"ttg\.warp_specialize\((.*?)\)(.*?)partition0\(", ttgir, re.DOTALL)
    made = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<\w+xi64", ttgir)
    return [name for name in made if used and not re.search(rf"{name}\b", used.group())]


def main() -> None:
    for text in sys.argv[1:]:
        problem = Problem(**json.loads(text))
        for kernel in compiled(problem):
            print(json.dumps({"problem": text} | report(kernel)), flush=True)


if __name__ == "__main__":
    main()
