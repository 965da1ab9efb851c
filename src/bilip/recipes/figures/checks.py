"""What a figure accepts: plain numbers in the right shape, or a sentence that says what was wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bilip.errors import InputError

__all__ = ["array", "interval", "named"]


def named(value: Any, what: str) -> Mapping[str, Any]:
    """A mapping with at least one entry and text for keys."""
    if not isinstance(value, Mapping):
        raise InputError(f"{what} is a {type(value).__name__}; expected a mapping from names to data.")
    if not value:
        raise InputError(f"{what} is empty; expected at least one entry.")
    for name in value:
        if not isinstance(name, str):
            raise InputError(f"{what} has the key {name!r}; expected text, for it is printed.")
    return value


def array(values: Any, what: str, *, shape: tuple[int | None, ...] = (None,)) -> np.ndarray:
    """Numbers as float64 in the given shape, where None stands for any length; Inf and NaN pass.

    Example:
        >>> array([1, "inf"], "y")
        array([ 1., inf])
    """
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"{what} is not an array of numbers ({error}).") from error
    if found.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, found.shape, strict=True)):
        expected = ", ".join("any" if n is None else str(n) for n in shape)
        raise InputError(f"{what} has shape {found.shape}; expected ({expected}).")
    return found


def interval(value: Any, what: str) -> tuple[float, float]:
    """Two finite numbers, the smaller one first."""
    low, high = array(value, what, shape=(2,)).tolist()
    if not (np.isfinite([low, high]).all() and low < high):
        raise InputError(f"{what} is ({low:g}, {high:g}); expected two finite numbers, the smaller one first.")
    return low, high
