"""Compiles the kernels of a call for a GPU that need not be there.

The launches are those of the backends themselves: Triton is stopped after the compilation, and
told the target. What ptxas prints is kept.
"""

import contextlib
import hashlib
import io
import re
from collections.abc import Callable, Container
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import masks
import sparseflash
from experiments.tools.calls import Call
from sparseflash.backends import hopper
from sparseflash.backends import triton as portable
from sparseflash.backends.protocol import Saved, TermTensors, Walk
from sparseflash.decoding import triton as decoding
from sparseflash.decoding.pattern import Bounds, pattern_of
from sparseflash.kernels.portable import tma
from sparseflash.kernels.portable.configs import Family
from sparseflash.picks.kernels import picked_backward, picked_forward
from sparseflash.problem import Options, describe
from sparseflash.schedule.blocks import schedule_for
from sparseflash.schedule.tile_lists import tile_lists
from sparseflash.testing import make_qkv


class Chip(NamedTuple):
    """A GPU, as far as compilers and backends ask.

    kind, arch, warp: Triton's name of the target; shared_bytes: what one program may take."""

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
HOPPER, WGMMA = "sm_90a", "wgmma.mma_async"


# rules with the shapes of their tables, for 4 heads and at most 1024 tokens
SCORES: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]]]] = {
    "cap": (lambda s: 30.0 * np.tanh(s / 30.0), {}),
    "slopes": (lambda s, h, q, k, slopes: s - slopes[h] * abs(k - q), {"slopes": (4,)}),
    "distance": (lambda s, h, q, k, bias: s + bias[h, k - q + 127], {"bias": (4, 255)}),
    "sloped": (
        lambda s, h, q, k, slopes, bias: s - slopes[h] * abs(k - q) + bias[h, k - q + 127],
        {"slopes": (4,), "bias": (4, 255)},
    ),
    "window": (
        lambda s, h, q, k, bias: s + bias[h, q // 32 - k // 32 + 31, q % 32 - k % 32 + 31],
        {"bias": (4, 63, 63)},
    ),
    # a read of each kind, and a value that the derivatives take from the logits
    "mixed": (
        lambda s, b, h, q, k, t, row, col, far, shared, pair: (
            np.tanh(s * t[h]) * row[q] + col[b, k] + far[h, q - k + 99] + shared[q, k % 9]
            + pair[b, h, q, k]
        ),
        {"t": (4,), "row": (1024,), "col": (1, 1024), "far": (4, 200), "shared": (1024, 9),
         "pair": (1, 4, 1024, 1024)},
    ),
}  # fmt: skip


class Kernel(NamedTuple):
    """A compiled kernel; variant: a digest of all that it was compiled for, its source apart."""

    name: str
    variant: str
    compiled: Any
    log: str  # of ptxas

    def report(self) -> dict[str, Any]:
        """Return registers, spills and so on, as ptxas or the AMD compiler tells them."""
        asm, log = self.compiled.asm, self.log
        if "ptx" in asm:
            spills = [_number(rf"(\d+) bytes spill {kind}", log) for kind in ("stores", "loads")]
            registers, products = _number(r"Used (\d+) registers", log), asm["ptx"].count(WGMMA)
        else:
            text = asm["amdgcn"]
            spills = [_number(r"\.private_segment_fixed_size: (\d+)", text)]
            registers, products = _number(r"\.vgpr_count: +(\d+)", text), 0
        return {
            "registers": registers,
            "spilled_bytes": sum(spills),
            "shared_bytes": self.compiled.metadata.shared,
            "wgmma": products,
            "serialized": "instructions are serialized" in log,
            "idle_barriers": len(idle_barriers(asm["ttgir"])),
        }


def compiled(call: Call, chip: Chip, known: Container[str] = ()) -> list[Kernel]:
    """Return the kernels that a call launches, but for the variants that are known.

    One chip a process: Triton's functions keep the options of the first target.
    """
    return compiled_by(lambda: _launch(call), chip, known)


def compiled_by(
    launch: Callable[[], object], chip: Chip, known: Container[str] = ()
) -> list[Kernel]:
    """`compiled`, of the kernels that a function launches; none of them runs."""
    kernels: list[Kernel] = []
    target = GPUTarget(chip.kind, chip.arch, chip.warp)
    asked: Any = SimpleNamespace(  # as much of a driver as the compilation asks for
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    driver.set_active(asked)
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        run(self, *args, grid=grid, warmup=True, **options)

    def do_compile(self, key, signature, device, constexprs, options, attrs, warmup):
        name = self._fn_name.split(".")[-1]
        chosen = {k: v for k, v in options.__dict__.items() if k != "extern_libs"}  # a path
        about = name, target, list(signature.values()), constexprs, attrs, chosen
        variant = hashlib.sha256(repr(about).encode()).hexdigest()[:10]
        if variant in known or variant in {kernel.variant for kernel in kernels}:
            return None
        source, log = self.ASTSource(self, signature, constexprs, attrs), io.StringIO()
        with contextlib.redirect_stdout(log):
            made = self.compile(source, target=target, options=options.__dict__)
        kernels.append(Kernel(name, variant, made, log.getvalue()))
        return None

    properties = SimpleNamespace(multi_processor_count=chip.multiprocessors)
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(JITFunction, "_do_compile", do_compile),
        mock.patch.object(knobs.compilation, "always_compile", True),  # the cache has no log
        mock.patch.object(knobs.nvidia, "dump_ptxas_log", True),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True),
        mock.patch("torch.cuda.device", lambda device: contextlib.nullcontext()),
        mock.patch("torch.cuda.get_device_properties", lambda device: properties),
        mock.patch("torch.cuda.is_current_stream_capturing", lambda: False),
        mock.patch("torch.cuda.current_stream", lambda device: None),
        mock.patch.object(Tensor, "record_stream", lambda tensor, stream: None),
        mock.patch.object(tma, "has_tma", lambda device: chip.tma),
        mock.patch.object(portable, "family_of", lambda device: chip.family),
    ):
        launch()
    return kernels


