"""A checksum inside the file that it is for, so that one file can be replaced at once and still be checked."""

from __future__ import annotations

import hashlib

from bilip.errors import RecordError

__all__ = ["UNSEALED", "is_whole", "seal"]

UNSEALED = "0" * 64
"""What stands where the checksum will be."""


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
