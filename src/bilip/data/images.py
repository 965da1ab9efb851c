"""Labelled images from files: CIFAR-10 in its three forms, `.npz`, and folders."""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from bilip.data.files import FolderRows, open_file
from bilip.errors import InputError
from bilip.record.files import read_file

__all__ = ["Images", "cifar10", "load_images", "load_plain"]

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = {"train": tuple(f"data_batch_{k}" for k in range(1, 6)), "test": ("test_batch",)}  # names of its files
MOST_PICKLE = 2**31  # bytes of a file
RECORD = 1 + 3 * 32 * 32  # one label, then the red, green and blue planes


@dataclass(frozen=True)
class Images:
    """Images in memory.

    Attributes:
        x: Pixels, uint8 of shape (count, channels, height, width).
        y: Labels, int64 of shape (count,), or None.
        classes: Names of the labels, where known.

    Example:
        >>> from bilip.data import as_source
        >>> images = Images(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([1, 0]), ("cat", "dog"))
        >>> as_source("photos", images.x).first(2).x.dtype
        torch.float32
    """

    x: Tensor
    y: Tensor | None = None
    classes: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.x)


def cifar10(folder: str | Path, *, split: str = "train") -> Images:
    """CIFAR-10 from a folder that holds it in any of its forms.

    These are looked for, also in a folder `cifar-10-batches-bin` or `cifar-10-batches-py` below: the binary batches
    (`data_batch_1.bin`, ..., `test_batch.bin`); the Python batches (`data_batch_1`, ..., `test_batch`), which are
    pickles and are read without running anything in them; `cifar10_train.npz` and `cifar10_test.npz`; folders of
    images `train/airplane`, ... . Training batches that are missing are left out.

    Args:
        folder: The folder.
        split: `"train"` or `"test"`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "test_batch.bin").write_bytes(bytes([3] + [255] * 3072))
        ...     images = cifar10(folder, split="test")
        >>> images.x.shape, images.classes[images.y[0]]
        (torch.Size([1, 3, 32, 32]), 'cat')
    """
    root = Path(folder)
    if split not in ("train", "test"):
        raise InputError(f"cifar10(split={split!r}): expected 'train' or 'test'.")
    if not root.is_dir():
        raise InputError(f"cifar10: {root} is not a folder.")
    if batches := cifar10_batches(root, split):
        x, y = (torch.cat([part[k] for part in batches.values()]) for k in (0, 1))
        return Images(x, y, CIFAR10_CLASSES)
    if (root / f"cifar10_{split}.npz").is_file():
        found = load_images(root / f"cifar10_{split}.npz")
        return Images(found.x, found.y, CIFAR10_CLASSES)
    if (root / split).is_dir():
        return load_images(root / split)
    raise InputError(
        f"cifar10: {root} holds no {split} images in a form that is known: {BATCHES[split][0]}.bin, {BATCHES[split][0]}, "
        f"cifar10_{split}.npz or {split}/<class>/*.png."
    )


def cifar10_batches(root: Path, split: str) -> dict[Path, tuple[Tensor, Tensor]]:
    """Pixels and labels of each binary or Python batch of a split that a folder holds."""
    for suffix, read, below in ((".bin", _binary, "cifar-10-batches-bin"), ("", _pickled, "cifar-10-batches-py")):
        for place in (root, root / below):
            paths = [place / f"{name}{suffix}" for name in BATCHES[split] if (place / f"{name}{suffix}").is_file()]
            if paths:
                return {path: read(path) for path in paths}
    return {}


