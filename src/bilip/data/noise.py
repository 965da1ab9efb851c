"""Noise to look at a model outside its data."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bilip.data.rows import ChunkRows, MappedRows, Rows
from bilip.data.source import Source
from bilip.errors import InputError, nearest

__all__ = ["NOISE_NAMES", "noise"]

NOISE_NAMES = ("uniform", "gaussian", "rademacher", "scaled", "near", "shuffled")


def noise(spec: str, like: Source, *, count: int = 1024, seed: int = 0, clip: bool = False) -> Source:
    r"""An out-of-distribution source of the shape, dtype and range of some data.

    With c the centre and h the half-width of the range of the data, and an optional factor f after a colon:

    * `"uniform"`, `"uniform:2"`: each entry uniform on $[c - fh, c + fh]$;
    * `"near"`: the same on 1.5 times the range;
    * `"gaussian"`, `"gaussian:2"`: each entry normal, mean c, standard deviation fh;
    * `"rademacher"`: each entry $c - fh$ or $c + fh$ with probability 1/2;
    * `"scaled"`, `"scaled:4"`: the data times f, 10 by default; no more samples than there are data;
    * `"shuffled"`: each entry from another sample of the data, so that every feature is as in the data and no two belong together.

    Where a sample is a list of features, c and h are those of each feature: columns in [0, 1] and in [0, 1e4] get noise on their own
    ranges. Images have one range for all pixels.

    Gaussian noise is not clipped by default: clipping puts an atom of probability on both ends of the range, 16% each
    at f = 1, and a model that begins with a logit has no value there. Published tables often do clip; `clip=True`
    does it, to $[c - fh, c + fh]$.

    Sample k depends on the spec, the seed and the data alone, not on the batch size, and no sample is kept in memory.
    Where the data have contexts, noise takes them in order, from the beginning again when they run out.

    Args:
        spec: The kind of noise and its factor.
        like: The data.
        count: Number of samples.
        seed: Seed, 0 or more.
        clip: Clip Gaussian noise.

    Example:
        >>> from bilip.data import as_source
        >>> data = as_source("test", torch.tensor([[-4.0, 4.0], [4.0, -4.0]]))
        >>> noise("uniform:2", data, count=1000)
        Source('uniform:2', ood, 1000 samples of shape (2,): uniform noise on [-8, 8], seed 0)
        >>> sorted(set(noise("rademacher", data).first(100).x.flatten().tolist()))
        [-4.0, 4.0]
        >>> noise("scaled:3", data).first(1).x
        tensor([[-12.,  12.]])
    """
    kind, factor = parse(spec)
    for label, number, least in (("count", count, 1), ("seed", seed, 0)):
        if not isinstance(number, int) or number < least:
            raise InputError(f"noise({spec!r}, {label}={number!r}): expected a whole number, {least} or more.")

    def made(rows: Rows, text: str) -> Source:
        context = None if like.context_rows is None else _Around(like.context_rows, rows.count)
        return Source(spec, rows, role="ood", description=text, context=context)

    if kind == "scaled":
        rows = MappedRows(like.rows, lambda x: x * factor, count=min(count, like.count))
        return made(rows, f"{like.name} times {factor:g}")
    if kind == "shuffled":
        return made(_shuffled(like, count, seed), f"{like.name} with features shuffled, seed {seed}")
    low, high = _range(like)
    center, half = (low + high) / 2, (high - low) / 2 * factor
    if not (np.isfinite(center).all() and np.isfinite(half).all()):
        like.check()
        raise InputError(f"noise({spec!r}): the range of source {like.name!r} times {factor:g} is not finite.")
    if not half.any():
        where = f"{float(center.flat[0]):g}"
        raise InputError(
            f"noise({spec!r}): every entry of source {like.name!r} is {where}, so it has no range to draw from."
        )
    low, high = center - half, center + half
    between = _span(low, high)
    uniform = (lambda rng, size: low + (high - low) * rng.random(size), f"uniform noise on {between}")
    rules: dict[str, tuple[Callable[[np.random.Generator, tuple[int, ...]], np.ndarray], str]] = {
        "uniform": uniform,
        "near": uniform,
        "gaussian": (
            lambda rng, size: center + half * rng.standard_normal(size),
            f"gaussian noise, mean {_span(center, center)}, std {_span(half, half)}",
        ),
        "rademacher": (
            lambda rng, size: np.where(rng.integers(0, 2, size) == 0, low, high),
            f"rademacher noise on the ends of {between}",
        ),
    }
    draw, text = rules[kind]
    if clip and kind == "gaussian":
        text += f", clipped to {between}"

    def make(index: int) -> Tensor:
        rng = np.random.default_rng((seed, index, zlib.crc32(kind.encode())))
        values = draw(rng, (ChunkRows.CHUNK, *like.shape))
        return torch.from_numpy(np.clip(values, low, high) if clip else values).to(like.dtype)

    rows = ChunkRows(count, like.shape, like.dtype, make)
    # No draw lies 40 standard deviations out.
    rows.finite = bool((np.abs(center) + 40 * half).max() < torch.finfo(like.dtype).max)
    return made(rows, f"{text}, seed {seed}")


def _range(like: Source) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of the range: of each feature where a sample is a list of them, else of all entries."""
    if len(like.shape) == 1:
        x = like.spread(4096).x.double()
        return x.amin(0).numpy(), x.amax(0).numpy()
    seen = like.statistics()
    return np.array(seen.low), np.array(seen.high)