def _launch(call: Call) -> None:
    heads, n = call.heads, call.n
    q, k, v = make_qkv(
        1, heads, n, n, call.head_dim, kv_heads=call.kv_heads, v_head_dim=call.v_head_dim,
        dtype=getattr(torch, call.dtype),
    )  # fmt: skip
    if call.backend == "decode":
        _launch_decode(call, q, k, v)
        return
    if call.backend == "picks":
        blocks = torch.zeros(1, call.kv_heads, n, 8, dtype=torch.int32)
        lists = blocks, call.block_size[1], True, call.head_dim**-0.5
        results = picked_forward(q, k, v, *lists)
        picked_backward(torch.zeros_like(results[0]), None, q, k, v, *results, *lists)
        return
    schedule = None
    if call.mask is not None:
        mask = masks.parse(call.mask).build(n, block_size=call.block_size)
        schedule = schedule_for(mask, n, n, 1, heads, "cpu")
    backend = hopper if call.backend == "hopper" else portable
    dtype = torch.int32 if call.keyed else torch.int64  # a `key_table` is int32
    seed = torch.zeros(1, dtype=dtype) if call.dropout_p else None
    call_options = call.head_dim**-0.5, call.dropout_p, call.deterministic, call.backend
    terms, key = TermTensors(torch.zeros(heads) if call.sink else None), ""
    if call.score:
        fn, shapes = SCORES[call.score]
        tables = {name: torch.zeros(shape).requires_grad_() for name, shape in shapes.items()}
        bound = sparseflash.score(fn)(**tables)
        key, terms = bound.key(), terms._replace(tables=tuple(t.detach() for t in bound.tables))
    options = Options(*call_options, key, call.keyed, call.max_scores)
    problem = describe(q, k, v, call.mask, options, True)

    def walk(specs) -> Walk:
        return Walk(schedule, tuple(tile_lists(schedule, spec, "cpu") for spec in specs))

    forward = backend.plan_forward(problem, schedule)
    out, lse, _ = forward(q, k, v, seed, walk(forward.specs), terms)
    if not call.backward:
        return
    backward = backend.plan_backward(problem, schedule)
    dlse = torch.zeros_like(lse) if call.lse_gradient else None
    saved = Saved(q, k, v, out, lse, seed, terms)
    backward(torch.zeros_like(out), dlse, saved, walk(backward.specs))


def _launch_decode(call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    batch, heads, n, _ = k.shape
    mask = None if call.mask is None else masks.parse(call.mask)
    if mask is not None and mask != masks.causal():
        mask = mask.build(n, block_size=call.block_size)
    q, table = q[:, :, : call.n_q].contiguous(), None
    if call.page:
        k, v = (t.new_zeros(n // call.page, heads, call.page, t.shape[3]) for t in (k, v))
        table = torch.zeros(batch, n // call.page, dtype=torch.int32)
    options = Options(None, 0.0, True, "triton")
    problem = describe(q, k, v, call.mask, options, False)
    step = decoding.Decode(problem, pattern_of(mask, problem, n), n, call.page, splits=4)
    step(q, k, v, Bounds(torch.zeros(batch, dtype=torch.int32), None, table), None)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def idle_barriers(ttgir: str) -> list[str]:
    """Barriers that no partition of warps uses: Triton hands their memory out again."""
    # what is passed on to the other partitions, and all of the one that sees every name
    used = re.search(r"ttg\.warp_specialize\((.*?)\)(.*?)partition0\(", ttgir, re.DOTALL)
    made = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<\w+xi64", ttgir)
    return [name for name in made if used and not re.search(rf"{name}\b", used.group())]
