"""What does a model of Pathfinder look at? Four questions, and the probe that they share.

    python -m experiments.pathfinder.studies.probe ask=shortcuts 'shortcuts.size=[32,128,256]'
    python -m experiments.pathfinder.studies.probe ask=cuts cuts.run=docs/results/lra/path_x
    python -m experiments.pathfinder.studies.probe ask=strokes 'strokes.parts=[marks]'
    python -m experiments.pathfinder.studies.probe ask=directions directions.model.rotary=true

- shortcuts: how accurate is a classifier that does not follow the curve? A probe sees the two marks
  and the first k paddles at each. A better probe may find more, so its accuracy is a lower bound of
  what a shortcut can reach. A classifier needs more to show that it follows curves.
- cuts: what does a trained model answer when paddles are left out in the middle of the curve, or at
  both marks? Both change the answer of a model that follows the curve; a gap in the middle does not
  change that of a model that uses only the paddles at the marks. Each answer is compared with that
  of a probe to the whole image. A model that follows curves is also right where the probe is wrong.
- strokes: how accurate is a trained model with other thickness of paddles or radius of marks?
- directions: how fast does a small model learn the direction of the paddle at a mark, and does this
  carry over to images of another size? It takes a minute on a CPU.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from experiments.common.checks import as_list, check_options, choose
from experiments.common.devices import find_device
from experiments.common.files import digest, read_arrays, write_whole
from experiments.common.program import program
from experiments.common.progress import progress
from experiments.common.rows import Rows, frame
from experiments.common.tables import MISSING, markdown
from experiments.common.threads import threads
from experiments.lra.finished import load_model
from experiments.lra.models.classifier import Classifier, model_config
from experiments.lra.settings import Settings
from experiments.lra.tasks.task import PATHFINDER, SPLITS, Split, Task, pixel_order
from experiments.pathfinder.generate import (
    VERSION,
    Images,
    check_seed,
    ends,
    headings,
    make,
    redraw,
)
from experiments.pathfinder.parameters import STROKES, Spec, spec
from experiments.pathfinder.render import LABEL, MARKERS, ORIGIN
from experiments.training.device import DTYPES, autocast
from experiments.training.run_file import read_settings

RUN = 50  # images that a thread makes at a time: under a second, so Ctrl-C works
BATCH, WIDTH, BLOCKS, RATE = 512, 128, 2, 4e-3
BLOCK = 100  # images of a row: an interrupted study continues with the next
PLACES = {True: "the middle", False: "the marks"}
CLASSES, EVERY = 8, 100  # directions; steps between two lines of progress
TESTED = 1000  # crops of each size
SOURCES = ("experiments/pathfinder", "experiments/lra/models", "masks", "sparseflash")
WHAT = "images_version size contour paddles seed examples tested steps run left_out place first"
KEY = (*WHAT.split(), "step", "images", "probe_examples", "probe_steps")


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
    key = {"version": VERSION, "spec": asdict(spec), "seed": seed, "n": n}
    path = cache_dir / f"pathfinder{spec.size}-seen-{digest(key)}.npz"

    def run(first: int) -> tuple[np.ndarray, np.ndarray]:
        images = make(spec, seed, first, min(RUN, n - first))
        return seen(images, spec), images.labels

    if not path.exists():
        starts = range(0, n, RUN)
        what = f"Pathfinder-{spec.size}, contour {spec.contour}, {RUN} at a time"
        with threads() as pool:
            x, labels = zip(*progress(pool.map(run, starts), len(starts), what), strict=True)
        views, labels = np.concatenate(x), np.concatenate(labels)
        write_whole(path, lambda file: np.savez(file, seen=views, labels=labels), "cache_dir")
    found = read_arrays(path, "delete it to recreate it")
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


@dataclass(frozen=True)
class Trained:
    """The best model of a run, and what it was trained on."""

    settings: Settings
    model: nn.Module
    step: int  # of the weights
    order: np.ndarray  # of the pixels, as in the run
    device: torch.device
    dtype: torch.dtype

    def spec(self, strokes: float | None = None) -> Spec:
        """Return the parameters of the run's images, with other strokes if given."""
        task = self.settings.task
        look: dict[str, Any] = {name: task.get(name) for name in ("margins", "distractors")}
        look["documented"] = task.get("documented") or False
        return spec(PATHFINDER[task["name"]], task.get("difficulty") or 14, strokes=strokes, **look)

    def fresh(self, spec: Spec, seed: int, examples: int) -> Images:
        """Return images of both labels that the run was not trained on.

        Raises ValueError for the seed of its training data, and if all labels are the same.
        """
        check_seed(seed)
        if self.settings.task.get("generate") and seed == self.settings.data_seed:
            raise ValueError(f"seed={seed}: the run was trained on images of this seed")
        images = make(spec, seed, 0, examples)
        if len(np.unique(images.labels)) < 2:
            raise ValueError(f"examples={examples}: all have the same label; give more")
        return images

    @torch.no_grad()
    def answers(self, pixels: np.ndarray, batch: int) -> Tensor:
        """Return the logits, float32 (n, 2) on the CPU, of uint8 images, `batch` at a time."""
        tokens = torch.from_numpy(pixels.reshape(len(pixels), -1)[:, self.order])
        with autocast(self.device, self.dtype):
            parts = tokens.split(batch)
            return torch.cat([self.model(part.to(self.device)).float().cpu() for part in parts])


