"""Samples of a PyTorch `DataLoader` or `Dataset`, read once: a second pass may be shuffled or augmented in another way."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from bilip.data.rows import Rows, TensorRows
from bilip.errors import InputError

__all__ = ["is_loader", "open_loader"]

MOST_SAMPLES = 102_400
MOST_NUMBERS = 2**27


def is_loader(value: Any) -> bool:
    """Whether this is a `DataLoader` or a `Dataset`.

    Example:
        >>> is_loader(TensorDataset(torch.zeros(3, 2))), is_loader(torch.zeros(3, 2))
        (True, False)
    """
    return isinstance(value, (DataLoader, Dataset))


def open_loader(value: Any, *, most: int | None, conditional: bool) -> tuple[Rows, Rows | None, str]:
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
        what = f"{str(taken.context.dtype).removeprefix('torch.')}"
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
        return torch.as_tensor(value)
    return None


def _told(item: Any) -> str:
    if isinstance(item, (tuple, list)):
        return f"({', '.join(type(entry).__name__ for entry in item[:4])})"
    return type(item).__name__
