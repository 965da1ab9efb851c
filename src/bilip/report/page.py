"""HTML: one self-contained page, which makes no request and holds the record it was made from; and a table of verdicts for notebooks."""

from __future__ import annotations

import base64
import functools
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from bilip.errors import InputError, need
from bilip.record import AuditRecord, Status, Verdict, write_aside
from bilip.report.format import USE_TITLES, clean, number, sentence
from bilip.report.parts import Figure, Section
from bilip.report.sections import sections
from bilip.report.sections.map import glance
from bilip.report.summary import (
    STATUS_WORDS,
    Summary,
    lost_lines,
    news,
    ordered_verdicts,
    sentences,
    source_about,
    source_names,
    summarize,
    verdict_numbers,
)

__all__ = ["Card", "Records", "cards", "notebook_html", "to_html", "write_html"]

WORDS = {Status.SAFE: "Safe", Status.UNSAFE: "Unsafe", Status.NOT_MEASURED: "Not measured"}
QUESTIONS = {
    "inversion": "May I recover x from z, edit latents, compress?",
    "sampling": "May I draw samples from it?",
    "likelihood": "May I trust its likelihood on data like mine?",
    "ood-likelihood": "May I trust its likelihood on other data?",
    "reversible-gradients": "May I recompute activations instead of storing them?",
}
Records = AuditRecord | Mapping[str, AuditRecord] | Sequence[AuditRecord]


def write_html(records: Records, path: str | Path, *, title: str | None = None) -> None:
    """Write one page for a record, or for several side by side.

    Args:
        records: A record, a list of them, or records by name.
        path: The file to write, whole or not at all.
        title: Heading of the page.

    Raises:
        InputError: There is no record, or the file cannot be written.
        MissingExtra: jinja2 or plotly is not installed.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_html(AuditRecord(model={"name": "flow"}), f"{folder}/run.html")
        ...     pathlib.Path(f"{folder}/run.html").read_text(encoding="utf-8")[:15]
        '<!doctype html>'
    """
    write_aside(path, to_html(records, title=title))


def to_html(records: Records, *, title: str | None = None) -> str:
    """The page as text.

    Example:
        >>> page = to_html({"one": AuditRecord(), "two": AuditRecord()}, title="Two flows")
        >>> "<h1>Two flows</h1>" in page
        True
    """
    named = _by_name(records)
    need("jinja2", "the HTML page")
    markup = need("markupsafe", "the HTML page").Markup
    shelf = Shelf()
    views = [View.of(i, name, record, shelf) for i, (name, record) in enumerate(named.items())]
    heading = title or (f"Audit of {views[0].name}" if len(views) == 1 else f"Audit of {len(views)} models")
    page = _template().render(
        title=clean(heading, 300),
        views=views,
        titles=USE_TITLES,
        several=len(views) > 1,
        style=markup(_asset("style.css")),
        script=markup(_asset("page.js")),
        headline=_headline(views),
        shared=views[0].sources if all(view.sources == views[0].sources for view in views) else [],
        uses=list({card.use: card for view in views for card in view.cards}.values()),
        figures=lambda: markup(_json(shelf.figures)),
        plotly=lambda: markup(_plotly()) if shelf.figures else "",
        records=[markup(record.to_json().replace("<", "\\u003c")) for record in named.values()],
    )
    return page.lstrip().encode("utf-8", "replace").decode("utf-8")


@dataclass(frozen=True)
class Card:
    """One verdict, in words; what a record does not say is empty."""

    use: str
    title: str  # the use for people
    question: str  # what the user asks
    status: str
    word: str  # the status for people
    value: str  # the deciding number
    label: str  # what the number is, and where it was measured
    limit: str
    reason: str
    about: str = ""  # what the source is that decided it


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


class Shelf:
    """Collects the figures of a page and gives each its id."""

    def __init__(self) -> None:
        self.figures: dict[str, dict[str, Any]] = {}

    def put(self, figure: Figure) -> str:
        """Keep a figure; its id in the page."""
        name = f"figure-{len(self.figures) + 1}"
        self.figures[name] = {part: getattr(figure, part) for part in ("data", "layout", "height", "square")}
        return name


@dataclass(frozen=True)
class View:
    """What the template needs of one record."""

    id: str
    name: str
    summary: Summary
    cards: list[Card]
    sections: list[Section]
    command: str
    repeat: list[tuple[str, list[tuple[str, str]]]]
    put: Any
    news: tuple[str, ...]
    about: str
    sources: list[tuple[str, str, str]]
    glance: Figure | None

    @classmethod
    def of(cls, index: int, name: str, record: AuditRecord, shelf: Shelf) -> View:
        """The view of the index-th record."""
        settings = {k: v for k, v in record.settings.items() if k not in ("thresholds", "command")}
        thresholds = record.settings.get("thresholds")
        groups = {
            "Settings": settings,
            "Thresholds": thresholds if isinstance(thresholds, Mapping) else {},
            "Environment": record.environment,
            "Sources": {s.get("name", ""): _source(s) for s in record.sources},
        }
        return cls(
            id=f"model-{index + 1}",
            name=clean(name, 200),
            summary=summarize(record),
            cards=cards(record),
            sections=sections(record),
            command=clean(record.settings.get("command") or "", 4000),
            repeat=[
                (title, [(clean(k, 200), _plain(v)) for k, v in group.items()])
                for title, group in groups.items()
                if group
            ],
            put=shelf.put,
            news=news(record),
            about=clean(record.model.get("description") or "", 300),
            sources=[
                (clean(name, 80), ROLES.get(role, role), source_about(record, name)) for name, role in _named(record)
            ],
            glance=glance(record),
        )


