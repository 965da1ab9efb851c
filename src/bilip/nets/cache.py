"""A value computed from a tensor and reused only where it cannot be stale."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["EvalCache", "is_plain"]


class EvalCache:
    """Keeps `compute(weight)` in evaluation mode under `no_grad`, for as long as `weight` holds the same numbers.

    The key is the values themselves, not a version counter: writing through `weight.data` moves no counter.
    """

    def __init__(self) -> None:
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    def get(self, owner: nn.Module, weight: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """The value for `weight`, from the cache when that is allowed and right."""
        if owner.training or torch.is_grad_enabled() or not is_plain(weight):
            self._key = self._value = None
            return compute(weight)
        key = self._key
        if key is None or key.device != weight.device or key.dtype != weight.dtype or not torch.equal(key, weight):
            self._key, self._value = weight.detach().clone(), compute(weight)
        if self._value is None:
            self._value = compute(weight)
        return self._value

    def __deepcopy__(self, memo: dict) -> EvalCache:
        return EvalCache()

    def __reduce__(self):
        return (EvalCache, ())


def is_plain(weight: Tensor) -> bool:
    """Whether values can be read here: not while tracing, transforming, or capturing a CUDA graph."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return not (weight.is_cuda and torch.cuda.is_current_stream_capturing())