def trained(run: str | Path, device: str | None = None) -> Trained:
    """Return the model in the folder of a run; device: None for cuda if there is a GPU, else cpu.

    Raises ValueError for no such run or device, or a run of another task.
    """
    folder, place = Path(run), find_device(device)
    settings = read_settings(folder, Settings)
    name = settings.task.get("name")
    if name not in PATHFINDER or settings.pretrain:
        raise ValueError(f"run={folder}: give a classifier of Pathfinder, not of {name}")
    grid = (PATHFINDER[name], PATHFINDER[name])
    blank = Split(np.zeros((1, grid[0] * grid[1]), np.uint8), np.zeros(1, np.int64))
    task = Task(name, "generated", 2, 256, dict.fromkeys(SPLITS, blank), grid)
    model, step = load_model(folder, settings, task)
    return Trained(
        settings=settings,
        model=model.to(place).eval(),
        step=step,
        order=pixel_order(grid, settings.task.get("order") or "row"),
        device=place,
        dtype=DTYPES[settings.precision or "fp32"] if place.type == "cuda" else torch.float32,
    )


# ---- the questions


def shortcuts(options: dict[str, Any], command: str) -> str:
    """Measure every size, contour and number of paddles that the rows do not have."""
    seed, n, tested = (options[name] for name in ("seed", "examples", "tested"))
    check_seed(seed)
    check_options(options, whole="examples tested steps")
    counts, device = as_list(options["paddles"]), find_device(options["device"])
    specs = [spec(s, c) for s in as_list(options["size"]) for c in as_list(options["contour"])]
    check_paddles("paddles", counts, min(each.contour for each in specs))
    rows = Rows(options["rows"], KEY, SOURCES, allow_changes=options["allow_changes"])
    common = {name: options[name] for name in ("seed", "examples", "tested", "steps")}
    for each in specs:
        what = {"size": each.size, "contour": each.contour, "images_version": VERSION, **common}
        wanted = [{**what, "paddles": k, **rows.origin(device, command)} for k in counts]
        if missing := [row for row in wanted if rows.find(row) is None]:
            data = seen_on_disk(each, seed, n + tested, Path(options["cache_dir"]))
            (x, x_test), (y, y_test) = (part.split([n, tested]) for part in data)
        for row in missing:
            steps, k = options["steps"], row["paddles"]
            probe = fit(each, k, x, y, steps=steps, seed=seed, device=device)
            rows.append(row | {"right": int((says_yes(probe, x_test) == (y_test > 0)).sum())})
    return tables(frame(rows.rows))["shortcuts"]


