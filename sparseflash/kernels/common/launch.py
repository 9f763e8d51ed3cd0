"""Kernel launches that cost the host little more than the driver's own call.

`kernel[grid](...)` inspects every argument, looks the compiled kernel up by a text and calls hooks:
tens of microseconds for kernels with forty arguments. In calls of one plan only the addresses
differ. A `Launch` therefore keeps the compiled kernel and its arguments as Triton's C launcher
takes them, and fills in the addresses: of tensors as ints, of descriptors as tensor maps. The maps
are kept by address; a map holds no more than the address, shape and strides of its argument, so
nothing is kept alive, and CUDA graphs capture it by value. `launch` does the same for the small
kernels around attention, which have no plan.

The C launcher is internal to Triton. `_repeat` knows those of the tested versions; with any other,
and under a profiler's launch hooks, every launch is an ordinary one.
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash.cache import on_clear, persistent
from sparseflash.kernels.common.device import on
from sparseflash.kernels.common.versions import is_tested

# an option of every launch of floating-point kernels: Triton 3.10 will no longer fuse by default
FUSED = {"enable_fp_fusion": True}
_MAX_REPEATS = 64  # of a launch: layouts of gradients
_MAX_MAPS = 64  # of an argument: torch's allocator returns to a few addresses
_MAX_LAUNCHES = 512  # without a plan that are known
_STREAM = 3  # its place in (*grid, stream, ...)

Arguments = Callable[[], tuple[tuple[int, ...], Sequence[Any], dict[str, Any]]]


class Launch:
    """One kernel launch of a plan: kernel[grid](*args, **options), again and again.

    All calls must have the same grid, arguments and options, but for the addresses of tensors and
    for what `layout` tells. static: the lists are the same tensors in every call.
    """

    def __init__(self, kernel: Any, *, static: bool):
        self._kernel, self._static = kernel, static
        self._repeats: dict[tuple[Hashable, tuple[int, ...]], _Repeat | None] = {}

    def __call__(
        self, tensors: Sequence[Tensor | None], arguments: Arguments,
        lists: Sequence[Tensor | None] = (), layout: Hashable = (),
    ) -> None:  # fmt: skip
        """Launch with (grid, args, options) = arguments().

        tensors, lists: all tensors among the arguments, alone or under a descriptor, in the same
            order in every call. The first is not None.
        arguments: called where the launch cannot be repeated. It must make no tensors.
        """
        if not self._static:
            tensors = (*tensors, *lists)
        addresses, union = [], 0
        for t in tensors:
            if t is None:
                addresses.append(0)
            else:
                addresses.append(address := t.data_ptr())
                union |= address
        misaligned = ()
        if union & 15:  # Triton compiles another kernel where an address is not a multiple of 16
            misaligned = tuple(i for i, address in enumerate(addresses) if address & 15)
        repeat = self._repeats.get((layout, misaligned))
        fits = True
        if repeat is not None:
            device, launcher, values, listed, pointers, maps, tuples, alike, runtime = repeat
            for i, j in alike:  # a tensor that had two places is taken for both
                fits = fits and addresses[i] == addresses[j]
            hooked = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
            if fits and not hooked and device == torch._C._cuda_getDevice():
                values = values.copy()
                for place, number in pointers:
                    values[place] = addresses[number]
                for place, number, encoded in maps:
                    values[place] = encoded[addresses[number]]
                for part in tuples:
                    values[part] = [tuple(values[part])]
                values[_STREAM] = torch._C._cuda_getCurrentRawStream(device)
                if listed:
                    launcher(*values[:listed], values[listed:])
                else:
                    launcher(*values)
                return
        assert tensors[0] is not None
        device = tensors[0].get_device()  # -1: the CPU
        with on(tensors[0].device):
            grid, args, options = arguments()
            everything = (*tensors, *lists) if self._static else tensors
            places = _places((*args, *options.values()), everything)
            compiled = self._kernel[grid](*args, **options, **FUSED)
            # the interpreter, which takes tensors on a GPU too, has compiled nothing
            known = (layout, misaligned) in self._repeats and fits
            if device < 0 or compiled is None or known:
                return
            repeat = _repeat(self._kernel, device, compiled, (grid, args, options), places)
            if repeat is not None:
                fixed = [0 if t is None else t.data_ptr() for t in everything[len(tensors) :]]
                first = [i if t is None else places[id(t)] for i, t in enumerate(tensors)]
                alike = [(i, j) for i, j in enumerate(first) if i != j]
                repeat = repeat.bind(len(tensors), fixed)._replace(alike=alike)
            if len(self._repeats) >= _MAX_REPEATS:
                self._repeats.clear()
            self._repeats[layout, misaligned] = repeat


_launches: dict[Hashable, Launch | None] = {}  # None: seen once
on_clear(_launches.clear)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """kernel[grid](*args, **options), which is repeated where all but the addresses of the tensors
    is as in an earlier call. Tensors are positional arguments or in tuples that are, the first of
    them is not None. Those under descriptors are arguments themselves, too.

    The first call is an ordinary one: shapes that never come again are not worth more.
    """
    tensors: list[Tensor] = []
    known = []
    for arg in args:
        if type(arg) is Tensor:
            tensors.append(arg)
            known.append(arg.dtype)
        else:
            known.append(arg if type(arg) is int else _known(arg, tensors))
    # the function of a kernel: the hash of the kernel itself is slow
    key = kernel.fn, grid, tensors[0].get_device(), *known, *options.items()
    found = _launches.get(key)
    if found is None:
        if key not in _launches:
            if len(_launches) >= _MAX_LAUNCHES:
                _launches.clear()
            _launches[key] = None
            with on(tensors[0].device):
                kernel[grid](*args, **options, **FUSED)
            return
        found = _launches[key] = Launch(kernel, static=False)
    found(tensors, lambda: (grid, args, options))


def _known(arg: Any, tensors: list[Tensor]) -> Hashable:
    """Return all of an argument but its address; append the tensors in it to `tensors`."""
    if isinstance(arg, Tensor):
        tensors.append(arg)
        return arg.dtype
    if isinstance(arg, tuple):
        return tuple([part if type(part) is int else _known(part, tensors) for part in arg])
    if hasattr(arg, "block_shape"):  # a descriptor
        return arg.base.dtype, *arg.shape, *arg.strides, *arg.block_shape
    return arg


_counters: dict[tuple[int, torch.device], Tensor] = {}  # by stream
on_clear(_counters.clear)


def zeroed_counter(device: torch.device) -> Tensor:
    """int32 zeros (2,) that kernels count their work with, and leave as zeros.

    One for every stream. A CUDA graph, which may be replayed on any stream, has its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    # what torch.cuda.current_stream() wraps, at a twentieth of its time
    key = torch._C._cuda_getCurrentRawStream(device.index), device
    counter = _counters.get(key)
    if counter is None:
        make = lambda: torch.zeros(2, dtype=torch.int32, device=device)  # noqa: E731
        counter = _counters[key] = persistent(make, device)
        # it may be dropped while a kernel of this stream still counts with it
        counter.record_stream(torch.cuda.current_stream(device))
    return counter


