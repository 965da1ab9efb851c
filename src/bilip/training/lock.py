"""One run in a folder at a time."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import IO

from bilip.errors import InputError

__all__ = ["hold"]


def hold(folder: Path) -> IO[str] | None:
    """A lock on a folder until it is closed, or its process ends in whatever way. None where a file system has no locks.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lock = hold(Path(folder))
        ...     lock.close()
    """
    try:
        import fcntl
    except ImportError:  # there is none on Windows
        return None
    file = (folder / ".lock").open("w")
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise InputError(
                f"another process is training in {folder}. Wait until it ends, or choose another folder."
            ) from error
    return file
