"""One run in a folder at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from bilip.errors import InputError

try:
    import fcntl
except ImportError:  # there is none on Windows
    fcntl = None

__all__ = ["alone"]


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make a folder, and keep other runs out of it; where a file system has no locks, they are not kept out.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, alone(Path(folder) / "run"):
        ...     pass
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot train in {folder} ({error.strerror}).") from error
    if fcntl is None:
        yield
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(held)
        raise InputError(
            f"another run, of this or another process, is training in {folder}. Wait until it ends, or choose another folder."
        ) from error
    except OSError:  # no locks here
        pass
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_UN)  # a forked child may have it open still
        os.close(held)
