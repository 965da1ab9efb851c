"""Numbers and names as people read them: 1.2e-7, 3.4 %, Inf."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from bilip.record import Quantity

MISSING = "–"
USE_TITLES = {
    "inversion": "Inversion on data",
    "sampling": "Sampling",
    "likelihood": "Likelihood on data",
    "ood-likelihood": "Likelihood out of distribution",
    "reversible-gradients": "Memory-saving gradients",
}


def as_float(value: Any) -> float:
    """The number, or NaN for whatever is not one.

    Example:
        >>> as_float(3), as_float("x"), as_float(None)
        (3.0, nan, nan)
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return math.nan


def number(value: Any) -> str:
    """A number for people.

    Example:
        >>> [number(v) for v in (0, 12345, 0.25, 1.234e-7, 3e12, float("inf"), float("nan"), None, True, "lanczos")]
        ['0', '12,345', '0.25', '1.2e-7', '3e12', 'Inf', 'NaN', '–', 'yes', 'lanczos']
    """
    if isinstance(value, (bool, str)) or value is None:
        return word(value)
    if isinstance(value, int) and abs(value) < 10**9:
        return f"{value:,}"
    value = as_float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        text = f"{value:.3g}"
        return f"{value:.0f}" if "e" in text else text
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def share(value: Any) -> str:
    """A share from 0 to 1 in percent; never rounded to 0 % or 100 % unless it is.

    Example:
        >>> [share(v) for v in (0, 0.034, 1, 0.99999, 3e-6, 0.126, None)]
        ['0 %', '3.4 %', '100 %', '> 99.9 %', '< 0.01 %', '12.6 %', '–']
    """
    part = as_float(value)
    if not math.isfinite(part):
        return number(value)
    if 0 < part < 1e-4:
        return "< 0.01 %"
    if 0.9995 <= part < 1:
        return "> 99.9 %"
    percent = f"{100 * part:.2f}" if part < 0.01 else f"{100 * part:.1f}"
    return (percent.rstrip("0").rstrip(".") or "0") + " %"


def power(log10: Any) -> str:
    """A number given by its decimal logarithm, however large.

    Example:
        >>> power(2), power(456.5), power(1.84e17), power(float("inf"))
        ('100', '10^456.5', '10^(1.8e17)', 'Inf')
    """
    value = as_float(log10)
    if not math.isfinite(value) or abs(value) < 300:
        return number(log10) if not math.isfinite(value) else number(10.0**value)
    return f"10^({number(value)})" if abs(value) >= 1e6 else f"10^{value:.1f}".removesuffix(".0")


def written(quantity: Quantity, value: Any) -> str:
    """A value by its unit: shares in percent, logarithms as powers, others as numbers.

    Example:
        >>> written(Quantity("bad", unit="share"), 0.5), written(Quantity("top", unit="log10"), 3.0), written(Quantity("k"), 1e-6)
        ('50 %', '1000', '1e-6')
    """
    if quantity.unit == "share":
        return share(value)
    if quantity.unit == "log10":
        return power(value)
    return number(value)


def word(value: Any) -> str:
    """Words: yes and no for booleans, a dash for nothing."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == "":
        return MISSING
    return clean(value)


def clean(text: Any, limit: int = 400) -> str:
    """One line without control characters; what is longer than the limit is cut in its middle.

    Example:
        >>> clean("a\\n\\x1b[31mb"), clean("abcdefghij", 5)
        ('a [31mb', 'ab…ij')
    """
    line = "".join(c if c.isprintable() else " " for c in str(text))
    line = " ".join(line.split())
    if len(line) <= limit:
        return line
    keep = max(limit - 1, 1)
    return f"{line[: keep - keep // 2]}…{line[len(line) - keep // 2 :]}"


def sentence(text: Any, *, capital: bool = True) -> str:
    """A text as a sentence; without a capital where it follows a colon.

    Example:
        >>> sentence("nothing was measured"), sentence("Why?")
        ('Nothing was measured.', 'Why?')
    """
    line = clean(text, 1000)
    first = line[:1].upper() if capital else line[:1]
    return first + line[1:] + ("" if not line or line[-1] in ".!?…" else ".")


def shape(value: Any) -> str:
    """A shape such as 3×32×32.

    Example:
        >>> shape([3, 32, 32]), shape(None)
        ('3×32×32', '–')
    """
    if isinstance(value, (list, tuple)) and value:
        return "×".join(clean(n, 20) for n in value)
    return word(value)


def when(created: str) -> str:
    """The time of a record.

    Example:
        >>> when("2026-01-05T10:11:12+00:00"), when("soon")
        ('2026-01-05 10:11 UTC', 'soon')
    """
    try:
        return f"{datetime.fromisoformat(created).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError):
        return clean(created, 40)


def plural(count: int, noun: str) -> str:
    """A count and its noun.

    Example:
        >>> plural(1, "block"), plural(3, "block")
        ('1 block', '3 blocks')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
