"""The sections of a page: a file named after its probe holds text, table and figure, `tables` those that are tables alone; the section of
any other probe is drawn from its quantities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pkgutil import iter_modules

from bilip.record import AuditRecord, Measurement
from bilip.report.charts import distribution_figure
from bilip.report.format import clean, sentence
from bilip.report.parts import Line, Section, by_source, gallery, measured, row_columns, some, table
from bilip.report.sections.tables import SECTIONS

__all__ = ["sections"]

Builder = Callable[[AuditRecord], tuple[Section, ...]]


def sections(record: AuditRecord) -> list[Section]:
    """All sections that have something to show; the last one lists what was not measured."""
    own = _own()
    built = [s for _, build in sorted(own.values(), key=lambda entry: entry[0]) for s in build(record)]
    others = dict.fromkeys(m.probe for m in record.measurements if m.measured and m.probe not in own)
    drawn = [_drawn(record, probe, f"other-{k + 1}") for k, probe in enumerate(others)]
    return [s for s in (*built, *drawn, *_notes(record), *_missing(record)) if s.parts]


def _own() -> dict[str, tuple[int, Builder]]:
    """Place on the page and builder of the sections that are written down, by the name of their probe."""
    found = dict(SECTIONS)
    for name in (m.name for m in iter_modules(__path__) if m.name != "tables"):
        module = import_module(f"{__name__}.{name}")
        found[name] = module.PLACE, module.sections
    return found


def _drawn(record: AuditRecord, probe: str, name: str) -> Section:
    """A probe that this page knows nothing about, from the quantities of its measurements."""
    found = measured(record, probe)
    columns = dict.fromkeys((value, clean(m.quantity(value).label, 60)) for m in found for value in m.values)
    histograms = dict.fromkeys((h, m.quantity(h)) for m in found for h in m.histograms)
    parts = some(
        by_source(record, probe, "By source", list(columns)) if columns else None,
        *(distribution_figure(found, h, _capital(clean(q.label, 60)), q.unit or q.label) for h, q in histograms),
        *(
            table(
                f"On {clean(m.source, 60) or 'all'}", row_columns(m), m.rows[:200], sortable=True, quantity=m.quantity
            )
            for m in found
            if m.rows
        ),
        gallery("Pictures", found),
    )
    said = record.settings.get("sections")
    text = said.get(probe) if isinstance(said, Mapping) else None
    text = text if isinstance(text, Mapping) else {}
    title = clean(text.get("title") or _capital(_title(probe)), 120)
    lead = sentence(text.get("lead") or f"What the probe {_title(probe)} measured")
    return Section(name, title, lead, parts, probe)


def _title(probe: str) -> str:
    return clean(probe.replace("_", " "), 60)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _notes(record: AuditRecord) -> list[Section]:
    lines = _grouped((m, note) for m in record.measurements for note in m.notes)
    return [Section("notes", "Notes", "What a reader of these numbers has to know.", tuple(lines))] if lines else []


def _missing(record: AuditRecord) -> list[Section]:
    lines = _grouped((m, m.reason) for m in record.measurements if m.reason)
    asked = {m.probe for m in record.measurements}
    absent = [_title(probe) for probe in sorted(_own()) if probe not in asked]
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
        where = ", ".join(s for s in list(sources)[:8] if s)
        lines.append(Line(text, _capital(_title(probe)) + (f", on {where}" if where else "")))
    return lines