def cuts(options: dict[str, Any], command: str) -> str:
    """Ask a trained model about rows of BLOCK images for each n of `erased` and each place."""
    run, erased, seed = (
        trained(options["run"], options["device"]),
        options["erased"],
        options["seed"],
    )
    check_options(options, whole="batch examples probe_examples probe_steps")
    strokes = run.settings.task.get("strokes")
    if isinstance(strokes, list):
        raise ValueError(f"run={options['run']} has images of several strokes, {strokes}")
    each = run.spec(strokes)
    check_paddles("erased", erased, each.contour)
    check_paddles("paddles", [options["paddles"]], each.contour)
    images = run.fresh(each, seed, options["examples"])
    rows = Rows(options["rows"], KEY, SOURCES, allow_changes=options["allow_changes"])
    names = ("run", "seed", "paddles", "probe_examples", "probe_steps")
    common = {name: options[name] for name in names} | {"images_version": VERSION, "step": run.step}
    wanted = [
        {**common, "first": first, "images": len(images.labels[first : first + BLOCK])}
        | {"left_out": n, "place": PLACES[middle], **rows.origin(run.device, command)}
        for n in erased
        for middle in PLACES
        if n or middle
        for first in range(0, len(images.labels), BLOCK)
    ]
    if missing := [row for row in wanted if rows.find(row) is None]:
        n, steps = options["probe_examples"], options["probe_steps"]
        x, y = seen_on_disk(each, seed + 1, n, Path(options["cache_dir"]))  # of other images
        k = options["paddles"]
        probe = fit(each, k, x, y, steps=steps, seed=seed + 1, device=run.device)
        probed = says_yes(probe, x.new_tensor(seen(images, each))).numpy()
    for row in progress(missing, len(missing), f"{BLOCK} images at a time"):
        here = slice(row["first"], row["first"] + BLOCK)
        part = Images(*(getattr(images, field.name)[here] for field in fields(Images)))
        without = paddles_at(
            part, each.contour, row["left_out"], middle=row["place"] == PLACES[True]
        )
        yes = run.answers(redraw(part, each, ~without), options["batch"]).argmax(1).numpy() == 1
        rows.append(row | _counts(part.labels == 1, yes, probed[here]))
    return tables(frame(row for row in map(rows.find, wanted) if row))["cuts"]


def _counts(curve: np.ndarray, yes: np.ndarray, probed: np.ndarray) -> dict[str, int]:
    """Count images with a curve, and others: all, yes of the model, of the probe, and of both."""
    counted = {"": True, "_yes": yes, "_probe": probed, "_both": yes & probed}
    return {
        name + end: int((of & what).sum())
        for name, of in (("curve", curve), ("other", ~curve))
        for end, what in counted.items()
    }


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


def strokes(options: dict[str, Any], command: str) -> str:
    """Ask a trained model about images with each of `strokes`, or with these `parts` of them."""
    check_options(options, whole="batch examples")
    parts = list(STROKES) if options["parts"] is None else options["parts"]
    for part in parts:
        choose("parts", part, STROKES)
    run = trained(options["run"], options["device"])
    names = [field for part in parts for field in STROKES[part]]
    head = "strokes of" if options["parts"] is None else f"{' and '.join(parts)} of"
    lines = [[head, "accuracy (%)", "loss"]]
    for size in options["strokes"]:
        other = run.spec(size)
        look = replace(run.spec(), **{name: getattr(other, name) for name in names})
        images = run.fresh(look, options["seed"], options["examples"])
        logits, labels = (
            run.answers(images.pixels, options["batch"]),
            torch.from_numpy(images.labels),
        )
        accuracy = (logits.argmax(1) == labels).float().mean().item()
        loss = F.cross_entropy(logits, labels.long()).item()
        lines.append([str(size), f"{100 * accuracy:.1f}", f"{loss:.2f}"])
        print(f"strokes of {size} done", file=sys.stderr, flush=True)
    return markdown(lines, left=())


def crops(each: Spec, seed: int, n: int, side: int, shift: int) -> tuple[Tensor, Tensor]:
    """Return crops around the first mark of n images, int32 (n, side * side), and their classes,
    int64 (n,).

    shift: how many pixels the mark may be off the middle. Pixels beyond the border are 0.
    """
    images = make(each, seed, 0, n)
    angle = headings(images, each)[np.arange(n), images.info[:, ORIGIN]]
    classes = np.floor(angle % (2 * np.pi) / (2 * np.pi) * CLASSES).astype(np.int64) % CLASSES
    rng = np.random.default_rng(seed)
    corners = images.info[:, MARKERS : MARKERS + 2] - side // 2
    corners = corners + rng.integers(-shift, shift + 1, corners.shape)
    wide = np.pad(images.pixels, ((0, 0), (side, side), (side, side)))
    found = [
        image[y + side : y + 2 * side, x + side : x + 2 * side]
        for image, (y, x) in zip(wide, corners, strict=True)
    ]
    pixels = np.stack(found).reshape(n, -1).astype(np.int32)
    return torch.from_numpy(pixels), torch.from_numpy(classes)


