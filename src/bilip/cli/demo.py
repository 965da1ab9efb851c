"""`bilip demo`: three small trained flows, audited side by side, and the broken one cured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bilip._progress import bar

if TYPE_CHECKING:
    from bilip.cures import Cure
    from bilip.record import AuditRecord

__all__ = ["demo"]


def demo(
    html: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("bilip-demo.html"),
    budget: Annotated[str, typer.Option(help="quick, standard or thorough.")] = "quick",
) -> None:
    """Audit three small flows, trained on a checkerboard on [-4, 4]², say what is wrong with one, cure it, and write the page."""
    from bilip import report
    from bilip.cli._arguments import require_page, require_writable
    from bilip.demo import run_demo

    require_writable(html)
    require_page(html)
    console = Console(highlight=False)
    with bar() as shown:
        task = shown.add_task("loading", total=1.0)
        found = run_demo(budget, lambda text, share: shown.update(task, description=text[:60], completed=share))
    report.write_html(found.records, html, title="bilip demo: three flows on a checkerboard, and a cure")
    console.print(_table(found.records))
    console.print(
        "Three flows trained on one checkerboard on [-4, 4]²: affine coupling with a scale in (0, 1) or (0.5, 1), and "
        "residual blocks with a certified constant of 0.8. All give their data back. [bold]Outside[/bold] is uniform noise on "
        "[-8, 8]²: the first flow does not give all of it back, and raises no error. Errors are the largest finite relative "
        "errors of F⁻¹(F(x)); lost: above √eps, NaN or Inf."
    )
    console.print()
    for line in _story(found.broken, found.cure):
        console.print(line)
    console.print(f"\nThe whole report: [bold]{html}[/bold]   (open it in a browser)")
    console.print(
        "Next, for a model of yours:  bilip audit my_module:my_model --data x.npy --html report.html", markup=False
    )
    console.print("                             bilip cure my_module:my_model --data x.npy --out cured/", markup=False)


def _story(record: AuditRecord, result: Cure) -> list[str]:
    """Found, explained, cured, before and after."""
    lines = []
    blame = next((m for m in record.find("blame", "uniform:2") if m.measured and m.get("guilty")), None)
    if blame is not None:
        why = f"block {blame['guilty']} ({blame['guilty_kind']}): {blame['why']}"
        lines.append(f"[bold]Found[/bold]      {record.model['name']}: {why}.")
    for attempt in result.tried:
        if attempt.outcome == "skipped":
            continue
        colour = "bold green" if attempt.outcome == "cured" else "red"
        lines.append(f"[bold]Tried[/bold]      {attempt.what}: [{colour}]{attempt.outcome}[/{colour}].")
    if result.cured and result.after is not None:
        before, after = (r.find("reconstruction", "uniform:2")[0] for r in (result.before, result.after))
        cost = result.cost.get("rise")
        lines.append(
            f"[bold green]Cured[/bold green]      lost outside {100 * before['share_bad']:.2g} % → {100 * after['share_bad']:.2g} %, "
            f"largest error {before['relative_max']:.1e} → {after['relative_max']:.1e}"
            + ("" if cost is None else f"; held-out log-likelihood {-cost:+.1g} nats")
            + ". An audit has checked it."
        )
    return lines


def _table(records: dict[str, AuditRecord]) -> Table:
    table = Table(title="May they be used?", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("flow", no_wrap=True)
    for head in ("inversion", "sampling", "likelihood", "error\noutside", "lost\noutside"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, record in records.items():
        outside = record.find("reconstruction", "uniform:2")[0]
        lost = 100 * outside["share_bad"]
        states = [record.verdicts[use].status.value for use in ("inversion", "sampling", "likelihood")]
        table.add_row(
            name,
            *(f"[bold red]{s.upper()}[/bold red]" if s == "unsafe" else s for s in states),
            f"{outside['relative_max']:.1e}",
            f"[bold red]{lost:.2g} %[/bold red]" if lost else "0 %",
        )
    return table
