"""Launches that are repeated by Triton's C launcher alone, on a stand-in for the driver."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from sparseflash.kernels import launch as module
from sparseflash.kernels.launch import Launch, forget_plans, launch

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith(module._KNOWN), reason="launches are ordinary ones here"
)

META = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [16, 8], "fp4_padded": False}
SIGNATURE = {"a": "*fp32", "desc": "tensordesc<fp32[16, 8]>", "n": "i32", "b": "*fp32"}
Metadata = namedtuple("Metadata", "tensordesc_meta")


class OnDevice(torch.Tensor):
    """A CPU tensor that says it is on GPU 0."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def get_device(self):
        return 0


class Kernel:
    """As much of a JITFunction as a launch touches; it records what reaches Triton's C launcher."""

    def __init__(self, monkeypatch):
        from triton.backends.nvidia import driver

        self.calls, self.ordinary = [], 0
        self.arg_names = [*SIGNATURE, "BLOCK"]
        self.params = [SimpleNamespace(name=name, default=None) for name in self.arg_names]
        self.pre_run_hooks = []
        signature = SIGNATURE | {"BLOCK": "constexpr"}
        # the C function of real launches is a builtin under this very wrapper
        wrapped = driver.wrap_handle_tensordesc(lambda *a: self.calls.append(a), signature, [META])
        self.compiled = SimpleNamespace(
            metadata=Metadata([META]),
            function=77,
            packed_metadata=(4, 1, 1024),
            run=SimpleNamespace(
                launch=wrapped, global_scratch_size=0, profile_scratch_size=0,
                launch_cooperative_grid=False, launch_pdl=False,
            ),
        )  # fmt: skip
        self.encoded = []
        encode = lambda *a: self.encoded.append(a[0]) or ("map", *a)  # noqa: E731
        active = SimpleNamespace(utils=SimpleNamespace(fill_tma_descriptor=encode))
        monkeypatch.setattr(triton.runtime.driver, "_active", active, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)

    def __getitem__(self, grid):
        def run(*args, **options):
            self.ordinary += 1
            values = [*args, *(options[name] for name in self.arg_names[len(args) :])]
            grids = (*grid, 1, 1)[:3]
            base = (*grids, 5, 77, False, False, None, None, (4, 1, 1024), None, None, None)
            self.compiled.run.launch(*base, *values)
            return self.compiled

        return run


@pytest.fixture
def kernel(monkeypatch):
    forget_plans()
    yield Kernel(monkeypatch)
    forget_plans()


def arguments_of(a, b, n=3):
    from triton.tools.tensor_descriptor import TensorDescriptor

    descriptor = TensorDescriptor(b, list(b.shape), list(b.stride()), [16, 8])
    return (6, 2), (a, descriptor, n, b), {"BLOCK": 32}


def call(kernel, a, b, key=0, n=3):
    launch(kernel, key, (a, b), lambda: arguments_of(a, b, n))


def tensors():
    return (torch.zeros(32, 8).as_subclass(OnDevice) for _ in range(2))


def by_address(values):
    return [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]


def test_repeated_launch_hands_over_what_an_ordinary_one_does(kernel):
    first, second = tuple(tensors()), tuple(tensors())
    for pair in (first, second):
        call(kernel, *pair)
    assert kernel.ordinary == 1
    forget_plans()
    call(kernel, *second)
    assert kernel.ordinary == 2
    assert by_address(kernel.calls[1]) == by_address(kernel.calls[2])
    assert by_address(kernel.calls[0]) != by_address(kernel.calls[1])
    assert not any(isinstance(value, torch.Tensor) for value in kernel.calls[1])


def test_new_key_is_launched_anew(kernel):
    pair = tuple(tensors())
    call(kernel, *pair, key=1, n=3)
    call(kernel, *pair, key=2, n=4)
    call(kernel, *pair, key=1, n=3)
    assert kernel.ordinary == 2
    assert by_address(kernel.calls[2]) == by_address(kernel.calls[0])


