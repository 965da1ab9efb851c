"""A bar in the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

__all__ = ["shown"]


@contextlib.contextmanager
def shown(title: str = "training") -> Iterator[Callable[[int, int, Mapping[str, float]], None]]:
    """A bar with the latest numbers, on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title)

        def show(done: int, steps: int, latest: Mapping[str, float]) -> None:
            numbers = " ".join(f"{name} {value:.4g}" for name, value in list(latest.items())[:3])
            bar.update(task, completed=done, total=steps, description=f"{title} {numbers}")

        yield show
