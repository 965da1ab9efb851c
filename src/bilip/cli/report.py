"""`bilip report` and `bilip compare`: read records; neither torch nor the model is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

__all__ = ["compare", "report"]


def report(
    record: Annotated[Path, typer.Argument(help="A record that bilip audit --out wrote.")],
    html: Annotated[Path | None, typer.Option(help="Write one HTML page.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of a table.")] = False,
    junit: Annotated[Path | None, typer.Option(help="Write a JUnit file: one test case for each use.")] = None,
) -> None:
    """Show a record on the terminal, as Markdown, as an HTML page or as a JUnit file."""
    from bilip import report as pages
    from bilip.cli._arguments import require_outputs, require_page
    from bilip.record import AuditRecord, write_aside

    require_outputs({"--html": html, "--junit": junit}, [record])
    require_page(html)
    found = AuditRecord.load(record)
    try:
        if markdown:
            typer.echo(pages.to_markdown(found))
        else:
            pages.print_terminal(found)
    finally:  # also where nobody reads on, as after `| head`
        if junit is not None:
            write_aside(junit, pages.to_junit(found))
            Console(highlight=False, stderr=True).print(f"wrote {junit}", markup=False)
        if html is not None:
            pages.write_html(found, html)
            Console(highlight=False, stderr=True).print(f"wrote {html}", markup=False)


def compare(
    before: Annotated[Path, typer.Argument(help="The earlier record.")],
    after: Annotated[Path, typer.Argument(help="The later record.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of a table.")] = False,
) -> None:
    """Show what changed between two records."""
    from bilip import report as pages
    from bilip.record import AuditRecord

    change = pages.compare(AuditRecord.load(before), AuditRecord.load(after))
    if markdown:
        typer.echo(pages.comparison_markdown(change))
    else:
        pages.print_comparison(change)
