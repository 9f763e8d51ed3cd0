"""Kernel launches that cost the host little more than the driver's own call.

`kernel[grid](...)` inspects every argument anew, looks the compiled kernel up by a text, and calls
hooks: tens of microseconds for kernels with forty arguments. Of all that, only the addresses
change from call to call while shapes, strides and dtypes stay. `launch` therefore keeps, under a
key of its caller, the compiled kernel and its arguments as Triton's C launcher takes them, and
fills in the addresses: of tensors as ints, of descriptors as tensor maps, which it keeps by address
(a map holds no more than its argument's address, shape and strides, so nothing is kept alive, and
CUDA graphs capture it by value). `Launch` also leaves out the key, and the addresses of tensors
that stay.

The C launcher is internal to Triton. `_make_plan` knows that of the versions in _KNOWN; with any
other, and under a profiler's launch hooks, every launch is the ordinary one.
"""

import inspect
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

_KNOWN = ("3.6.",)
_MAX_PLANS = 4096  # of some kilobytes each: shapes that never come back must not pile up
_MAX_MAPS = 64  # of an argument: torch's allocator returns to a few addresses

Arguments = Callable[[], tuple[tuple[int, ...], Sequence[Any], dict[str, Any]]]


def launch(kernel: Any, key: Any, tensors: Sequence[Tensor | None], arguments: Arguments) -> None:
    """kernel[grid](*args, **options), where (grid, args, options) = arguments().

    key: hashable; all that the grid, the arguments and the options follow from, but for the
        addresses of `tensors`: shapes, strides, dtypes, scalars, which of `tensors` are None.
    tensors: every tensor among the arguments, alone or under a descriptor; the first is no None.
    arguments: called where the key is new. It must make no tensors.
    """
    first = tensors[0]
    assert first is not None
    device = first.get_device()
    if device < 0:  # the interpreter
        grid, args, options = arguments()
        _places(args, tensors)
        kernel[grid](*args, **options)
        return
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(kernel, key, tensors, arguments)
        return
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    # Triton compiles another kernel where an address is no multiple of 16
    misaligned = tuple([i for i, address in enumerate(addresses) if address & 15])
    plan_key = (id(kernel), device, misaligned, key)
    plan = _plans.get(plan_key)
    if isinstance(plan, _Plan) and not plan.hooked():
        plan.run(addresses)
        return
    grid, args, options = arguments()
    places = _places(args, tensors)
    compiled = kernel[grid](*args, **options)
    if plan is None:
        if len(_plans) >= _MAX_PLANS:
            forget_plans()
        _plans[plan_key] = _make_plan(kernel, device, compiled, grid, args, options, places)


def forget_plans() -> None:
    """For whoever changes what a key does not tell, such as a table of tiles."""
    _plans.clear()


class Launch:
    """`launch` for a caller that comes back with the same kernel and key, and the same `fixed`
    tensors, which follow those of a call.
    """

    def __init__(self, kernel: Any, key: Any, fixed: tuple[Tensor, ...] = ()):
        self.kernel, self.key, self.fixed = kernel, key, fixed
        self._plan: _Plan | None = None
        self._launched = False

    def __call__(self, tensors: Sequence[Tensor | None], arguments: Arguments) -> None:
        if self._launched and self._plan is None:
            self._plan = self._bound(tensors)
        plan = self._plan
        if plan is not None and plan.device == torch._C._cuda_getDevice() and not plan.hooked():
            addresses, union = [], 0
            for t in tensors:
                address = 0 if t is None else t.data_ptr()
                addresses.append(address)
                union |= address
            if not union & 15:
                plan.run(addresses)
                return
        launch(self.kernel, self.key, (*tensors, *self.fixed), arguments)
        self._launched = True

    def _bound(self, tensors: Sequence[Tensor | None]) -> "_Plan | None":
        assert tensors[0] is not None
        plan = _plans.get((id(self.kernel), tensors[0].get_device(), (), self.key))
        fixed = [t.data_ptr() for t in self.fixed]
        if not isinstance(plan, _Plan) or any(address & 15 for address in fixed):
            return None
        return plan.bind(len(tensors), fixed)


