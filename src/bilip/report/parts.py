"""What a page is made of: figures, tables, pictures and lines, and how a record gives them. The template only lays them out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from bilip.record import AuditRecord, Measurement, Picture, Quantity, quantity_named
from bilip.report.format import as_float, clean, word, written


@dataclass(frozen=True)
class Figure:
    """A plotly figure: traces and layout whose colours are names that the page's theme fills in."""

    kind: ClassVar[str] = "figure"
    title: str  # heading of the figure
    summary: str  # one sentence computed from the numbers, for those who cannot see it
    data: list[dict[str, Any]]  # traces
    layout: dict[str, Any]  # layout; the page adds fonts and colours
    height: int = 340  # in pixels
    square: bool = False  # whether the figure keeps its proportions


@dataclass(frozen=True)
class Cell:
    """Text and the key it is sorted by; a note stands below it in small print."""

    text: str
    key: str = ""
    numeric: bool = False
    note: str = ""

    @classmethod
    def of(cls, text: str, value: float) -> Cell:
        """A number written in its own way."""
        return cls(text, "NaN" if math.isnan(value) else repr(value).replace("inf", "Infinity"), numeric=True)


@dataclass(frozen=True)
class Table:
    """A table; with `sortable` its heads are buttons."""

    kind: ClassVar[str] = "table"
    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: tuple[bool, ...]
    sortable: bool = False


@dataclass(frozen=True)
class Gallery:
    """Groups of pictures that stand side by side."""

    kind: ClassVar[str] = "gallery"
    title: str
    groups: tuple[tuple[Picture, ...], ...]


@dataclass(frozen=True)
class Line:
    """A sentence, and what it is about."""

    kind: ClassVar[str] = "line"
    text: str
    about: str = ""


@dataclass(frozen=True)
class Fold:
    """Parts that are shown when the label is clicked."""

    kind: ClassVar[str] = "fold"
    label: str
    parts: tuple[Part, ...]


Part = Figure | Table | Gallery | Line | Fold


@dataclass(frozen=True)
class Section:
    """One question of the audit, explained in plain words and answered by parts; `probe` where the page knows only its name."""

    id: str
    title: str
    lead: str
    parts: tuple[Part, ...] = field(default=())
    probe: str = ""


def table(
    caption: str,
    columns: Iterable[tuple[str, str]],
    rows: Iterable[Mapping[str, Any]],
    *,
    sortable: bool = False,
    quantity: Callable[[str], Quantity] = quantity_named,
) -> Table:
    """A table of record rows; a column is its name in the record and its head. Columns without any value are left out.

    `quantity` says what the values of a column are, and so how they are written.

    Example:
        >>> table("t", [("block", "block"), ("share_wrong", "wrong"), ("gain", "gain")], [{"block": "3", "share_wrong": 0.5}]).heads
        ('block', 'wrong')
    """
    rows = list(rows)
    kept = [(name, head) for name, head in columns if any(row.get(name) is not None for row in rows)]
    cells = tuple(tuple(_cell(quantity(name), row.get(name)) for name, _ in kept) for row in rows)
    numeric = tuple(any(line[i].numeric for line in cells) for i in range(len(kept)))
    return Table(caption, tuple(head for _, head in kept), cells, numeric, sortable)


def _cell(quantity: Quantity, value: Any) -> Cell:
    if isinstance(value, Cell):
        return value
    if isinstance(value, (bool, str)) or value is None:
        return Cell(word(value), word(value))
    return Cell.of(written(quantity, value), as_float(value))


def measured(record: AuditRecord, probe: str) -> list[Measurement]:
    """The measurements of a probe that hold numbers."""
    return [m for m in record.find(probe) if m.measured]


def by_source(record: AuditRecord, probe: str, caption: str, columns: Sequence[tuple[str, str]]) -> Table | None:
    """One row for each source."""
    found = measured(record, probe)
    rows = [{"source": m.source or "all", **m.values} for m in found]
    return table(caption, [("source", "source"), *columns], rows, quantity=found[0].quantity) if rows else None


def row_columns(m: Measurement) -> list[tuple[str, str]]:
    """The columns of all rows of a measurement, each with its label."""
    names = dict.fromkeys(str(name) for row in m.rows for name in row)
    return [(name, clean(m.quantity(name).label, 40)) for name in names]


def some(*parts: Part | None) -> tuple[Part, ...]:
    """The parts that are there."""
    return tuple(p for p in parts if p is not None)


def gallery(title: str, measurements: Iterable[Measurement]) -> Gallery | None:
    """Pictures of the measurements, group by group."""
    groups: list[tuple[Picture, ...]] = []
    for m in measurements:
        groups += [tuple(g) for _, g in itertools.groupby(m.pictures, key=lambda p: p.group)]
    return Gallery(title, tuple(groups)) if groups else None
