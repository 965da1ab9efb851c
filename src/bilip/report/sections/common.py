"""What the sections share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from bilip.record import AuditRecord, Measurement, Picture
from bilip.report.parts import Gallery, Part, Table, table

__all__ = ["by_source", "gallery", "measured", "some"]


def measured(record: AuditRecord, probe: str) -> list[Measurement]:
    """The measurements of a probe that hold numbers."""
    return [m for m in record.find(probe) if m.measured]


def by_source(record: AuditRecord, probe: str, caption: str, columns: Sequence[tuple[str, str]]) -> Table | None:
    """One row for each source."""
    found = measured(record, probe)
    rows = [{"source": m.source or "all", **m.values} for m in found]
    return table(caption, [("source", "source"), *columns], rows, quantity=found[0].quantity) if rows else None


def some(*parts: Part | None) -> tuple[Part, ...]:
    """The parts that are there."""
    return tuple(p for p in parts if p is not None)


def gallery(title: str, measurements: Iterable[Measurement]) -> Gallery | None:
    """Pictures of the measurements, group by group."""
    groups: list[tuple[Picture, ...]] = []
    for m in measurements:
        groups += [tuple(g) for _, g in itertools.groupby(m.pictures, key=lambda p: p.group)]
    return Gallery(title, tuple(groups)) if groups else None
