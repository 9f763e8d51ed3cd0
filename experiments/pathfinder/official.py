"""Writes generated images in the folders of the Long Range Arena release:

pathfinder128/curv_contour_length_14/imgs/0/sample_0.png, ...
pathfinder128/curv_contour_length_14/metadata/0.npy, ...    (text, despite the name)
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from PIL import Image

from experiments.common.files import read_json, write_text
from experiments.common.work import progress, threads
from experiments.pathfinder.generate import VERSION, make
from experiments.pathfinder.parameters import Spec
from experiments.pathfinder.render import LABEL, MARGIN

FOLDER = 1000  # images
SETTINGS = "generated.json"  # the release has no such file


def write(out: Path, spec: Spec, seed: int, examples: int) -> Path:
    """Write images 0 .. examples - 1 of a seed below `out`, and keeps complete folders.

    Returns the folder of the level. Raises ValueError if it holds other images.
    """
    level = out / f"pathfinder{spec.size}" / spec.level
    settings = {"version": VERSION, "seed": seed, **asdict(spec), "margins": list(spec.margins)}
    known = level / SETTINGS
    if known.exists():
        if read_json(known, "give another out=") != settings:
            raise ValueError(
                f"{level} holds images of other settings (see {known}): give another out="
            )
    elif level.exists() and any(level.iterdir()):
        raise ValueError(f"{level} holds other files: give another out=")
    (level / "metadata").mkdir(parents=True, exist_ok=True)
    write_text(known, json.dumps(settings, indent=1) + "\n", "out")
    folders = range(0, examples, FOLDER)
    with threads() as pool:
        for first in progress(folders, len(folders), f"{level}, {FOLDER} images at a time"):
            _write_folder(pool, level, spec, seed, first, min(FOLDER, examples - first))
    return level


def _write_folder(
    pool: ThreadPoolExecutor, level: Path, spec: Spec, seed: int, first: int, n: int
) -> None:
    k = first // FOLDER
    metadata, folder = level / "metadata" / f"{k}.npy", level / "imgs" / str(k)
    if metadata.exists() and _lines(metadata) >= n:
        return
    folder.mkdir(parents=True, exist_ok=True)

    def run(begin: int) -> list[str]:
        images = make(spec, seed, first + begin, min(50, n - begin))
        lines = []
        for i, (pixels, info) in enumerate(zip(images.pixels, images.info, strict=True), begin):
            Image.fromarray(pixels).save(folder / f"sample_{i}.png")
            margin = spec.margins[info[MARGIN]]
            line = [f"imgs/{k}", f"sample_{i}.png", i, info[LABEL], spec.continuity, spec.contour]
            line += [spec.distractor_length, spec.length, spec.thickness, margin, 1]
            lines.append(" ".join(map(str, line)) + "\n")
        return lines

    runs = pool.map(run, range(0, n, 50))
    text = "".join(line for lines in runs for line in lines)
    write_text(metadata, text, "out")


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())
