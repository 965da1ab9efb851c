"""Pieces of work side by side, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

from bilip.errors import BilipError

__all__ = ["side_by_side"]

Do = Callable[[Any, Callable[[str, float], None]], None]


def side_by_side(do: Do, pieces: Sequence[Any], jobs: int, show: Callable[[str, str, float], None]) -> None:
    """Run `do(piece, progress)` for every piece, so many at a time.

    The first error ends the other pieces and is raised here; Ctrl-C lets them save first.

    Args:
        do: A function at the top level of a module.
        pieces: Each with a `title`.
        jobs: How many at a time.
        show: Called here with title, text and share whenever a piece reports.
    """
    context = multiprocessing.get_context("spawn")
    reports, waiting, running = context.Queue(), list(pieces), {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                piece = waiting.pop(0)
                running[piece.title] = context.Process(target=_one, args=(do, piece, reports))
                running[piece.title].start()
            dead = [title for title, process in running.items() if not process.is_alive()]  # before their last words
            for title, kind, *words in _heard(reports):
                if kind == "failed":
                    raise words[0]
                show(title, *words)
                if kind == "done":
                    running.pop(title).join()
            for title in dead:
                if title in running:
                    raise BilipError(
                        f"the process of {title!r} ended with exit code {running[title].exitcode}, perhaps for want of memory. "
                        "Run the command again: it goes on from the last checkpoint. --jobs 1 needs less at once."
                    )
    except KeyboardInterrupt:
        for process in running.values():  # they were interrupted too, and save
            process.join(timeout=60)
        raise
    finally:
        for process in running.values():
            process.terminate()
            process.join()


def _one(do: Do, piece: Any, reports: Any) -> None:
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    last = 0.0

    def progress(text: str, share: float) -> None:
        nonlocal last
        if time.monotonic() - last > 0.3:
            last = time.monotonic()
            reports.put((piece.title, "working", text, share))

    try:
        do(piece, progress)
    except KeyboardInterrupt:
        return
    except BilipError as error:
        reports.put((piece.title, "failed", error))
        return
    except Exception as error:
        reports.put((piece.title, "failed", BilipError(f"{piece.title} failed: {type(error).__name__}: {error}")))
        raise
    reports.put((piece.title, "done", "done", 1.0))


def _leave_with_parent() -> None:
    """A piece whose parent was killed must not go on beside the one that takes its place."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _heard(reports: Any) -> list[tuple]:
    """All that was reported, after a moment at most."""
    found = []
    try:
        found.append(reports.get(timeout=0.2))
        while True:
            found.append(reports.get_nowait())
    except queue.Empty:
        return found
