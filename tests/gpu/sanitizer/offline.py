"""Compile the kernels of this folder for sm_90a, without a GPU; prints their PTX as JSON."""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tests.gpu.sanitizer import named_barrier, record


def ptx(kernel, variant: dict) -> str:
    constants = {**variant, "num_warps": 4}
    signature = {"out_ptr": "*i32", "rounds": "i32"} | dict.fromkeys(constants, "constexpr")
    source = GluonASTSource(kernel, signature, constants)
    return triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4}).asm["ptx"]


if __name__ == "__main__":
    texts = {f"record {name}": ptx(record.exchange_records, variant)
             for name, variant in record.VARIANTS.items()}  # fmt: skip
    texts |= {f"barrier {name}": ptx(named_barrier.swap_halves, variant)
              for name, variant in named_barrier.VARIANTS.items()}  # fmt: skip
    print(json.dumps(texts))
