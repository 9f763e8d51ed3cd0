"""The checks of the public functions. Every error names the argument, its value and the remedy."""

import math
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from masks import BlockMask, Mask
from sparseflash.dropout import holds_keys, is_table


def check_options(
    scale: Any, dropout_p: Any, backend: Any, backends: tuple[str, ...], flags: dict[str, Any]
) -> None:
    """Raise ValueError for an option of a wrong type or value; backends: their names."""
    for name, value in flags.items():
        if type(value) is not bool:
            raise ValueError(f"{name} is {value!r}; pass True or False")
    if type(backend) is not str or (backend != "auto" and backend not in backends):
        choices = ", ".join(("auto", *backends))
        raise ValueError(f"backend is {backend!r}; choose one of {choices}")
    if not is_number(dropout_p):
        raise ValueError(f"dropout_p is {dropout_p!r}; pass a number in [0, 1)")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p is {dropout_p}; it must lie in [0, 1)")
    if scale is not None:
        check_scale(scale)


def check_scale(scale: Any) -> None:
    """Raise ValueError for a scale that is no positive number."""
    if isinstance(scale, Tensor):
        if scale.requires_grad:
            raise ValueError(
                "scale is a tensor that requires a gradient, and attention gives it none;"
                " multiply q by it and pass scale=1.0, or pass scale.item()"
            )
        if scale.numel() != 1:
            raise ValueError(f"scale is a tensor of shape {tuple(scale.shape)}; pass one number")
    elif not is_number(scale):
        raise ValueError(f"scale is {scale!r}; pass a positive number or None")
    if not 0 < scale < math.inf:
        raise ValueError(
            f"scale is {float(scale)}; it must be positive and finite"
            " (negate q for a negative scale)"
        )


def is_number(x: Any) -> bool:
    """Whether x is a number of Python or NumPy; a bool is not."""
    return type(x) is float or (isinstance(x, Real) and not isinstance(x, bool))


def check_tensors(q: Any, k: Any, *v: Any) -> None:
    """Raise ValueError for q, k and v that attention does not take, or q and k alone.

    An empty batch, no queries and no keys pass: see `is_empty`.
    """
    for name, t in zip("qkv", (q, k, *v), strict=False):
        if not isinstance(t, Tensor):
            kind = type(t).__name__
            order = "; the mask comes after q, k and v" if isinstance(t, Mask | BlockMask) else ""
            raise ValueError(f"{name} is a {kind}; pass a torch tensor{order}")
        if t.layout != torch.strided or t.is_nested:
            raise ValueError(
                f"{name} is {'nested' if t.is_nested else 'sparse'}, of layout {t.layout}; pass a"
                " dense tensor: for sequences of several lengths padded with lengths=, or one after"
                " another with the mask sparseflash.packed.documents"
            )
        if t.ndim != 4:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; it must be (batch, heads, length, head dim)"
            )
        if not t.shape[1] or not t.shape[3]:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; heads and head dim must be at least 1"
            )
        if not t.dtype.is_floating_point or t.dtype.itemsize < 2:
            raise ValueError(
                f"{name} is {t.dtype}; cast it to bfloat16, float16, float32 or float64"
            )
        if t.dtype != q.dtype or t.device != q.device:
            raise ValueError(
                f"q is {q.dtype} on {q.device}, {name} is {t.dtype} on {t.device};"
                " bring them to one dtype and device"
            )
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"q, k and v are on {q.device}; no backend runs there, move them to cpu or cuda"
        )
    _check_shapes(q, k, *v)


def is_empty(q: Tensor, k: Tensor) -> bool:
    """Whether there is no sequence, no query or no key, so that nothing is computed."""
    return 0 in (q.shape[0], q.shape[2], k.shape[2])


def _check_shapes(q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    """Raise ValueError where the shapes of q, k and v do not fit together."""
    if v is not None and k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k has shape {tuple(k.shape)}, v {tuple(v.shape)}; all but the head dim must be equal"
        )
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"q has shape {tuple(q.shape)}, k {tuple(k.shape)};"
            " batch and head dim must be those of q"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads, k and v {k.shape[1]};"
            " the first must be a multiple of the second"
        )


def check_extents(
    mask: Any, n_q: int, n_k: int, batch: int, heads: int, kv_heads: int | None = None
) -> None:
    """Raise ValueError where a BlockMask, a Selection or a Schedule is for other inputs."""
    if (mask.n_q, mask.n_k) != (n_q, n_k):
        raise ValueError(
            f"the mask is for {mask.n_q} queries and {mask.n_k} keys, q and k have {n_q} and {n_k};"
            f" build it with mask.build({n_q}, {n_k}), or pass the Mask itself"
        )
    if mask.batch not in (1, batch) or mask.heads not in (1, heads, kv_heads):
        of_k = f", k {kv_heads} heads" if kv_heads not in (None, heads) else ""
        raise ValueError(
            f"the mask has batch {mask.batch} and heads {mask.heads}, q has {batch} and {heads}"
            f"{of_k}; each extent of the mask must be 1 or that of q, or its heads those of k"
        )


def check_transforms(*tensors: Tensor) -> None:
    """Raise RuntimeError for forward-mode derivatives, which attention does not have."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    stack = functorch.get_interpreter_stack() or ()
    refused = any(level.key() == functorch.TransformType.Jvp for level in stack)
    if torch.autograd.forward_ad._current_level >= 0 and not stack:
        refused = any(torch.autograd.forward_ad.unpack_dual(t).tangent is not None for t in tensors)
    if refused:
        raise RuntimeError(
            "sparseflash.attention has no forward-mode derivatives (torch.func.jvp, jacfwd,"
            " hessian, make_dual); use reverse mode: torch.func.grad, vjp or jacrev"
        )


def readable(given: Tensor) -> bool:
    """Whether values can be checked without waiting for a device, or stopping a compiler or
    torch.vmap."""
    on_host = type(given) is Tensor and given.device.type == "cpu"
    return on_host and not (torch.compiler.is_compiling() or is_wrapped(given))


def is_wrapped(given: Tensor) -> bool:
    """Whether torch.vmap or torch.func hold the values of a tensor back."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return functorch.is_functorch_wrapped_tensor(given)


def without_gradients(given: Tensor) -> Tensor:
    """Return the tensor without what torch.func.grad wraps it in."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    while functorch.is_gradtrackingtensor(given):
        given = functorch.get_unwrapped(given)
    return given


def check_table(seed: Any, q: Tensor, k: Tensor) -> None:
    """Raise ValueError for an int32 seed that is no `key_table` of a call of q and k."""
    if not holds_keys(seed, q, k):
        raise _not_a_seed(seed, q.device)


def _not_a_seed(seed: Tensor, device: torch.device) -> ValueError:
    return ValueError(
        f"seed is a {seed.dtype} tensor of shape {tuple(seed.shape)} on {seed.device};"
        f" pass one int64 element on {device}, or an int"
    )


def seed_tensor(seed: Any, device: torch.device) -> Tensor:
    """Return the seed of dropout as an int64 tensor (1,) on `device`; drawn by torch where it is
    None. A `key_table` stays.
    """
    if is_table(seed):
        return seed
    if seed is None:
        return torch.randint(2**63 - 1, (1,), device=device)
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype != torch.int64 or seed.device != device:
            raise _not_a_seed(seed, device)
        return seed.reshape(1)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed!r}; pass an int in [0, 2**63), an int64 tensor or None")
    return torch.full((1,), int(seed), dtype=torch.int64, device=device)
