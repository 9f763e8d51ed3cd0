"""What a repeated launch hands to Triton's C launcher, in the form of the installed version.

It must be what an ordinary launch hands over. No GPU is needed: a Python function stands for the C
function, behind Triton's own code that turns descriptors into tensor maps.
"""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from sparseflash.kernels import launch as module
from sparseflash.kernels.launch import Launch

triton = pytest.importorskip("triton")
driver = pytest.importorskip("triton.backends.nvidia.driver")

META = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [16, 8], "fp4_padded": False}
SIGNATURE = {"A": "*fp32", "desc": "tensordesc<fp32[16, 8]>", "n": "i32", "List": "*fp32"}
Metadata = namedtuple("Metadata", "tensordesc_meta")
LISTED = not triton.__version__.startswith("3.6.")
HOOKS, SCRATCH, PACKED = (None,) * 3, (None,) * 2, (4, 1, 1024)


class OnDevice(torch.Tensor):
    """A tensor in the memory of the CPU that says it is on a GPU."""

    def get_device(self):
        return 0


class Kernel:
    """Stands for a Triton kernel on a GPU; `calls` are those of the C launcher."""

    def __init__(self):
        self.arg_names = [*SIGNATURE, "BLOCK"]
        self.params = [SimpleNamespace(name=name, default=None) for name in self.arg_names]
        self.pre_run_hooks, self.calls, self.ordinary = [], [], 0
        signature = SIGNATURE | {"BLOCK": "constexpr"}
        listed = {"arg_annotations": "annotations", "kernel_signature": b"types"}
        self.compiled = SimpleNamespace(
            metadata=Metadata([META]), function=77, packed_metadata=PACKED,
            run=SimpleNamespace(
                launch=driver.wrap_handle_tensordesc(self.launcher, signature, [META]),
                global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False,
                launch_pdl=False, **(listed if LISTED else {}),
            ),
        )  # fmt: skip

    def launcher(self, *values):
        if LISTED:
            *head, arguments = values
            values = *head, *arguments
        self.calls.append([v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values])

    def __getitem__(self, grid):
        def run(*args, **options):
            self.ordinary += 1
            assert options.pop("enable_fp_fusion") is True
            values = [*args, *(options[name] for name in self.arg_names[len(args) :])]
            base = *(*grid, 1, 1)[:3], 5, 77, False, False
            launch = self.compiled.run.launch
            if LISTED:
                launch(*base, PACKED, *HOOKS, *SCRATCH, "annotations", b"types", values)
            else:
                launch(*base, *SCRATCH, PACKED, *HOOKS, *values)
            return self.compiled

        return run


@pytest.fixture
def kernel(monkeypatch):
    encode = lambda *a: ("map", *(list(x) if isinstance(x, tuple) else x for x in a))  # noqa: E731
    name = "fill_tma_descriptor_tiled" if LISTED else "fill_tma_descriptor"
    active = SimpleNamespace(utils=SimpleNamespace(**{name: encode}))
    monkeypatch.setattr(triton.runtime.driver, "_active", active, raising=False)
    for function, value in (("_cuda_getDevice", 0), ("_cuda_getCurrentRawStream", 5)):
        answer = lambda *device, value=value: value  # noqa: E731
        monkeypatch.setattr(torch._C, function, answer, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: module.nullcontext())
    return Kernel()


def on_device(*shape):
    return torch.zeros(*shape).as_subclass(OnDevice)


def call(launch, a, base, lists):
    from triton.tools.tensor_descriptor import TensorDescriptor

    desc = TensorDescriptor(base, list(base.shape), list(base.stride()), [16, 8])
    launch((a, base), lambda: ((6,), (a, desc, 9, lists), {"BLOCK": 32}), (lists,))


@pytest.mark.parametrize("static", [False, True])
def test_a_repeated_launch_is_the_ordinary_one_with_other_addresses(kernel, static):
    launch, lists = Launch(kernel, static=static), on_device(16)
    tensors = [(on_device(32), on_device(64, 8)) for _ in range(3)]
    for a, base in tensors:
        call(launch, a, base, lists)
    assert kernel.ordinary == 1 and len(kernel.calls) == 3
    for a, base in tensors[1:]:  # the same by ordinary launches
        call(Launch(kernel, static=static), a, base, lists)
    assert kernel.ordinary == 3 and kernel.calls[3:] == kernel.calls[1:3]


def interpret(kernel, grid):
    """The interpreter takes tensors on a GPU, and returns nothing."""

    def run(*args, **options) -> None:
        kernel.ordinary += 1

    return run


@pytest.mark.parametrize(
    "change",
    [(triton, "__version__", "3.10.0"), (Kernel, "__getitem__", interpret)],
    ids=["unknown launcher", "interpreter"],
)
def test_others_launch_as_usual(kernel, change, monkeypatch):
    monkeypatch.setattr(*change)
    launch, lists = Launch(kernel, static=True), on_device(16)
    for _ in range(3):
        call(launch, on_device(32), on_device(64, 8), lists)
    assert kernel.ordinary == 3
