"""Steps that are recorded as CUDA graphs: such code may not stop to look at a number, so it raises a flag."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["Flag", "capturing", "noting"]


def capturing(x: Tensor) -> bool:
    """Whether what happens to a tensor now is recorded, to be replayed with other numbers.

    Example:
        >>> capturing(torch.zeros(2))
        False
    """
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class Flag:
    """A number on the device. Above 1, the step that raised it has to be run again without its graph.

    Args:
        owner: What raises it, and keeps counts on the host that a replay does not move.

    Example:
        >>> flag = Flag()
        >>> flag.raise_to(torch.tensor(3.0))
        >>> float(flag.on(torch.device("cpu")))
        3.0
    """

    def __init__(self, owner: Any = None) -> None:
        self.owner = owner
        self.value: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """The number, 0 before it is raised."""
        if self.value is None or self.value.device != device:
            self.value = torch.zeros((), dtype=torch.float64, device=device)
        return self.value

    def raise_to(self, number: Tensor) -> None:
        """Raise it, unless it is higher already."""
        self.note()
        value = self.on(number.device)
        value.copy_(torch.maximum(value, number))

    def raise_unless(self, good: Tensor) -> None:
        """Raise it to infinity where something is not as it should be."""
        self.raise_to(torch.where(good, 0.0, torch.inf))

    def note(self) -> None:
        """Tell who listens that this flag has a part in the step."""
        for flags in _LISTENING:
            if all(flag is not self for flag in flags):
                flags.append(self)


_LISTENING: list[list[Flag]] = []  # for all threads: on a GPU backward passes run in one of their own


@contextlib.contextmanager
def noting(flags: list[Flag]) -> Iterator[None]:
    """Add to a list the flags that have a part in what happens inside."""
    _LISTENING.append(flags)
    try:
        yield
    finally:
        _LISTENING.remove(flags)
