"""Steps that are recorded as CUDA graphs: such code may not stop to look at a number, so it raises a flag."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Flag", "capturing"]


def capturing(x: Tensor) -> bool:
    """Whether what happens to a tensor now is recorded, to be replayed with other numbers.

    Example:
        >>> capturing(torch.zeros(2))
        False
    """
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class Flag:
    """A number on the device. Above 1, the step that raised it has to be run again without its graph.

    Example:
        >>> flag = Flag()
        >>> flag.raise_to(torch.tensor(3.0))
        >>> float(flag.on(torch.device("cpu")))
        3.0
    """

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """The number, 0 before it is raised."""
        if self.value is None or self.value.device != device:
            self.value = torch.zeros((), dtype=torch.float64, device=device)
        return self.value

    def raise_to(self, number: Tensor) -> None:
        """Raise it, unless it is higher already."""
        value = self.on(number.device)
        value.copy_(torch.maximum(value, number))
