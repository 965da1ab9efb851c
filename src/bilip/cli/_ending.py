"""How a verb ends: whatever goes wrong in it, in one line and an exit code."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import traceback
from collections.abc import Callable
from signal import SIGTERM, signal
from types import FrameType, TracebackType
from typing import Any, NoReturn

import typer

from bilip.errors import BilipError, Stopped, said_by

__all__ = ["Stop", "end", "last_words", "with_exit_codes"]

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
        shown = given.pop("traceback")
        try:
            with Stop():
                verb(**given)
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise
        except BaseException as error:
            if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
                raise  # rich leaves so where nobody reads on, as after `| head`
            if shown:
                traceback.print_exception(error)
            end(*last_words(error))

    guarded.__signature__ = signature.replace(parameters=[*signature.parameters.values(), more])  # type: ignore[attr-defined]
    guarded.__annotations__ = {**verb.__annotations__, "traceback": bool}
    return guarded


def last_words(error: BaseException) -> tuple[str, int]:
    """The line that is said about an error, and the exit code."""
    if isinstance(error, Terminated):
        return "stopped", TERMINATED
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
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory ({str(error) or type(error).__name__})", 2
    return f"{said_by(error)}. Nobody foresaw this: --traceback shows where it comes from", FAULT


def end(text: str, code: int) -> NoReturn:
    """Print one line on standard error and leave."""
    line = "".join(c if c.isprintable() else " " for c in text)
    print(f"bilip: {' '.join(line.split())}", file=sys.stderr)
    sys.exit(code)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which is answered like Ctrl-C."""


class Stop:
    """While it is open, SIGTERM interrupts like Ctrl-C; a model that swallows the interrupt meets it again in `check`.

    Outside of the main thread, where Python delivers no signals, it does nothing.

    Attributes:
        asked: Whether there was a SIGTERM.
        late: Set to only note a SIGTERM, while results are written.
    """

    def __init__(self) -> None:
        self.asked = self.late = False

    def check(self) -> None:
        """Raise if there was a SIGTERM."""
        if self.asked:
            raise Terminated

    def __enter__(self) -> Stop:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal(SIGTERM, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._main:
            signal(SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if not self.late:
            raise Terminated
