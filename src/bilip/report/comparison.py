"""Two records side by side: what changed, and whether the two may be compared at all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bilip.record import AuditRecord, Quantity, Status
from bilip.report.format import USE_TITLES, as_float, clean, number, plural, word, written
from bilip.report.markdown import markdown_table, plain
from bilip.report.summary import STATUS_WORDS, non_finite, ordered_verdicts, worst_condition
from bilip.report.terminal import Teller

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Change", "Comparison", "VerdictChange", "compare", "comparison_markdown", "print_comparison"]

SAME = 1.25
LOST = Quantity("share_non_finite", "Inf/NaN", "share", "lower")
WRONG = Quantity("share_lost", "wrong or Inf/NaN", "share", "lower")
MEDIAN = Quantity("relative_median", "median error", "relative", "lower")
TAIL = Quantity("relative_p999", "p99.9 error", "relative", "lower")
CONDITION = Quantity("condition", "condition", "", "lower")


@dataclass(frozen=True)
class VerdictChange:
    """One use before and after; `word` is better, worse, same or unknown."""

    use: str
    before: Status | None
    after: Status | None
    word: str


@dataclass(frozen=True)
class Change:
    """One number of one source before and after.

    Attributes:
        source: Name of the source.
        name: Name of the number.
        before: Its value before.
        after: Its value after.
        ratio: After divided by before; NaN where that means nothing.
        word: better, worse, same (within a factor of 1.25) or unknown.
        quantity: What the number is.
    """

    source: str
    name: str
    before: float
    after: float
    ratio: float
    word: str
    quantity: Quantity


@dataclass(frozen=True)
class Comparison:
    """What changed from one record to another.

    Attributes:
        before: Name of the first model.
        after: Name of the second.
        verdicts: Use by use.
        changes: Source by source, number by number.
        warnings: What differs and should not, for the comparison to mean something.
    """

    before: str
    after: str
    verdicts: tuple[VerdictChange, ...]
    changes: tuple[Change, ...]
    warnings: tuple[str, ...]

    @property
    def word(self) -> str:
        """The verdicts decide: worse if one got worse, else better if one got better, else the numbers in the same way."""
        for found in (self.verdicts, self.changes):
            words = {item.word for item in found}
            if words & {"worse", "better"}:
                return "worse" if "worse" in words else "better"
        return "same"


def compare(before: AuditRecord, after: AuditRecord) -> Comparison:
    """Compare two records.

    Example:
        >>> from bilip.record import AuditRecord, Measurement
        >>> def record(error):
        ...     return AuditRecord(measurements=(Measurement("reconstruction", "test", {"relative_p999": error}),))
        >>> compare(record(1e-2), record(1e-5)).word
        'better'
    """
    return Comparison(
        clean(before.model.get("name") or "before", 80),
        clean(after.model.get("name") or "after", 80),
        tuple(_verdicts(before, after)),
        tuple(_changes(before, after)),
        tuple(_warnings(before, after)),
    )


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print a comparison in 80 columns, source by source; numbers that are the same are counted, not listed.

    Example:
        >>> import io
        >>> from rich.console import Console
        >>> console = Console(width=80, record=True, file=io.StringIO())
        >>> print_comparison(compare(AuditRecord(), AuditRecord()), console)
        >>> "same" in console.export_text()
        True
    """
    teller = Teller(console)
    teller.say(f"{comparison.before} → {comparison.after}: {comparison.word}", "bold")
    for warning in comparison.warnings:
        teller.item(f"not alike: {warning}")
    if comparison.verdicts:
        teller.table(["use", "before", "after", "change"], [list(row) for row in _verdict_rows(comparison)], left=4)
    rows = [row for row in _change_rows(comparison) if row[-1] != "same"]
    for source in dict.fromkeys(row[0] for row in rows):
        teller.table(
            [source or "all", "before", "after", "ratio", "change"], [list(row[1:]) for row in rows if row[0] == source]
        )
    if len(comparison.changes) > len(rows):
        same = plural(len(comparison.changes) - len(rows), "other number")
        teller.say(f"{same}: the same within a factor of {SAME:g}", "dim")
    teller.console.print()


