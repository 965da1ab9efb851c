"""The bar of a long command."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["bar"]


def bar(*, quiet: bool = False) -> Progress:
    """Progress on standard error, if that is a terminal; it is gone when the command is done."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
