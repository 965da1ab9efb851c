"""How a verb ends: whatever goes wrong in it, in one line and an exit code."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable
from signal import SIG_DFL, SIG_IGN, SIGINT, SIGTERM, getsignal, signal
from types import FrameType, TracebackType
from typing import Any, NoReturn, TextIO

import typer

from bilip.errors import BilipError, Stopped, said_by

__all__ = ["Stop", "Streams", "Terminated", "end", "last_words", "with_exit_codes"]

FAULT = 3
AGAIN = 75
TERMINATED = 128 + SIGTERM


def with_exit_codes(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb that takes `--traceback` as well; without it, an error is one line.

    The exit code is 2 for bad input, 130 after Ctrl-C, 143 after SIGTERM, 75 for work that was stopped and goes on
    when it is called again, and 3 for an error that nobody foresaw.
    """
    signature = inspect.signature(verb, eval_str=True)
    option = typer.Option(False, "--traceback", help="Show where an error comes from.")
    more = inspect.Parameter("traceback", inspect.Parameter.KEYWORD_ONLY, default=option, annotation=bool)

    @functools.wraps(verb)
    def guarded(**given: Any) -> None:
        shown, streams, stop = given.pop("traceback"), Streams(), Stop()
        try:
            with stop:
                verb(**given)
                stop.check()
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise
        except BaseException as error:
            if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
                raise  # rich leaves so where nobody reads on, as after `| head`
            streams.restore()
            if shown:
                traceback.print_exception(error)
            if stop.asked is not None and not isinstance(error, (KeyboardInterrupt, Stopped)):
                error = stop.asked()  # which somebody has caught, as libraries do while they load, and failed then
            end(*last_words(error))
        finally:
            streams.close()

    guarded.__signature__ = signature.replace(parameters=[*signature.parameters.values(), more])  # type: ignore[attr-defined]
    guarded.__annotations__ = {**verb.__annotations__, "traceback": bool}
    return guarded


def last_words(error: BaseException) -> tuple[str, int]:
    """The line that is said about an error, and the exit code."""
    if isinstance(error, Terminated):
        return str(error) or "stopped", TERMINATED
    if isinstance(error, KeyboardInterrupt):
        return "stopped", 130
    if isinstance(error, Stopped):
        return str(error), AGAIN
    if isinstance(error, BilipError):
        return str(error), 2
    if isinstance(error, OSError):  # a folder that cannot be written, a disk that is full
        return f"{error.filename or 'the system says'}: {error.strerror or error}", 2
    if isinstance(error, SystemExit):  # no verb ends in this way
        return f"the model ended the program ({said_by(error)}). Remove the call of sys.exit", 2
    if isinstance(error, RecursionError):
        return f"the model, or a file, is nested too deeply, or in itself ({said_by(error)})", 2
    no_room = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # as torch says it on a CPU
    if no_room or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory ({str(error) or type(error).__name__})", 2
    return f"{said_by(error)}. Nobody foresaw this: --traceback shows where it comes from", FAULT


def end(text: str, code: int) -> NoReturn:
    """Print one line on standard error and leave."""
    line = "".join(c if c.isprintable() else " " for c in text)
    print(f"bilip: {' '.join(line.split())}", file=sys.stderr)
    sys.exit(code)


class Streams:
    """Standard output and standard error as they are now, to be restored after a model that closes them."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, TextIO, int, int]] = []
        for name in ("stdout", "stderr"):
            with contextlib.suppress(AttributeError, ValueError, OSError):  # there is none, or it leads to no file
                number = getattr(sys, name).fileno()
                self._kept.append((name, getattr(sys, name), number, os.dup(number)))

    def restore(self) -> None:
        """Open again what was closed."""
        for name, before, number, kept in self._kept:
            try:
                there = os.path.sameopenfile(number, kept)
            except OSError:
                there = False
            if not there:
                os.dup2(kept, number)
            now = getattr(sys, name)
            if now is None or getattr(now, "closed", False):  # a stream of a model's own need not know whether it is
                again = open(os.dup(kept), "w", encoding=before.encoding, errors=before.errors)  # noqa: SIM115
                setattr(sys, name, again)

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what is kept."""
        for *_, kept in self._kept:
            os.close(kept)
        self._kept = []


class Terminated(KeyboardInterrupt):
    """SIGTERM, which is answered like Ctrl-C."""


class Stop:
    """While it is open, Ctrl-C and SIGTERM interrupt; a model that swallows the interrupt meets it again in `check`.

    Outside of the main thread, where Python delivers no signals, it does nothing.

    Args:
        keeps: Whether what was done until the first signal is kept. A second one is then only noted, so that it does not lose that, and
            a third ends the program.

    Attributes:
        asked: What the first signal raises; `None` before.
        late: Set to only note signals, while results are written.
        patient: Set to note every later signal, as one of several processes that wait for one another.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self.keeps, self.late, self.patient = keeps, False, False
        self.asked: type[KeyboardInterrupt] | None = None
        self._count = 0

    def check(self) -> None:
        """Raise if there was a signal."""
        if self.asked is not None:
            raise self.asked

    def __enter__(self) -> Stop:
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            # a process in the background may have to ignore Ctrl-C, which was typed for another
            taken = (SIGTERM,) if getsignal(SIGINT) is SIG_IGN else (SIGTERM, SIGINT)
            self._before = {number: signal(number, self._note) for number in taken}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal(number, SIG_DFL if before is None else before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        kind, first = Terminated if number == SIGTERM else KeyboardInterrupt, self.asked is None
        self.asked, self._count = self.asked or kind, self._count + 1
        if not self.late and (first or not self.keeps):
            raise kind
        if self._count > 2 and not self.patient:
            signal(number, SIG_DFL)
            os.kill(os.getpid(), number)
