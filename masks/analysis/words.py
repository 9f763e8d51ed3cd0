"""Numbers, shares and ranges as text."""

from collections.abc import Sequence


def number(value: float) -> str:
    """Three significant digits, and whole numbers in full."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def percent(share: float) -> str:
    """Return a share in percent, three digits; never rounded to 0 or to 100 % when it is not."""
    if 0.9995 <= share < 1:
        return "99.9 %"
    value = 100 * share
    return "0 %" if share == 0 else "less than 0.001 %" if value < 0.001 else f"{value:.3g} %"


def spans(ranges: Sequence[tuple[int, int]], most: int = 3) -> str:
    """`0-127, 512, 640-767 and 5 more ranges`."""
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:most]]
    more = len(ranges) - len(shown)
    text = ", ".join(shown)
    return f"{text} and {more} more range{'s' * (more > 1)}" if more else text


def count_of(count: int, one: str, many: str | None = None) -> str:
    """`1 query`, `5 queries`."""
    return f"{count} {one if count == 1 else many or one + 's'}"
