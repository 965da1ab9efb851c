"""Anything that holds samples, as a source."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from bilip._torch import dtype_name
from bilip.data.files import open_file
from bilip.data.image_sets import IMAGE_SETS, image_set
from bilip.data.noise import NOISE_NAMES
from bilip.data.rows import ArrayRows, Rows, TensorRows
from bilip.data.source import Source
from bilip.errors import InputError

__all__ = ["as_source", "is_loader"]

MOST_SAMPLES = 102_400  # that are read from a loader
MOST_NUMBERS = 2**27


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
        return TensorRows(value), None, f"tensor, {dtype_name(value.dtype)}"
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
        return _open_loader(value, most=most, conditional=conditional)
    if isinstance(value, tuple) and len(value) == 2:
        (x, _, description), (context, _, _) = _open(value[0]), _open(value[1])
        return x, context, f"{description}, with contexts"
    raise InputError(
        f"{type(value).__name__} holds no samples that are read here. Pass a tensor, a numpy array, a pair "
        "(x, context), a DataLoader or Dataset, or the path of a file: .npy, .npz, .csv, .pt, .safetensors or a folder of images."
    )


def is_loader(value: Any) -> bool:
    """Whether this is a `DataLoader` or a `Dataset`.

    Example:
        >>> is_loader(TensorDataset(torch.zeros(3, 2))), is_loader(torch.zeros(3, 2))
        (True, False)
    """
    return isinstance(value, (DataLoader, Dataset))


def _open_loader(value: Any, *, most: int | None, conditional: bool) -> tuple[Rows, Rows | None, str]:
    """At most `most` samples, their contexts where the model is conditional, and a sentence that says what was taken.

    Of what a loader yields the first entry is x, and the second the context of a conditional model. A dataset, and a
    loader that goes through one in order, is read evenly over its length, since it may be sorted; another loader from its beginning. All
    with a seed of their own.
    """
    kind, most = type(value).__name__, min(most or MOST_SAMPLES, MOST_SAMPLES)
    if isinstance(value, TensorDataset):  # nothing to copy
        tensors = value.tensors
        taken = Taken(tensors[0], tensors[1] if len(tensors) > 1 else None)
        how = ""
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            taken, how = _read(value, kind, most)
    context = taken.context if conditional else None
    said = f"{kind}{how}"
    if taken.context is not None:
        what = dtype_name(taken.context.dtype)
        said += (
            f"; the second entry ({what}) is the context"
            if conditional
            else f"; the second entry ({what}) is not taken: the model takes no context"
        )
    return TensorRows(taken.x), None if context is None else TensorRows(context), said


@dataclass(frozen=True)
class Taken:
    """What was taken of an item, or of a batch: x, and what stands beside it."""

    x: Tensor
    context: Tensor | None


def _read(value: Any, kind: str, most: int) -> tuple[Taken, str]:
    if isinstance(value, (DataLoader, IterableDataset)):
        batched, how = isinstance(value, DataLoader), f", up to {most:,} samples of one pass"
        if isinstance(value, DataLoader) and (count := _in_order(value)) > most:
            value, how = _spaced(value, count, most), f", {most:,} of its {count:,} samples, evenly spaced"
        return _gathered(_guarded(value, kind), kind, most, batched=batched), how
    try:
        count = len(value)
    except TypeError as error:
        raise InputError(f"{kind} has no length: give it a method __len__, or pass a DataLoader.") from error
    take = min(count, most)
    places = (k * count // take for k in range(take))
    items = _guarded((value[k] for k in places), kind)
    part = f", {take:,} of its {count:,} samples, evenly spaced" if take < count else ""
    return _gathered(items, kind, most, batched=False), part


def _in_order(loader: DataLoader) -> int:
    """Number of samples of a loader that goes through a dataset from its beginning; 0 for others."""
    plain = isinstance(loader.sampler, SequentialSampler) and type(loader.batch_sampler) is BatchSampler
    return len(loader.dataset) if plain else 0  # type: ignore[arg-type]


def _spaced(loader: DataLoader, count: int, take: int) -> DataLoader:
    """The same loader over samples that are evenly spaced: a dataset may be sorted."""
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=[k * count // take for k in range(take)],
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
    )


def _guarded(items: Iterable[Any], kind: str) -> Iterator[Any]:
    """What the user's own code raises is one line about it."""
    try:
        yield from items
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{kind} raised {type(error).__name__}: {' '.join(str(error).split()):.300}") from error


def _gathered(items: Iterator[Any], kind: str, most: int, *, batched: bool) -> Taken:
    xs: list[Tensor] = []
    contexts: list[Tensor | None] = []
    samples = numbers = 0
    for item in items:
        taken = _taken(item, kind)
        if batched and (taken.x.ndim == 0 or (taken.context is not None and len(taken.context) != len(taken.x))):
            raise InputError(f"{kind} yields {_told(item)}: expected batches (x, context) of one length.")
        if not batched:
            taken = Taken(taken.x[None], None if taken.context is None else taken.context[None])
        if xs and (taken.x.shape[1:] != xs[0].shape[1:] or taken.x.dtype != xs[0].dtype):
            raise InputError(
                f"{kind}: samples differ, {tuple(xs[0].shape[1:])} {xs[0].dtype} and {tuple(taken.x.shape[1:])} {taken.x.dtype}. "
                "One model takes one of them: crop or pad them first."
            )
        xs.append(taken.x)
        contexts.append(taken.context)
        samples, numbers = samples + len(taken.x), numbers + taken.x.numel()
        if samples >= most or numbers >= MOST_NUMBERS:
            break
    if not samples:
        raise InputError(f"{kind} yields nothing: there is no sample in it.")
    beside = [c for c in contexts if c is not None]
    return Taken(torch.cat(xs)[:most], torch.cat(beside)[:most] if len(beside) == len(xs) else None)


def _taken(item: Any, kind: str) -> Taken:
    if isinstance(item, Mapping):
        keys = ", ".join(repr(k) for k in list(item)[:8])
        first = next(iter(item), "x")
        raise InputError(
            f"{kind} yields dictionaries with the keys {keys}: say which one is x, as in "
            f"bilip.audit(model, torch.cat([batch[{first!r}] for batch in loader]))."
        )
    entries = list(item) if isinstance(item, (tuple, list)) else [item]
    x = _tensor(entries[0]) if entries else None
    if x is None:
        raise InputError(
            f"{kind} yields {_told(item)}: expected a tensor x, or a tuple (x, ...) that begins with one. Transform the samples to tensors."
        )
    return Taken(x, _tensor(entries[1]) if len(entries) > 1 else None)


def _tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, (bool, int, float, np.number)) and math.isfinite(value):
        return torch.as_tensor(value, device="cpu")
    return None


def _told(item: Any) -> str:
    if isinstance(item, (tuple, list)):
        return f"({', '.join(type(entry).__name__ for entry in item[:4])})"
    return type(item).__name__
