"""How long work tells how far it is: one signature, one bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

__all__ = ["Progress", "bar", "silent"]

Progress = Callable[[str, float], None]  # what is being done, and the share of it that is done, from 0 to 1


def silent(text: str, share: float) -> None:
    """Progress that nobody wants to see."""


def bar(*, quiet: bool = False, steps: bool = False) -> Bar:
    """A bar on standard error, if that is a terminal; it is gone when the work is done.

    Args:
        quiet: Show nothing.
        steps: Show how many steps are done and the time that remains, in place of a share and the time that has passed.

    Example:
        >>> with bar() as shown:
        ...     task = shown.add_task("auditing", total=1.0)
        ...     shown.update(task, completed=0.5)
    """
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    if steps:
        numbers = (rich.MofNCompleteColumn(), rich.TimeRemainingColumn())
    else:
        numbers = (rich.TextColumn("{task.percentage:3.0f} %"), rich.TimeElapsedColumn())
    columns = (rich.TextColumn("{task.description}", markup=False), rich.BarColumn(), *numbers)
    return rich.Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
