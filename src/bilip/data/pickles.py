"""Arrays out of a pickle without running what it asks for.

A pickle is a program: loading one calls the functions that it names. Here every name is answered by a stand-in that
only takes notes, and arrays of bytes or numbers are built from the notes; any other name is an error.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from bilip.errors import InputError
from bilip.record.files import read_file

__all__ = ["load_plain"]

MOST = 2**31  # bytes of a file


class _DType:
    """Stands for numpy.dtype: keeps the code, such as `u1`, and the byte order."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        self.code, self.order = code, "|"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def resolve(self) -> np.dtype:
        code, order = (k.decode("latin1") if isinstance(k, bytes) else k for k in (self.code, self.order))
        if not isinstance(code, str) or code[:1] not in "uif" or not code[1:].isdigit() or order not in ("|", "<", ">"):
            raise pickle.UnpicklingError(f"an array of {code!r} is not one of plain numbers")
        return np.dtype(code).newbyteorder(order) if order != "|" else np.dtype(code)


class _Array:
    """Stands for numpy.ndarray: keeps shape, dtype and bytes."""

    state: tuple | None = None

    def __setstate__(self, state: tuple) -> None:
        self.state = state

    def resolve(self) -> np.ndarray:
        if self.state is None or len(self.state) != 5:
            raise pickle.UnpicklingError("an array without its numbers")
        _, shape, dtype, columns_first, raw = self.state
        if not isinstance(dtype, _DType) or not isinstance(raw, bytes):
            raise pickle.UnpicklingError("an array that does not hold plain numbers")
        flat = np.frombuffer(raw, dtype.resolve())
        return flat.reshape(shape, order="F" if columns_first else "C").copy(order="C")


class _Function:
    """Stands for a function; a pickle can call it, and cannot change it."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError("it changes a function")


class _Reconstruct(_Function):
    __slots__ = ()

    def __call__(self, *_: Any) -> _Array:
        return _Array()


class _Encode(_Function):
    __slots__ = ()

    def __call__(self, text: str, encoding: str = "latin1") -> bytes:
        if not isinstance(text, str) or encoding != "latin1":
            raise pickle.UnpicklingError(f"text in {encoding!r:.40}")
        return text.encode("latin1")


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
    ("_codecs", "encode"): _Encode(),
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not run here") from None


def load_plain(path: str | Path) -> dict[Any, Any]:
    """The dictionary in a pickle file, with lists, numbers, text, and numpy arrays of numbers as values.

    Raises:
        InputError: The file is truncated, holds something else, or asks for any other function or class.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "batch")
        ...     _ = path.write_bytes(pickle.dumps({"data": np.arange(3, dtype=np.uint8), "labels": [1, 2]}, protocol=2))
        ...     load_plain(path)
        {'data': array([0, 1, 2], dtype=uint8), 'labels': [1, 2]}
    """
    data = read_file(path, most=MOST)
    try:
        _require_modest(data)
        content = _PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(content, dict):
            raise pickle.UnpicklingError(f"it holds {type(content).__name__}, not a dictionary")
        return {key: value.resolve() if isinstance(value, _Array) else value for key, value in content.items()}
    except Exception as error:  # a broken pickle can raise almost anything
        raise InputError(f"{path} cannot be read as a plain pickle: {error!s:.300}.") from error


def _require_modest(data: bytes) -> None:
    """A pickle numbers what it remembers; a number far beyond its own length would only fill the memory."""
    for code, number, _ in pickletools.genops(data):
        if "PUT" in code.name and isinstance(number, int) and number > len(data):
            raise pickle.UnpicklingError(f"it remembers something as number {number}")