def test_misaligned_address_has_a_plan_of_its_own(kernel):
    a, b = tensors()
    for _ in range(2):
        call(kernel, a, b)
        call(kernel, a.view(-1)[1:].as_subclass(OnDevice), b)
    assert kernel.ordinary == 2
    assert by_address(kernel.calls[3]) == by_address(kernel.calls[1])


def test_hooks_of_a_profiler_are_called_by_triton(kernel):
    a, b = tensors()
    call(kernel, a, b)
    hook = lambda metadata: None  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        call(kernel, a, b)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert kernel.ordinary == 2
    call(kernel, a, b)
    assert kernel.ordinary == 2


def test_unknown_triton_launches_as_ever(kernel, monkeypatch):
    monkeypatch.setattr(module, "_KNOWN", ("0.0.",))
    for _ in range(2):
        call(kernel, *tensors())
    assert kernel.ordinary == 2


def test_argument_that_is_not_announced_is_refused(kernel):
    a, b = tensors()
    with pytest.raises(ValueError, match="argument 1 of the kernel"):
        launch(kernel, 0, (a,), lambda: ((1,), (a, b, 1), {}))


def test_tensor_maps_are_kept_by_address_and_not_without_end(kernel, monkeypatch):
    monkeypatch.setattr(module, "_MAX_MAPS", 3)
    pairs = [tuple(tensors()) for _ in range(5)]
    call(kernel, *pairs[0])
    for _ in range(3):
        call(kernel, *pairs[1])
    assert len(kernel.encoded) == 2  # by the ordinary launch, and once again
    for pair in pairs:
        call(kernel, *pair)
    (plan,) = module._plans.values()
    assert len(plan.maps[0].encoded) <= 3
    assert kernel.calls[-1][14][1] == pairs[-1][1].data_ptr()


# ---- a caller that comes back


@pytest.mark.parametrize("second", [False, True])
def test_launch_that_comes_back_hands_over_what_an_ordinary_one_does(second, kernel):
    fixed, *others = (next(tensors()) for _ in range(5))
    again = Launch(kernel, 0, (fixed,))
    pairs = [(fixed, t) if second else (t, fixed) for t in others]
    for t, pair in zip(others, pairs, strict=True):
        again((t,), lambda pair=pair: arguments_of(*pair))
    assert kernel.ordinary == 1
    forget_plans()
    for pair, repeated in zip(pairs, list(kernel.calls), strict=True):
        call(kernel, *pair)
        assert by_address(repeated) == by_address(kernel.calls[-1])
        forget_plans()


def test_launch_that_comes_back_misaligned_has_a_plan_of_its_own(kernel):
    a, b = tensors()
    again = Launch(kernel, 0, (b,))
    odd = torch.zeros(257).as_subclass(OnDevice)[1:].view(32, 8).as_subclass(OnDevice)
    for t in (a, a, odd, odd, a):
        again((t,), lambda t=t: arguments_of(t, b))
    assert kernel.ordinary == 2
    assert by_address(kernel.calls[3]) == by_address(kernel.calls[2])
    assert by_address(kernel.calls[4]) == by_address(kernel.calls[1])


def test_launch_that_comes_back_under_hooks_is_an_ordinary_one(kernel):
    a, b = tensors()
    again = Launch(kernel, 0, (a,))
    for _ in range(2):
        again((b,), lambda: arguments_of(a, b))
    hook = lambda metadata: None  # noqa: E731
    triton.knobs.runtime.launch_exit_hook.add(hook)
    try:
        again((b,), lambda: arguments_of(a, b))
    finally:
        triton.knobs.runtime.launch_exit_hook.remove(hook)
    assert kernel.ordinary == 2


def test_launch_that_comes_back_on_another_device_goes_there(kernel, monkeypatch):
    a, b = tensors()
    again = Launch(kernel, 0, (a,))
    current, entered = [0], []

    class Device:
        def __init__(self, device):
            entered.append(device)

        def __enter__(self):
            current[0] = 0

        def __exit__(self, *error):
            current[0] = 1

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    for device in (0, 0, 1):
        current[0] = device
        again((b,), lambda: arguments_of(a, b))
    assert entered == [0] and kernel.ordinary == 1 and len(kernel.calls) == 3
