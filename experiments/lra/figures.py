"""What the figures of the Long Range Arena share: names of rows, groups of them, labels."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from typing import TypeVar

from experiments.common.figures import MAX_ENTRIES, Style
from experiments.lra import published as lra
from experiments.lra.cells import RowKey

T = TypeVar("T")
USUAL_CONTOUR = "contour 14"  # which labels leave out


def row_labels(keys: Sequence[RowKey]) -> dict[RowKey, str]:
    """Return short names of the rows of a figure, all different.

    A name leaves out what all rows share. A mask is named by its patterns, and only if two names
    would be equal without it.
    """
    words = {key: [key.name, *filter(None, key.label.split(", "))] for key in keys}
    for own in words.values():
        if "contour" in " ".join(key.label for key in keys) and "contour" not in " ".join(own):
            own.append(USUAL_CONTOUR)
    shared = set.intersection(*map(set, words.values())) if len(keys) > 1 else set()
    labels = {
        key: ", ".join(word for word in own if word not in shared) or key.name
        for key, own in words.items()
    }
    for describe in (pattern_names, str):
        count = Counter(labels.values())
        labels = {
            key: f"{text}, {describe(key.mask)}" if count[text] > 1 and key.mask else text
            for key, text in labels.items()
        }
    return labels


def pattern_names(mask: str) -> str:
    """Return the patterns of a mask text: "butterfly + local" of "butterfly:64|local:64"."""
    parts = [part.partition(">>")[0].strip("( )") for part in re.split(r"[|&]", mask)]
    return " + ".join(re.split(r"[:(]", part)[0].replace("_", " ") for part in parts)


def row_styles(keys: Sequence[RowKey]) -> dict[RowKey, Style]:
    """Return the style of each row.

    Rows of one attention differ in marker and dashes, and in colour if there is no other attention.
    """
    if len({key.attention for key in keys}) == 1:
        return dict(zip(keys, cycle(lra.STYLES.values()), strict=False))
    styles: dict[RowKey, Style] = {}
    for key in keys:
        same = sum(other.attention == key.attention for other in styles)
        styles[key] = lra.style(key.attention, same)
    return styles


def by_contour(keys: Sequence[RowKey], other_entries: int = 0) -> dict[str, list[RowKey]]:
    """Return the rows of each contour of Pathfinder by its name, if not all rows fit one legend.

    Rows that fit, or that share a contour, stay together without a name.

    other_entries: entries of the legend for other things.
    """
    found: dict[str, list[RowKey]] = {}
    for key in keys:
        words = (word for word in key.label.split(", ") if word.startswith("contour "))
        found.setdefault(next(words, USUAL_CONTOUR), []).append(key)
    fits = len(keys) + other_entries <= MAX_ENTRIES
    return {"": list(keys)} if fits or len(found) == 1 else found


def groups(items: Sequence[T], other_entries: int = 0) -> list[list[T]]:
    """Divide what a figure shows into groups with legends of at most MAX_ENTRIES entries.

    The first item, the reference, is in every group.

    other_entries: entries of the legend for other things.
    """
    room = MAX_ENTRIES - other_entries
    if len(items) <= room:
        return [list(items)]
    count = math.ceil((len(items) - 1) / (room - 1))
    size = math.ceil((len(items) - 1) / count)
    return [[items[0], *items[1 + i * size : 1 + (i + 1) * size]] for i in range(count)]
