"""A value computed from a tensor and reused only where it cannot be stale."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from bilip._torch import capturing, is_transformed

__all__ = ["EvalCache", "is_plain", "reusing"]

_REUSING: ContextVar[bool] = ContextVar("reusing", default=False)


@contextlib.contextmanager
def reusing() -> Iterator[None]:
    """Let values be reused in training mode too: for the many evaluations of one iterative solve, without gradients."""
    token = _REUSING.set(True)
    try:
        yield
    finally:
        _REUSING.reset(token)


class EvalCache:
    """Keeps `compute(weight)` in evaluation mode, for as long as `weight` holds the same numbers and no gradient goes to it: under
    `no_grad`, or where it is frozen.

    The key is the values themselves, not a version counter: writing through `weight.data` moves no counter.
    """

    def __init__(self) -> None:
        self._kept: tuple[Tensor, dict[Callable[[Tensor], Tensor], Tensor]] | None = None  # the weight, values of it

    def get(self, owner: nn.Module, weight: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """The value for `weight`, from the cache when that is allowed and right."""
        return self.get_all(owner, weight, (compute,))[0]

    def get_all(self, owner: nn.Module, weight: Tensor, computes: Sequence[Callable[[Tensor], Tensor]]) -> list[Tensor]:
        """`get` for several values of one weight, which is compared once: on a device, that has to be waited for."""
        learns = torch.is_grad_enabled() and weight.requires_grad
        if (owner.training and not _REUSING.get()) or learns or not is_plain(weight):
            self.clear()
            return [compute(weight) for compute in computes]
        kept = self._kept  # once: other threads may empty or replace it meanwhile
        if kept is None or not _same(kept[0], weight):
            kept = self._kept = weight.detach().clone(), {}
        values = kept[1]
        for compute in computes:
            if compute not in values:
                values[compute] = compute(weight)
        return [values[compute] for compute in computes]

    def clear(self) -> None:
        """Keep nothing."""
        self._kept = None

    def __deepcopy__(self, memo: dict) -> EvalCache:
        return EvalCache()

    def __reduce__(self):
        return (EvalCache, ())


def _same(key: Tensor, weight: Tensor) -> bool:
    return key.device == weight.device and key.dtype == weight.dtype and torch.equal(key, weight)


def is_plain(weight: Tensor) -> bool:
    """Whether values can be read here: not while tracing, transforming, or capturing a CUDA graph."""
    return not is_transformed() and not capturing(weight)
