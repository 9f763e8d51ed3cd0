"""The run of experiments.papers.attention_table: settings in order, predictions, rows."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

import masks
from experiments.common.records import OK, Records
from experiments.papers.attention.measure import (
    DIRECTIONS,
    PaddedCase,
    PaddedGate,
    Step,
    draw,
    free,
    gate_error,
    time_call,
    why,
)
from experiments.papers.attention.methods import CAUSAL, PUBLISHED, VARIANTS, Setting, compiled
from experiments.papers.attention.resume import LEFT_OUT, resumed
from experiments.papers.attention.rows import LengthRow

Rows = dict[str, LengthRow]  # by direction


@dataclass
class Run:
    """Measures settings, the short ones first, and predicts which of the long ones take too long.

    seconds: of repeats a measurement.
    limit_s: the longest call that is measured.
    """

    device: torch.device
    seconds: float
    limit_s: float
    records: Records[LengthRow]
    command: str
    last: dict[tuple[object, ...], LengthRow] = field(default_factory=dict)

    def rows(self, setting: Setting) -> Rows:
        """The rows of a setting before it is measured, or as the records hold them."""
        facts = asdict(setting)
        del facts["causal"]  # the mask says so
        origin = LengthRow.origin(str(self.device), self.command)
        mask, density = mask_of(setting)
        rows = [
            LengthRow(direction=direction, mask=mask, density=density, **facts, **origin)
            for direction in DIRECTIONS
        ]
        return {row.direction: self.records.find(row) or row for row in rows}

    def go(self, settings: Sequence[Setting], minutes: float | None) -> Iterator[LengthRow]:
        """Every row, measured or known; ends early after `minutes`, or when the GPU is lost."""
        groups = (
            (list(self.rows(setting).values()), partial(self._group, setting))
            for setting in settings
        )
        for row in resumed(groups, self.records, minutes):
            if row.status == OK:
                self.last[_series(row)] = row
            yield row

    def _group(self, setting: Setting, rows: Sequence[LengthRow]) -> list[LengthRow]:
        return list(self.measured(setting, {row.direction: row for row in rows}).values())

    def measured(self, setting: Setting, rows: Rows) -> Rows:
        """The rows with times, or with the status that says why there are none."""
        reason = setting.unsupported(self.device)
        left = {d: reason or self.too_slow(setting, row) for d, row in rows.items()}
        if all(left[d] or row.status == OK for d, row in rows.items()):  # none to be measured
            return {d: r if r.status == OK else replace(r, status=left[d]) for d, r in rows.items()}
        try:
            return self._measured(setting, rows, left)
        except Exception as error:
            return {d: replace(row, status=why(error)) for d, row in rows.items()}
        finally:
            free(self.device)

    def _measured(self, setting: Setting, rows: Rows, left: dict[str, str | None]) -> Rows:
        made = setting.make(self.device)
        lengths = setting.lengths(self.device)
        case = PaddedCase(
            **asdict(setting.case(made)), lengths=() if lengths is None else tuple(lengths.tolist())
        )
        qkv = draw(case, self.device)
        plan = None if lengths is None else made.plan(lengths, qkv[0].dtype)
        run = compiled(made, self.device) if setting.about.compiled else made
        q, k, v = qkv
        if made.shared_qk:
            k = q
        step = Step(lambda q, k, v: run(q, k, v, plan), (q, k, v), tuple(made.parameters()))
        error = None
        if setting.about.exact:
            gate = PaddedGate(case, q, k, v)
            made.eval()  # without dropout
            error = gate_error(gate, step)
            made.train()
            if wrong := gate.verdict(error):
                return {d: replace(r, status=wrong, error=error) for d, r in rows.items()}
            del gate
        saved = step.saved_mib()
        peak = step.peak_mib(self.device) if left["both"] is None else None
        wanted = [d for d in DIRECTIONS if left[d] is None]
        found = {d: replace(r, status=left[d] or "", error=error) for d, r in rows.items()}
        for direction, call in step.calls(wanted).items():
            call()
            times = time_call(call, self.device, self.seconds)
            found[direction] = replace(found[direction], status=OK, **times._asdict())
        found["both"] = replace(found["both"], saved_mib=saved, peak_mib=peak)
        return found

    def too_slow(self, setting: Setting, row: LengthRow) -> str | None:
        """Why a call is left out, by the growth of its work since the last length, or None."""
        known = self.last.get(_series(row))
        if known is None or known.n > setting.n:
            return None
        growth = (setting.n / known.n) ** (2 if setting.about.quadratic else 1)
        predicted = known.ms / 1000 * growth * setting.batch / known.batch
        if predicted <= self.limit_s:
            return None
        return f"{LEFT_OUT}: a call would take about {predicted:.2g} s, limit_s={self.limit_s:g}"


def _series(row: LengthRow) -> tuple[object, ...]:
    return row.method, row.direction, row.dropout, row.padding, row.head_dim, row.causal


def mask_of(setting: Setting) -> tuple[str, float | None]:
    """The mask of a block-sparse or causal method and its density; empty for the others."""
    if setting.causal and setting.about.kind not in CAUSAL:
        return str(masks.causal()), None
    if setting.about.kind not in ("sparse", *PUBLISHED) and not setting.causal:
        return "", None
    case = setting.case(setting.make(torch.device("cpu")))
    return case.mask, case.density


def settings(options: dict[str, Any], methods: Sequence[str], dtype: str) -> list[Setting]:
    """The settings of the options: the plain table first, and in it the short lengths.

    From 131,072 tokens on, batches shrink so that the tokens of a batch stay those of 65,536.
    """
    shape: dict[str, Any] = {"dtype": dtype}
    shape |= {name: options[name] for name in ("heads", "head_dim", "causal")}
    batch, p = options["batch"], options["dropout"]
    return [
        Setting(
            name, max(1, min(batch, batch * 65536 // n)), n=n,
            dropout=p if dropout else 0.0, padding=padding, **shape,
        )
        for dropout, padding in (VARIANTS[variant] for variant in options["variants"])
        for n in sorted(options["lengths"])
        for name in methods
        if n <= options["peers_to"] or name in ("flash", "sparse")
    ]  # fmt: skip
