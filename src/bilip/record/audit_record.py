"""The record of an audit: its verdicts beside its measurements, written and read as JSON.

A record is strict JSON: numbers that are not finite are written as the strings `"nan"`, `"inf"` and `"-inf"`; a text that
reads like one of these gets a backslash in front. What each probe measures, and under which names, stands in
`docs/record.md`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Any

from bilip.errors import InputError, RecordError, nearest
from bilip.record.files import read_file, write_aside
from bilip.record.measurement import Histogram, Measurement, Picture, Quantity, quantity_named
from bilip.record.plain import MOST, from_plain, parse_json, to_plain

__all__ = ["SCHEMA", "USES", "AuditRecord", "Status", "Verdict"]

SCHEMA = 2
FORMAT = "bilip-audit"
USES = ("inversion", "sampling", "likelihood", "ood-likelihood", "reversible-gradients")


class Status(StrEnum):
    """What a verdict says about one use."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    NOT_MEASURED = "not-measured"


@dataclass(frozen=True)
class Verdict:
    """Whether the model may be put to one use, and the number that decided it.

    Attributes:
        use: One of `USES`.
        status: `safe`, `unsafe` or `not-measured`.
        reason: One sentence with the number.
        number: Name of the deciding number.
        value: Its value.
        limit: What it was compared with.
        source: Where it was measured.
        remedy: What to do about it; empty if nothing needs doing.
        quantity: What the deciding number is.
        interval: For a share: what the true share lies in, with 99 % confidence.
    """

    use: str
    status: Status
    reason: str
    number: str = ""
    value: float | None = None
    limit: float | None = None
    source: str = ""
    remedy: str = ""
    quantity: Quantity | None = None
    interval: tuple[float, float] | None = None

    @property
    def measure(self) -> Quantity:
        """What the deciding number is, also where the verdict holds its name alone."""
        return self.quantity or quantity_named(self.number or "value")


