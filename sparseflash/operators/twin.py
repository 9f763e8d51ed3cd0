"""Device functions that exist twice: in plain torch, and as Triton kernels for NVIDIA GPUs."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch

from sparseflash.kernels.common.device import kernels_of, on_nvidia

P = ParamSpec("P")
R = TypeVar("R")


def twin(
    room: str, schema: str, shapes: Callable[..., object] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function in plain torch whose kernels have its name in `sparseflash.ROOM.kernels`.

    They run where the first argument, or its first element, is on an NVIDIA GPU. `__wrapped__` is
    the plain function.

    schema: of the torch.library operator, so that a compiled function has the same kernels.
    shapes: makes results of the right shapes and types, for the compiler; by default `plain`.
    """

    def decorate(plain: Callable[P, R]) -> Callable[P, R]:
        name: str = plain.__name__  # pyright: ignore[reportFunctionMemberAccess]

        def run(*given: Any) -> Any:
            first = given[0] if isinstance(given[0], torch.Tensor) else given[0][0]
            chosen: Any = getattr(kernels_of(room), name) if on_nvidia(first) else plain
            return chosen(*given)

        torch.library.define(f"sparseflash::{name}", schema)
        torch.library.impl(f"sparseflash::{name}", ("CPU", "CUDA"))(run)
        torch.library.register_fake(f"sparseflash::{name}")(shapes or plain)
        operator = getattr(torch.ops.sparseflash, name)

        @wraps(plain)
        def call(*given: Any) -> Any:
            return operator(*given) if torch.compiler.is_compiling() else run(*given)

        return cast(Callable[P, R], call)

    return decorate
