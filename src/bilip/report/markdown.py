"""A record as Markdown, for issues and papers."""

from __future__ import annotations

import re

from bilip.record import AuditRecord, Status
from bilip.report.format import USE_TITLES, clean, number
from bilip.report.summary import STATUS_WORDS, deciding, lost_lines, summarize

__all__ = ["markdown_table", "plain", "to_markdown"]

MARKS = {Status.SAFE: "✅", Status.UNSAFE: "❌", Status.NOT_MEASURED: "❔"}


def to_markdown(record: AuditRecord) -> str:
    """Verdicts, errors by source, the guilty block, what to do and how to repeat it.

    Example:
        >>> from bilip.record import AuditRecord, Status, Verdict
        >>> record = AuditRecord(model={"name": "my flow"}, verdicts={"sampling": Verdict("sampling", Status.SAFE, "fine")})
        >>> print(to_markdown(record).splitlines()[0])
        ## Audit of my flow
    """
    s = summarize(record)
    parts = [f"## Audit of {plain(s.name)}", plain(" · ".join(s.facts)), f"**{plain(s.headline)}**"]
    lost = lost_lines(record)
    parts += ["\n".join(f"- {plain(line)}" for line in lost)] if lost else []
    if s.verdicts:
        rows = [
            [USE_TITLES.get(v.use, v.use), f"{MARKS[v.status]} {STATUS_WORDS[v.status]}", deciding(v)]
            for v in s.verdicts
        ]
        parts.append(markdown_table(["use", "verdict", "what decided it"], rows, left=3))
    lines = [
        [x.name, x.role, x.count, x.non_finite, x.wrong, x.median, x.p999, x.condition]
        for x in s.sources
        if not x.reason
    ]
    if lines:
        heads = ["source", "role", "samples", "Inf/NaN", "wrong", "median error", "p99.9 error", "worst condition"]
        parts.append(markdown_table(heads, lines, left=2))
        parts.append("Errors are relative, of F⁻¹(F(x)) against x in the model's own precision.")
    parts += [f"- {plain(x.name)}: not measured, {plain(x.reason)}" for x in s.sources if x.reason]
    for title, points in (("Guilty", s.blame), ("Failed", s.failures), ("What to do", s.advice_lines)):
        if points:
            parts.append(f"**{title}**\n\n" + "\n".join(f"- {plain(p)}" for p in points))
    parts.append(_repeat(record))
    return "\n\n".join(p for p in parts if p) + "\n"


def markdown_table(heads: list[str], rows: list[list[str]], *, left: int = 1) -> str:
    """A table; the first `left` columns are words, the others numbers.

    Example:
        >>> print(markdown_table(["a", "b"], [["x", "1"]]))
        | a | b |
        |:--|--:|
        | x | 1 |
    """
    rule = "|".join(":--" if i < left else "--:" for i in range(len(heads)))
    lines = [heads, *rows]
    body = ["| " + " | ".join(plain(cell) for cell in line) + " |" for line in lines]
    return "\n".join([body[0], f"|{rule}|", *body[1:]])


def plain(text: str) -> str:
    """Text that Markdown shows as it is.

    Example:
        >>> plain("a|b <i> *c*")
        'a\\\\|b &lt;i> \\\\*c\\\\*'
    """
    return re.sub(r"([\\`*_|\[\]#~])", r"\\\1", clean(text, 4000)).replace("&", "&amp;").replace("<", "&lt;")


def _repeat(record: AuditRecord) -> str:
    command, seed = record.settings.get("command"), record.settings.get("seed")
    versions = ", ".join(
        f"{k} {clean(record.environment[k], 40)}" for k in ("bilip", "torch", "python") if k in record.environment
    )
    lines = [f"Seed {number(seed)}" if seed is not None else "", plain(versions)]
    text = "; ".join(line for line in lines if line)
    if command:
        text += f"\n\n```console\n{clean(command, 4000).replace('```', '` ` `')}\n```"
    return f"Repeat it: {text}" if text else ""
