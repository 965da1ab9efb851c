"""Random numbers that depend on what they are for, and on nothing else."""

from __future__ import annotations

import hashlib

__all__ = ["seed_of"]


def seed_of(seed: int, step: int, purpose: str) -> int:
    """A seed, 63 bits, for one purpose in one step of a run.

    A run that draws all of its numbers by such seeds has no state to save: stopped and resumed, on one process or on several, it sees
    the same numbers.

    Example:
        >>> seed_of(0, 17, "data")
        6908351948378805153
        >>> seed_of(0, 17, "data") == seed_of(0, 18, "data")
        False
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
