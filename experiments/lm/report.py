"""Tables and figures of the plans, from their rows and nothing else."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from experiments.common.files import read_text, write_text
from experiments.common.text_table import MISSING, aligned, markdown
from experiments.lm.attention import resolve
from experiments.lm.model import LEARNED, ROTARY
from experiments.lm.rows import ModelRow, PointRow
from experiments.lm.windows import NEXT

CURVES = ("same", "contexts")  # the plans whose figures have curves; the others have points
LOOKS = (  # of the first cases, and the same again
    ("#000000", "o", "-"),
    ("#0072B2", "s", "--"),
    ("#D55E00", "^", "-."),
    ("#009E73", "v", ":"),
    ("#CC79A7", "D", "-"),
    ("#E69F00", "P", "--"),
    ("#56B4E9", "X", "-."),
    ("#888888", "*", ":"),
)


class Case:
    """The rows of one case on one device, over seeds: newest of each seed."""

    def __init__(self, rows: Sequence[ModelRow]):
        self.rows = list({row.seed: row for row in rows}.values())
        self.first = self.rows[0]

    def mean(self, name: str) -> float | None:
        values = [getattr(row, name) for row in self.rows]
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    def text(self, name: str, digits: str = ".3f") -> str:
        """The mean over the seeds, and half their range where there are several."""
        value = self.mean(name)
        if value is None:
            return MISSING
        values = [getattr(row, name) for row in self.rows]
        spread = (max(values) - min(values)) / 2 if len(values) > 1 else 0
        return f"{value:{digits}}" + (f" ± {spread:{digits}}" if len(values) > 1 else "")

    @property
    def perplexity(self) -> str:
        found = [math.exp(row.val_loss) for row in self.rows]
        text = f"{fmean(found):.2f}"
        return text + (f" ± {(max(found) - min(found)) / 2:.2f}" if len(found) > 1 else "")


def report(
    plan: str,
    rows: Sequence[ModelRow],
    points: Sequence[PointRow],
    figures: Path,
    pages: Sequence[str],
) -> str:
    """The tables of a plan as text; writes its figures, and the tables into pages."""
    if not rows:
        return f"plan={plan}: no run is complete yet; the same command continues"
    for page in pages:
        _fill(Path(page), plan, rows)
    groups = grouped(rows)
    texts = [f"{about(some)}\n{aligned(TABLES[plan](some))}" for some in groups]
    drawn: Counter[Path] = Counter()
    lengths = [(some[0].first.steps, i) for i, some in enumerate(groups)]
    for _, i in sorted(lengths, reverse=True):
        paths = _draw(plan, groups[i], points, figures, drawn)
        texts[i] += "".join(f"\n{path}" for path in paths)
    return "\n\n".join(texts)


def grouped(rows: Sequence[ModelRow]) -> list[list[Case]]:
    """The cases of each table, of one model, data, recipe, tokens a step, steps and device."""
    tables: dict[tuple[object, ...], dict[str, list[ModelRow]]] = {}
    for row in rows:
        shared = row.model, row.data_digest, row.tokenizer, row.recipe, row.tokens, row.device
        shared += row.precision, row.objective, *_unusual(row)
        context = 0 if row.plan == "contexts" else row.context
        steps = 0 if row.plan == "equal_time" else row.steps
        mode = row.mode if row.plan in CURVES else ""  # MoBA is never compiled
        tables.setdefault((*shared, context, steps, mode), {}).setdefault(row.case, []).append(row)
    return [[Case(some) for some in cases.values()] for cases in tables.values()]


def _unusual(row: ModelRow) -> list[str]:
    """Options that differ from those of the plan, and that no case of it changes."""
    names = "positions", "packed", "provider", "mask"
    given = {name: getattr(row, name) for name in names}
    usual = {"positions": ROTARY if row.plan == "contexts" else LEARNED, "packed": False}
    usual["provider"] = row.provider if row.plan == "same" else "sparse"
    dense = str(resolve(None, causal=row.objective == NEXT))
    usual["mask"] = dense if row.plan in CURVES else row.mask
    return [f"{name}={value}" for name, value in given.items() if value != usual[name]]


def about(cases: Sequence[Case]) -> str:
    """What the cases of a table share, in a line."""
    row = cases[0].first
    seeds = max(len(case.rows) for case in cases)
    modes = "; ".join(sorted({case.first.mode for case in cases}))
    steps = (
        f"the time of {row.steps} steps of {row.case}"
        if row.plan == "equal_time"
        else (f"{row.steps} steps")
    )
    return (
        f"{row.model} ({row.params / 1e6:.3g} M parameters), {row.data} ({row.tokenizer}), "
        f"{row.tokens} tokens a step, {steps}, "
        f"{'a single run each' if seeds == 1 else f'{seeds} seeds'}; {row.device}, "
        f"{row.precision}, {modes}, {row.date[:10]}"
        + "".join(f"; {words}" for words in (row.recipe, *_unusual(row)) if words)
    )


# ---- tables


def same_table(cases: Sequence[Case]) -> list[list[str]]:
    """Loss, its difference to standard attention, time and memory."""
    base = next((case for case in cases if case.first.provider == "standard"), cases[0])
    head = "attention;train loss;difference;validation loss;ms a step;speed-up;saved MiB;peak MiB"
    table: list[list[str]] = [[*head.split(";")]]
    for case in cases:
        table.append(
            [
                case.first.case,
                case.text("train_loss", ".4f"),
                f"{difference(case, base):.3f} %",
                case.text("val_loss", ".4f"),
                f"{case.mean('ms_step'):.4g}",
                f"{(base.mean('ms_step') or 0) / (case.mean('ms_step') or 1):.2f}x",
                _whole(case.mean("saved_mib")),
                _whole(case.mean("peak_mib")),
            ]
        )
    return table


def difference(case: Case, base: Case) -> float:
    """The largest difference of the training loss of a seed, in percent: mean of 100 steps."""
    by_seed = {row.seed: row.train_loss for row in base.rows}
    found = [
        100 * abs(row.train_loss - by_seed[row.seed]) / by_seed[row.seed]
        for row in case.rows
        if row.seed in by_seed
    ]
    return max(found, default=math.nan)


def context_table(cases: Sequence[Case]) -> list[list[str]]:
    """Perplexity and time by context, at equal tokens a step."""
    head = "context;windows a step;perplexity;validation loss;last quarter;ms a step;saved MiB"
    table: list[list[str]] = [[*head.split(";")]]
    for case in sorted(cases, key=lambda case: case.first.context):
        table.append(
            [
                str(case.first.context),
                str(case.first.batch),
                case.perplexity,
                case.text("val_loss"),
                case.text("late_loss"),
                f"{case.mean('ms_step'):.4g}",
                _whole(case.mean("saved_mib")),
            ]
        )
    return table


def mask_table(cases: Sequence[Case]) -> list[list[str]]:
    """Perplexity against density: of the blocks, and of the pairs against dense attention."""
    head = "name;mask;block density;pairs;steps;perplexity;validation loss;ms a step"
    table: list[list[str]] = [[*head.split(";")]]
    for case in sorted(cases, key=lambda case: -(case.mean("pairs") or 1)):
        table.append(
            [
                case.first.case,
                f"`{case.first.mask}`",
                _share(case.mean("density")),
                _share(case.mean("pairs")),
                _whole(case.mean("steps")),
                case.perplexity,
                case.text("val_loss"),
                f"{case.mean('ms_step'):.4g}",
            ]
        )
    return table


TABLES: dict[str, Callable[[Sequence[Case]], list[list[str]]]] = {
    "same": same_table,
    "contexts": context_table,
    "masks": mask_table,
    "equal_time": mask_table,
}


def _whole(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0f}"


def _share(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f} %"


def _fill(path: Path, plan: str, rows: Sequence[ModelRow]) -> None:
    """Puts the tables of a plan between <!-- lm: PLAN --> and <!-- end --> of a page."""
    text = read_text(path, "name another page", f"pages=[{path}]")
    filled = filled_page(text, plan, rows)
    write_text(path, filled, "pages")


def filled_page(text: str, plan: str, rows: Sequence[ModelRow]) -> str:
    """A page with the tables of a plan. Raises ValueError if it has no place for them."""
    parts = [f"{markdown(TABLES[plan](some))}\n\n{about(some)}." for some in grouped(rows)]
    body = "\n\n".join(parts)
    pattern = rf"(<!-- lm: {plan} -->)\n.*?(<!-- end -->)"
    new = re.compile(pattern, re.DOTALL)
    if not new.search(text):
        raise ValueError(f"the page has no line <!-- lm: {plan} --> with <!-- end --> after it")
    return new.sub(lambda found: f"{found[1]}\n{body}\n{found[2]}", text)


# ---- figures


def _draw(
    plan: str,
    cases: Sequence[Case],
    points: Sequence[PointRow],
    folder: Path,
    drawn: Counter[Path],
) -> list[Path]:
    """The figure of a table: curves of training, loss against position, loss against density.

    drawn: how many tables had the same name before. The first has it alone, the others a number.
    """
    from matplotlib import pyplot as plt

    from experiments.common import figures as f

    row = cases[0].first
    folder.mkdir(parents=True, exist_ok=True)
    context = "" if plan == "contexts" else row.context
    stem = folder / f.file_name("lm", plan, row.model, context, row.device)
    drawn[stem] += 1
    if drawn[stem] > 1:
        stem = stem.with_name(f"{stem.name}-{drawn[stem]}")
    if plan not in CURVES:  # one look for a mask in all figures
        cases = sorted(cases, key=lambda case: case.first.case)
    with f.style():
        figure, axes = plt.subplots(figsize=(f.COLUMN, 2.5))
        for case, look in zip(cases, LOOKS * 2, strict=False):
            first, style = case.first, f.Style(*look)
            if plan not in CURVES:
                x = [100 * (case.mean("pairs") or 1)]
                f.curve(axes, x, [case.mean("val_loss") or 0], style, first.case, line=False)
                continue
            curve = "step" if plan == "same" else "position"
            found = [p for p in points if (p.source, p.date) == (first.source, first.date)]
            found = [p for p in found if (p.plan, p.case, p.curve) == (plan, first.case, curve)]
            f.curve(axes, [p.x for p in found], [p.loss for p in found], style, first.case)
        labels = {"same": "step", "contexts": "position in the window"}
        if plan == "contexts":
            longest = max(case.first.context for case in cases)
            f.length_axis(axes, [n for i in range(0, 20, 2) if (n := longest >> i)])
        elif plan != "same":
            axes.set_xlim(0, 105)
        axes.set_xlabel(labels.get(plan, "pairs (% of the causal ones)"))
        axes.set_ylabel("training loss" if plan == "same" else "validation loss")
        f.legend(figure, [axes])
        return f.save(figure, stem, ("png",))
