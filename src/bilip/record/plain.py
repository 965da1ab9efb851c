"""Values as strict JSON and back: numbers that are not finite become the words nan, inf and -inf."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bilip.errors import RecordError
from bilip.record.files import write_aside

__all__ = ["from_plain", "read_json", "to_plain", "write_json"]

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_plain(value: Any) -> Any:
    """Tables, lists, words and finite numbers for a value made of these and of dataclasses.

    Example:
        >>> to_plain({"error": float("inf"), "word": "inf", "steps": (1, 2)})
        {'error': 'inf', 'word': '\\\\inf', 'steps': [1, 2]}
    """
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, str):
        return f"\\{value}" if value.lstrip("\\") in _NON_FINITE else str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int)):
        return value
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of numpy or torch
        return to_plain(value.item())  # pyright: ignore[reportAttributeAccessIssue]
    raise RecordError(
        f"a record holds numbers, words, lists and tables of these, not a {type(value).__name__}: convert it first, as in "
        "float(value) or value.tolist()."
    )


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`, but for dataclasses, which stay tables.

    Example:
        >>> from_plain(to_plain({"error": float("inf"), "word": "inf"}))
        {'error': inf, 'word': 'inf'}
    """
    if isinstance(value, str):
        return (
            value[1:] if value.startswith("\\") and value.lstrip("\\") in _NON_FINITE else _NON_FINITE.get(value, value)
        )
    if isinstance(value, dict):
        return {k: from_plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    return value


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as strict JSON, whole or not at all."""
    write_aside(path, json.dumps(to_plain(value), indent=1, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Read what `write_json` wrote.

    Raises:
        RecordError: The file is missing, truncated or no JSON.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_json(f"{folder}/a.json", {"worst": float("nan")})
        ...     read_json(f"{folder}/a.json")
        {'worst': nan}
    """
    try:
        return from_plain(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise RecordError(f"{path} is not readable JSON ({error}). It may be truncated.") from error
