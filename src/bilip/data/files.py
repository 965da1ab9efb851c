"""Rows of files, read where they lie: a file of any length costs the memory of one batch."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from bilip.data.rows import ArrayRows, Rows, torch_dtype
from bilip.errors import InputError, MissingExtra

__all__ = ["open_file"]

READABLE = ".npy, .npz, .safetensors, or a folder of PNG or JPEG images"


def open_file(path: Path) -> tuple[Rows, Rows | None]:
    """The samples and the contexts of a file or of a folder of images; nothing in a file is executed."""
    if not path.exists():
        raise InputError(f"{path} does not exist.")
    if path.is_dir():
        from bilip.data.folder import FolderRows

        return FolderRows(path), None
    openers = {".npy": _npy, ".npz": _npz, ".safetensors": _safetensors}
    if path.suffix.lower() not in openers:
        raise InputError(f"{path} is not of a kind that is read here: expected {READABLE}.")
    try:
        return openers[path.suffix.lower()](path)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        if isinstance(error, InputError):
            raise
        # zipfile knows more ways of packing than Python can undo
        unknown = isinstance(error, NotImplementedError)
        advice = "Save it again with numpy." if unknown else "It may be truncated: copy it again."
        raise InputError(f"{path} cannot be read: {_line(error)}. {advice}") from error


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _refuse_objects(where: str, dtype: np.dtype) -> None:
    if dtype.hasobject:
        raise InputError(f"{where} holds Python objects, which could run code when loaded: save plain numbers instead.")


def choose(path: Path, names: list[str]) -> tuple[str, str | None]:
    """Which arrays of a file are the samples and the contexts."""
    context = "context" if "context" in names else None
    if "x" in names:
        return "x", context
    others = [name for name in names if name != "context"]
    if len(others) == 1:
        return others[0], context
    held = ", ".join(map(repr, sorted(names))) if names else "nothing"
    raise InputError(f"{path} holds {held}: expected an array 'x', or one array alone, and optionally 'context'.")


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    raise ValueError(f"version {version} of the .npy format is not known here")


def _npy(path: Path) -> tuple[Rows, None]:
    with path.open("rb") as file:
        shape, _, dtype = _header(file)
    _refuse_objects(str(path), dtype)
    if 0 in shape:
        return ArrayRows(np.empty(shape, dtype)), None
    return ArrayRows(np.lib.format.open_memmap(path, mode="r")), None


def _npz(path: Path) -> tuple[Rows, Rows | None]:
    with zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    x, context = choose(path, names)
    return _ZipRows.open(path, x), None if context is None else _ZipRows.open(path, context)


class _ZipRows(Rows):
    """Rows of one array of an .npz file, unpacked as they are asked for; going back unpacks from the beginning again."""

    def __init__(self, path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        super().__init__(shape[0], shape[1:], torch_dtype(dtype))
        self.path, self.name, self.numpy_dtype = path, name, dtype
        self._file: IO[bytes] | None = None
        self._begin = 0

    @staticmethod
    def open(path: Path, name: str) -> Rows:
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
            shape, columns_first, dtype = _header(file)
            _refuse_objects(f"{path}, array {name!r},", dtype)
            if not shape:
                raise InputError(f"{path}, array {name!r}, is a single number: expected shape (count, ...).")
            if not columns_first:
                return _ZipRows(path, name, shape, dtype)
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
            return ArrayRows(np.lib.format.read_array(file, allow_pickle=False))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def read(self, start: int, stop: int) -> Tensor:
        width = self.numpy_dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))
        try:
            if self._file is None:
                self._file = zipfile.ZipFile(self.path).open(f"{self.name}.npy")  # noqa: SIM115 (kept open between reads)
                _header(self._file)
                self._begin = self._file.tell()
            self._file.seek(self._begin + start * width)
            raw = self._file.read((stop - start) * width)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise InputError(f"{self.path}, array {self.name!r}, cannot be read: {_line(error)}.") from error
        if len(raw) < (stop - start) * width:
            raise InputError(f"{self.path}, array {self.name!r}, ends early: it is truncated.")
        part = np.frombuffer(raw, self.numpy_dtype).reshape(stop - start, *self.shape)
        return torch.from_numpy(part.astype(self.numpy_dtype.newbyteorder("="), copy=True))


def _safetensors(path: Path) -> tuple[Rows, Rows | None]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingExtra(f"reading {path} needs safetensors: pip install 'bilip[train]'.") from error
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    x, context = choose(path, list(file.keys()))
    return _SliceRows(path, file, x), None if context is None else _SliceRows(path, file, context)


class _SliceRows(Rows):
    """Rows of one tensor of a safetensors file, which is memory-mapped."""

    def __init__(self, path: Path, file: Any, name: str) -> None:
        self._slice = file.get_slice(name)
        shape = tuple(self._slice.get_shape())
        if not shape:
            raise InputError(f"{path}, tensor {name!r}, is a single number: expected shape (count, ...).")
        super().__init__(shape[0], shape[1:], self._slice[0:0].dtype)

    def read(self, start: int, stop: int) -> Tensor:
        return self._slice[start:stop]
