"""The Long Range Arena as tables and figures name it, and what the FlashAttention paper reports."""

from collections.abc import Iterable

from experiments.common.figures import OTHER, Style
from experiments.lra.models.attention import KINDS

LABELS = {
    "listops": "ListOps",
    "text": "Text",
    "text4k": "Text 4K",
    "retrieval": "Retrieval",
    "imdb_same_movie": "IMDB same movie",
    "image": "Image",
    "pathfinder32": "Pathfinder",
    "pathfinder64": "Pathfinder-64",
    "pathfinder128": "Path-X",
    "pathfinder256": "Path-256",
    "files": "Files",
}
AVERAGED = ("listops", "text", "retrieval", "image", "pathfinder32")  # the five of the table
TIMED = (*AVERAGED, "imdb_same_movie")  # enter the mean speed-up
PATH = ("pathfinder64", "pathfinder128", "pathfinder256")

BASE = "standard"  # what speed-ups are relative to
# Dao et al. 2022, Table 3 (accuracy %, training speed-up) and Table 6 (Path-X, Path-256).
_TABLE_3 = {
    "standard": (36.0, 63.6, 81.6, 42.3, 72.7, 1.0),
    "flash": (37.6, 63.9, 81.4, 43.5, 72.7, 2.4),
    "sparse": (37.0, 63.0, 81.3, 43.6, 73.3, 2.8),
    "linformer": (35.6, 55.9, 77.7, 37.8, 67.6, 2.5),
    "linear": (38.8, 63.2, 80.7, 42.6, 72.5, 2.3),
    "performer": (36.8, 63.6, 82.2, 42.1, 69.9, 1.8),
    "local": (36.1, 60.2, 76.7, 40.6, 66.6, 1.7),
    "reformer": (36.5, 63.8, 78.5, 39.6, 69.4, 1.3),
    "smyrf": (36.1, 64.1, 79.0, 39.6, 70.5, 1.7),
}
PAPER_SPEEDUP = {name: row[-1] for name, row in _TABLE_3.items()}
PAPER = {
    (name, task): accuracy
    for name, row in _TABLE_3.items()
    for task, accuracy in zip(AVERAGED, row[:-1], strict=True)
} | {
    ("flash", "pathfinder128"): 61.4,
    ("sparse", "pathfinder128"): 56.0,
    ("sparse", "pathfinder256"): 63.1,
}
# Its cells that equal those of Xiong et al. 2021 (local attention: Tay et al. 2021). Where it could
# not reproduce a baseline, it reports the better of the two (appendix E.3).
EARLIER = {(name, "pathfinder32") for name in ("linformer", "performer", "reformer", "local")}
EARLIER |= {("linformer", "text"), ("linformer", "image")}

# in the order of the paper's table, then what is registered besides
ATTENTIONS = {name: KINDS[name].label for name in dict.fromkeys((*_TABLE_3, *KINDS))}
STYLES = {name: Style(*kind.style) for name, kind in KINDS.items()}

# Of further masks of block-sparse attention, and of runs with other settings.
VARIANTS = (("d", "--"), ("p", "-."), ("h", ":"), ("*", "-"))


def style(attention: str, number: int = 0) -> Style:
    """Return the style of an attention; `number` counts the lines that share it, which differ."""
    base = STYLES.get(attention, OTHER)
    if not number:
        return base
    marker, line = VARIANTS[(number - 1) % len(VARIANTS)]
    return base._replace(marker=marker, line=line)


def order(known: Iterable[str], name: str) -> int:
    """Return the place of a task in LABELS, or of an attention in ATTENTIONS; unknown ones last."""
    names = list(known)
    return names.index(name) if name in names else len(names)