def comparison_markdown(comparison: Comparison) -> str:
    """A comparison as Markdown.

    Example:
        >>> print(comparison_markdown(compare(AuditRecord(), AuditRecord())).splitlines()[0])
        ## before → after: same
    """
    parts = [f"## {plain(comparison.before)} → {plain(comparison.after)}: {comparison.word}"]
    if comparison.warnings:
        parts.append("\n".join(f"- not alike: {plain(w)}" for w in comparison.warnings))
    if comparison.verdicts:
        rows = [[USE_TITLES.get(row[0], row[0]), *row[1:]] for row in _verdict_rows(comparison)]
        parts.append(markdown_table(["use", "before", "after", "change"], rows, left=4))
    if comparison.changes:
        heads = ["source", "number", "before", "after", "ratio", "change"]
        parts.append(markdown_table(heads, [list(row) for row in _change_rows(comparison)], left=2))
    return "\n\n".join(parts) + "\n"


def _verdict_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    for v in comparison.verdicts:
        sides = (STATUS_WORDS[s] if s else "not judged" for s in (v.before, v.after))
        yield (clean(v.use, 24), *sides, v.word)


def _change_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    for c in comparison.changes:
        ratio = "–" if math.isnan(c.ratio) else f"{number(c.ratio)}×"
        sides = ("–" if math.isnan(v) else written(c.quantity, v) for v in (c.before, c.after))
        yield (clean(c.source, 60), clean(c.quantity.label, 90), *sides, ratio, c.word)


def _verdicts(before: AuditRecord, after: AuditRecord) -> Iterator[VerdictChange]:
    for use in dict.fromkeys(v.use for r in (before, after) for v in ordered_verdicts(r)):
        a, b = (r.verdicts[use].status if use in r.verdicts else None for r in (before, after))
        known = {a, b} <= {Status.SAFE, Status.UNSAFE}
        changed = "same" if a == b else ("better" if b == Status.SAFE else "worse")
        yield VerdictChange(use, a, b, changed if known or a == b else "unknown")


def _changes(before: AuditRecord, after: AuditRecord) -> Iterator[Change]:
    sides = [_numbers(before), _numbers(after)]
    for source in [s for s in sides[0] if s in sides[1]]:
        for q in dict.fromkeys([*sides[0][source], *sides[1][source]]):
            a, b = (side[source].get(q, math.nan) for side in sides)
            if not (math.isnan(a) and math.isnan(b)):
                ratio = b / a if a and math.isfinite(a) and not math.isnan(b) else math.nan
                yield Change(source, q.name, a, b, ratio, _judge(a, b, q.better), q)


def _numbers(record: AuditRecord) -> dict[str, dict[Quantity, float]]:
    """By source: the round trip in five numbers, and whatever other probes measure that is judged."""
    found: dict[str, dict[Quantity, float]] = {}
    for m in record.measurements:
        if m.measured and m.probe == "reconstruction":
            found.setdefault(m.source, {}).update(
                {
                    LOST: non_finite(m),
                    WRONG: non_finite(m) + as_float(m.get("share_wrong")),
                    MEDIAN: as_float(m.get("relative_median")),
                    TAIL: as_float(m.get("relative_p999")),
                    CONDITION: worst_condition(record, m.source)[1],
                }
            )
        elif m.measured:
            judged = {q: as_float(m.get(q.name)) for q in m.quantities if q.judged and q.better}
            if judged:
                found.setdefault(m.source, {}).update(judged)
    return found


def _judge(before: float, after: float, better: str) -> str:
    if math.isnan(before) or math.isnan(after):
        return "unknown"
    if before == after or (before > 0 and after > 0 and 1 / SAME <= after / before <= SAME):
        return "same"
    return "better" if (after < before) == (better != "higher") else "worse"


def _warnings(before: AuditRecord, after: AuditRecord) -> Iterator[str]:
    if before.schema != after.schema:
        yield f"schema {before.schema} and {after.schema}"
    for key in ("library", "dtype", "device", "shape", "dimension"):
        yield from _differs(f"model's {key}", before.model.get(key), after.model.get(key))
    sides: list[dict[str, Mapping[str, Any]]] = [{str(s.get("name")): s for s in r.sources} for r in (before, after)]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        if name not in sides[0] or name not in sides[1]:
            yield f"source {clean(name, 60)} is only in the {'second' if name not in sides[0] else 'first'} record"
            continue
        for key in ("role", "count", "shape", "description"):
            yield from _differs(f"{key} of source {clean(name, 60)}", sides[0][name].get(key), sides[1][name].get(key))
    for key in ("budget", "tf32", "thresholds"):
        yield from _differs(key, before.settings.get(key), after.settings.get(key))
    yield from _differs("torch", before.environment.get("torch"), after.environment.get("torch"))


def _differs(what: str, before: Any, after: Any) -> Iterator[str]:
    if before != after:
        yield f"{what}: {word(before)[:80]} and {word(after)[:80]}"