def _span(low: np.ndarray, high: np.ndarray) -> str:
    """One range in words, or that each feature has its own."""
    ends = {(f"{a:.4g}", f"{b:.4g}") for a, b in zip(low.flat, high.flat, strict=True)}
    if len(ends) > 1:
        wide = float((high - low).max())
        if wide > 0 and max(float(np.ptp(low)), float(np.ptp(high))) < 0.01 * wide:
            return f"about [{float(low.mean()):.2g}, {float(high.mean()):.2g}]"
        return "each feature's own" if np.array_equal(low, high) else "each feature's own range"
    a, b = ends.pop()
    return a if a == b else f"[{a}, {b}]"


def _shuffled(like: Source, count: int, seed: int) -> Rows:
    """Rows each of whose entries comes from another sample of the data."""
    pool = like.spread(4096).x.flatten(1)

    def make(index: int) -> Tensor:
        rng = np.random.default_rng((seed, index, zlib.crc32(b"shuffled")))
        rows = torch.from_numpy(rng.integers(0, len(pool), (ChunkRows.CHUNK, pool.shape[1])))
        return pool.gather(0, rows).reshape(-1, *like.shape)

    return ChunkRows(count, like.shape, like.dtype, make)


class _Around(Rows):
    """Rows of another store, from the beginning again when they run out."""

    def __init__(self, rows: Rows, count: int) -> None:
        super().__init__(count, rows.shape, rows.dtype)
        self.rows = rows

    def read(self, start: int, stop: int) -> Tensor:
        parts = []
        while start < stop:
            offset = start % self.rows.count
            take = min(stop - start, self.rows.count - offset)
            parts.append(self.rows.read(offset, offset + take))
            start += take
        return torch.cat(parts)


def parse(spec: str) -> tuple[str, float]:
    """Kind and factor of a spec such as `"uniform:2"`."""
    if not isinstance(spec, str):
        raise InputError(f"noise({spec!r}): expected a string such as 'uniform' or 'uniform:2'.")
    kind, colon, text = spec.partition(":")
    if kind not in NOISE_NAMES:
        hint = nearest(kind.lower(), NOISE_NAMES)
        raise InputError(f"noise({spec!r}): the kinds of noise are {', '.join(NOISE_NAMES)}.{hint}")
    try:
        factor = float(text) if colon else {"scaled": 10.0, "near": 1.5}.get(kind, 1.0)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise InputError(f"noise({spec!r}): after the colon comes a positive factor, such as '{kind}:4'.")
    return kind, factor
