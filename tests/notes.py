"""Cases of a loop, named where one of them fails, and how many random ones there are."""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps


@contextmanager
def note(*case: object) -> Iterator[None]:
    """Add the case to the error of its block."""
    try:
        yield
    except Exception as error:
        error.add_note(f"case {', '.join(map(str, case))}")
        raise


def each_seed(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with the seeds below `count`, and name the one that fails."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(**fixtures: object) -> None:
            for seed in range(count):
                with note("seed", seed):
                    test(seed=seed, **fixtures)

        taken = inspect.signature(test)
        others = [p for p in taken.parameters.values() if p.name != "seed"]
        vars(run)["__signature__"] = taken.replace(parameters=others)  # what pytest gives
        return run

    return decorate


FUZZ = int(os.environ.get("SPARSEFLASH_FUZZ", "1"))  # times as many random cases


def seeds(count: int, first: int = 0) -> range:
    """Return the seeds of random cases."""
    return range(first, first + count * FUZZ)
