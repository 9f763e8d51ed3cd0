"""Writes docs/gallery.md and its pictures: every pattern, transform and preset of `masks`.

    python -m experiments.tools.gallery            # into docs/, from the root of the repository

A picture shows 256 x 256 pairs of tokens, a pixel each, with the colours of `Mask.draw` for blocks
of 16. `figures/masks.png` shows patterns at the length of a benchmark side by side.
"""

import sys
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from numpy.typing import NDArray
from PIL import Image

import masks
from experiments.common import figures
from experiments.common.files import write_text, write_whole
from masks.draw import COLOURS, tokens
from masks.registry import PATTERNS, TRANSFORMS, Example

TOKENS, BLOCK = 256, 16
JOINED = (  # no pattern of its own
    Example("(local(24) | butterfly(16)) & causal()", "or, and"),
    Example("causal() - sliding(48)", "without"),
)
OVERVIEW = (  # of 16384 tokens
    "local(1024) & causal()",
    "dilated(2048, 8)",
    "strided(1024)",
    "local(256) | global_at((0,))",
    "butterfly(128)",
    "local(256) | butterfly(128) | global_tokens(128)",
    "bigbird(128, 3, per_head=False)",
    "random_blocks(0.125)",
)
HEAD = f"""# Gallery

Made by `python -m experiments.tools.gallery`. The tests compare every count with the mask.
Click a picture for its full size. [Eight patterns at 16384 tokens](figures/masks.png).

A picture has {TOKENS} queries (down) and {TOKENS} keys (across), a pixel for every pair, and
blocks of {BLOCK} x {BLOCK}: blue is allowed in a full block, orange in a partial one, grey is not.
*Pairs* counts the allowed pairs of N tokens, B to a token block and n = N / B blocks, L = log2 of
N or n. *Blocks* is the share of non-empty blocks in the picture. Numbers of sources are arXiv's.
"""


def write(out: Path) -> list[Path]:
    """Write the page and the pictures into `out`; their paths."""
    pictures = out / "figures" / "gallery"
    lines, written = [HEAD], []
    for section, examples in sections().items():
        lines.append(f"## {section}\n\n| | use | pairs | blocks | source |\n|---|---|---|---|---|")
        for example in examples:
            path = pictures / f"{figures.file_name(example.code)[:60].strip('-')}.png"
            blocks = build(example)
            codes = tokens(blocks, (0, TOKENS - 1), (0, TOKENS - 1), batch=0, head=example.head)
            save(codes, path)
            written.append(path)
            lines.append(row(example, path.relative_to(out), blocks))
        lines.append("")
    page = out / "gallery.md"
    write_text(page, "\n".join(lines), "out")
    return [page, *written, overview(pictures.parent / "masks.png")]


def overview(path: Path) -> Path:
    """Draw eight patterns side by side, with their density; return the path."""
    with figures.style():
        size, dpi = (figures.PAGE, 4.7), figures.RC["savefig.dpi"]  # a pixel is one of the axes
        figure, grid = plt.subplots(2, 4, figsize=size, dpi=dpi)
        handles: list[Any] = []
        for axes, text in zip(grid.flat, OVERVIEW, strict=True):
            blocks = masks.parse(text).build(16384)
            blocks.draw(ax=axes)
            axes.set(xlabel="", ylabel="", xticks=[], yticks=[])
            title = f"{fill(blocks.text, 30)}\n{blocks.n_q} tokens, density {blocks.density:.3f}"
            axes.set_title(title, fontsize=7)
            axes.spines[:].set(visible=True, color="0.7", lw=0.6)
            if legend := axes.get_legend():
                handles = max(handles, legend.legend_handles, key=len)
                legend.remove()
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
        return figures.save(figure, path.with_suffix(""), ["png"])[0]


def sections() -> dict[str, list[Example]]:
    """Return the examples that patterns and transforms are registered with, by section."""
    entries = {entry.function: entry for entry in (PATTERNS | TRANSFORMS).values()}
    found: dict[str, list[Example]] = {}
    for entry in entries.values():
        if entry.function.__module__.startswith("masks."):
            found.setdefault(entry.section, []).extend(entry.examples)
    found["Composition"] = [*found.pop("Composition"), *JOINED]  # after the patterns
    return found


def build(example: Example) -> masks.BlockMask:
    """Return the block mask of an example."""
    mask = eval(example.code, dict(vars(masks)))  # noqa: S307 - of the registry; some are no texts
    return mask.build(TOKENS, block_size=BLOCK, heads=2 if mask.per_head else None)


def row(example: Example, picture: Path, blocks: masks.BlockMask) -> str:
    """Return a line of a table in Markdown."""
    count = example.count.replace("**2", "²").replace("*", "\N{MIDDLE DOT}")
    found = blocks.stats(head=example.head)
    pairs = f"{count} = {found.pairs}" if count else str(found.pairs)
    code = example.code.replace("|", "\\|")
    return (
        f'| <img src="{picture.as_posix()}" width="128" alt=""> | `{code}`<br>{example.use} | '
        f"{pairs} | {found.block_density:.3g} | {example.source} |"
    )


def save(codes: NDArray[np.uint8], path: Path) -> None:
    """Write 0 empty, 1 partial, 2 full as a PNG of three colours."""
    image = Image.fromarray(codes, "P")
    image.putpalette([int(c[i : i + 2], 16) for c in COLOURS.values() for i in (1, 3, 5)])
    write_whole(path, lambda file: image.save(file, format="png", optimize=True, bits=2), "out")


def main() -> None:
    if len(sys.argv) > 1:
        sys.exit(f"error: {sys.argv[1]}: there are no options; docs/ of this folder is written")
    if not Path("docs").is_dir():
        sys.exit("error: no folder docs here: go to the root of the repository")
    paths = write(Path("docs"))
    print(f"{len(paths)} files, {sum(path.stat().st_size for path in paths) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
