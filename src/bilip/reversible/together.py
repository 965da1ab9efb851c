"""Several calls in one backward pass: gradients that nearly cancel leave their errors behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

__all__ = ["Together"]


class Together:
    """What the calls of one `Reversible` add up to in one backward pass.

    A loss that goes there and back, or subtracts, has calls whose gradients nearly cancel: each of them is right to a few digits, and
    these may be all that is left of the sum. Gradients are held as long as calls are waiting whose backward pass is to come. A copy
    starts without any.
    """

    def __init__(self) -> None:
        self.waiting: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.task = -1
        self.grads: dict[Tensor, Tensor] = {}
        self.wrong: Tensor | None = None

    def expect(self, call: Any) -> None:
        """Take note of a call that was made."""
        self.waiting[id(call)] = call

    def add(self, call: Any, grads: Mapping[Tensor, Tensor], drift: Tensor) -> Tensor | None:
        """What the gradients found so far in this backward pass may be wrong by, over the size of their sum; `None` for one alone.

        Args:
            call: Whose backward pass this is.
            grads: What it has found.
            drift: What that may be wrong by, relative to its size.
        """
        self.waiting.pop(id(call), None)
        task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        several = task == self.task and task >= 0 and bool(self.grads)
        if not several:
            self.clear()
        if not grads or not (several or self.waiting):
            return None
        wrong = drift * _size(grads)
        self.wrong = wrong if self.wrong is None else self.wrong + wrong
        for p, g in grads.items():
            self.grads[p] = self.grads[p] + g if p in self.grads else g
        self.task = task
        found = self.wrong / _size(self.grads) if several else None
        if not self.waiting:
            self.clear()
        return found

    def clear(self) -> None:
        self.task, self.grads, self.wrong = -1, {}, None

    def __reduce__(self) -> tuple[type[Together], tuple[()]]:
        return Together, ()


def _size(grads: Mapping[Tensor, Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads.values()), dtype=torch.float64)))