class _Plan(NamedTuple):
    """A compiled kernel with its arguments."""

    device: int
    launcher: Any  # Triton's C function
    arguments: list[Any]  # of it, without the stream and the addresses
    pointers: list[tuple[int, int]]  # (place among the arguments, number of the tensor)
    maps: list["_Map"]
    encode: Any
    runtime: Any  # Triton's knobs
    kernel: Any  # kept, so that its id in the key stays its own

    def hooked(self) -> bool:
        return bool(self.runtime.launch_enter_hook.calls or self.runtime.launch_exit_hook.calls)

    def run(self, addresses: Sequence[int]) -> None:
        values = self.arguments.copy()
        values[_STREAM] = torch._C._cuda_getCurrentRawStream(self.device)
        for place, number in self.pointers:
            values[place] = addresses[number]
        for place, number, layout, encoded in self.maps:
            address = addresses[number]
            tensor_map = encoded.get(address)
            if tensor_map is None:
                if len(encoded) >= _MAX_MAPS:
                    encoded.clear()
                tensor_map = encoded[address] = self.encode(address, *layout)
            values[place] = tensor_map
        self.launcher(*values)

    def bind(self, n: int, fixed: Sequence[int]) -> "_Plan":
        """The plan for the first `n` tensors, with the addresses of the `fixed` ones filled in."""
        values = self.arguments.copy()
        for place, number in self.pointers:
            values[place] = None if number < n else fixed[number - n]
        for place, number, layout, _ in self.maps:
            values[place] = None if number < n else self.encode(fixed[number - n], *layout)
        pointers = [pointer for pointer in self.pointers if pointer[1] < n]
        maps = [map_ for map_ in self.maps if map_.number < n]
        return self._replace(arguments=values, pointers=pointers, maps=maps)


class _Map(NamedTuple):
    """A tensor map among the arguments."""

    place: int
    number: int  # of its tensor
    layout: tuple[Any, ...]  # what it is encoded from beside the address
    encoded: dict[int, Any]  # by address


_STREAM = 3  # after the three extents of the grid
_plans: dict[Any, _Plan | bool] = {}  # False: this launch has no plan


def _places(args: Sequence[Any], tensors: Sequence[Tensor | None]) -> dict[int, int]:
    """Argument -> number of its tensor. An argument that is missing there would go stale."""
    numbers = {id(t): i for i, t in enumerate(tensors) if t is not None}
    places = {}
    for i, arg in enumerate(args):
        base = getattr(arg, "base", None) if hasattr(arg, "block_shape") else arg
        if isinstance(base, Tensor):
            if id(base) not in numbers:
                raise ValueError(f"argument {i} of the kernel is none of the tensors of the launch")
            places[i] = numbers[id(base)]
    return places


def _make_plan(
    kernel: Any, device: int, compiled: Any, grid: Sequence[int], args: Sequence[Any],
    options: dict[str, Any], places: dict[int, int],
) -> "_Plan | bool":  # fmt: skip
    """What repeats this launch, or False where this Triton, or this kernel, has it otherwise."""
    import triton

    if not triton.__version__.startswith(_KNOWN) or kernel.pre_run_hooks:
        return False
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    run, metadata = compiled.run, compiled.metadata
    if run.global_scratch_size or run.profile_scratch_size:  # allocated for each launch
        return False
    launcher = run.launch
    if not isinstance(launcher, BuiltinFunctionType):  # wrapped by what encodes descriptors
        launcher = inspect.getclosurevars(launcher).nonlocals["launcher"]
    named = dict(zip(kernel.arg_names, args, strict=False)) | options
    values: list[Any] = [
        *grid, *(1,) * (3 - len(grid)), None, compiled.function,
        run.launch_cooperative_grid, run.launch_pdl, None, None,  # no scratch memory
        compiled.packed_metadata, None, None, None,  # no hooks
    ]  # fmt: skip
    pointers, maps, descriptors = [], [], 0
    for i, parameter in enumerate(kernel.params):
        arg = named.get(parameter.name, parameter.default)
        if isinstance(arg, tuple):
            return False
        if isinstance(arg, Tensor):
            pointers.append((len(values), places[i]))
            values.append(None)
        elif hasattr(arg, "block_shape"):
            meta = metadata.tensordesc_meta and metadata.tensordesc_meta[descriptors]
            descriptors += 1
            if not meta or meta["fp4_padded"]:
                return False
            layout = (
                meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]],
                meta["block_size"], list(arg.shape), list(arg.strides), int(arg.padding == "nan"),
            )  # fmt: skip
            maps.append(_Map(len(values), places[i], layout, {}))
            values += [None, *arg.shape, *arg.strides]
        else:
            values.append(arg)
    encode = triton.runtime.driver.active.utils.fill_tma_descriptor
    runtime = triton.knobs.runtime
    return _Plan(device, launcher, values, pointers, maps, encode, runtime, kernel)
