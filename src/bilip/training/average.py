"""An exponential moving average of weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

__all__ = ["Average"]


class Average:
    r"""$\bar\theta \leftarrow \beta \bar\theta + (1 - \beta)\, \theta$ after each step, from the weights at the start.

    Buffers are not averaged. (torch's `AveragedModel` copies the whole model, begins with the weights after the first step, and reads a
    count from the device, which a captured step may not.)

    Args:
        model: The model.
        decay: $\beta$.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> average = Average(model, decay=0.9)
        >>> before = float(model.weight)
        >>> _ = model.weight.data.add_(1.0)
        >>> average.update()
        >>> with average.in_place():
        ...     round(float(model.weight) - before, 6)
        0.1
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._live = dict(model.named_parameters())
        self.weights: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._live.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the present weights."""
        torch._foreach_lerp_(list(self.weights.values()), list(self._live.values()), 1 - self.decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the averaged weights, for as long as the context is open."""
        kept = {name: p.detach().clone() for name, p in self._live.items()}
        self._write(self.weights)
        try:
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        for name, p in self._live.items():
            p.copy_(values[name])
