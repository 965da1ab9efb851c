"""A named stream of samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bilip._torch import dtype_name
from bilip.data.rows import ChunkRows, OrderedRows, Rows, pixels
from bilip.errors import InputError

__all__ = ["Batch", "Source", "Statistics"]

ROLES = ("data", "ood")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Batch:
    """Some consecutive samples.

    Attributes:
        x: The samples, shape `(batch, ...)`.
        context: Their contexts, or None.
        start: Index of the first one in its source.

    Example:
        >>> from bilip.data import as_source
        >>> batch = as_source("test", torch.zeros(5, 2)).read(3, 5)
        >>> len(batch), batch.start, batch.context
        (2, 3, None)
    """

    x: Tensor
    context: Tensor | None
    start: int

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: Tensor | slice) -> Batch:
        """Some of the samples with their contexts, by a mask, by indices or by a slice; `start` stays."""
        return Batch(self.x[rows], None if self.context is None else self.context[rows], self.start)

    @classmethod
    def joined(cls, batches: Sequence[Batch]) -> Batch:
        """All samples of some batches, one batch or more, as one that starts at 0."""
        contexts = [batch.context for batch in batches if batch.context is not None]
        return cls(torch.cat([batch.x for batch in batches]), torch.cat(contexts) if contexts else None, 0)

    def cpu(self) -> Batch:
        """The same on the CPU."""
        return Batch(self.x.cpu(), None if self.context is None else self.context.cpu(), self.start)


@dataclass(frozen=True)
class Statistics:
    """Range and moments over all entries of `samples` samples, and the median of their Euclidean norms.

    Example:
        >>> from bilip.data import as_source
        >>> found = as_source("test", torch.tensor([[-1.0, 1.0], [3.0, 1.0]])).statistics()
        >>> found.center, found.half_range, found.mean
        (1.0, 2.0, 1.0)
    """

    low: float
    high: float
    mean: float
    std: float
    samples: int
    norm: float = 1.0

    @property
    def center(self) -> float:
        """Middle of the range."""
        return self.low + (self.high - self.low) / 2

    @property
    def half_range(self) -> float:
        """Half of the range."""
        return (self.high - self.low) / 2


class Source:
    """A named stream of samples, the same on every pass; a pass holds one batch in memory, however long the source.

    `as_source` makes one from a tensor, an array or a file, and `noise` one from a rule.

    Args:
        name: Name in reports.
        rows: Where the samples lie. Bytes are read as pixels: float32 in [0, 1].
        role: `"data"` or `"ood"` (out of distribution).
        description: One line for reports.
        context: One context for each sample. Integers, such as class labels, are passed on as they are.

    Raises:
        InputError: There is no sample, samples are not floats or bytes, are single numbers, or have too few contexts.

    Example:
        >>> from bilip.data import as_source
        >>> source = as_source("test", torch.linspace(-1, 1, 10).reshape(5, 2))
        >>> source
        Source('test', data, 5 samples of shape (2,): tensor, float32)
        >>> [(batch.start, tuple(batch.x.shape)) for batch in source.batches(2)]
        [(0, (2, 2)), (2, (2, 2)), (4, (1, 2))]
        >>> source.first(2).x.shape, source.statistics().high
        (torch.Size([2, 2]), 1.0)
    """

    def __init__(
        self, name: str, rows: Rows, *, role: str = "data", description: str = "", context: Rows | None = None
    ) -> None:
        if not isinstance(name, str) or not name:
            raise InputError(f"a source needs a name, a non-empty string; got {name!r}.")
        self.name, self.context_rows = name, context
        if role not in ROLES:
            raise self._error(f"role={role!r}: expected 'data' or 'ood'.")
        if not rows.shape:
            raise self._error(
                f"the data have shape ({rows.count},): each sample is a single number. Expected (count, features) or "
                "(count, channels, height, width); for one feature reshape to (count, 1)."
            )
        if rows.count < 1 or not math.prod(rows.shape):
            raise self._error(f"the data have shape {(rows.count, *rows.shape)}: there is nothing in them.")
        if rows.dtype == torch.uint8:
            rows, note = pixels(rows)
            description = f"{description}, {note}" if description else note
        if rows.dtype not in FLOATS:
            raise self._error(
                f"the data are {dtype_name(rows.dtype)}: expected floats, or uint8 pixels. Convert "
                "them to float32 in the units that the model was trained on."
            )
        if context is not None and context.count != rows.count:
            raise self._error(f"{rows.count} samples with {context.count} contexts: expected one for each.")
        self.rows, self.role, self.description = rows, role, description
        self._statistics: dict[int, Statistics] | None = None

    def _error(self, text: str) -> InputError:
        return InputError(f"source {self.name!r}: {text}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.rows.shape

    @property
    def context_shape(self) -> tuple[int, ...] | None:
        """Shape of one context, or None."""
        return None if self.context_rows is None else self.context_rows.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the samples as they are read."""
        return self.rows.dtype

    @property
    def count(self) -> int:
        """Number of samples."""
        return self.rows.count

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        text = f": {self.description}" if self.description else ""
        return f"Source({self.name!r}, {self.role}, {self.count} samples of shape {self.shape}{text})"

    def batches(
        self,
        size: int,
        *,
        limit: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Iterator[Batch]:
        """The samples in order, `size` at a time, the first `limit` of them.

        Args:
            size: Samples in a batch; the last batch may be smaller.
            limit: Stop after so many samples.
            dtype: Dtype of `x` and of contexts that are floats; by default as stored.
            device: Device of both; by default where they lie.
        """
        for label, number in (("size", size), ("limit", limit)):
            if number is not None and (not isinstance(number, int) or number < 1):
                raise self._error(f"batches({label}={number!r}): expected a whole number, 1 or more.")
        if dtype is not None and not dtype.is_floating_point:
            raise self._error(f"batches(dtype={dtype}): expected a floating dtype.")
        return self._batches(size, self.count if limit is None else min(limit, self.count), dtype, device)

    def _batches(
        self, size: int, end: int, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> Iterator[Batch]:
        for start in range(0, end, size):
            yield self.read(start, min(start + size, end), dtype=dtype, device=device)

    def read(
        self,
        start: int,
        stop: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Batch:
        """Samples `start` to `stop`."""
        if not 0 <= start < stop <= self.count:
            raise self._error(f"read({start}, {stop}): expected 0 <= start < stop <= {self.count}.")
        x = self.rows.read(start, stop).to(device=device, dtype=dtype)
        if self.context_rows is None:
            return Batch(x, None, start)
        context = self.context_rows.read(start, stop)
        return Batch(x, context.to(device=device, dtype=dtype if context.is_floating_point() else None), start)

    def first(self, n: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Batch:
        """The first `n` samples, or all where there are fewer."""
        return next(self.batches(n, limit=n, dtype=dtype, device=device))

    def spread(self, n: int) -> Batch:
        """About `n` samples, in blocks spread evenly over the source; all where there are fewer. They are read into memory."""
        n = min(n, self.count, max(64, 2**24 // math.prod(self.shape)))
        if n == self.count:
            return self.read(0, self.count)
        blocks = min(16, n)
        size = n // blocks
        starts = [k * (self.count - size) // max(1, blocks - 1) for k in range(blocks)]
        return Batch.joined([self.read(start, start + size) for start in starts])

    def shuffled(self, seed: int = 0) -> Source:
        """The same samples in an order drawn at random, the same for the same seed; `row` tells where each stood.

        A file may be sorted, by class or by time: then its first samples say nothing about the others.

        Example:
            >>> from bilip.data import as_source
            >>> source = as_source("test", torch.arange(10.0)[:, None]).shuffled()
            >>> int(source.first(1).x) == source.row(0)
            True
        """
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(seed), device="cpu")
        context = None if self.context_rows is None else OrderedRows(self.context_rows, order)
        rows = OrderedRows(self.rows, order)
        return Source(self.name, rows, role=self.role, description=self.description, context=context)

    def row(self, k: int) -> int:
        """The number of sample k in what the source was made from."""
        return self.rows.place(k)

    def _chunk(self) -> int:
        """Samples of one batch of about a million entries."""
        return min(4096, max(1, 2**20 // math.prod(self.shape)))

    def remember(self) -> None:
        """From now on nothing about the samples changes: statistics are computed once, and samples made by a rule are kept, up to 128 MiB.

        Example:
            >>> from bilip.data import as_source
            >>> source = as_source("test", torch.zeros(5, 2))
            >>> source.remember()
            >>> source.statistics() is source.statistics()
            True
        """
        self._statistics = {}
        if isinstance(self.rows, ChunkRows):
            self.rows.room = 2**27

    def statistics(self, limit: int = 4096) -> Statistics:
        """Range, mean and standard deviation over all entries of at most `limit` samples, in blocks spread evenly.

        A file may be sorted: its first samples alone could tell little about the others.
        """
        if limit < 1:
            raise self._error(f"statistics(limit={limit}): expected 1 or more.")
        if self._statistics is not None:
            if limit not in self._statistics:
                self._statistics[limit] = self._looked_at(limit)
            return self._statistics[limit]
        return self._looked_at(limit)

    def _looked_at(self, limit: int) -> Statistics:
        take = min(limit, self.count)
        block = min(self._chunk(), max(1, take // 16))
        blocks = -(-take // block)
        seen, low, high, mean, squares, sizes = 0, math.inf, -math.inf, 0.0, 0.0, []
        for k in range(blocks):
            start = k * block if take == self.count else k * self.count // blocks
            x = self.read(start, start + min(block, take - k * block)).x.double()
            # One pass: the sums of squared deviations of two sets add up with the gap between their means.
            n, m = x.numel(), float(x.mean())
            gap = m - mean
            squares += float((x - m).square().sum()) + gap * gap * seen * n / (seen + n)
            mean += gap * n / (seen + n)
            seen += n
            low, high = min(low, float(x.min())), max(high, float(x.max()))
            sizes.append(x.flatten(1).norm(dim=1))
        std = math.sqrt(squares / seen) if math.isfinite(squares) else math.nan
        norm = torch.cat(sizes)
        norm = norm[torch.isfinite(norm) & (norm > 0)]
        typical = float(norm.median()) if len(norm) else 1.0
        return Statistics(low, high, mean, std, seen // math.prod(self.shape), typical)

    def check(self, limit: int | None = None) -> None:
        """Read the first `limit` samples once and raise an `InputError` that names one with NaN or Inf."""
        if self.rows.finite and self.context_rows is None:
            return
        for batch in self.batches(self._chunk(), limit=limit):
            for label, values in (("sample", batch.x), ("the context of sample", batch.context)):
                if values is None or not values.is_floating_point() or bool(torch.isfinite(values).all()):
                    continue
                bad = ~torch.isfinite(values.flatten(1) if values.ndim > 1 else values[:, None])
                row = int(bad.any(1).nonzero()[0])
                raise self._error(
                    f"{label} {self.row(batch.start + row)} holds NaN or Inf ({int(bad[row].sum())} of {bad.shape[1]} entries). "
                    "Clean the data or leave that row out."
                )
