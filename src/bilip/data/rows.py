"""Where the rows of a source lie: in memory, in a mapped file, or in a rule that makes them chunk by chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from bilip.errors import InputError

__all__ = ["ArrayRows", "ChunkRows", "MappedRows", "OrderedRows", "Rows", "TensorRows", "pixels"]


class Rows(ABC):
    """`count` tensors of one shape and dtype; `read(start, stop)` gives some of them and leaves the rest where it is.

    Attributes:
        count: Number of rows.
        shape: Shape of one row.
        dtype: Dtype of the tensors that `read` returns.
        finite: Whether it is known, without reading them, that they hold no NaN and no Inf.
    """

    finite: bool = False

    def __init__(self, count: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.count, self.shape, self.dtype = int(count), tuple(int(n) for n in shape), dtype

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop`, 0 <= start <= stop <= count."""

    def take(self, places: Tensor) -> Tensor:
        """The rows with these numbers, in this order; read in ascending order, neighbours together."""
        rising, back = places.sort()
        parts = [torch.empty((0, *self.shape), dtype=self.dtype, device="cpu")]
        for run in rising.tensor_split((rising.diff() != 1).nonzero().flatten() + 1) if len(rising) else ():
            parts.append(self.read(int(run[0]), int(run[-1]) + 1))
        return torch.cat([part.to(parts[-1].device) for part in parts])[back.argsort().to(parts[-1].device)]

    def place(self, k: int) -> int:
        """The number of row k in what the rows were made from."""
        return k


class TensorRows(Rows):
    """Rows of a tensor on any device; what is read is on the CPU, as of every other kind of rows."""

    def __init__(self, tensor: Tensor) -> None:
        odd = {
            "sparse": tensor.layout != torch.strided,
            "nested": tensor.is_nested,
            "on the device meta": tensor.is_meta,
        }
        if any(odd.values()):
            what = next(name for name, found in odd.items() if found)
            raise InputError(
                f"the data are a tensor that is {what}: expected a dense one with numbers, of shape (count, ...)."
            )
        if tensor.ndim == 0:
            raise InputError("a tensor without dimensions holds no samples: expected shape (count, ...).")
        self.tensor = tensor.detach()
        super().__init__(len(tensor), tensor.shape[1:], tensor.dtype)

    def read(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop].cpu()

    def take(self, places: Tensor) -> Tensor:
        return self.tensor[places.to(self.tensor.device)].cpu()


class ArrayRows(Rows):
    """Rows of a numpy array, in memory or memory-mapped; what is read is copied."""

    def __init__(self, array: np.ndarray) -> None:
        if array.ndim == 0:
            raise InputError("an array without dimensions holds no samples: expected shape (count, ...).")
        self.array = array
        super().__init__(len(array), array.shape[1:], torch_dtype(array.dtype))

    def read(self, start: int, stop: int) -> Tensor:
        part = self.array[start:stop]
        return torch.from_numpy(np.array(part, dtype=part.dtype.newbyteorder("="), order="C"))

    def take(self, places: Tensor) -> Tensor:
        part = self.array[places.cpu().numpy()]
        return torch.from_numpy(np.array(part, dtype=part.dtype.newbyteorder("="), order="C"))


class ChunkRows(Rows):
    """Rows made by a rule: chunk k, of `CHUNK` rows, is a function of k alone, so that batch sizes change nothing.

    Attributes:
        room: How many bytes of the first chunks are kept once they are made; none by default.
    """

    CHUNK = 256
    room = 0

    def __init__(self, count: int, shape: Sequence[int], dtype: torch.dtype, make: Callable[[int], Tensor]) -> None:
        super().__init__(count, shape, dtype)
        self.make = make
        self._last: tuple[int, Tensor] | None = None
        self._kept: dict[int, Tensor] = {}

    def _chunk(self, index: int) -> Tensor:
        if index in self._kept:
            return self._kept[index]
        last = self._last
        if last is None or last[0] != index:
            self._last = last = (index, self.make(index))
        if (index + 1) * last[1].numel() * last[1].element_size() <= self.room:
            self._kept[index] = last[1]
        return last[1]

    def read(self, start: int, stop: int) -> Tensor:
        parts = [torch.empty((0, *self.shape), dtype=self.dtype, device="cpu")]
        while start < stop:
            index, offset = divmod(start, self.CHUNK)
            end = min(stop, (index + 1) * self.CHUNK)
            parts.append(self._chunk(index)[offset : end - index * self.CHUNK])
            start = end
        return torch.cat(parts)


class OrderedRows(Rows):
    """Rows of another store in another order: row k is its row `order[k]`.

    Example:
        >>> OrderedRows(TensorRows(torch.tensor([[0.0], [1.0], [2.0]])), torch.tensor([2, 0, 1])).read(0, 2)
        tensor([[2.],
                [0.]])
    """

    def __init__(self, rows: Rows, order: Tensor) -> None:
        super().__init__(len(order), rows.shape, rows.dtype)
        self.rows, self.order = rows, order

    def read(self, start: int, stop: int) -> Tensor:
        return self.rows.take(self.order[start:stop])

    def take(self, places: Tensor) -> Tensor:
        return self.rows.take(self.order[places])

    def place(self, k: int) -> int:
        return self.rows.place(int(self.order[k]))


class MappedRows(Rows):
    """Rows of another store, passed through a function of a batch."""

    def __init__(self, rows: Rows, function: Callable[[Tensor], Tensor], *, count: int | None = None) -> None:
        like = function(torch.empty((0, *rows.shape), dtype=rows.dtype, device="cpu"))
        super().__init__(rows.count if count is None else count, like.shape[1:], like.dtype)
        self.rows, self.function = rows, function

    def read(self, start: int, stop: int) -> Tensor:
        return self.function(self.rows.read(start, stop))

    def take(self, places: Tensor) -> Tensor:
        return self.function(self.rows.take(places))

    def place(self, k: int) -> int:
        return self.rows.place(k)


def pixels(rows: Rows) -> tuple[Rows, str]:
    """Bytes as float32 in [0, 1], channels first, and a note that says what was done."""
    last = len(rows.shape) == 3 and rows.shape[-1] in (1, 3) and rows.shape[0] not in (1, 3)

    def convert(x: Tensor) -> Tensor:
        return (x.movedim(-1, 1) if last else x).contiguous().to(torch.float32) / 255

    return MappedRows(rows, convert), "uint8 scaled to [0, 1]" + (", channels moved first" if last else "")


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """The dtype of `torch.from_numpy`, or an `InputError` for what torch cannot hold."""
    try:
        return torch.from_numpy(np.empty(0, dtype=dtype.newbyteorder("="))).dtype
    except TypeError as error:
        raise InputError(f"an array of {dtype} cannot become a tensor: save it as float32 or float64.") from error
