"""Ctrl-C between steps, never inside one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

__all__ = ["Interrupts"]


class Interrupts:
    """While it is open, the first Ctrl-C waits until `check()`; a second one stops at once.

    Outside of the main thread, where Python delivers no signals, it does nothing.

    Example:
        >>> with Interrupts() as interrupts:
        ...     interrupts.check()
    """

    def __init__(self) -> None:
        self.asked = False

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if one was asked for."""
        if self.asked:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
