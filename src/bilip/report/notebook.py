"""A record in a notebook: one table of verdicts, with what does not come back above it. It needs neither jinja2 nor a script."""

from __future__ import annotations

from html import escape

from bilip.record import AuditRecord, Status
from bilip.report.format import USE_TITLES, clean, sentence
from bilip.report.summary import STATUS_WORDS, lost_lines, ordered_verdicts, summarize, verdict_numbers

__all__ = ["notebook_html"]

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
