"""`bilip demo`: three small trained flows, audited side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bilip.cli._bar import bar

if TYPE_CHECKING:
    from bilip.record import AuditRecord

__all__ = ["demo"]

TITLES = {
    "affine_sigmoid": "affine (0, 1)",
    "affine_half": "affine (0.5, 1)",
    "residual": "residual 0.8",
}


def demo(
    html: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("bilip-demo.html"),
    budget: Annotated[str, typer.Option(help="quick, standard or thorough.")] = "quick",
) -> None:
    """Audit three small flows, trained on a checkerboard on [-4, 4]², on their data and around it, and write the page."""
    from bilip import report
    from bilip.cli.audit import require_page, require_writable

    require_writable(html)
    require_page(html)
    records: dict[str, AuditRecord] = {}
    console = Console(highlight=False)
    with bar() as shown:
        task = shown.add_task("loading", total=float(len(TITLES)))
        for k, name in enumerate(TITLES):
            records[TITLES[name]] = _audit(
                name,
                budget,
                lambda text, share, k=k, name=name: shown.update(
                    task, description=f"{name}: {text}", completed=k + share
                ),
            )
    console.print(_table(records))
    console.print(
        "Three flows trained on one checkerboard on [-4, 4]²: affine coupling with a scale in (0, 1) or (0.5, 1), and "
        "residual blocks with a certified constant of 0.8. All give their data back. [bold]Outside[/bold] is uniform noise on "
        "[-8, 8]²: the first flow gives some of it back as garbage, without a word. Errors are the largest finite relative "
        "errors of F⁻¹(F(x)); lost: above √eps, NaN or Inf."
    )
    report.write_html(records, html, title="bilip demo: three flows on a checkerboard")
    console.print(f"\nThe whole report: [bold]{html}[/bold]   (open it in a browser)")
    console.print(
        "Next, for a model of yours:  bilip audit my_module:my_model --data x.npy --html report.html", markup=False
    )


def _audit(name: str, budget: str, progress) -> AuditRecord:
    import bilip
    from bilip.data import checkerboard
    from bilip.demo_flows import load_demo_flow

    x = checkerboard(2000, seed=1)
    sources = {"checkerboard": x}
    return bilip.audit(
        load_demo_flow(name),
        sources,
        ood=["uniform:2"],
        budget=budget,
        name=TITLES[name],
        command=f"bilip demo --budget {budget}",
        progress=progress,
    )


def _table(records: dict[str, AuditRecord]) -> Table:
    table = Table(title="May they be used?", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("flow", no_wrap=True)
    for head in ("sampling", "likelihood", "likelihood\noutside", "error\non data", "error\noutside", "lost\noutside"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, record in records.items():
        inside = record.find("reconstruction", "checkerboard")[0]
        outside = record.find("reconstruction", "uniform:2")[0]
        lost = outside["share_wrong"] + outside["share_nan"] + outside["share_inf"] + outside["share_failed"]
        states = [record.verdicts[use].status.value for use in ("sampling", "likelihood", "ood-likelihood")]
        table.add_row(
            name,
            *(f"[bold red]{s.upper()}[/bold red]" if s == "unsafe" else s for s in states),
            f"{inside['relative_max']:.1e}",
            f"{outside['relative_max']:.1e}",
            f"{100 * lost:.2g} %",
        )
    return table
