"""Under stress: fewer bits, and a search for inputs that break it."""

from __future__ import annotations

from bilip.record import AuditRecord
from bilip.report import charts
from bilip.report.format import clean, number
from bilip.report.parts import Fold, Line, Part, Section, table
from bilip.report.sections.common import gallery, measured, some

__all__ = ["attack_section", "precision_section"]


def precision_section(record: AuditRecord) -> Section:
    """The precision ladder."""
    found = measured(record, "precision")
    parts: list[Part | None] = []
    columns = [
        ("rung", "precision"),
        ("eps", "eps"),
        ("error_median", "median"),
        ("error_max", "largest"),
        ("share_non_finite", "Inf/NaN"),
        ("predicted", "eps × condition"),
        ("delta", "|δ|"),
        ("lip_inverse", "gain along δ"),
        ("left_side", "error"),
        ("right_side", "bound on it"),
        ("holds", "holds"),
    ]
    for m in found:
        cure = m.get("cure")
        parts.append(
            Line(
                "No precision on the ladder cures it."
                if cure in (None, "none")
                else f"All is well in {clean(cure)}; the model runs in {clean(m.get('own') or 'an unknown precision')}."
            )
        )
        parts += [
            charts.precision_figure(m),
            Fold("Numbers by precision", (table("Precision ladder", columns, m.rows),)) if m.rows else None,
        ]
    lead = (
        "The same model, the same inputs, in fewer and fewer bits: if more bits cure the error, "
        "it is a rounding error that the inverse magnifies."
    )
    return Section("precision", "Would more bits help?", lead, some(*parts))


def attack_section(record: AuditRecord) -> Section:
    """Attacks on the round trip."""
    found = measured(record, "attack")
    columns = [
        ("method", "method"),
        ("success", "broke it"),
        ("steps", "steps"),
        ("start_error", "error before"),
        ("end_error", "error after"),
        ("worst_relative", "worst relative"),
        ("samples", "samples"),
    ]
    parts: list[Part | None] = []
    for m in found:
        parts += [charts.attack_figure(m), table("Attacks", columns, m.rows) if m.rows else None]
        if m.get("box") is not None:
            size = f"radius {number(m.get('radius'))}, step {number(m.get('step'))}"
            parts.append(Line(f"The search stays inside: {clean(m['box'])} ({size})."))
    parts.append(gallery("The point found and its reconstruction", found))
    lead = (
        "A search near real samples, inside the range of the data, for an input whose round trip fails: "
        "that the data at hand comes back proves little."
    )
    return Section("attack", "Can it be broken on purpose?", lead, some(*parts))