class _Repeat(NamedTuple):
    """A compiled kernel with its arguments."""

    device: int
    launcher: Any  # Triton's C function
    values: list[Any]  # what it takes, without stream and addresses: see _STREAM
    listed: int  # how many come before those that it takes as a list; 0: it takes none
    pointers: list[tuple[int, int]]  # (place among the values, number of the tensor)
    maps: list[tuple[int, int, "_Maps"]]  # likewise
    tuples: list[slice]  # of values that are one with tensors, the last first
    alike: list[tuple[int, int]]  # numbers of tensors that are one
    runtime: Any  # Triton's knobs

    def bind(self, n: int, fixed: Sequence[int]) -> "_Repeat":
        """Return the same for the first `n` tensors, with the addresses of the `fixed` ones filled
        in.
        """
        values = self.values.copy()
        for place, number in self.pointers:
            values[place] = None if number < n else fixed[number - n]
        for place, number, encoded in self.maps:
            values[place] = None if number < n else encoded[fixed[number - n]]
        pointers = [pointer for pointer in self.pointers if pointer[1] < n]
        maps = [map_ for map_ in self.maps if map_[1] < n]
        return self._replace(values=values, pointers=pointers, maps=maps)


class _Maps(dict[int, Any]):
    """The tensor maps of an argument by address."""

    def __init__(self, encode: Any, layout: tuple[Any, ...]):
        self.encode, self.layout = encode, layout

    def __missing__(self, address: int) -> Any:
        if len(self) >= _MAX_MAPS:
            self.clear()
        tensor_map = self[address] = self.encode(address, *self.layout)
        return tensor_map


