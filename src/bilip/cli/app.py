"""The verbs."""

from __future__ import annotations

import typer

import bilip
from bilip.cli._ending import with_exit_codes
from bilip.cli.audit import audit
from bilip.cli.bounds import bounds
from bilip.cli.cure import cure
from bilip.cli.data import data
from bilip.cli.demo import demo
from bilip.cli.report import compare, report
from bilip.cli.reproduce import reproduce

__all__ = ["app"]

app = typer.Typer(
    name="bilip",
    help="Find, explain and cure exploding inverses in invertible neural networks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (audit, cure, report, compare, bounds, demo, reproduce, data):
    app.command()(with_exit_codes(verb))


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    if version:
        typer.echo(f"bilip {bilip.__version__}")
        raise typer.Exit
