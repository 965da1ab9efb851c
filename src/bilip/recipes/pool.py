"""Pieces of work side by side, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

__all__ = ["side_by_side"]


def side_by_side(
    do: Callable[[Any, Callable[[str, float], None]], None],
    pieces: Sequence[Any],
    jobs: int,
    show: Callable[[str, str, float], None],
) -> None:
    """Run `do(piece, progress)` for every piece, so many at a time.

    The first error, or Ctrl-C, lets running pieces save what they have, begins no further ones, and is raised here.

    Args:
        do: A function at the top level of a module.
        pieces: Each with a `title`.
        jobs: How many at a time.
        show: Called here with title, text and share whenever a piece reports.
    """
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        reports = manager.Queue()
        with ProcessPoolExecutor(min(jobs, len(pieces)), mp_context=context) as pool:
            running: set[Future] = {pool.submit(_one, do, piece, reports) for piece in pieces}
            try:
                while running:
                    done, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                    _drain(reports, show)
                    for future in done:
                        future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _one(do: Callable[[Any, Callable[[str, float], None]], None], piece: Any, reports: Any) -> None:
    import time

    last = 0.0

    def progress(text: str, share: float) -> None:
        nonlocal last
        if time.monotonic() - last > 0.3 or share >= 1:
            last = time.monotonic()
            reports.put((piece.title, text, share))

    do(piece, progress)
    reports.put((piece.title, "done", 1.0))


def _drain(reports: Any, show: Callable[[str, str, float], None]) -> None:
    while True:
        try:
            show(*reports.get_nowait())
        except queue.Empty:
            return