def load_images(path: str | Path) -> Images:
    """Images and labels of an `.npz` file (`x` uint8, channels last or first; optionally `y`) or of a folder.

    Where all images of a folder lie in folders below it, these are the classes, in the order of their names.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "few.npz")
        ...     np.savez(file, x=np.zeros((4, 8, 8, 3), np.uint8), y=np.arange(4))
        ...     images = load_images(file)
        >>> images.x.shape, images.y
        (torch.Size([4, 3, 8, 8]), tensor([0, 1, 2, 3]))
    """
    path = Path(path)
    if path.is_dir():
        return _folder(path)
    if path.suffix.lower() != ".npz":
        raise InputError(f"load_images: {path} is neither a folder nor an .npz file.")
    rows, _ = open_file(path)
    if rows.dtype != torch.uint8 or len(rows.shape) != 3:
        raise InputError(
            f"load_images: {path}, array 'x', has shape {(rows.count, *rows.shape)}, {rows.dtype}; expected uint8 of "
            "shape (count, height, width, channels) or (count, channels, height, width)."
        )
    x = rows.read(0, rows.count)
    if rows.shape[-1] in (1, 3) and rows.shape[0] not in (1, 3):
        x = x.movedim(-1, 1).contiguous()
    try:
        with np.load(path, allow_pickle=False) as archive:
            y = archive["y"] if "y" in archive.files else None
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"load_images: {path}, array 'y', cannot be read: {error}") from error
    if y is not None and (y.shape != (len(x),) or y.dtype.kind not in "iu"):
        raise InputError(f"load_images: {path}, array 'y', is {y.dtype} of shape {y.shape}; expected {len(x)} labels.")
    return Images(x, None if y is None else torch.from_numpy(y.astype(np.int64)))


def _folder(folder: Path) -> Images:
    rows = FolderRows(folder)
    return labelled(rows.read(0, rows.count), folder, rows.paths)


def labelled(x: Tensor, folder: Path, paths: Sequence[Path]) -> Images:
    """Images of files below a folder; the folders right below it are the classes, where all images lie in some."""
    parts = [path.relative_to(folder).parts for path in paths]
    if any(len(part) < 2 for part in parts):
        return Images(x)
    classes = tuple(sorted({part[0] for part in parts}))
    return Images(x, torch.tensor([classes.index(part[0]) for part in parts], device="cpu"), classes)


def _binary(path: Path) -> tuple[Tensor, Tensor]:
    raw = np.fromfile(path, np.uint8)
    if not len(raw) or len(raw) % RECORD:
        raise InputError(
            f"cifar10: {path} has {len(raw)} bytes, which is not a whole number of images of {RECORD} bytes: it is "
            "truncated or foreign; get it again."
        )
    records = raw.reshape(-1, RECORD)
    return _checked(path, records[:, 1:].copy(), records[:, 0].astype(np.int64))


def _pickled(path: Path) -> tuple[Tensor, Tensor]:
    content = load_plain(path)
    batch = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in content.items()}
    data, labels = batch.get("data"), batch.get("labels")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != RECORD - 1:
        raise InputError(
            f"cifar10: {path} holds no array 'data' of bytes with shape (count, 3072): it is no batch of CIFAR-10; get it again."
        )
    if not isinstance(labels, list) or len(labels) != len(data) or not all(isinstance(k, int) for k in labels):
        raise InputError(
            f"cifar10: {path} holds no list 'labels' of {len(data)} numbers: it is no batch of CIFAR-10; get it again."
        )
    return _checked(path, data, np.array(labels, np.int64))


def _checked(path: Path, data: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    if len(labels) and not 0 <= labels.min() <= labels.max() < 10:
        raise InputError(
            f"cifar10: {path} holds labels {labels.min()} to {labels.max()}; expected 0 to 9: it is damaged or foreign; get it again."
        )
    return torch.from_numpy(data.reshape(-1, 3, 32, 32)), torch.from_numpy(labels)


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
    data = read_file(path, most=MOST_PICKLE)
    try:
        _require_modest(data)
        content = _PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(content, dict):
            raise pickle.UnpicklingError(f"it holds {type(content).__name__}, not a dictionary")
        return {key: value.resolve() if isinstance(value, _Array) else value for key, value in content.items()}
    except Exception as error:  # a broken pickle can raise almost anything
        raise InputError(
            f"{path} cannot be read as a plain pickle ({error!s:.300}): it is truncated, damaged or something else; get it again."
        ) from error


def _require_modest(data: bytes) -> None:
    """A pickle numbers what it remembers; a number far beyond its own length would only fill the memory."""
    for code, number, _ in pickletools.genops(data):
        if "PUT" in code.name and isinstance(number, int) and number > len(data):
            raise pickle.UnpicklingError(f"it remembers something as number {number}")
