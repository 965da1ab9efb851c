"""Rows of files, read where they lie: a file of any length costs the memory of one batch."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import pickle
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from bilip.data.rows import ArrayRows, Rows, TensorRows, torch_dtype
from bilip.errors import InputError, MissingExtra, need
from bilip.record.files import open_regular
from bilip.record.header import read_header

__all__ = ["FolderRows", "image_files", "open_file", "open_image", "pillow"]

READABLE = ".npy, .npz, .csv, .pt, .safetensors, or a folder of PNG or JPEG images"
MOST = 2**50  # bytes of a file, which is read row by row
MOST_TEXT = 2**31  # bytes of a table in text, which is read as a whole
MOST_IMAGE = 2**30  # bytes of one image
MOST_ROW = 2**30  # bytes of one sample
MOST_WHOLE = 2**33  # bytes of an array that has to be unpacked as a whole
MOST_KEPT = 2**30  # bytes of an array that is kept in memory when it is read in another order
CHUNK = 4096  # lines of a table that are converted together
SUFFIXES = (".png", ".jpg", ".jpeg")
GREY, COLOUR = ("1", "L", "LA"), ("P", "RGB", "RGBA", "CMYK", "YCbCr")
DTYPES = {"F16", "BF16", "F32", "F64", "U8", "I8", "I16", "I32", "I64", "BOOL"}


def open_file(path: Path) -> tuple[Rows, Rows | None]:
    """The samples and the contexts of a file or of a folder of images; nothing in a file is executed."""
    try:
        if not path.exists():
            raise InputError(f"{path} does not exist.")
        if path.is_dir():
            return FolderRows(path), None
        openers = {".npy": _npy, ".npz": _npz, ".safetensors": _safetensors, ".pt": _pt, ".pth": _pt}
        if path.suffix.lower() not in (*openers, ".csv"):
            raise InputError(f"{path} is not of a kind that is read here: expected {READABLE}.")
        if path.suffix.lower() == ".csv":  # read as a whole
            return _csv(path)
        found = path.stat()
        x, context = openers[path.suffix.lower()](path)
        return _WatchedRows(path, found, x), None if context is None else _WatchedRows(path, found, context)
    except (InputError, MissingExtra):
        raise
    except Exception as error:  # a broken archive can raise almost anything
        # zipfile knows more ways of packing than Python can undo
        unknown = isinstance(error, NotImplementedError) or "encrypted" in str(error)
        advice = "Save it again with numpy." if unknown else "It may be truncated: copy it again."
        raise InputError(f"{path} cannot be read: {_line(error)}. {advice}") from error


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")[:300]


class _WatchedRows(Rows):
    """Rows of a file that nobody may change meanwhile: what is left of a mapped file that shrinks ends the program.

    A file that is replaced, or removed, keeps its bytes for whoever has it open.
    """

    def __init__(self, path: Path, found: os.stat_result, rows: Rows) -> None:
        super().__init__(rows.count, rows.shape, rows.dtype)
        self.path, self.found, self.rows = path.absolute(), found, rows

    def read(self, start: int, stop: int) -> Tensor:
        self._check()
        part = self.rows.read(start, stop)
        return self._checked(part.clone() if isinstance(self.rows, (TensorRows, _SliceRows)) else part)

    def take(self, places: Tensor) -> Tensor:
        self._check()
        return self._checked(self.rows.take(places))

    def _checked(self, part: Tensor) -> Tensor:
        self._check()
        return part

    def _check(self) -> None:
        try:
            now = self.path.stat()
        except OSError:
            return
        then = self.found
        if os.path.samestat(now, then) and (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
            raise InputError(f"{self.path} was changed while it was read: wait until it is written, or read a copy.")


def choose(path: Path, names: list[str]) -> tuple[str, str | None]:
    """Which arrays of a file are the samples and the contexts."""
    context = "context" if "context" in names else None
    if "x" in names:
        return "x", context
    others = [name for name in names if name != "context"]
    if len(others) == 1:
        return others[0], context
    held = ", ".join(map(repr, sorted(names)[:8])) + (", ..." if len(names) > 8 else "") if names else "nothing"
    raise InputError(f"{path} holds {held}: expected an array 'x', or one array alone, and optionally 'context'.")


def _header(file: IO[bytes], where: str, size: int) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and dtype of an array in a file of `size` bytes, which has to be long enough for them."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, columns_first, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, columns_first, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"version {version} of the .npy format is not known here")
    if dtype.hasobject:
        raise InputError(f"{where} holds Python objects, which could run code when loaded: save plain numbers instead.")
    if type(columns_first) is not bool or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        raise ValueError(f"its header says that the shape is {shape!r:.60}")
    torch_dtype(dtype)
    _require_rows(where, shape, dtype.itemsize)
    wanted, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    if wanted > there:
        raise ValueError(f"an array of shape {shape!r:.60} has {wanted:,} bytes, the file has {max(0, there):,} for it")
    return shape, columns_first, dtype


def _require_rows(where: str, shape: tuple[int, ...], width: int) -> None:
    if not shape:
        raise InputError(f"{where} is a single number: expected shape (count, ...).")
    if len(shape) > 32 or math.prod(shape[1:]) * width > MOST_ROW:
        raise InputError(f"{where} has shape {shape!r:.60}: one sample may have at most {MOST_ROW:,} bytes.")


def _npy(path: Path) -> tuple[Rows, None]:
    with open_regular(path, most=MOST) as file:
        shape, columns_first, dtype = _header(file, str(path), os.fstat(file.fileno()).st_size)
        if 0 in shape:
            return ArrayRows(np.empty(shape, dtype)), None
        order = "F" if columns_first else "C"
        return ArrayRows(np.memmap(file, dtype, "r", offset=file.tell(), shape=shape, order=order)), None


def _pt(path: Path) -> tuple[Rows, Rows | None]:
    """A tensor, a pair (x, context) or a dict of tensors, read as weights are: no object of Python is made."""
    with open_regular(path, most=MOST) as file:
        packed = zipfile.is_zipfile(file)
    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=packed)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} holds Python objects, which could run code when loaded, or is no file of torch.save: save the tensor itself, as in "
            "torch.save(x, path)."
        ) from error
    if isinstance(held, (tuple, list)) and len(held) == 2:
        held = {"x": held[0], "context": held[1]}
    if isinstance(held, Tensor):
        held = {"x": held}
    named = {str(k): v for k, v in held.items() if isinstance(v, Tensor)} if isinstance(held, dict) else {}
    x, context = choose(path, list(named))
    for name in (x,) if context is None else (x, context):
        tensor = named[name]
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_complex():
            raise InputError(
                f"{path}, tensor {name!r}, is not a plain tensor of real numbers: save x.to_dense() or x.dequantize()."
            )
        _require_rows(f"{path}, tensor {name!r},", tuple(tensor.shape), tensor.element_size())
        kept = tensor.untyped_storage().nbytes() // tensor.element_size()
        if kept < tensor.numel():  # a few bytes could stand for more rows than any memory can number
            raise InputError(
                f"{path}, tensor {name!r}, has shape {tuple(tensor.shape)!r:.60} but holds {kept:,} numbers, which are repeated by expand: "
                "save x.contiguous()."
            )
    return TensorRows(named[x]), None if context is None else TensorRows(named[context])


def _npz(path: Path) -> tuple[Rows, Rows | None]:
    with open_regular(path, most=MOST) as file, zipfile.ZipFile(file) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    x, context = choose(path, names)
    return _ZipRows.open(path, x), None if context is None else _ZipRows.open(path, context)


class _ZipRows(Rows):
    """Rows of one array of an .npz file, unpacked as they are asked for; going back unpacks from the beginning again."""

    def __init__(self, path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        super().__init__(shape[0], shape[1:], torch_dtype(dtype))
        self.path, self.name, self.numpy_dtype = path.absolute(), name, dtype
        self._file: IO[bytes] | None = None
        self._begin = 0
        self._whole: Tensor | None = None

    @staticmethod
    def open(path: Path, name: str) -> Rows:
        where = f"{path}, array {name!r},"
        with open_regular(path, most=MOST) as raw, zipfile.ZipFile(raw) as archive:
            size = archive.getinfo(f"{name}.npy").file_size
            with archive.open(f"{name}.npy") as file:
                shape, columns_first, dtype = _header(file, where, size)
                if not columns_first or len(shape) < 2:
                    return _ZipRows(path, name, shape, dtype)
                if size > MOST_WHOLE:
                    raise InputError(f"{where} is stored by columns, {size:,} bytes: save it by rows, or as .npy.")
                whole = np.frombuffer(file.read(math.prod(shape) * dtype.itemsize), dtype)
                return ArrayRows(whole.reshape(shape, order="F"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_whole": None}

    def take(self, places: Tensor) -> Tensor:
        """Unpacked once and kept, where it is not too large: every order but the stored one goes back and forth."""
        if self._whole is None and self.numpy_dtype.itemsize * self.count * math.prod(self.shape) <= MOST_KEPT:
            self._whole = self.read(0, self.count)
        return super().take(places) if self._whole is None else self._whole[places]

    def read(self, start: int, stop: int) -> Tensor:
        width = self.numpy_dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))
        try:
            if self._file is None:
                raw = open_regular(self.path, most=MOST)
                archive = zipfile.ZipFile(raw)
                self._file = archive.open(f"{self.name}.npy")  # kept open between reads
                _header(self._file, str(self.path), archive.getinfo(f"{self.name}.npy").file_size)
                self._begin = self._file.tell()
            self._file.seek(self._begin + start * width)
            raw = self._file.read((stop - start) * width)
        except InputError:
            raise
        except Exception as error:  # a broken archive can raise almost anything
            raise InputError(f"{self.path}, array {self.name!r}, cannot be read: {_line(error)}.") from error
        if len(raw) < (stop - start) * width:
            raise InputError(f"{self.path}, array {self.name!r}, ends early: it is truncated.")
        part = np.frombuffer(raw, self.numpy_dtype).reshape(stop - start, *self.shape)
        return torch.from_numpy(part.astype(self.numpy_dtype.newbyteorder("="), copy=True))


def _safetensors(path: Path) -> tuple[Rows, Rows | None]:
    safetensors = need("safetensors", f"reading {path}", "train")
    with open_regular(path, most=MOST) as raw:
        header = read_header(
            raw,
            os.fstat(raw.fileno()).st_size,
            lambda why: InputError(f"{path} cannot be read: {why}. It may be truncated: copy it again."),
        )
    x, context = choose(path, list(header.tensors))
    for name in (x,) if context is None else (x, context):
        entry, where = header.tensors[name], f"{path}, tensor {name!r},"
        if entry.dtype not in DTYPES:
            raise InputError(f"{where} holds {entry.dtype}: expected {', '.join(sorted(DTYPES))}. Save it as F32.")
        _require_rows(where, entry.shape, 8)
    try:
        file = safetensors.safe_open(path, framework="pt")
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error
    return _SliceRows(path, file, x), None if context is None else _SliceRows(path, file, context)


class _SliceRows(Rows):
    """Rows of one tensor of a safetensors file, which is memory-mapped."""

    def __init__(self, path: Path, file: Any, name: str) -> None:
        self._slice = file.get_slice(name)
        shape = tuple(self._slice.get_shape())
        super().__init__(shape[0], shape[1:], self._slice[0:0].dtype)

    def read(self, start: int, stop: int) -> Tensor:
        return self._slice[start:stop]


def _csv(path: Path) -> tuple[Rows, None]:
    """The columns of a `.csv` file as features, in float64; commas, semicolons or tabs stand between them.

    The first line is a header if none of its cells is a number. Every other cell has to be one.

    Raises:
        InputError: A column holds text, a cell is empty, or a line has more or fewer cells than the first; one line that says where.
    """
    with open_regular(path, most=MOST_TEXT) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
        try:
            first = file.readline(2**20)
            file.seek(0)
            mark = max(",;\t", key=first.count)
            return ArrayRows(_numbers(path, csv.reader(file, delimiter=mark))), None
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not a text in UTF-8: save it as a CSV file of numbers.") from error
        except csv.Error as error:
            raise InputError(f"{path} cannot be read as a CSV file: {error}.") from error


def _numbers(path: Path, lines: Iterator[list[str]]) -> np.ndarray:
    names: list[str] | None = None
    width, chunks, rows = 0, [], []
    for k, cells in enumerate(lines, 1):
        if not cells or (len(cells) == 1 and not cells[0].strip()):
            continue  # a blank line
        if not width:
            width = len(cells)
            if not any(_is_number(cell) for cell in cells):
                names = [cell.strip() for cell in cells]
                continue
        if len(cells) != width:
            raise InputError(f"{path}, line {k}: {len(cells)} cells; the first line has {width}.")
        try:
            rows.append([float(cell) for cell in cells])
        except ValueError:
            raise _wrong(path, k, cells, names) from None
        if len(rows) == CHUNK:
            chunks.append(np.array(rows))
            rows = []
    if rows or chunks:
        chunks += [np.array(rows)] if rows else []
        return np.concatenate(chunks)
    raise InputError(f"{path} holds no numbers: expected one sample in each line.")


def _wrong(path: Path, line: int, cells: list[str], names: list[str] | None) -> InputError:
    at = next(i for i, cell in enumerate(cells) if not _is_number(cell))
    column = repr(names[at]) if names and names[at] else str(at + 1)
    if not cells[at].strip():
        return InputError(f"{path}, line {line}: the cell of column {column} is empty. Fill it, or leave the line out.")
    return InputError(
        f"{path}: column {column} holds text ({cells[at].strip()!r:.40} in line {line}). Leave the column out, or write it as numbers."
    )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


class FolderRows(Rows):
    """The PNG and JPEG images below a folder, in the order of their paths, as bytes of shape (channels, height, width).

    Images are grey where all files are, otherwise RGB. The sizes are read from the headers at once; pixels are
    decoded batch by batch.
    """

    def __init__(self, folder: Path) -> None:
        pillow()  # what is missing is said first
        self.paths = image_files(folder.absolute())
        if not self.paths:
            raise InputError(f"{folder} holds no PNG or JPEG image.")
        size, grey = (0, 0), True
        for path in self.paths:
            with open_image(path) as file:
                found, mode = file.size, file.mode
            if path is self.paths[0]:
                size = found
            elif found != size:
                raise InputError(
                    f"images of one size are needed: {self.paths[0]} is {size[0]} x {size[1]}, {path} is "
                    f"{found[0]} x {found[1]}. Resize them first."
                )
            grey = grey and mode in GREY
        self.mode = "L" if grey else "RGB"
        super().__init__(len(self.paths), (1 if grey else 3, size[1], size[0]), torch.uint8)

    def read(self, start: int, stop: int) -> Tensor:
        out = np.empty((stop - start, *self.shape), np.uint8)
        for k, path in enumerate(self.paths[start:stop]):
            with open_image(path) as file:
                try:
                    pixels = np.asarray(file.convert(self.mode))
                except Exception as error:  # a broken image can raise almost anything
                    raise InputError(f"{path} cannot be decoded ({error!s:.200}): copy it again.") from error
            if pixels.size != out[k].size:
                raise InputError(f"{path} has changed since its size was read.")
            out[k] = pixels.reshape(*self.shape[1:], self.shape[0]).transpose(2, 0, 1)
        return torch.from_numpy(out)


def image_files(folder: Path) -> list[Path]:
    """The PNG and JPEG images below a folder, in the order of their paths. Links are followed, and no folder is entered twice."""
    found: list[Path] = []
    entered: set[str] = set()
    for place, below, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in entered:
            below.clear()
            continue
        entered.add(real)
        below.sort()
        found += [
            path for path in map(Path(place).joinpath, names) if path.suffix.lower() in SUFFIXES and path.is_file()
        ]
    return sorted(found)


@contextlib.contextmanager
def open_image(path: Path) -> Iterator[Any]:
    """An image, of one of the two formats only: some others are programs, which pillow would hand to an interpreter."""
    image = pillow()
    with open_regular(path, most=MOST_IMAGE) as file:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", image.DecompressionBombWarning)
                found = image.open(file, formats=("PNG", "JPEG"))
        except Exception as error:  # a broken image can raise almost anything
            raise InputError(f"{path} is not a readable image ({error!s:.200}).") from error
        with found:
            if found.mode not in GREY + COLOUR:
                raise InputError(
                    f"{path} has pixels of kind {found.mode!r}: expected 8 bits a channel. Convert it first."
                )
            yield found


def pillow() -> Any:
    """The module that decodes images, or a `MissingExtra`."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("reading images needs pillow: pip install 'bilip[images]'.") from error
    return Image
