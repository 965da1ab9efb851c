"""The sections of a page: each asks one question, explains it in plain words and shows what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bilip.record import AuditRecord, Measurement
from bilip.report.format import clean, sentence
from bilip.report.parts import Line, Section, table
from bilip.report.sections.common import by_source, gallery, measured, some
from bilip.report.sections.density import log_det_section, sampling_section, trust_section
from bilip.report.sections.inside import blame_section, bounds_section, spectrum_section
from bilip.report.sections.round_trip import errors_section, map_section, worst_section
from bilip.report.sections.stress import attack_section, precision_section

__all__ = ["PROBES", "sections"]

PROBES = {
    "reconstruction": "reconstruction",
    "map": "map of the error",
    "blame": "blame by block",
    "spectrum": "spectrum",
    "bounds": "proven bounds",
    "precision": "precision ladder",
    "attack": "attack",
    "sampling": "sampling",
    "log_det": "log-determinant",
    "trust": "trust",
}

TITLES = {"consistency": "Is it a function at all?"}
LEADS = {
    "consistency": "The same input twice, alone and in a batch, should give the same answer; and the inverse should compute, not remember."
}
BUILDERS: tuple[Callable[[AuditRecord], Section], ...] = (
    errors_section,
    map_section,
    worst_section,
    blame_section,
    spectrum_section,
    bounds_section,
    precision_section,
    attack_section,
    sampling_section,
    log_det_section,
    trust_section,
)


def sections(record: AuditRecord) -> list[Section]:
    """All sections that have something to show; the last one lists what was not measured."""
    built = [build(record) for build in BUILDERS]
    return [*(s for s in built if s.parts), *_others(record), *_notes(record), *_missing(record)]


def _others(record: AuditRecord) -> list[Section]:
    """Probes that this page knows nothing about, as they are."""
    probes = dict.fromkeys(m.probe for m in record.measurements if m.measured and m.probe not in PROBES)
    found = []
    for probe in probes:
        names = dict.fromkeys(name for m in measured(record, probe) for name in m.values)
        columns = [(name, clean(name.replace("_", " "), 40)) for name in names]
        parts = some(
            by_source(record, probe, "By source", columns) if columns else None,
            *(
                table(f"On {clean(m.source, 60) or 'all'}", _columns(m), m.rows[:200], sortable=True)
                for m in measured(record, probe)
                if m.rows
            ),
            gallery("Pictures", measured(record, probe)),
        )
        if parts:
            title = TITLES.get(probe, clean(probe.replace("_", " "), 60).capitalize())
            found.append(Section(f"other-{len(found) + 1}", title, LEADS.get(probe, "As the probe states it."), parts))
    return found


def _columns(m: Measurement) -> list[tuple[str, str]]:
    names = dict.fromkeys(str(name) for row in m.rows for name in row)
    return [(name, clean(name.replace("_", " "), 40)) for name in names]


def _notes(record: AuditRecord) -> list[Section]:
    lines = _grouped((m, note) for m in record.measurements for note in m.notes)
    return [Section("notes", "Notes", "What a reader of these numbers has to know.", tuple(lines))] if lines else []


def _missing(record: AuditRecord) -> list[Section]:
    lines = _grouped((m, m.reason) for m in record.measurements if m.reason)
    asked = {m.probe for m in record.measurements}
    absent = [title for probe, title in PROBES.items() if probe not in asked]
    if absent:
        lines.append(Line(f"Not part of this audit: {', '.join(absent)}."))
    return [Section("missing", "Not measured", "What this audit leaves open, and why.", tuple(lines))] if lines else []


def _grouped(said: Iterable[tuple[Measurement, str]]) -> list[Line]:
    """What was said by each probe, once, with the sources it is about."""
    groups: dict[tuple[str, str], dict[str, None]] = {}
    for m, text in said:
        groups.setdefault((m.probe, sentence(text, capital=False)), {})[clean(m.source, 60)] = None
    lines = []
    for (probe, text), sources in groups.items():
        title = PROBES.get(probe, clean(probe, 60))
        where = ", ".join(s for s in list(sources)[:8] if s)
        lines.append(Line(text, f"{title[:1].upper()}{title[1:]}" + (f", on {where}" if where else "")))
    return lines
