"""Where an axis has ticks, and what stands beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

__all__ = ["Ticks", "linear_ticks", "log_ticks", "number"]


@dataclass(frozen=True)
class Ticks:
    """Places of the ticks, a text for each, and the places of small ticks without one."""

    major: np.ndarray
    names: list[str]
    minor: np.ndarray


def number(value: float) -> str:
    """A number on an axis, complete in itself: no factor stands elsewhere.

    Example:
        >>> number(2e-12), number(1e30), number(0.25)
        ('2e−12', '1e30', '0.25')
    """
    return _print(f"{value:g}")


def linear_ticks(low: float, high: float, *, count: int = 5) -> Ticks:
    """At most `count` + 1 ticks in [low, high], with the same number of digits.

    Example:
        >>> linear_ticks(0.9, 2.1).names
        ['1.0', '1.5', '2.0']
    """
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(count, steps=[1, 2, 5, 10]).tick_values(low, high)
    ticks = np.array([0.0 if abs(t) < 1e-9 * (high - low) else t for t in found if low <= t <= high])
    names = next(texts for n in range(6, 18) if len(set(texts := [f"{t:.{n}g}" for t in ticks])) == len(ticks))
    if not any("e" in name for name in names):
        digits = max((len(name.partition(".")[2]) for name in names), default=0)
        names = [f"{t:.{digits}f}" for t in ticks]
    return Ticks(ticks, [_print(name) for name in names], np.empty(0))


def log_ticks(low: float, high: float) -> Ticks:
    """Ticks between 10^low and 10^high, placed by exponent; where fewer than three decades lie inside, plain numbers.

    Example:
        >>> log_ticks(-8, 0).names[0], log_ticks(0, 0.7).names
        ('$10^{-8}$', ['1', '2', '5'])
    """
    low, high = low - 1e-3, high + 1e-3
    decades = np.arange(math.ceil(low), math.floor(high) + 1)
    if len(decades) >= 3 or high > 300 or low < -300:
        step = next((s for s in (1, 2, 5, 10, 20, 50) if len(decades) <= 6 * s), 100)
        major = decades[decades % step == 0]
        minor = decades if len(decades) <= 20 else np.empty(0)
        if step == 1 and len(decades) < 6:
            minor = (np.arange(math.floor(low), math.ceil(high))[:, None] + np.log10(np.arange(2, 10))).ravel()
        return Ticks(major, [f"$10^{{{k}}}$" for k in major], minor[(minor >= low) & (minor <= high)])
    values = np.outer(10.0 ** np.arange(math.floor(low), math.ceil(high)), [1, 2, 5]).ravel()
    values = values[(np.log10(values) >= low) & (np.log10(values) <= high)]
    if len(values) < 3:
        plain = linear_ticks(10**low, 10**high)
        return Ticks(np.log10(plain.major), plain.names, plain.minor)
    return Ticks(np.log10(values), [number(v) for v in values], np.empty(0))


def _print(text: str) -> str:
    mantissa, e, exponent = text.partition("e")
    return (mantissa + (f"e{int(exponent)}" if e else "")).replace("-", "\N{MINUS SIGN}")
