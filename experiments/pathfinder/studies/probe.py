"""What does a model of Pathfinder look at? Two questions.

    python -m experiments.pathfinder.studies.probe ask=shortcuts 'size=[32,128,256]'
    python -m experiments.pathfinder.studies.probe ask=cuts run=docs/results/lra/path_x

- shortcuts: how accurate is a classifier that does not follow the curve? A probe sees the two marks
  and the first k paddles at each. A better probe may find more, so its accuracy is a lower bound of
  what a shortcut can reach. A classifier needs more to show that it follows curves.
- cuts: what does a trained model answer when paddles are left out in the middle of the curve, or at
  both marks? Both change the answer of a model that follows the curve; a gap in the middle does not
  change that of a model that uses only the paddles at the marks.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from experiments.common.config import check, option
from experiments.common.devices import find_device
from experiments.common.program import program
from experiments.common.rows import Rows, frame
from experiments.common.tables import MISSING, markdown
from experiments.common.work import progress, threads
from experiments.lra.settings import Settings
from experiments.lra.tasks.task import PATHFINDER, SPLITS, Split, Task, cached, pixel_order
from experiments.lra.weights import load_model
from experiments.pathfinder.generate import VERSION, Images, check_seed, ends, make, redraw
from experiments.pathfinder.parameters import Spec, spec
from experiments.pathfinder.render import LABEL, MARKERS, ORIGIN
from experiments.training.device import DTYPES, autocast
from experiments.training.run_file import read_settings

RUN = 50  # images that a thread makes at a time: under a second, so Ctrl-C works
BATCH, WIDTH, BLOCKS, RATE = 512, 128, 2, 4e-3
BLOCK = 100  # images of a row: an interrupted study continues with the next
PLACES = {True: "the middle", False: "the marks"}
SOURCES = ("experiments/pathfinder", "experiments/lra/models", "masks", "sparseflash")
KEY = (
    "images_version size contour paddles seed examples tested steps run step left_out place first "
    "images"
).split()


# ---- the probe


def seen(images: Images, spec: Spec) -> np.ndarray:
    """Return rows and columns, float32 (n, 2, 1 + 2 contour, 2), for each of the two marks: its
    place, and the near and the far end of the paddles from it on."""
    info, contour = images.info, spec.contour
    # the first mark is on the tail of its snake, the second on the head of the same or the other
    snakes = info[:, ORIGIN], np.where(info[:, LABEL] == 1, info[:, ORIGIN], 1 - info[:, ORIGIN])
    # a seed starts at its tail, the others at their head
    both = ends(images, spec)[:, : 2 * contour].reshape(len(info), contour, 2, 2, 2).copy()
    both[:, 1:] = both[:, 1:, :, ::-1]
    of = np.arange(len(info))
    ways = both[of, :, snakes[0]], both[of, ::-1, snakes[1], ::-1]
    marks = info[:, MARKERS : MARKERS + 4].reshape(-1, 2, 1, 2)
    paddles = np.stack(ways, 1).reshape(len(info), 2, 2 * contour, 2)
    return np.concatenate([marks, paddles], 2).astype(np.float32)


def seen_on_disk(spec: Spec, seed: int, n: int, cache_dir: Path) -> tuple[Tensor, Tensor]:
    """Return `seen` of the first n images of a seed, and their labels, kept in a file."""

    def run(first: int) -> tuple[np.ndarray, np.ndarray]:
        images = make(spec, seed, first, min(RUN, n - first))
        return seen(images, spec), images.labels

    def views() -> dict[str, np.ndarray]:
        starts = range(0, n, RUN)
        what = f"Pathfinder-{spec.size}, contour {spec.contour}, {RUN} at a time"
        with threads() as pool:
            x, labels = zip(*progress(pool.map(run, starts), len(starts), what), strict=True)
        return {"seen": np.concatenate(x), "labels": np.concatenate(labels)}

    key = {"version": VERSION, "spec": asdict(spec), "seed": seed, "n": n}
    found = cached(cache_dir, f"pathfinder{spec.size}-seen", key, views)
    return torch.from_numpy(found["seen"]), torch.from_numpy(found["labels"])


class Probe(nn.Module):
    """A perceptron of residual layers over lengths, places and directions of what it sees."""

    def __init__(self, spec: Spec, paddles: int):
        super().__init__()
        self.paddles, self.size, self.length = paddles, spec.size, spec.length
        width = len(self._features(torch.zeros(1, 2, 1 + 2 * paddles, 2))[0])
        self.first = nn.Linear(width, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
            )
            for _ in range(BLOCKS)
        )
        self.last = nn.Sequential(nn.GELU(), nn.Linear(WIDTH, 1), nn.Flatten(0))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (n,) that a curve joins the marks.

        x: (n, 2, 1 + 2 paddles or more, 2), as `seen` has it. The order of the marks has no effect.
        """
        x = x[:, :, : 1 + 2 * self.paddles]
        return (self.one_order(x) + self.one_order(x.flip(1))) / 2

    def one_order(self, x: Tensor) -> Tensor:
        """Return the logits for the marks in their order."""
        x = self.first(self._features(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)

    def _features(self, x: Tensor) -> Tensor:
        x = (x - self.size / 2) / (self.size / 4)
        marks, loose = x[:, :, 0], x[:, :, -1]
        found = [*_between(marks), marks]
        if self.paddles:
            steps = x.diff(dim=2) * (self.size / 8 / self.length)
            turned = torch.cat([_turned(steps, pair) for pair in (marks, loose)], -1)
            found += [*_between(loose), loose, (x[:, :, 1:] - x[:, :, :1]) * 2, steps, turned]
        return torch.cat([part.flatten(1) for part in found], 1)


def _between(pair: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the way between two places, (n, 2, 2), its length and the logarithm of that."""
    way = pair[:, 1] - pair[:, 0]
    length = way.norm(dim=1, keepdim=True)
    return 2 * way, 2 * length, length.clamp_min(0.01).log()


def _turned(steps: Tensor, pair: Tensor) -> Tensor:
    """Return steps in the axes of the way between two places."""
    way = pair[:, 1] - pair[:, 0]
    along = way / way.norm(dim=1, keepdim=True).clamp_min(1e-6)
    across = torch.stack([-along[:, 1], along[:, 0]], 1)
    return torch.einsum("nmpi,nji->nmpj", steps, torch.stack([along, across], 1))


def fit(
    spec: Spec,
    paddles: int,
    x: Tensor,
    labels: Tensor,
    *,
    steps: int,
    seed: int,
    device: torch.device,
) -> Probe:
    """Return a probe trained on what it sees of n images, and their labels."""
    x, y = x[:, :, : 1 + 2 * paddles].to(device), labels.to(device).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        probe = Probe(spec, paddles)
    probe.to(device)
    optimizer = torch.optim.AdamW(probe.parameters(), weight_decay=1e-2)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    what = f"probe of {paddles} paddles, Pathfinder-{spec.size}"
    for _ in progress(range(steps), steps, what):
        rows = torch.randint(len(x), (BATCH,), generator=generator).to(device)
        other = torch.randint(2, (BATCH, 1, 1, 1), generator=generator).to(device).bool()
        images = torch.where(other, x[rows].flip(1), x[rows])
        loss = binary_cross_entropy_with_logits(probe.one_order(images), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
    return probe.eval()


@torch.no_grad()
def says_yes(probe: Probe, x: Tensor) -> Tensor:
    """Return whether the probe answers that a curve joins the marks, bool (n,) on the CPU."""
    device = next(probe.parameters()).device
    return torch.cat([probe(part.to(device)).cpu() for part in x.split(10_000)]) > 0


# ---- trained models


def trained(run: str | Path, device: torch.device) -> tuple[Settings, nn.Module, int]:
    """Return the settings of a run of Pathfinder, its best model and the step of that.

    Raises ValueError for no such run, or one of another task.
    """
    settings = read_settings(Path(run), Settings)
    name = settings.task.get("name")
    if name not in PATHFINDER or settings.pretrain:
        raise ValueError(f"run={run}: give a classifier of Pathfinder, not of {name}")
    grid = (PATHFINDER[name], PATHFINDER[name])
    blank = Split(np.zeros((1, grid[0] * grid[1]), np.uint8), np.zeros(1, np.int64))
    task = Task(name, "generated", 2, 256, dict.fromkeys(SPLITS, blank), grid)
    model, step = load_model(Path(run), settings, task)
    return settings, model.to(device).eval(), step


def spec_of(settings: Settings) -> Spec:
    """Return the parameters of the images of a run."""
    task = settings.task
    look = ("strokes", "margins", "distractors")
    own: dict[str, Any] = {name: task.get(name) for name in look}
    return spec(PATHFINDER[task["name"]], task.get("difficulty") or 14, **own)


@torch.no_grad()
def says_yes_of(
    model: nn.Module, pixels: np.ndarray, settings: Settings, device: torch.device, batch: int
) -> np.ndarray:
    """Return whether a model answers that a curve joins the marks, bool (n,)."""
    side = pixels.shape[1]
    order = pixel_order((side, side), settings.task.get("order") or "row")
    tokens = torch.from_numpy(pixels.reshape(len(pixels), -1)[:, order])
    precision = settings.precision if device.type == "cuda" else None
    with autocast(device, DTYPES[precision or "fp32"]):
        parts = [model(part.to(device)).argmax(1).cpu() for part in tokens.split(batch)]
    return torch.cat(parts).numpy() == 1


# ---- the questions


@dataclass
class Options:
    ask: str = option("shortcuts", "the question", choices=("shortcuts", "cuts"))
    paddles: Any = option(
        [0, 1, 2, 3], "of shortcuts: at each mark that the probe sees", several=int, least=0
    )
    examples: int = option(80_000, "of shortcuts: images to train a probe on", least=1)
    steps: int = option(6000, "of shortcuts: of the probe, of 512 images", least=1)
    tested: int | None = option(
        None, "images that are asked about; null: 20,000, of cuts 1100", least=1
    )
    seed: int | None = option(
        None, "of weights and data, other than the run's; null: 0, of cuts 1000", least=0
    )
    size: Any = option([32], "of shortcuts: 32, 64, 128 (Path-X), 256", several=int)
    contour: Any = option([14], "of shortcuts: paddles of long snakes, 6, 9 or 14", several=int)
    run: str = option("docs/results/lra/path_x", "of cuts: the folder of a run")
    erased: Any = option([0, 2, 4, 8, 12], "of cuts: paddles left out", several=int, least=0)
    batch: int = option(8, "of cuts: images at a time", least=1)
    device: str | None = option(None, "cuda | cpu; null: cuda if there is a GPU")
    rows: str = option("runs/pathfinder/${ask}.jsonl", "appended to")
    cache_dir: str = option("runs/data", "what the probe sees of its images")
    allow_changes: bool = option(False, "true: add rows below docs although files have changed")

    def __post_init__(self) -> None:
        check(self)
        tested, seed = (1100, 1000) if self.ask == "cuts" else (20_000, 0)
        self.tested, self.seed = self.tested or tested, seed if self.seed is None else self.seed


def shortcuts(options: Options, command: str) -> str:
    """Measure every size, contour and number of paddles that the rows do not have."""
    seed, n, tested = options.seed or 0, options.examples, options.tested or 0
    device = find_device(options.device)
    specs = [spec(size, contour) for size in options.size for contour in options.contour]
    check_paddles("paddles", options.paddles, min(each.contour for each in specs))
    rows = Rows(options.rows, KEY, SOURCES, allow_changes=options.allow_changes)
    common = {"seed": seed, "examples": n, "tested": tested, "steps": options.steps}
    for each in specs:
        what = {"size": each.size, "contour": each.contour, "images_version": VERSION, **common}
        wanted = [{**what, "paddles": k, **rows.origin(device, command)} for k in options.paddles]
        if missing := [row for row in wanted if rows.find(row) is None]:
            data = seen_on_disk(each, seed, n + tested, Path(options.cache_dir))
            (x, x_test), (y, y_test) = (part.split([n, tested]) for part in data)
        for row in missing:
            k = row["paddles"]
            probe = fit(each, k, x, y, steps=options.steps, seed=seed, device=device)
            rows.append(row | {"right": int((says_yes(probe, x_test) == (y_test > 0)).sum())})
    return tables(frame(rows.rows))["shortcuts"]


def cuts(options: Options, command: str) -> str:
    """Ask a trained model about rows of BLOCK images for each n of `erased` and each place."""
    device, seed = find_device(options.device), options.seed or 0
    settings, model, step = trained(options.run, device)
    if isinstance(settings.task.get("strokes"), list):
        raise ValueError(f"run={options.run} has images of several strokes")
    if settings.task.get("generate") and seed == settings.data_seed:
        raise ValueError(f"seed={seed}: the run was trained on images of this seed")
    each = spec_of(settings)
    check_paddles("erased", options.erased, each.contour)
    check_seed(seed)
    images = make(each, seed, 0, options.tested or 0)
    if len(np.unique(images.labels)) < 2:
        raise ValueError(f"tested={options.tested}: all have the same label; give more")
    rows = Rows(options.rows, KEY, SOURCES, allow_changes=options.allow_changes)
    common = {"run": options.run, "seed": seed, "images_version": VERSION, "step": step}
    common |= rows.origin(device, command)
    wanted = [
        {**common, "first": first, "images": len(images.labels[first : first + BLOCK])}
        | {"left_out": n, "place": PLACES[middle]}
        for n in options.erased
        for middle in PLACES
        if n or middle
        for first in range(0, len(images.labels), BLOCK)
    ]
    missing = [row for row in wanted if rows.find(row) is None]
    for row in progress(missing, len(missing), f"{BLOCK} images at a time"):
        here = slice(row["first"], row["first"] + BLOCK)
        part = Images(*(getattr(images, field.name)[here] for field in fields(Images)))
        middle = row["place"] == PLACES[True]
        without = paddles_at(part, each.contour, row["left_out"], middle=middle)
        pixels = redraw(part, each, ~without)
        yes = says_yes_of(model, pixels, settings, device, options.batch)
        curve = part.labels == 1
        counts = {
            "curve": curve,
            "curve_yes": curve & yes,
            "other": ~curve,
            "other_yes": yes & ~curve,
        }
        rows.append(row | {name: int(of.sum()) for name, of in counts.items()})
    return tables(frame(row for row in map(rows.find, wanted) if row))["cuts"]


def paddles_at(images: Images, contour: int, n: int, *, middle: bool) -> np.ndarray:
    """Return a bool array (images, paddles) of n paddles.

    middle: True for those in the middle of the snake with the first mark, False for those at the
        two marks. A curve that joins the marks is that snake, and both marks are at its ends.
    """
    number, first = np.arange(contour), (contour - n) // 2
    tail, origin = n - n // 2, images.info[:, ORIGIN][:, None]
    snake = np.broadcast_to(origin, (len(origin), n))
    if middle:
        chosen = number[first : first + n]
    else:
        chosen = np.concatenate([number[:tail], number[contour - n // 2 :]])
        other = np.where(images.labels[:, None] == 1, origin, 1 - origin)
        snake = np.where(np.arange(n) < tail, origin, other)
    found = np.zeros(images.placed.shape[:2], bool)
    # snakes grow in turn: paddle j of snake i is number 2 j + i
    np.put_along_axis(found, 2 * chosen[None] + snake, True, 1)
    return found


# ---- tables


def tables(rows: pd.DataFrame) -> dict[str, str]:
    """Return the Markdown table of rows: `shortcuts` or `cuts`, in percent with 95 % intervals."""
    return {"shortcuts": _shortcuts(rows)} if "right" in rows else {"cuts": _cuts(rows)}


def _shortcuts(rows: Any) -> str:
    """Return accuracies of the newest rows of the images as they are made now."""
    rows = rows[rows.images_version == VERSION]
    found = {(r.size, r.contour, r.paddles): r for r in rows.itertuples()}
    counts = sorted({key[2] for key in found})
    heads = ["the marks", *(f"and {k} paddle{'s' * (k > 1)} at each" for k in counts if k)]
    lines = [["size", "contour", *heads[-len(counts) :]]]
    for key in sorted({key[:2] for key in found}):
        cells = [found.get((*key, k)) for k in counts]
        lines.append(
            [*map(str, key), *(interval(r.right, r.tested) if r else MISSING for r in cells)]
        )
    return markdown(lines, left=())


def _cuts(rows: Any) -> str:
    """Return the share of images, with a curve and without, that get a yes."""
    lines = [["left out", "at", "with a curve, yes", "without, yes"]]
    for (n, place), of in rows.groupby(["left_out", "place"], sort=False):
        shares = (interval(int(of[f"{x}_yes"].sum()), int(of[x].sum())) for x in ("curve", "other"))
        lines.append([str(n), place if n else MISSING, *shares])
    return markdown(lines, left=(1,))


def interval(count: int, of: int) -> str:
    """Return a share in percent with half of its 95 % interval (Wilson's around its middle)."""
    if not of:
        return MISSING
    share, z2 = count / of, 1.96**2
    half = 1.96 * (share * (1 - share) / of + z2 / (4 * of * of)) ** 0.5 / (1 + z2 / of)
    return f"{100 * share:.1f} ± {100 * half:.1f}"


def check_paddles(name: str, counts: Sequence[int], most: int) -> None:
    if max(counts) > most:
        raise ValueError(f"{name}={counts}: give 0 to {most}, the paddles of a curve")


@program("probe", Options, "experiments.pathfinder.studies.probe")
def main(options: Options, command: str) -> None:
    print({"shortcuts": shortcuts, "cuts": cuts}[options.ask](options, command))


if __name__ == "__main__":
    main()