def _headline(views: list[View]) -> str:
    """The news of several models: who fails at what, and who does not."""
    bad = [view for view in views if view.news]
    judged = any(card.status != "not-measured" for view in views for card in view.cards)
    if not bad:
        return "Nothing wrong was found." if judged else "No use of any model was judged."
    first = " ".join(f"{view.name}: {sentences(view.news[0])[0]}" for view in bad[:2])
    more = f" And {len(bad) - 2} more." if len(bad) > 2 else ""
    fine = [view.name for view in views if not view.news]
    return f"{first}{more}" + (f" Nothing wrong was found in {' and '.join(fine)}." if 0 < len(fine) < 4 else "")


def _by_name(records: Records) -> dict[str, AuditRecord]:
    if isinstance(records, AuditRecord):
        records = [records]
    if isinstance(records, Mapping):
        found = {str(name): record for name, record in records.items()}
    else:
        found = {}
        for record in records:
            name = str(record.model.get("name") or "unnamed model") if isinstance(record, AuditRecord) else "?"
            same = sum(n == name or n.startswith(f"{name} (") for n in found)
            found[f"{name} ({same + 1})" if name in found else name] = record
    if not found:
        raise InputError("there is no record to show; pass at least one AuditRecord.")
    for name, record in found.items():
        if not isinstance(record, AuditRecord):
            raise InputError(
                f"{name!r} is a {type(record).__name__}; expected an AuditRecord (AuditRecord.load reads one)."
            )
    return found


ROLES = {"data": "data", "ood": "out of distribution"}


def _named(record: AuditRecord) -> list[tuple[str, str]]:
    """All sources with their roles, and the model's own samples where they were measured."""
    found = dict(source_names(record))
    if any(m.source == "base" for m in record.measurements):
        found.setdefault("base", "")
    return [(name, role) for name, role in found.items() if name]


def _source(source: Mapping[str, Any]) -> str:
    parts = [source.get("role"), f"{number(source.get('count'))} samples", source.get("description")]
    return ", ".join(clean(p, 300) for p in parts if p)


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return clean(", ".join(map(str, value)), 600)
    if isinstance(value, Mapping):
        return clean(", ".join(f"{k} {number(v)}" for k, v in value.items()), 600)
    return number(value)


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return resources.files("bilip.report").joinpath("templates", name).read_text(encoding="utf-8")


@functools.cache
def _template() -> Any:
    """The page's template, read and compiled once."""
    import jinja2

    loader = jinja2.PackageLoader("bilip.report", "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["held"] = lambda text: str(text).replace(" %", "\N{NO-BREAK SPACE}%")  # no line begins with it
    return environment.get_template("page.html.j2")


@functools.cache
def _plotly() -> str:
    """plotly.js, compressed: the browser unpacks it, and the page is less than half the size."""
    source = need("plotly.offline", "the HTML page").get_plotlyjs()
    return base64.b64encode(gzip.compress(source.encode(), 9, mtime=0)).decode()


# Tones that read on white and on black: a notebook does not say which it is.
TONES = {Status.SAFE: "#0f8a63", Status.UNSAFE: "#d9480f", Status.NOT_MEASURED: "#7a828c"}
MARKS = {Status.SAFE: "✓", Status.UNSAFE: "✗", Status.NOT_MEASURED: "?"}
CELL = "text-align:left;vertical-align:top;padding:4px 14px 4px 0;"


def notebook_html(record: AuditRecord) -> str:
    """What does not come back, and one row for each use: its verdict, the number that decided it, the reason and the remedy.

    Example:
        >>> from bilip.record import AuditRecord, Status, Verdict
        >>> unsafe = Verdict("sampling", Status.UNSAFE, "2 % are lost.", "share_non_finite", 0.02, 0.0, "base", "Use float64.")
        >>> shown = notebook_html(AuditRecord(model={"name": "my flow"}, verdicts={"sampling": unsafe}))
        >>> all(text in shown for text in ("my flow", "UNSAFE", "2 % (limit 0 %)", "2 % are lost.", "Use float64."))
        True
    """
    s = summarize(record)
    lines = [f"<p style='margin:0'><b>{_text(s.name, 160)}</b>: {_text(s.headline)}</p>"]
    lines += [f"<p style='margin:0;opacity:.75'>{_text(' · '.join(s.facts))}</p>"] if s.facts else []
    lines += [f"<p style='margin:4px 0;color:{TONES[Status.UNSAFE]}'>{_text(lost)}</p>" for lost in lost_lines(record)]
    rows = []
    for v in ordered_verdicts(record):
        value, limit = verdict_numbers(v)
        number = value + (f" (limit {limit})" if value and limit else "")
        why = _text(sentence(v.reason), 1000) + (f"<br><i>{_text(v.remedy, 1500)}</i>" if v.remedy else "")
        mark = f"<b style='color:{TONES[v.status]};white-space:nowrap'>{MARKS[v.status]} {STATUS_WORDS[v.status]}</b>"
        cells = (
            _text(USE_TITLES.get(v.use, v.use), 60),
            mark,
            f"<span style='white-space:nowrap'>{_text(number)}</span>",
            why,
        )
        rows.append("<tr>" + "".join(f"<td style='{CELL}'>{cell}</td>" for cell in cells) + "</tr>")
    if rows:
        heads = "".join(
            f"<th style='{CELL}'>{head}</th>" for head in ("use", "verdict", "number", "why, and what to do")
        )
        table = f"<table style='border-collapse:collapse;font-size:90%'><thead><tr>{heads}</tr></thead>"
        lines.append(f"{table}<tbody>{''.join(rows)}</tbody></table>")
    return f"<div style='max-width:70em'>{''.join(lines)}</div>"


def _text(text: object, limit: int = 400) -> str:
    return escape(clean(text, limit))
