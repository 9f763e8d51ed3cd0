"""What is wrong with a mask, in words, before it is trained."""

import re
import textwrap
from dataclasses import dataclass, replace

from masks.analysis import findings, reachability
from masks.analysis.reach import Reach
from masks.analysis.reachability import Model
from masks.analysis.segments import Segments
from masks.analysis.stats import Stats, stats
from masks.analysis.words import count_of
from masks.checks import flag, integer
from masks.types import Mask

HARD = "\xa0"  # a space at which no line of a report is broken
MOST_DIFFERENT = 4  # layers whose speed is looked at


@dataclass(frozen=True, eq=False)
class Report:
    """What `check` found. `print` shows it.

    Attributes:
        text: what was checked, in words.
        problems: sentences on what the model cannot see, or sees and must not, and on a mask that
            saves nothing. Each names a remedy where one was found. A remedy that names a depth or a
            share of the pairs was built and tried.
        notes: sentences on what costs speed, and on what is worth knowing.
        stats: of every layer that differs.
        reach: through all layers.
    """

    text: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    stats: tuple[Stats, ...]
    reach: Reach

    @property
    def ok(self) -> bool:
        """Whether there are no problems; notes do not count."""
        return not self.problems

    def __str__(self) -> str:
        verdict = count_of(len(self.problems), "problem") if self.problems else "no problem"
        lines = textwrap.wrap(f"{self.text}: {verdict}", 100, break_long_words=False)
        for mark, sentences in (("!", self.problems), ("-", self.notes)):
            for sentence in sentences:
                whole = re.sub(
                    r"mask >> .*?(?= computes )", lambda x: x[0].replace(" ", HARD), sentence
                )
                lines += textwrap.wrap(
                    whole, 100, initial_indent=f"  {mark} ", subsequent_indent="    "
                )
        return "\n".join(lines).replace(HARD, " ")


def check(
    mask: Mask,
    seq_len: int,
    layers: int | None = None,
    causal: bool | None = None,
    *,
    heads: int | None = None,
    block_size: int | tuple[int, int] = 128,
) -> Report:
    """Look for what is wrong with a mask of self-attention.

    The problems are pairs that no depth can connect, or too few layers; queries that see nothing,
    and keys that no query sees; keys ahead of a causal query; and that every block is computed,
    though few pairs are allowed. The notes tell of computed blocks
    that are mostly masked, of rows with much more work than others, and of differences between
    heads.

    All heads count together, because a layer passes on what any of them sees, as `reach` explains.
    So do batch entries, except that the reach is that of the first one: a note says so.
    Up to 4096 tokens the reach is exact. Beyond, it is bounded by blocks, and the sentences say so.

    Args:
        seq_len: tokens.
        layers: of the model; None asks only what any depth can do.
        causal: True: no query may see ahead, and only the keys before it are wanted. False: all
            keys are. None: what the mask is.
        heads, block_size: as in `Mask.build`.

    Raises:
        ValueError: as `Mask.build`; or a mask that differs from layer to layer without `layers`.
    """
    layers = None if layers is None else integer("layers", layers, min=1)
    if causal is not None:
        flag("causal", causal)
    model = Model(mask, seq_len, layers, False, block_size, heads)
    different = list(dict.fromkeys(model.blocks))
    numbers = [stats(blocks) for blocks in different]
    leaks = not all(found.causal for found in numbers)
    claim = causal if causal is not None else not leaks
    # What looks ahead is no help to a causal model.
    allowed = mask & findings.causal() if claim and leaks else mask
    seen = replace(model, mask=allowed, causal=claim)

    problems: list[str] = []
    notes: list[str] = []
    for i, (blocks, found) in enumerate(zip(different, numbers, strict=True)):
        layer = model.blocks.index(blocks)
        own, segments = mask.layer(layer), Segments.of(blocks)
        wrong, worth = findings.holes(segments), findings.between_heads(segments)
        if claim and not found.causal:
            wrong.insert(0, findings.ahead(mask, found, stats(seen.blocks[layer]).pairs))
        elif causal is None and not found.causal:
            worth = findings.precedence(own, blocks) + worth
        if i < MOST_DIFFERENT:
            slow, costs = findings.speed(own, found, heads)
            wrong, worth = wrong + slow, worth + costs
        where = f"Layer {layer}: " if len(different) > 1 else ""
        problems += [where + sentence for sentence in wrong]
        notes += [where + sentence for sentence in worth]
    if (entries := max(blocks.batch for blocks in different)) > 1:
        notes.insert(
            0,
            f"The {entries} batch entries have masks of their own, and are not separated here: the"
            " reach is that of the first one, and the rest holds for all of them together. Check"
            " the mask of each entry by itself.",
        )
    unseen, worth = reachability.findings(seen)
    depth = f", {count_of(layers, 'layer')}" if layers else ""
    text = f"{mask} at {seq_len} tokens{depth}{', causal' if claim else ''}"
    return Report(text, (*problems, *unseen), (*notes, *worth), tuple(numbers), seen.reach)
