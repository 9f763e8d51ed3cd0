"""How long a mask of a million tokens takes to build, on machines that do other things as well."""

import time

from masks import Mask

LONG = 1 << 20


def assert_builds_within(mask: Mask, milliseconds: float, tiles: int | None = None, **options):
    """The best of three lengths, none built before, within five times the target.

    In seconds of this process. No length has more than `tiles` bit tiles.
    """
    seconds = []
    for n in range(LONG, LONG - 3 * 128, -128):
        begin = time.process_time()
        blocks = mask.build(n, **options)
        seconds.append(time.process_time() - begin)
        assert tiles is None or len(blocks.bits) <= tiles
    assert min(seconds) * 1000 < 5 * milliseconds, mask
