"""Several calls in one backward pass: gradients that nearly cancel leave their errors behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

__all__ = ["Together", "sizes"]


class Together:
    """What the calls of one `Reversible` add up to in one backward pass.

    A loss that goes there and back, or subtracts, has calls whose gradients nearly cancel: each of them is right to a few digits, and
    these may be all that is left of the sum. Gradients are held as long as calls are waiting whose backward pass is to come. A copy
    starts without any.
    """

    def __init__(self) -> None:
        self.waiting: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.found: dict[
            int, tuple[dict[Tensor, Tensor], Tensor]
        ] = {}  # by backward pass: gradients, what they are wrong by

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
        before = self.found.pop(task, None)  # of this pass: those of other threads have other numbers
        if not self.waiting:
            self.found.clear()
            if before is None:
                return None
        if not grads:
            if before is not None:
                self.found[task] = before
            return None
        total, wrong = dict(grads), drift * torch.linalg.vector_norm(sizes(list(grads.values())))
        if before is not None:
            wrong = wrong + before[1]
            for p, g in before[0].items():
                total[p] = total[p] + g if p in total else g
        if self.waiting:
            self.found[task] = total, wrong
        return None if before is None else wrong / torch.linalg.vector_norm(sizes(list(total.values())))

    def __reduce__(self) -> tuple[type[Together], tuple[()]]:
        return Together, ()


def sizes(grads: Sequence[Tensor]) -> Tensor:
    """Their norms, in float64: squares of large gradients are no float32."""
    dense = [g.coalesce().values() if g.is_sparse else g for g in grads]
    return torch.stack(torch._foreach_norm(dense, dtype=torch.float64))
