"""Files that are written while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["Writer"]


class Writer:
    """Does one piece of work at a time on a thread of its own, and hands its error to whoever waits for it.

    Example:
        >>> done = []
        >>> writer = Writer()
        >>> writer.begin(lambda: done.append("first"))
        >>> writer.begin(lambda: done.append("second"))  # waits for the first
        >>> writer.wait()
        >>> done
        ['first', 'second']
        >>> writer.close()
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "bilip-writer")
        self._under_way: Future[object] | None = None

    def begin(self, work: Callable[[], object]) -> None:
        """Begin a piece of work when the one before is done; raises what that one raised."""
        self.wait()
        self._under_way = self._pool.submit(work)

    def wait(self) -> None:
        """Until nothing is under way; raises what it raised."""
        last, self._under_way = self._under_way, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()
