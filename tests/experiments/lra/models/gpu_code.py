"""The kernels that torch.compile writes for a Hopper GPU, on a machine without one.

    python -m tests.experiments.lra.models.gpu_code linear

The graphs of a step are traced on the CPU. Their tensors and devices are then renamed to those of
a GPU, Inductor writes its code, and Triton compiles it. It uses internals of one torch version.
"""

import importlib.util
import re
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import GraphModule
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from experiments.lra.models.classifier import Classifier, model_config

GPU, SM = torch.device("cuda:0"), GPUTarget("cuda", 90, 32)
HOPPER = SimpleNamespace(
    name="NVIDIA H200", type="cuda", index=0, major=9, minor=0, multi_processor_count=132,
    total_memory=140 << 30, warp_size=32, max_threads_per_block=1024,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, L2_cache_size=50 << 20,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472, is_integrated=False,
)  # fmt: skip
KERNEL = re.compile(r"(triton_\w+) = async_compile\.triton\('[^']*', '''(.*?)'''", re.S)
HEAD = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math

"""
# what a launch would choose, by the kind of a kernel
BLOCKS = {
    "poi": {"XBLOCK": 1024},
    "per": {"XBLOCK": 4},
    "red": {"XBLOCK": 64, "R0_BLOCK": 16},
}


def gpu_kernels(model: nn.Module, *inputs: Tensor) -> dict[str, str]:
    """The source of each Triton kernel of a training step under autocast, by its name."""
    sources: dict[str, str] = {}

    def compiler(graph: GraphModule, example):
        sources.update(KERNEL.findall(_inductor_code(graph, example)))
        return make_boxed_func(graph.forward)

    def partition(graph: GraphModule, *rest, **options):
        with V.set_fake_mode(_fake_mode(graph)):
            joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, *rest, **options)

    backend = aot_autograd(
        fw_compiler=compiler, decompositions=select_decomp_table(), partition_fn=partition
    )
    torch.compiler.reset()
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.compile(model, backend=backend, dynamic=False)(*inputs)
    out.sum().backward()
    return sources


def compile_kernel(name: str, source: str, folder: Path) -> None:
    """Compiles a kernel for sm_90a; raises what Triton raises."""
    path = folder / f"{name}.py"
    path.write_text(HEAD + source[source.index("@triton.jit") :])
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (kernel,) = (f for f in vars(module).values() if isinstance(f, triton.JITFunction))
    types = dict(re.findall(r"'(\w+)': '([*\w]+)'", source.split("'signature': ")[1].split("}")[0]))
    signature = {arg: types.get(arg, "constexpr") for arg in kernel.arg_names}
    blocks = BLOCKS[name.split("_")[1]]
    constants = {a: blocks.get(a, 1) for a, kind in signature.items() if kind == "constexpr"}
    triton.compile(ASTSource(kernel, signature, constants), target=SM, options={"num_warps": 8})


def _inductor_code(graph: GraphModule, example) -> str:
    """What Inductor writes for a graph that was traced on the CPU, if it were on a GPU."""
    fake = detect_fake_mode(example)

    def moved(x):
        if not isinstance(x, Tensor):
            return x
        with unset_fake_temporarily():
            meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            return FakeTensor(fake, meta, GPU)

    graph = GraphModule(graph, _copied(graph))
    for node in graph.graph.nodes:
        node.args, node.kwargs = (map_aggregate(a, _on_gpu) for a in (node.args, node.kwargs))
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])
    inputs = [moved(x) for x in example]
    with ExitStack() as stack:
        for patch in _patches():
            stack.enter_context(patch)
        stack.enter_context(V.set_fake_mode(fake))
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=fake.shape_env)
        stack.enter_context(V.set_graph_handler(lowering))
        stack.enter_context(V.set_debug_handler(DebugContext()))
        lowering.run(*inputs)
        return lowering.codegen()[0].value


def _copied(graph: GraphModule) -> torch.fx.Graph:
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    return copy


def _on_gpu(argument):
    return GPU if isinstance(argument, torch.device) else argument


def _fake_mode(graph: GraphModule):
    return detect_fake_mode([node.meta.get("val") for node in graph.graph.nodes])


class _Driver:
    """What Inductor asks of Triton's driver."""

    def get_current_target(self):
        return SM


def _patches():
    """The answers of a machine with a Hopper GPU."""
    answers = {
        "torch.cuda.is_available": True, "torch.cuda.get_device_properties": HOPPER,
        "torch.cuda.get_device_capability": (9, 0), "torch.cuda.current_device": 0,
        "torch.cuda.device_count": 1, "torch._inductor.scheduler.has_triton": True,
        "torch.utils._triton.has_triton": True,
        "torch._inductor.async_compile.AsyncCompile.triton": None,  # not here
    }  # fmt: skip
    for name, answer in answers.items():
        yield mock.patch(name, lambda *_, answer=answer: answer)
    yield mock.patch("torch.version.cuda", "13.0")
    yield mock.patch("triton.runtime.driver.driver._active", _Driver())
    for owner, name, answer in (
        (CudaInterface, "get_compute_capability", 90),
        (CudaInterface, "is_available", True),
        (CudaInterface, "is_triton_capable", True),
        (CudaInterface, "get_device_properties", HOPPER),
        (CudaInterface.Worker, "get_device_properties", HOPPER),
        (CudaInterface.Worker, "current_device", 0),
    ):
        yield mock.patch.object(owner, name, staticmethod(lambda *_, answer=answer: answer))


def main(attention: str) -> None:
    """Prints the names of the kernels with dropout of a training step, once they compile."""
    torch.manual_seed(0)
    config = model_config(dropout=0.1, attention_dropout=0.1)
    options = {"name": attention} | ({"backend": "cpu"} if attention == "sparse" else {})
    model = Classifier(256, 256, 2, model=config, attention=options)
    sources = gpu_kernels(model, torch.zeros(4, 256, dtype=torch.int16))
    with tempfile.TemporaryDirectory() as folder:
        for name, source in sources.items():
            if "rshift" in name:
                compile_kernel(name, source, Path(folder))
                print(name)


if __name__ == "__main__":
    main(sys.argv[1])
