"""A folder of images as rows."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilip.data.rows import Rows
from bilip.errors import InputError, MissingExtra
from bilip.record.files import open_regular

__all__ = ["FolderRows"]

SUFFIXES = (".png", ".jpg", ".jpeg")
MOST = 2**30  # bytes of one file
GREY, COLOUR = ("1", "L", "LA"), ("P", "RGB", "RGBA", "CMYK", "YCbCr")


class FolderRows(Rows):
    """The PNG and JPEG images below a folder, in the order of their paths, as bytes of shape (channels, height, width).

    Images are grey where all files are, otherwise RGB. The sizes are read from the headers at once; pixels are
    decoded batch by batch.
    """

    def __init__(self, folder: Path) -> None:
        image = _pillow()
        self.paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        if not self.paths:
            raise InputError(f"{folder} holds no PNG or JPEG image.")
        size, grey = (0, 0), True
        for path in self.paths:
            with _open(image, path) as file:
                found, mode = file.size, file.mode
            if mode not in GREY + COLOUR:
                raise InputError(f"{path} has pixels of kind {mode!r}: expected 8 bits a channel. Convert it first.")
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
        image = _pillow()
        out = np.empty((stop - start, *self.shape), np.uint8)
        for k, path in enumerate(self.paths[start:stop]):
            with _open(image, path) as file:
                try:
                    pixels = np.asarray(file.convert(self.mode))
                except Exception as error:  # a broken image can raise almost anything
                    raise InputError(f"{path} cannot be decoded ({error!s:.200}): copy it again.") from error
            if pixels.size != out[k].size:
                raise InputError(f"{path} has changed since its size was read.")
            out[k] = pixels.reshape(*self.shape[1:], self.shape[0]).transpose(2, 0, 1)
        return torch.from_numpy(out)


@contextlib.contextmanager
def _open(image: Any, path: Path) -> Iterator[Any]:
    """An image, of one of the two formats only: some others are programs, which pillow would hand to an interpreter."""
    with open_regular(path, most=MOST) as file:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", image.DecompressionBombWarning)
                found = image.open(file, formats=("PNG", "JPEG"))
        except Exception as error:  # a broken image can raise almost anything
            raise InputError(f"{path} is not a readable image ({error!s:.200}).") from error
        with found:
            yield found


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("reading images needs pillow: pip install 'bilip[images]'.") from error
    return Image
