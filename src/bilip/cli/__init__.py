"""The command line: `bilip VERB ...`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; a `BilipError` becomes one line and exit code 2."""
    try:
        from bilip.cli.app import app
    except ImportError as error:
        sys.exit(f"bilip: the command line needs {error.name}: pip install 'bilip[cli]'")
    from bilip.errors import BilipError

    try:
        app()
    except BilipError as error:
        print(f"bilip: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("bilip: stopped", file=sys.stderr)
        sys.exit(130)
