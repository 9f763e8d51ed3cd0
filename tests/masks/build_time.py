"""How long a mask of a million tokens takes to build, on machines that do other things as well."""

import time

from masks import Mask

LONG = 1 << 20


def assert_builds_within(mask: Mask, milliseconds: float, tiles: int | None = None, **options):
    """The best of up to ten lengths, none built before, within five times the target.

    In seconds of this process. No length has more than `tiles` bit tiles.
    """
    least = float("inf")
    for n in range(LONG, LONG - 10 * 128, -128):
        begin = time.process_time()
        blocks = mask.build(n, **options)
        least = min(least, time.process_time() - begin)
        assert tiles is None or len(blocks.bits) <= tiles
        if least * 1000 < 5 * milliseconds:
            return
    raise AssertionError(f"{mask} took {1000 * least:.0f} ms, against 5 x {milliseconds} ms")
