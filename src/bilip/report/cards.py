"""Verdicts as cards: the first thing a page says."""

from __future__ import annotations

from dataclasses import dataclass

from bilip.record import AuditRecord, Status, Verdict
from bilip.report.format import USE_TITLES, clean, sentence
from bilip.report.summary import ordered_verdicts, source_about, verdict_numbers

__all__ = ["Card", "cards"]

WORDS = {Status.SAFE: "Safe", Status.UNSAFE: "Unsafe", Status.NOT_MEASURED: "Not measured"}
QUESTIONS = {
    "inversion": "May I recover x from z, edit latents, compress?",
    "sampling": "May I draw samples from it?",
    "likelihood": "May I trust its likelihood on data like mine?",
    "ood-likelihood": "May I trust its likelihood on other data?",
    "reversible-gradients": "May I recompute activations instead of storing them?",
}


@dataclass(frozen=True)
class Card:
    """One verdict, in words.

    Attributes:
        use: Name of the use in the record.
        title: The use for people.
        question: What the user asks.
        status: `safe`, `unsafe` or `not-measured`, as in the record.
        word: The status for people.
        value: The deciding number, empty if there is none.
        label: What the number is, and where it was measured.
        limit: What it was compared with.
        reason: One sentence.
        about: What the source is that decided it; empty if the record does not say.
    """

    use: str
    title: str
    question: str
    status: str
    word: str
    value: str
    label: str
    limit: str
    reason: str
    about: str = ""


def cards(record: AuditRecord) -> list[Card]:
    """The verdicts of a record in the order of `USES`.

    Example:
        >>> record = AuditRecord(verdicts={"sampling": Verdict("sampling", Status.SAFE, "fine", "share_non_finite", 0.0, 0.0, "base")})
        >>> [(c.title, c.word, c.value, c.label) for c in cards(record)]
        [('Sampling', 'Safe', '0 %', 'share of Inf/NaN on base')]
    """
    return [_card(record, v) for v in ordered_verdicts(record)]


def _card(record: AuditRecord, v: Verdict) -> Card:
    value, limit = verdict_numbers(v)
    about = source_about(record, v.source)
    where = f" on {clean(v.source, 60)}" if v.source else ""
    return Card(
        use=v.use,
        title=USE_TITLES.get(v.use, clean(v.use, 80)),
        question=QUESTIONS.get(v.use, ""),
        status=v.status.value,
        word=WORDS[v.status],
        value=value,
        label=clean(v.measure.label) + where if value else "",
        limit=limit,
        reason=sentence(v.reason),
        about=f"{clean(v.source, 60)}: {about}" if about else "",
    )
