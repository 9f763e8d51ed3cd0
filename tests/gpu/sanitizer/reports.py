"""What a run of compute-sanitizer wrote, in numbers."""

import re
from collections import Counter

SUMMARY = {
    "memcheck": r"ERROR SUMMARY: (\d+) error",
    "racecheck": r"RACECHECK SUMMARY: (\d+) hazard",
    "synccheck": r"ERROR SUMMARY: (\d+) error",
}
TOOLS = tuple(SUMMARY)


def count(tool: str, log: str) -> int | None:
    """The reports of a tool; None if its log has no summary. Child processes have logs of their
    own, which stand one after the other.
    """
    found = re.findall(SUMMARY[tool], log)
    return sum(map(int, found)) if found else None


def places(log: str) -> Counter[str]:
    """How many lines name a place: kernel, and file and line where they are known."""
    pattern = r"at (\w+)(?:\([^)\n]*\))?\+0x([0-9a-f]+)(?: in (\S+:\d+))?"
    found = re.findall(pattern, log)
    return Counter(f"{kernel} {line or '+0x' + offset}" for kernel, offset, line in found)


def remarks(log: str) -> list[str]:
    """What makes the count doubtful."""
    doubts = {
        "Detected overflow of tracked": "too few barriers were tracked: try --barriers 64",
        "Maximum number of hazards reached": "there are more hazards than the tool keeps",
        "Internal Sanitizer Error": "an error of the tool itself",
    }
    return [meaning for text, meaning in doubts.items() if text in log]
