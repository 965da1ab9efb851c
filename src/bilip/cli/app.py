"""The verbs."""

from __future__ import annotations

import typer

import bilip
from bilip.cli.bounds import bounds
from bilip.cli.demo import demo

__all__ = ["app"]

app = typer.Typer(
    name="bilip",
    help="Find, explain and cure exploding inverses in invertible neural networks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(bounds)
app.command()(demo)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    if version:
        typer.echo(f"bilip {bilip.__version__}")
        raise typer.Exit
