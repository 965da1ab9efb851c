"""The header of a safetensors file, read strictly: what the tensors are, before any of them is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from bilip.errors import BilipError
from bilip.record.plain import parse_json

__all__ = ["Entry", "Header", "read_header"]

BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
LONGEST = 10**8  # bytes of a header, as in the format's own library


@dataclass(frozen=True)
class Entry:
    """One tensor: its dtype, as in `F32`, and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Header:
    """The tensors of a file by name, and the texts that were saved along."""

    tensors: Mapping[str, Entry]
    metadata: Mapping[str, str]

    @property
    def numbers(self) -> int:
        """Entries of all tensors together."""
        return sum(math.prod(entry.shape) for entry in self.tensors.values())


def read_header(file: BinaryIO, size: int, wrong: Callable[[str], BilipError]) -> Header:
    """Read and check the header of an open file of `size` bytes.

    Tensors have to lie one after the other, each as long as its shape and dtype say, up to the end of the file.

    Args:
        file: The file, at its beginning.
        size: Its bytes.
        wrong: Makes the error that is raised if the file is truncated, foreign or does not hold what it says, from the reason.
    """
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, LONGEST):
        raise wrong(f"its header should have {length:,} bytes" if size >= 8 else "it has no header")
    try:
        table = parse_json(file.read(length), "the header", advice="")
    except BilipError as why:
        raise wrong(str(why).rstrip(". ")) from why
    if not isinstance(table, dict):
        raise wrong("its header is no table")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise wrong("its metadata are no texts")
    tensors, places = {}, []
    for name, raw in table.items():
        tensors[name], place = _entry(name, raw, wrong)
        places.append(place)
    end = 0
    for begin, stop in sorted(places):
        if begin != end:
            raise wrong("its tensors overlap or have gaps")
        end = stop
    if end != size - 8 - length:
        raise wrong(f"its tensors have {end:,} bytes, the file has {size - 8 - length:,} for them")
    return Header(tensors, metadata)


def _entry(name: str, raw: Any, wrong: Callable[[str], BilipError]) -> tuple[Entry, tuple[int, int]]:
    name = f"{name!r:.60}"
    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise wrong(f"tensor {name} lacks dtype, shape or place")
    dtype, shape, place = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise wrong(f"tensor {name} has the unknown dtype {dtype!r:.40}")
    for numbers in (shape, place):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise wrong(f"tensor {name} has the shape or place {numbers!r:.60}")
    if len(shape) > 64 or len(place) != 2 or (place[1] - place[0]) * 8 != math.prod(shape) * BITS[dtype]:
        raise wrong(f"tensor {name} does not fill its place")
    return Entry(dtype, tuple(shape)), (place[0], place[1])
