"""The command line: `bilip VERB ...`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
import warnings
from typing import Any

__all__ = ["main"]

PATIENCE = 1.0  # seconds that threads get to end by themselves


def main() -> None:
    """Run the command line; an error is one line, with the exit codes that `docs/cli.md` lists."""
    before = threading.enumerate()
    try:
        _run()
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else int(end.code is not None), before)
        raise


def _run() -> None:
    # In ASCII, or a code page, what there is no letter for is replaced.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        from bilip.cli._ending import end
        from bilip.cli.app import app
    except ImportError as error:
        print(f"bilip: the command line needs {error.name}: pip install 'bilip[cli]'", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("bilip: stopped", file=sys.stderr)
        sys.exit(130)

    warnings.filterwarnings("ignore", message=".*deprecated")  # for the developers of libraries
    shown, warnings.showwarning = warnings.showwarning, _note
    try:
        app()
    except KeyboardInterrupt:  # while arguments were read
        end("stopped", 130)
    finally:
        warnings.showwarning = shown


def _leave(code: int, before: list[threading.Thread]) -> None:
    """See to it that the program ends, although Python waits for all threads that are no daemons, and a model may have started some.

    Python is left to end by itself first: it wakes idle pools of threads, and calls what a library registered with `atexit`.
    """
    left = [t for t in threading.enumerate() if t not in before and not t.daemon]

    def end() -> None:
        until = time.monotonic() + PATIENCE
        for thread in left:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in left):
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(AttributeError, ValueError, OSError):  # closed, or nobody reads on
                    stream.flush()
            os._exit(code)

    if left:
        threading.Thread(target=end, daemon=True).start()


def _note(message: Warning | str, *_: Any) -> None:
    """A warning as one line, without the place in the code that it comes from."""
    print(f"bilip: note: {' '.join(str(message).split())}", file=sys.stderr)
