"""A record in the terminal: read in ten seconds, at 80 columns, with or without colour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bilip.errors import need
from bilip.record import AuditRecord, Status
from bilip.report.format import clean
from bilip.report.summary import STATUS_WORDS, Summary, deciding, lost_lines, summarize

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Teller", "print_terminal"]

MARKS = {Status.SAFE: "✓", Status.UNSAFE: "✗", Status.NOT_MEASURED: "?"}
PLAIN_MARKS = {Status.SAFE: "+", Status.UNSAFE: "x", Status.NOT_MEASURED: "?"}
COLOURS = {Status.SAFE: "green", Status.UNSAFE: "bold red", Status.NOT_MEASURED: "yellow"}
MOST_SOURCES = 12


class Teller:
    """Prints through a rich console what its encoding can hold, and never reads markup in names."""

    def __init__(self, console: Console | None = None) -> None:
        self.console: Console = console or need("rich.console", "printing a record").Console()
        self.plain = not self.console.encoding.lower().startswith("utf")

    def text(self, content: str, style: str = "") -> Any:
        """Text in the console's encoding."""
        content = content.replace(" %", "%")  # a line must not break before it
        if self.plain:
            content = (
                content.replace("–", "-").replace("≥", ">=").replace("·", "|").replace("×", "x").replace("→", "->")
            )
        content = content.encode(self.console.encoding, "replace").decode(self.console.encoding)
        return need("rich.text", "printing a record").Text(content, style=style)

    def mark(self, status: Status) -> Any:
        """A status as a sign and a word."""
        marks = PLAIN_MARKS if self.plain else MARKS
        return self.text(f"{marks[status]} {STATUS_WORDS[status]}", COLOURS[status])

    def say(self, content: str = "", style: str = "", indent: int = 0) -> None:
        """One paragraph, wrapped."""
        padding = need("rich.padding", "printing a record").Padding
        self.console.print(padding(self.text(content, style), (0, 0, 0, indent), expand=False), highlight=False)

    def item(self, content: str) -> None:
        """One point of a list."""
        table = need("rich.table", "printing a record").Table.grid(padding=(0, 1))
        table.add_row(self.text("-" if self.plain else "•"), self.text(content))
        self.console.print(table)

    def table(self, heads: list[str], rows: list[list[Any]], *, left: int = 1, fold: tuple[int, ...] = (0,)) -> None:
        """A table whose first `left` columns are words; columns in `fold` may wrap."""
        box = need("rich.box", "printing a record")
        table = need("rich.table", "printing a record").Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
        for i, head in enumerate(heads):
            wraps = i in fold
            table.add_column(
                self.text(head),
                justify="left" if i < left else "right",
                no_wrap=not wraps,
                overflow="fold" if wraps else "ellipsis",
            )
        for row in rows:
            table.add_row(*(self.text(cell) if isinstance(cell, str) else cell for cell in row))
        self.console.print()
        self.console.print(table)


def print_terminal(record: AuditRecord, console: Console | None = None) -> None:
    """Print verdicts, errors by source, the guilty block and what to do.

    Args:
        record: What `bilip.audit` returned, or `AuditRecord.load`.
        console: Where to print; a new rich console on standard output by default.

    Example:
        >>> import io
        >>> from rich.console import Console
        >>> from bilip.record import AuditRecord, Status, Verdict
        >>> verdict = Verdict("sampling", Status.UNSAFE, "why", "share_non_finite", 0.02, 0.0, "base", "Bound the scale.")
        >>> record = AuditRecord(model={"name": "my flow"}, verdicts={"sampling": verdict})
        >>> console = Console(width=80, record=True, file=io.StringIO())
        >>> print_terminal(record, console)
        >>> "UNSAFE" in console.export_text()
        True
    """
    teller, summary = Teller(console), summarize(record)
    teller.say(clean(summary.name, 160), "bold")
    if summary.facts:
        teller.say(" · ".join(summary.facts), "dim")
    teller.say(summary.headline, "bold" if any(v.status == Status.UNSAFE for v in summary.verdicts) else "")
    lost, inversion = lost_lines(record), record.verdicts.get("inversion")
    told = inversion is not None and inversion.status == Status.UNSAFE  # then the data are the news, not other sources
    for line in () if told else lost:
        teller.say(line, "bold red")
    if summary.verdicts:
        rows = [[clean(v.use, 24), teller.mark(v.status), deciding(v)] for v in summary.verdicts]
        teller.table(["use", "verdict", "what decided it"], rows, left=3, fold=(2,))
    _print_sources(teller, summary)
    for line in lost if told else ():
        teller.item(line)
    for title, lines in (("Guilty", summary.blame), ("Failed", summary.failures), ("What to do", summary.advice_lines)):
        if lines:
            teller.say(title, "bold")
            for line in lines:
                teller.item(line)


def _print_sources(teller: Teller, summary: Summary) -> None:
    measured = [s for s in summary.sources if not s.reason]
    rows = [
        [clean(s.name, 30), s.count, s.non_finite, s.wrong, s.median, s.p999, s.condition]
        for s in measured[:MOST_SOURCES]
    ]
    if rows:
        heads = ["source", "samples", "Inf/NaN", "wrong", "median", "p99.9", "condition"]
        teller.table(heads, rows)
        teller.say("median, p99.9: relative error of F⁻¹(F(x)); condition: worst found", "dim")
    if len(measured) > MOST_SOURCES:
        teller.say(f"and {len(measured) - MOST_SOURCES} more sources in the record")
    for s in [s for s in summary.sources if s.reason][:MOST_SOURCES]:
        teller.say(f"{clean(s.name, 40)}: not measured, {s.reason}")
    teller.console.print()
