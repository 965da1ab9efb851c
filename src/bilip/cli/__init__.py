"""The command line: `bilip VERB ...`."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Run the command line; an error is one line, with the exit codes that `docs/cli.md` lists."""
    # In ASCII, or a code page, what there is no letter for is replaced.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        from bilip.cli.app import app
    except ImportError as error:
        print(f"bilip: the command line needs {error.name}: pip install 'bilip[cli]'", file=sys.stderr)
        sys.exit(2)
    from bilip.cli._ending import end

    warnings.filterwarnings("ignore", message=".*deprecated")  # for the developers of libraries
    shown, warnings.showwarning = warnings.showwarning, _note
    try:
        app()
    except KeyboardInterrupt:  # while arguments were read
        end("stopped", 130)
    finally:
        warnings.showwarning = shown


def _note(message: Warning | str, *_: Any) -> None:
    """A warning as one line, without the place in the code that it comes from."""
    print(f"bilip: note: {' '.join(str(message).split())}", file=sys.stderr)