def directions(options: dict[str, Any], command: str) -> str:
    """Train a small model on the direction of the paddle at the first mark, in eight classes."""
    seed, side, shift, steps = (options[name] for name in ("seed", "side", "shift", "steps"))
    check_seed(seed)
    check_options(options, whole="examples side steps batch warmup", positive="lr")
    own = spec(options["size"], options["contour"], strokes=options["strokes"])
    other = spec(options["other"], own.contour)
    if side > min(own.size, other.size) or shift not in range(side // 2 + 1):
        raise ValueError(f"side={side} shift={shift}: give a crop of the images, shift <= side / 2")
    x, y = crops(own, seed, options["examples"], side, shift)
    # other images than those for training, at both sizes
    tests = [crops(each, seed + 1, TESTED, side, shift) for each in (own, other)]
    torch.manual_seed(seed)
    sizes = model_config(**options["model"])
    model = Classifier(256, side**2, CLASSES, grid=(side, side), model=sizes)
    optimizer = torch.optim.AdamW(model.parameters(), options["lr"], (0.9, 0.98), weight_decay=0.0)
    losses: list[float] = []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = options["lr"] * min(1.0, step / options["warmup"])
        batch = torch.randint(len(x), (options["batch"],))
        loss = F.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % EVERY == 0:
            recent = sum(losses[-EVERY:]) / EVERY
            print(f"step {step} of {steps}  loss {recent:.3f}", file=sys.stderr, flush=True)
    model.eval()
    with torch.no_grad():
        right = [torch.cat([model(a) for a in x.split(100)]).argmax(1) == y for x, y in tests]
    first, second = (100 * each.float().mean().item() for each in right)
    words = [f"{k} {options['model'][k]}" for k in ("embedding", "positions", "rotary")]
    look = f" with the strokes of {options['strokes']}" if options["strokes"] else ""
    return (
        f"{', '.join(words)}: loss {sum(losses[-EVERY:]) / len(losses[-EVERY:]):.2f}, "
        f"test {first:.1f} % on {own.size}{look}, {second:.1f} % on {other.size}"
    )


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
    heads = ["left out", "at", "images with a curve", "yes", "as the probe", "right against it"]
    lines = [[*heads, "images without", "yes", "as the probe", "right against it"]]
    for (n, place), of in rows.groupby(["left_out", "place"], sort=False):
        cells = [str(n), place if n else MISSING]
        for name, label in (("curve", True), ("other", False)):
            ends = ("", "_yes", "_probe", "_both")
            count, yes, probe, both = (int(of[name + end].sum()) for end in ends)
            same = count - yes - probe + 2 * both
            # of the images that the probe answers wrongly, those that the model answers rightly
            against = (yes - both, count - probe) if label else (probe - both, probe)
            cells += [str(count), interval(yes, count), interval(same, count), interval(*against)]
        lines.append(cells)
    return markdown(lines, left=(1,))


def interval(count: int, of: int) -> str:
    """Return a share in percent with half of its 95 % interval (Wilson's around its middle)."""
    if not of:
        return MISSING
    share, z2 = count / of, 1.96**2
    half = 1.96 * (share * (1 - share) / of + z2 / (4 * of * of)) ** 0.5 / (1 + z2 / of)
    return f"{100 * share:.1f} ± {100 * half:.1f}"


def check_paddles(name: str, counts: Sequence[Any], most: int) -> None:
    if not isinstance(counts, list) or not counts or any(k not in range(most + 1) for k in counts):
        raise ValueError(f"{name}={counts}: give 0 to {most}, the paddles of a curve")


QUESTIONS = {"shortcuts": shortcuts, "cuts": cuts, "strokes": strokes, "directions": directions}


@program("probe", module="experiments.pathfinder.studies.probe")
def main(options: dict[str, Any], command: str) -> None:
    choose("ask", options["ask"], QUESTIONS)
    shared = {name: value for name, value in options.items() if name not in QUESTIONS}
    print(QUESTIONS[options["ask"]](shared | options[options["ask"]], command))


if __name__ == "__main__":
    main()
