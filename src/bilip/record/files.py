"""Files: opened safely, written whole or not at all, sealed with a checksum; and where a record was made."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import re
import stat
import threading
import time
from pathlib import Path
from typing import BinaryIO

from bilip.errors import BilipError, InputError, RecordError

__all__ = ["UNSEALED", "environment", "is_open_file", "is_whole", "open_regular", "read_file", "seal", "write_aside"]

KINDS = (
    (stat.S_ISDIR, "Is a directory"),
    (stat.S_ISFIFO, "it is a pipe"),
    (stat.S_ISCHR, "it is a device"),
    (stat.S_ISBLK, "it is a device"),
    (stat.S_ISSOCK, "it is a socket"),
)

UNSEALED = "0" * 64
"""What stands where the checksum will be."""


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


def open_regular(path: str | Path, *, most: int, error: type[BilipError] = InputError, missing: str = "") -> BinaryIO:
    """Open a file for reading, after links are followed: a regular one of at most so many bytes, nothing else.

    A pipe, a device, a socket or a folder is refused before it is opened, so that none can make the caller wait for ever.

    Args:
        path: The file.
        most: Largest size in bytes.
        error: What is raised.
        missing: What is said of a file that does not exist, after its name.

    Raises:
        BilipError: Of the kind `error`, in one line.

    Example:
        >>> open_regular("/", most=100)
        Traceback (most recent call last):
        ...
        bilip.errors.InputError: / cannot be read (Is a directory).
    """
    try:
        _require_regular(os.stat(path), path, most, error)
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        handle = os.open(path, flags)
        try:
            _require_regular(os.fstat(handle), path, most, error)  # it may have been replaced in between
            return os.fdopen(handle, "rb")
        except BaseException:
            os.close(handle)
            raise
    except OSError as why:
        if missing and isinstance(why, FileNotFoundError):
            raise error(f"{path} {missing}") from why
        raise error(f"{path} cannot be read ({why.strerror}).") from why
    except (ValueError, TypeError) as why:  # a name with a zero byte in it, or no name at all
        if isinstance(why, BilipError):
            raise
        raise error(f"{str(path)!r} is no name of a file ({why}).") from why


def _require_regular(found: os.stat_result, path: str | Path, most: int, error: type[BilipError]) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = next((text for test, text in KINDS if test(found.st_mode)), "it is no regular file")
        raise error(f"{path} cannot be read ({kind}).")
    if found.st_size > most:
        raise error(f"{path} has {found.st_size:,} bytes: at most {most:,} are read here.")


def read_file(path: str | Path, *, most: int, error: type[BilipError] = InputError, missing: str = "") -> bytes:
    """The bytes of a regular file, at most so many; the arguments are those of `open_regular`."""
    with open_regular(path, most=most, error=error, missing=missing) as file:
        try:
            data = file.read(os.fstat(file.fileno()).st_size) or b""
            while len(data) <= most and (more := file.read(2**20)):  # files of the kernel say that they have no bytes
                data += more
        except (OSError, MemoryError) as why:
            raise error(f"{path} cannot be read ({getattr(why, 'strerror', None) or 'out of memory'}).") from why
    if len(data) > most:
        raise error(f"{path} has more than {most:,} bytes, which is all that is read here.")
    return data


def write_aside(path: str | Path, content: str | bytes) -> None:
    """Write a file whole or not at all: aside first, then renamed. Of a link, the file that it leads to.

    Pipes and devices are written to, and so is `/dev/stdout`, whatever it leads to: neither is replaced. What is printed before or
    after stands before or after it.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    target = Path(path)
    if not target.name:
        raise InputError(f"cannot write {str(path)!r}: expected the name of a file.")
    real = target if is_open_file(target) else Path(os.path.realpath(target))
    aside = real.with_name(f".{real.name}.{os.getpid()}.{threading.get_ident()}")  # no other writer's
    try:
        if is_open_file(target) or (target.exists() and not target.is_file() and not target.is_dir()):
            _write_through(target, data)
            return
        aside.write_bytes(data)
        os.replace(aside, real)
    except OSError as error:
        raise InputError(f"cannot write {target} ({error.strerror}).") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def is_open_file(target: Path) -> bool:
    """Whether a name leads to a file that a process holds open, as `/dev/stdout` does."""
    return bool(_open_file(target))


def _open_file(target: Path) -> str:
    """Where a name leads among the files that processes hold open; empty if it leads to none of them."""
    for _ in range(40):
        if str(target).startswith(("/proc/", "/dev/fd/")):
            return str(target)
        try:
            target = target.parent / os.readlink(target)
        except (OSError, ValueError):
            break
    return ""


def _opened(target: Path) -> int:
    """A pipe or a device for writing; of a file that is open here a copy, which goes on where that one stands."""
    here = re.fullmatch("/(?:proc/self|dev)/fd/([0-9]+)", _open_file(target))
    flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0)
    return os.open(target, flags) if here is None else os.dup(int(here[1]))


def _write_through(target: Path, data: bytes, patience: float = 5.0) -> None:
    """Write to a pipe or a device; a pipe that nobody reads is an error, not a wait without end."""
    end = time.monotonic() + patience
    while True:
        try:
            handle = _opened(target)
            break
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > end:
                raise
            time.sleep(0.02)
    os.set_blocking(handle, True)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def seal(data: bytes) -> bytes:
    """The bytes with the SHA-256 of themselves in place of the one `UNSEALED` that they hold.

    Example:
        >>> sealed = seal(b'{"sha256": "' + UNSEALED.encode() + b'"}')
        >>> is_whole(sealed, sealed[12:76].decode()), is_whole(sealed.replace(b"{", b"["), sealed[12:76].decode())
        (True, False)
    """
    before, place, after = data.partition(UNSEALED.encode())
    if not place:
        raise RecordError("there is no place for a checksum in this.")
    return before + hashlib.sha256(data).hexdigest().encode() + after


def is_whole(data: bytes, checksum: object) -> bool:
    """Whether bytes are those that `seal` gave, with this checksum in them."""
    if not isinstance(checksum, str) or len(checksum) != 64 or not checksum.isascii():
        return False
    before, found, after = data.partition(checksum.encode())
    if not found:
        return False
    digest = hashlib.sha256(before)
    digest.update(UNSEALED.encode())
    digest.update(after)
    return digest.hexdigest() == checksum
