"""The hopper backend: warp-specialised FlashAttention kernels in Gluon, with wgmma and TMA.

Dense attention is the same kernel with one list for all rows. See docs/internals/hopper.md.
"""

from functools import cache

import torch

from sparseflash.backends.hopper.backward import Backward, backward_form
from sparseflash.backends.hopper.forward import Forward, forward_spec, forward_tiles_for
from sparseflash.backends.hopper.tma import ALIGNED, not_copied
from sparseflash.backends.protocol import Direction
from sparseflash.kernels.common.device import described, nvidia_capability
from sparseflash.kernels.common.versions import untested
from sparseflash.problem import Problem
from sparseflash.schedule.blocks import ScheduleFacts
from sparseflash.schedule.tile_lists import indivisible
from sparseflash.score.rule import rule_of

name = "hopper"


def unsupported(problem: Problem, direction: Direction) -> str | None:
    """Why this backend cannot run the problem in this direction, or None."""
    if problem.device.type != "cuda":
        return f"its kernels run on CUDA tensors, not on {problem.device.type}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels take bfloat16 and float16, not {problem.dtype}"
    if reason := _missing(problem.device):
        return reason
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > 256:
        return f"its kernels hold head dims up to 256, not {widest}"
    options = problem.options
    if direction == "backward" and widest > 128 and (options.deterministic or options.score):
        kind = "deterministic backward" if options.deterministic else "backward of a score"
        return f"its {kind} holds head dims up to 128, not {widest}"
    if direction == "backward" and options.score:
        if widest > 64 and rule_of(options.score).paired:
            return f"its backward reads tables by key or pair up to head dim 64, not {widest}"
        if rule_of(options.score).singular:
            return "its backward takes no score functions that may be infinite for a score of 0"
    if direction == "forward" and options.score and options.backend == "auto":
        # measured up to head dim 128; rows of other lengths are not aligned, and slow in both
        if rule_of(options.score).by_pair and problem.n_k % 16 == 0 and widest <= 128:
            return "its forward reads a bias of each pair more slowly than triton's"
    for tensor, (shape, strides) in problem.layouts.items():
        if tensor in problem.misaligned:
            return f"{tensor} {ALIGNED}"
        if reason := not_copied(tensor, shape, strides):
            return reason
    for tensors, width in (("q and k", problem.head_dim), ("v", problem.head_dim_v)):
        if width % 8:  # also where their strides have room: out and the gradients have none
            return f"the head dim of {tensors}, {width}, is not a multiple of 8; pad it"
    if not isinstance(facts := problem.mask, ScheduleFacts):
        return None
    if direction == "forward":
        return indivisible(facts, forward_spec(problem, forward_tiles_for(problem, facts, 1), 1))
    specs = backward_form(problem, facts).specs(problem, sms=1)
    return next((reason for spec in specs if (reason := indivisible(facts, spec))), None)


plan_forward, plan_backward = Forward, Backward


def _missing(device: torch.device) -> str | None:
    """Why kernels for Hopper GPUs cannot run on a CUDA device, or None."""
    capability = nvidia_capability(device)
    if capability != (9, 0):
        return f"it needs a Hopper GPU, compute capability 9.0; {described(capability)}"
    return gluon_missing()


@cache
def gluon_missing() -> str | None:
    """Why the kernels cannot be compiled here, or None."""
    try:
        if reason := untested(_triton()):
            return reason
        from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma  # noqa: F401
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: F401
    except ImportError as error:
        return f"Triton's Gluon cannot be imported ({error}); install a Triton from 3.6 to 3.9"
    return None


def _triton() -> str:
    """Return the version of Triton."""
    import triton

    return triton.__version__
