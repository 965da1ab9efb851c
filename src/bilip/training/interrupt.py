"""Ctrl-C, SIGTERM and a deadline between steps, never inside one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from bilip.errors import Stopped

__all__ = ["Interrupts"]


class Interrupts:
    """While it is open, the first Ctrl-C or SIGTERM waits until `check()`; a second Ctrl-C stops at once.

    Outside of the main thread, where Python delivers no signals, only the deadline counts.

    Args:
        deadline: In the seconds of `time.time()`; `None` for none.

    Example:
        >>> with Interrupts() as interrupts:
        ...     interrupts.check()
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.asked, self.ended, self.deadline = False, False, deadline

    def check(self, now: float | None = None) -> None:
        """Raise `KeyboardInterrupt` or `Stopped` if one was asked for, `Stopped` if the deadline is before `now`."""
        if self.asked:
            raise KeyboardInterrupt
        if self.ended:
            raise Stopped("stopped by SIGTERM; the same call goes on from here.")
        if self.deadline is not None and now is not None and now >= self.deadline:
            raise Stopped("the time is up; the same call goes on from here.")

    def __enter__(self) -> Interrupts:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._main:
            for number, before in self._before.items():
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self.ended = True
        elif self.asked:
            raise KeyboardInterrupt
        else:
            self.asked = True
