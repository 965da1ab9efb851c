"""What a record says in a few lines; the terminal, Markdown and the page tell the same story from it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bilip.record import USES, AuditRecord, Measurement, Status, Verdict
from bilip.report.format import USE_TITLES, as_float, clean, number, plural, sentence, shape, share, when, written

STATUS_WORDS = {Status.SAFE: "safe", Status.UNSAFE: "UNSAFE", Status.NOT_MEASURED: "not measured"}


@dataclass(frozen=True)
class SourceLine:
    """Reconstruction on one source, in words."""

    name: str
    role: str
    count: str
    non_finite: str
    wrong: str
    median: str
    p999: str
    condition: str
    reason: str = ""


@dataclass(frozen=True)
class Summary:
    """A record in a few lines; `advice` holds the uses and what to do for them."""

    name: str
    facts: tuple[str, ...]
    headline: str
    verdicts: tuple[Verdict, ...]
    sources: tuple[SourceLine, ...]
    blame: tuple[str, ...]
    failures: tuple[str, ...]
    advice: tuple[tuple[tuple[str, ...], str], ...]

    @property
    def advice_lines(self) -> tuple[str, ...]:
        """What to do, one line each."""
        return tuple(f"{', '.join(uses)}: {text}" for uses, text in self.advice)


def summarize(record: AuditRecord) -> Summary:
    """Read a record once and say what matters."""
    verdicts = ordered_verdicts(record)
    return Summary(
        name=clean(record.model.get("name") or "unnamed model"),
        facts=_facts(record),
        headline=headline(verdicts, lost=bool(lost_lines(record))),
        verdicts=verdicts,
        sources=tuple(_source_line(record, name, role) for name, role in source_names(record)),
        blame=guilty_lines(record),
        failures=tuple(
            f"{share(m.get('share_failed'))} of {clean(m.source, 40)} made the model raise: "
            + clean(m.get("failure") or "no message", 200)
            for m in record.measurements
            if m.probe in ("reconstruction", "sampling") and as_float(m.get("share_failed")) > 0
        ),
        advice=_advice(verdicts),
    )


def ordered_verdicts(record: AuditRecord) -> tuple[Verdict, ...]:
    """Verdicts in the order of `USES`, then any others."""
    known = [record.verdicts[use] for use in USES if use in record.verdicts]
    return (*known, *(v for use, v in record.verdicts.items() if use not in USES))


def headline(verdicts: tuple[Verdict, ...], *, lost: bool = False) -> str:
    """One sentence over all verdicts, the bad news first; `lost` where samples do not come back although no use is unsafe.

    Example:
        >>> headline((Verdict("sampling", Status.UNSAFE, ""), Verdict("likelihood", Status.SAFE, "")))
        'Unsafe for sampling; safe for likelihood on data.'
    """
    count = {status: sum(v.status == status for v in verdicts) for status in Status}
    if not verdicts:
        return "No use was judged."
    if count[Status.SAFE] == len(verdicts):
        if lost:
            return f"Safe for {plural(len(verdicts), 'use')}, but not every sample comes back outside the data."
        return (
            f"Safe for all {plural(len(verdicts), 'use')}."
            if len(verdicts) > 1
            else "Safe for the one use that was judged."
        )
    said = {Status.UNSAFE: "unsafe for ", Status.NOT_MEASURED: "not measured: ", Status.SAFE: "safe for "}
    parts = []
    for status, words in said.items():
        titles = [USE_TITLES.get(v.use, clean(v.use, 60)) for v in verdicts if v.status == status]
        names = [title[:1].lower() + title[1:] for title in titles]
        if status == Status.SAFE and parts and len(names) > 1:
            names = [f"the other {plural(len(names), 'use')}"]
        if names:
            parts.append(words + " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))))
    return sentence("; ".join(parts))


def news(record: AuditRecord) -> tuple[str, ...]:
    """What is wrong, the worst first: uses that are unsafe, then sources whose samples do not come back. Empty if nothing is.

    Example:
        >>> from bilip.record import Measurement
        >>> lost = Measurement("reconstruction", "uniform:2", {"share_bad": 0.038, "relative_max": 6.6})
        >>> source = {"name": "uniform:2", "role": "ood", "description": "uniform noise on [-8, 8], seed 0"}
        >>> news(AuditRecord(sources=(source,), measurements=(lost,)))
        ('3.8 % of uniform:2 (uniform noise on [-8, 8], seed 0) does not come back; relative errors reach 6.6.',)
    """
    unsafe = [v for v in ordered_verdicts(record) if v.status == Status.UNSAFE]
    lines = []
    for v in unsafe:
        why = sentence(v.reason)
        why = why[:1].lower() + why[1:] if why[1:2].islower() else why
        causes = _causes(record, v.source) if v.use == "inversion" else ""
        lines.append(f"{USE_TITLES.get(v.use, clean(v.use, 60))} is unsafe: {why}{causes}")
    return (*lines, *lost_lines(record))


def lost_lines(record: AuditRecord) -> tuple[str, ...]:
    """One sentence for each source whose samples do not all come back, unless the verdict on inversion says so already."""
    inversion = record.verdicts.get("inversion")
    told = inversion.source if inversion is not None and inversion.status == Status.UNSAFE else None
    lines = []
    for m in record.find("reconstruction"):
        lost = lost_share(m)
        if m.measured and m.source != told and lost > 0:
            largest = m.get("relative_max")
            error = f"; relative errors reach {number(largest)}" if as_float(largest) > 0 else ""
            lines.append(
                f"{share(lost)} of {source_text(record, m.source)} does not come back{error}.{_causes(record, m.source)}"
            )
    return tuple(lines)


def _causes(record: AuditRecord, source: str) -> str:
    """The block where it breaks, and whether more bits cure it, where that was found."""
    said = []
    for m in record.find("blame", source):
        if m.measured and m.get("guilty") not in (None, ""):
            kind = f" ({clean(m['guilty_kind'], 60)})" if m.get("guilty_kind") else ""
            said.append(f"It breaks at block {clean(m['guilty'], 60)}{kind}.")
    for m in record.find("reconstruction", source):
        tried, still = m.get("float64_tried"), m.get("float64_bad")
        if tried and still is not None:
            all_ = "all of them come back" if not still else "none of them comes back"
            said.append(
                f"In float64 {all_ if still in (0, tried) else f'{number(still)} of these {number(tried)} still fail'}."
            )
    return "".join(f" {text}" for text in said)


def lost_share(m: Measurement) -> float:
    """Share of the samples of a source that do not come back: wrong, not finite or raised."""
    if m.get("share_bad") is not None:
        return as_float(m["share_bad"])
    parts = [non_finite(m), as_float(m.get("share_wrong")), as_float(m.get("share_failed"))]
    return sum(p for p in parts if not math.isnan(p))


def source_about(record: AuditRecord, name: str) -> str:
    """What a source is, as its description says; empty where the record does not."""
    about = next((s.get("description") for s in record.sources if s.get("name") == name), "")
    return clean(about or ("samples of the model itself" if name == "base" else ""), 160)


def source_text(record: AuditRecord, name: str) -> str:
    """A source and what it is, as in `uniform:2 (uniform noise on [-8, 8], seed 0)`."""
    about = source_about(record, name)
    return clean(name, 60) + (f" ({about})" if about else "")


def verdict_numbers(verdict: Verdict) -> tuple[str, str]:
    """The deciding number and its limit as people read them; empty where a yes or no decided.

    Example:
        >>> verdict_numbers(Verdict("sampling", Status.UNSAFE, "2 % are lost.", "share_non_finite", 0.02, 0.0))
        ('2 %', '0 %')
    """
    if verdict.value is None or verdict.measure.unit == "flag":
        return "", ""
    limit = written(verdict.measure, verdict.limit) if verdict.limit is not None else ""
    return written(verdict.measure, verdict.value), limit


def deciding(verdict: Verdict) -> str:
    """The deciding number beside its limit, as in `p99.9 relative error 7.1e-5 (limit 3.5e-4) on test`."""
    value, limit = verdict_numbers(verdict)
    if not value:
        return clean(verdict.reason)
    if verdict.interval is not None and verdict.status == Status.SAFE:  # what was excluded
        value += f", at most {written(verdict.measure, verdict.interval[1])}"
    text = f"{clean(verdict.measure.label)} {value}" + (f" (limit {limit})" if limit else "")
    return text + (f" on {clean(verdict.source, 60)}" if verdict.source else "")


def source_names(record: AuditRecord) -> list[tuple[str, str]]:
    """Names and roles of the sources, also of those that only a measurement names."""
    names = {str(s.get("name", "")): clean(s.get("role", "")) for s in record.sources}
    for m in record.find("reconstruction"):
        names.setdefault(m.source, "")
    return list(names.items())


def non_finite(m: Measurement) -> float:
    """Share of Inf and NaN among the reconstructions."""
    parts = [as_float(m.get(name)) for name in ("share_nan", "share_inf")]
    known = [p for p in parts if not math.isnan(p)]
    return sum(known) if known else math.nan


def worst_condition(record: AuditRecord, source: str) -> tuple[str, float]:
    """Worst condition number on a source, in words and as a number; with a sign when it is known from one side only."""
    for m in record.find("spectrum", source):
        if m.measured and "condition" in m.values:
            sided = "one-sided" in (m.get("sigma_min_status"), m.get("sigma_max_status"))
            return ("≥ " if sided else "") + number(m["condition"]), as_float(m["condition"])
    return number(None), math.nan


def _source_line(record: AuditRecord, name: str, role: str) -> SourceLine:
    found = record.find("reconstruction", name)
    m = found[0] if found else Measurement("reconstruction", name, reason="not asked for")
    missing = number(None)
    has_shares = m.measured and not math.isnan(non_finite(m))
    return SourceLine(
        name=clean(name) or missing,
        role=role or missing,
        count=number(m.get("count")),
        non_finite=share(non_finite(m)) if has_shares else missing,
        wrong=share(m.get("share_wrong")),
        median=number(m.get("relative_median")),
        p999=number(m.get("relative_p999")),
        condition=worst_condition(record, name)[0],
        reason=clean(m.reason),
    )


def _facts(record: AuditRecord) -> tuple[str, ...]:
    model = record.model
    facts = [clean(model[key], 60) for key in ("library", "dtype", "device") if model.get(key)]
    if model.get("shape"):
        facts.append(f"input {shape(model['shape'])}")
    for key, noun in (("parameters", "parameter"), ("blocks", "block")):
        count = model.get(key)
        count = len(count) if isinstance(count, (list, tuple)) else count
        if isinstance(count, int) and not isinstance(count, bool):
            facts.append(plural(count, noun))
    if model.get("called"):
        facts.append(f"called as {clean(model['called'], 120)}")
    return (*facts, when(record.created)) if record.created else tuple(facts)


def worst_blame(record: AuditRecord) -> list[Measurement]:
    """Measurements of blame, the one with the largest carried error first."""

    def key(m: Measurement) -> tuple[bool, float]:
        carried = [as_float(row.get("carried_max")) for row in m.rows]
        return m.get("guilty") not in (None, ""), max((c for c in carried if not math.isnan(c)), default=-1.0)

    return sorted((m for m in record.find("blame") if m.measured), key=key, reverse=True)


def guilty_lines(record: AuditRecord) -> tuple[str, ...]:
    """One line for each guilty block, the worst first; three at most."""
    guilty: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for m in worst_blame(record):
        if m.get("guilty") not in (None, ""):
            guilty.setdefault((clean(m["guilty"], 60), clean(m.get("guilty_kind") or "", 60)), []).append(
                {"source": clean(m.source, 40), "why": clean(m.get("why") or "", 300)}
            )
    lines = []
    for (block, kind), found in list(guilty.items())[:3]:
        where = ", ".join(f["source"] for f in found[:4] if f["source"])
        why = found[0]["why"].rstrip(".")
        lines.append(
            f"block {block}"
            + (f" ({kind})" if kind else "")
            + (f" on {where}" if where else "")
            + (f": {why}." if why else ".")
        )
    return tuple(lines)


def sentences(text: str) -> list[str]:
    """The sentences of a text.

    Example:
        >>> sentences("Look at block 3 (e.g. its scale). Then retrain.")
        ['Look at block 3 (e.g. its scale).', 'Then retrain.']
    """
    return [s for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", clean(text, 2000)) if s]


def _advice(verdicts: tuple[Verdict, ...]) -> tuple[tuple[tuple[str, ...], str], ...]:
    """Each sentence of the remedies once, with the uses it is for."""
    said: dict[str, dict[str, None]] = {}
    for v in verdicts:
        for line in sentences(v.remedy):
            said.setdefault(line, {})[clean(v.use, 60)] = None
    lines: dict[tuple[str, ...], list[str]] = {}
    for line, uses in said.items():
        lines.setdefault(tuple(uses), []).append(line)
    return tuple((uses, " ".join(found)) for uses, found in lines.items())