def _places(args: Sequence[Any], tensors: Sequence[Tensor | None]) -> dict[int, int]:
    """Return the numbers of tensors by their id. An argument that is missing there would go
    stale.
    """
    numbers: dict[int, int] = {}
    for i, t in enumerate(tensors):
        if t is not None:
            numbers.setdefault(id(t), i)
    for i, arg in enumerate(args):
        for part in arg if isinstance(arg, tuple) else (arg,):
            base = getattr(part, "base", None) if hasattr(part, "block_shape") else part
            if isinstance(base, Tensor) and id(base) not in numbers:
                raise ValueError(
                    f"argument {i} of the kernel is not among the tensors of the launch: add it"
                )
    return numbers


def _repeat(
    kernel: Any, device: int, compiled: Any,
    launch: tuple[Sequence[int], Sequence[Any], dict[str, Any]], places: dict[int, int],
) -> "_Repeat | None":  # fmt: skip
    """Return what repeats this launch, or None where this version of Triton, or this kernel,
    cannot.
    """
    import triton

    if not is_tested(triton.__version__) or kernel.pre_run_hooks:
        return None
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    grid, args, options = launch
    run, metadata = compiled.run, compiled.metadata
    if run.global_scratch_size or run.profile_scratch_size:  # allocated for each launch
        return None
    launcher = run.launch
    if not isinstance(launcher, BuiltinFunctionType):  # wrapped by what encodes descriptors
        launcher = inspect.getclosurevars(launcher).nonlocals["launcher"]
    named = dict(zip(kernel.arg_names, args, strict=False)) | options
    head = compiled.function, run.launch_cooperative_grid, run.launch_pdl
    scratch, hooks = (None, None), (None, None, None)  # no scratch memory, no hooks
    utils = triton.runtime.driver.active.utils
    listed = hasattr(run, "kernel_signature")
    if listed:  # since 3.7 one C function launches every kernel, given the types
        signature = run.arg_annotations, run.kernel_signature
        head = *head, compiled.packed_metadata, *hooks, *scratch, *signature
        encode = utils.fill_tma_descriptor_tiled
    else:  # a C function for each signature
        head = *head, *scratch, compiled.packed_metadata, *hooks
        encode = utils.fill_tma_descriptor
    grid = *grid, *(1,) * (3 - len(grid))
    values = [*grid, None, *head]
    front = len(values) if listed else 0
    pointers, maps, descriptors, tuples = [], [], 0, []

    def add(arg: Any) -> None:
        if isinstance(arg, Tensor):
            pointers.append((len(values), places[id(arg)]))
        values.append(None if isinstance(arg, Tensor) else arg)

    for parameter in kernel.params:
        arg = named.get(parameter.name, parameter.default)
        if isinstance(arg, tuple) and any(isinstance(part, Tensor) for part in arg):
            tuples.append(slice(len(values), len(values) + len(arg)))
            for part in arg:
                add(part)
        elif hasattr(arg, "block_shape"):
            meta = metadata.tensordesc_meta and metadata.tensordesc_meta[descriptors]
            descriptors += 1
            if not meta or meta["fp4_padded"]:
                return None
            layout = (
                meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]],
                meta["block_size"], list(arg.shape), list(arg.strides), int(arg.padding == "nan"),
            )  # fmt: skip
            maps.append((len(values), places[id(arg.base)], _Maps(encode, layout)))
            values += [None, *arg.shape, *arg.strides]
        else:
            add(tuple(arg) if isinstance(arg, tuple) else arg)
    filled = values, front, pointers, maps, tuples[::-1], []
    return _Repeat(device, launcher, *filled, triton.knobs.runtime)
