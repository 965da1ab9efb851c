"""The command line: `bilip VERB ...`."""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> None:
    """Run the command line; a `BilipError` becomes one line and exit code 2, `Stopped` 75, Ctrl-C 130."""
    try:
        from bilip.cli.app import app
    except ImportError as error:
        _end(f"the command line needs {error.name}: pip install 'bilip[cli]'", 2)
    from bilip.errors import BilipError, Stopped

    try:
        app()
    except Stopped as why:
        _end(str(why), 75)
    except BilipError as error:
        _end(str(error), 2)
    except BrokenPipeError:
        raise
    except OSError as error:  # a folder that cannot be written, a disk that is full
        _end(f"{error.filename or 'the system says'}: {error.strerror or error}", 2)
    except SystemExit as end:
        if end.code == 130:  # what typer makes of Ctrl-C
            _end("stopped", 130)
        raise
    except KeyboardInterrupt:
        _end("stopped", 130)


def _end(text: str, code: int) -> NoReturn:
    print(f"bilip: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(code)
