"""The backends, and the choice among them."""

from sparseflash.backends import cpu, hopper, reference, triton
from sparseflash.backends.protocol import Backend, Direction
from sparseflash.problem import Problem

# The fastest first: the order of backend="auto".
BACKENDS: dict[str, Backend] = {
    "hopper": hopper,
    "triton": triton,
    "cpu": cpu,
    "reference": reference,
}
NAMES = tuple(BACKENDS)


def reasons(problem: Problem, direction: Direction) -> dict[str, str | None]:
    """For every backend, in order of preference: why it cannot run a problem, or None."""
    return {name: backend.unsupported(problem, direction) for name, backend in BACKENDS.items()}


def note(name: str, problem: Problem) -> str | None:
    """Return what a user should know of a backend that can run a problem, or None."""
    return hopper.note(problem.device) if name == "hopper" else None


def choose(problem: Problem, direction: Direction) -> Backend:
    """Return the backend that the problem names, or for "auto" the first that can run this
    direction.

    Raises ValueError with the reasons where it, or none, can.
    """
    name = problem.options.backend
    refused = []
    for candidate in BACKENDS.values() if name == "auto" else (BACKENDS[name],):
        reason = candidate.unsupported(problem, direction)
        if reason is None:
            return candidate
        call = "this call" if direction == "forward" else "the backward of this call"
        refused.append(f"backend {candidate.name!r} cannot run {call}: {reason}")
    advice = ""
    if direction == "backward" and name != "auto":
        advice = "; pass backend='auto', which may take another backend for the backward"
    raise ValueError("; ".join(refused) + advice)
