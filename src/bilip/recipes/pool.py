"""Pieces of work side by side, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

from bilip.errors import BilipError, Stopped

__all__ = ["side_by_side"]

GRACE = 5.0  # seconds after Ctrl-C in which pieces may end by themselves, before they are asked to
Do = Callable[[Any, Callable[[str, float], None]], None]


def side_by_side(
    do: Do,
    pieces: Sequence[Any],
    jobs: int,
    show: Callable[[str, str, float], None],
    deadline: float | None = None,
) -> None:
    """Run `do(piece, progress)` for every piece, so many at a time.

    The first error ends the other pieces and is raised here; Ctrl-C, SIGTERM and errors let them save first.

    Args:
        do: A function at the top level of a module.
        pieces: Each with a `title`.
        jobs: How many at a time.
        show: Called here with title, text and share whenever a piece reports.
        deadline: When no piece is begun any more, in the seconds of `time.time()`.

    Raises:
        Stopped: Some pieces have stopped at the deadline, or were not begun.
    """
    context = multiprocessing.get_context("spawn")
    reports, waiting, running = context.Queue(), list(pieces), {}
    stopped = ""
    before = _on_sigterm(_ended)
    try:
        while waiting or running:
            if waiting and deadline is not None and time.time() >= deadline:
                waiting, stopped = [], stopped or "the time is up."
            while waiting and len(running) < jobs:
                piece = waiting.pop(0)
                running[piece.title] = context.Process(target=_one, args=(do, piece, reports))
                running[piece.title].start()
            dead = [title for title, process in running.items() if not process.is_alive()]  # before their last words
            for title, kind, *words in _heard(reports):
                if kind == "failed":
                    running.pop(title).join(
                        timeout=20
                    )  # killed as it leaves, it would take the lock of the queue along
                    raise words[0]
                if kind == "stopped":
                    stopped = "the time is up."
                show(title, *words)
                if kind in ("done", "stopped"):
                    running.pop(title).join()
            for title in dead:
                if title in running:
                    raise BilipError(
                        f"the process of {title!r} ended with exit code {running[title].exitcode}, perhaps for want of memory. "
                        "Run the command again: it goes on from the last checkpoint. --jobs 1 needs less at once."
                    )
    except KeyboardInterrupt:
        end = time.monotonic() + GRACE
        for process in running.values():  # by a terminal they were interrupted too, and save
            process.join(timeout=max(0.0, end - time.monotonic()))
        raise
    finally:
        _on_sigterm(before)
        for process in running.values():
            process.terminate()  # a piece in training saves first
        for process in running.values():
            process.join(timeout=60)
            process.kill()
            process.join()
    if stopped:
        raise Stopped(stopped)


def _ended(number: int, frame: object) -> None:
    raise Stopped("stopped by SIGTERM.")


def _on_sigterm(handler: Any) -> Any:
    """Set what SIGTERM does here, in the main thread, and give back what it did."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


def _one(do: Do, piece: Any, reports: Any) -> None:
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _on_sigterm(_ended)  # in training, the loop's own
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
    except Stopped as why:
        reports.put((piece.title, "stopped", str(why), 0.0))
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
