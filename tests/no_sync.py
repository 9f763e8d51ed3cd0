"""A guard against waiting for the device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoSync(TorchDispatchMode):
    """Fails on the operators that make the host wait for the device."""

    waiting = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.waiting, f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "boolean index"
        if name == "repeat_interleave":
            assert (kwargs and kwargs.get("output_size") is not None) or len(args) > 1
        return func(*args, **(kwargs or {}))
