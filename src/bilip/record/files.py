"""Where a record was made, and writing files whole or not at all."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

from bilip.errors import InputError

__all__ = ["environment", "write_aside"]


def environment() -> dict[str, str]:
    """Versions of Python and of the libraries that matter, and the machine, as a record states them."""
    from importlib.metadata import PackageNotFoundError, version

    import bilip

    found = {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine()}
    found |= {"cores": str(os.cpu_count()), "bilip": bilip.__version__}  # which need not be installed
    for name in ("torch", "numpy", "scipy", "FrEIA", "nflows", "normflows", "zuko", "pyro-ppl"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_aside(path: str | Path, content: str | bytes) -> None:
    """Write a file whole or not at all: aside first, then renamed."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    target = Path(path)
    if not target.name:
        raise InputError(f"cannot write {str(path)!r}: expected the name of a file.")
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if target.exists() and not target.is_file() and not target.is_dir():  # a pipe or a device is no file to replace
            target.write_bytes(data)
            return
        aside.write_bytes(data)
        os.replace(aside, target)
    except OSError as error:
        raise InputError(f"cannot write {target} ({error.strerror}).") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
