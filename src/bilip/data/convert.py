"""Anything that holds samples, as a source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bilip.data.files import open_file
from bilip.data.image_sets import IMAGE_SETS, image_set
from bilip.data.loader import is_loader, open_loader
from bilip.data.noise import NOISE_NAMES
from bilip.data.rows import ArrayRows, Rows, TensorRows
from bilip.data.source import Source
from bilip.errors import InputError

__all__ = ["as_source"]


def as_source(
    name: str, value: Any, *, role: str | None = None, most: int | None = None, conditional: bool = False
) -> Source:
    """A source from whatever holds samples; the first dimension counts them.

    Files are read where they lie, never as a whole, and nothing in them is executed (pickled arrays are refused).

    Args:
        name: Name in reports.
        value: A tensor; a numpy array; a pair `(x, context)` of these; a `DataLoader` or `Dataset` that yields tensors, or tuples
            whose first entry is x; the path of an `.npy` file; of an `.npz` or `.safetensors` file with an array `x` (or only one) and
            optionally `context`; of a `.pt` file with a tensor, a pair or a dict like that (read as weights only); of a `.csv` file of
            numbers, with or without a header; of a folder of PNG or JPEG images of one size; the name of an image set that `bilip data`
            prepared, `"svhn"` or `"cifar10:test"`; or a `Source`, which is returned. Bytes (uint8) become floats in [0, 1] and images
            with channels last get them first.
        role: `"data"` or `"ood"`; by default `"ood"` where the name begins with a kind of noise, otherwise `"data"`.
        most: Largest number of samples to read from a `DataLoader` or `Dataset`; 102,400 at most.
        conditional: Whether the second entry of what a `DataLoader` or `Dataset` yields is the context; else it is not taken. An audit
            looks at the model.

    Raises:
        InputError: One line that names the source and says what was found and what was expected.

    Example:
        >>> import numpy as np, pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "x.npy")
        ...     np.save(path, np.zeros((100, 3), np.float32))
        ...     as_source("test", path)
        Source('test', data, 100 samples of shape (3,): x.npy)
        >>> as_source("photos", np.zeros((5, 32, 32, 3), np.uint8)).shape
        (3, 32, 32)
        >>> as_source("uniform", np.zeros((5, 3))).role
        'ood'
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> labelled = TensorDataset(torch.zeros(100, 3), torch.ones(100, dtype=torch.long))
        >>> as_source("test", DataLoader(labelled, batch_size=10), most=64).description
        'DataLoader, 64 of its 100 samples, evenly spaced; the second entry (int64) is not taken: the model takes no context'
    """
    if isinstance(value, Source):
        return value
    if not isinstance(name, str) or not name:
        raise InputError(f"a source needs a name, a non-empty string; got {name!r}.")
    try:
        rows, context, description = _open(value, most, conditional)
    except InputError as error:
        raise InputError(f"source {name!r}: {error}") from error
    kind = name.lower().partition(":")[0]
    noisy = kind in NOISE_NAMES or kind.startswith(("uniform", "gaussian", "rademacher", "scaled"))
    role = ("ood" if noisy else "data") if role is None else role
    return Source(name, rows, role=role, description=description, context=context)


def _open(value: Any, most: int | None = None, conditional: bool = False) -> tuple[Rows, Rows | None, str]:
    if isinstance(value, Tensor):
        return TensorRows(value), None, f"tensor, {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, np.ndarray):
        return ArrayRows(value), None, f"array, {value.dtype}"
    if isinstance(value, (str, os.PathLike)):
        path = Path(value)
        if not os.path.exists(path) and isinstance(value, str) and value.partition(":")[0] in NOISE_NAMES:
            raise InputError(f"{value!r} is a kind of noise, not a file: pass bilip.data.noise({value!r}, data).")
        if isinstance(value, str) and value.partition(":")[0] in IMAGE_SETS and not path.exists():
            name, _, split = value.partition(":")
            images = image_set(name, split or None)
            return TensorRows(images.x), None, f"{len(images)} images of {name}"
        rows, context = open_file(path)
        return rows, context, path.name or str(path)
    if is_loader(value):
        return open_loader(value, most=most, conditional=conditional)
    if isinstance(value, tuple) and len(value) == 2:
        (x, _, description), (context, _, _) = _open(value[0]), _open(value[1])
        return x, context, f"{description}, with contexts"
    raise InputError(
        f"{type(value).__name__} holds no samples that are read here. Pass a tensor, a numpy array, a pair "
        "(x, context), a DataLoader or Dataset, or the path of a file: .npy, .npz, .csv, .pt, .safetensors or a folder of images."
    )