@dataclass(frozen=True, repr=False)
class AuditRecord:
    """Everything one audit found, and everything needed to repeat it.

    As the last line of a notebook's cell it is shown as a table of its verdicts.

    Attributes:
        model: What was audited: name, library, dtype, device, parameters, shape, blocks.
        sources: What it was audited on: name, role, count, shape, description.
        measurements: One for each probe and source.
        verdicts: By use.
        settings: Seed, budget, probes, thresholds and the command.
        environment: Versions and machine.
        created: When, ISO 8601 in UTC.
        schema: Version of this layout.

    Example:
        >>> record = AuditRecord(model={"name": "flow"}, verdicts={"sampling": Verdict("sampling", Status.SAFE, "fine")})
        >>> AuditRecord.from_json(record.to_json()) == record
        True
        >>> record
        AuditRecord of flow: 1 safe
          sampling: safe, fine
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[Mapping[str, Any], ...] = ()
    measurements: tuple[Measurement, ...] = ()
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""
    schema: int = SCHEMA

    def find(self, probe: str, source: str | None = None) -> list[Measurement]:
        """The measurements of one probe, on one source or on all."""
        return [m for m in self.measurements if m.probe == probe and source in (None, m.source)]

    def passed(self, *uses: str, not_measured: str = "fail") -> bool:
        """Whether the model is safe for these uses; without any, for all that were judged.

        Args:
            uses: Names of uses, as in `record.passed("sampling", "likelihood")`.
            not_measured: `"fail"`, or `"pass"` where a use that could not be measured shall not count against the model.

        Raises:
            InputError: The record has no verdict for a use.

        Example:
            >>> open_ = Verdict("sampling", Status.NOT_MEASURED, "the model has no base")
            >>> record = AuditRecord(verdicts={"sampling": open_})
            >>> record.passed("sampling"), record.passed("sampling", not_measured="pass")
            (False, True)
        """
        if not_measured not in ("fail", "pass"):
            raise InputError(f"passed(not_measured={not_measured!r}): expected 'fail' or 'pass'.")
        for use in uses:
            if use not in self.verdicts:
                known, hint = (
                    ", ".join(map(repr, self.verdicts)) or "none",
                    nearest(str(use), self.verdicts, cutoff=0.6),
                )
                raise InputError(f"passed({use!r}): the uses that this record judges are {known}.{hint}")
        if self.settings.get("ended"):  # the model ended the program: what was measured before says nothing
            return False
        good = {Status.SAFE} | ({Status.NOT_MEASURED} if not_measured == "pass" else set())
        found = [self.verdicts[use] for use in uses or self.verdicts]
        return bool(found) and all(v.status in good for v in found)

    def __repr__(self) -> str:
        counts = {status: sum(v.status == status for v in self.verdicts.values()) for status in Status}
        told = [f"{n} {s.value}" for s, n in sorted(counts.items(), key=lambda c: c[0] != Status.UNSAFE) if n]
        lines = [
            f"AuditRecord of {_short(self.model.get('name') or 'unnamed model', 60)}: {', '.join(told) or 'no verdicts'}"
        ]
        lines += [f"  {_short(use, 40)}: {v.status.value}, {_short(v.reason, 160)}" for use, v in self.verdicts.items()]
        return "\n".join(lines[:12] + ([f"  and {len(lines) - 12} more uses"] if len(lines) > 12 else []))

    def _repr_html_(self) -> str:
        """The verdicts as a table, for a notebook."""
        from bilip.report import notebook_html

        return notebook_html(self)

    def to_json(self) -> str:
        """Strict JSON; numbers that are not finite become strings."""
        document = {"format": FORMAT, **{f.name: to_plain(getattr(self, f.name)) for f in fields(self)}}
        shared = {q: k for k, q in enumerate(dict.fromkeys(q for m in self.measurements for q in m.quantities))}
        for plain, m in zip(document["measurements"], self.measurements, strict=True):
            plain["quantities"] = [shared[q] for q in m.quantities]
        document["quantities"] = [to_plain(q) for q in shared]
        return json.dumps(document, allow_nan=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "the text") -> AuditRecord:
        """Read what `to_json` wrote.

        Raises:
            RecordError: It is not JSON, not a record, or from a newer bilip.
        """
        document = parse_json(text, where, advice="It may be truncated: run the audit again.")
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise RecordError(f"{where} is not an audit record: its 'format' is not {FORMAT!r}.")
        schema = document.get("schema")
        if type(schema) is not int or schema < 1:
            raise RecordError(f"{where} has schema {schema!r}; expected a number from 1 to {SCHEMA}.")
        if schema > SCHEMA:
            raise RecordError(f"{where} has schema {schema}; this bilip reads up to {SCHEMA}. Upgrade bilip.")
        try:
            document = from_plain(document)
            known = [_quantity(q) for q in (_items(document, "quantities", dict) if schema > 1 else ())]
            return cls(
                model=_typed(document, "model", dict),
                sources=tuple(_items(document, "sources", dict)),
                measurements=tuple(_measurement(m, known) for m in _items(document, "measurements", dict)),
                verdicts={use: _verdict(v) for use, v in _typed(document, "verdicts", dict).items()},
                settings=_typed(document, "settings", dict),
                environment=_typed(document, "environment", dict),
                created=_typed(document, "created", str),
                schema=schema,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RecordError(f"{where} is not a whole audit record ({type(error).__name__}: {error}).") from error

    def save(self, path: str | Path) -> None:
        """Write the record, whole or not at all."""
        write_aside(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> AuditRecord:
        """Read a record that `save` wrote."""
        return cls.from_json(read_file(path, most=MOST, error=RecordError), str(path))


def _short(text: object, most: int) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _typed(raw: Mapping[str, Any], name: str, kind: type) -> Any:
    if not isinstance(raw[name], kind):
        raise TypeError(f"{name!r} is {raw[name]!r:.40}, not a {kind.__name__}")
    return raw[name]


def _items(raw: Mapping[str, Any], name: str, kind: Any) -> list[Any]:
    for item in _typed(raw, name, list):
        if not isinstance(item, kind):
            raise TypeError(f"{name!r} holds {item!r:.40}")
    return raw[name]


def _quantity(raw: dict[str, Any]) -> Quantity:
    texts = {name: _typed(raw, name, str) for name in ("name", "label", "unit", "better", "judged_by")}
    return Quantity(**texts, uses=tuple(_items(raw, "uses", str)))


def _measurement(raw: dict[str, Any], known: list[Quantity]) -> Measurement:
    places = _items(raw, "quantities", int) if "quantities" in raw else []
    if any(not 0 <= k < len(known) for k in places):
        raise ValueError("a measurement names a quantity that the record does not hold")
    series = _typed(raw, "series", dict)
    return Measurement(
        probe=_typed(raw, "probe", str),
        source=_typed(raw, "source", str),
        values=_typed(raw, "values", dict),
        series={k: tuple(_items(series, k, (int, float))) for k in series},
        rows=tuple(_items(raw, "rows", dict)),
        histograms={k: _histogram(h) for k, h in _typed(raw, "histograms", dict).items()},
        pictures=tuple(_picture(p) for p in _items(raw, "pictures", dict)),
        notes=tuple(_items(raw, "notes", str)),
        reason=_typed(raw, "reason", str),
        quantities=tuple(known[k] for k in places),
    )


def _picture(raw: dict[str, Any]) -> Picture:
    return Picture(**{name: _typed(raw, name, str) for name in raw})


def _histogram(raw: dict[str, Any]) -> Histogram:
    counts = {int(k): n for k, n in _typed(raw, "counts", dict).items()}
    for name, count in (*counts.items(), *((k, raw.get(k, 0)) for k in ("zeros", "infinite", "nans"))):
        if type(count) is not int or not 0 <= count < 2**63:
            raise TypeError(f"{name!r} is {count!r:.40}, not a count")
    if any(not -325 <= k / Histogram.PER_DECADE <= 308.25 for k in counts):
        raise ValueError("a bin of a histogram lies beyond all floats")
    for name in ("smallest", "largest"):
        if not isinstance(raw.get(name, 0.0), (int, float)):
            raise TypeError(f"{name!r} is {raw[name]!r:.40}, not a number")
    return Histogram(**{**raw, "counts": counts})


def _verdict(raw: dict[str, Any]) -> Verdict:
    if not isinstance(raw, dict):
        raise TypeError(f"a verdict is {raw!r:.40}, not a table")
    words = {name: _typed(raw, name, str) for name in ("use", "reason", "number", "source", "remedy") if name in raw}
    for name in ("value", "limit"):
        if not isinstance(raw.get(name), (int, float, NoneType)):
            raise TypeError(f"{name!r} is {raw[name]!r:.40}, not a number")
    raw = {**raw, **words, "status": Status(raw["status"])}
    if "quantity" not in raw:  # version 0.1 told shares by the percent sign of the reason
        number = raw.get("number") or ""
        share = " %" in raw["reason"] or "share" in number
        flag = number in ("stochastic", "batch_dependent", "cached")
        known = quantity_named(number)
        raw["quantity"] = (
            Quantity(number, known.label, "flag" if flag else "share" if share else "") if number else None
        )
    elif raw["quantity"] is not None:
        raw["quantity"] = _quantity(_typed(raw, "quantity", dict))
    if raw.get("interval") is not None:
        low, high = _items(raw, "interval", (int, float))
        raw["interval"] = (float(low), float(high))
    return Verdict(**raw)
