"""Values as strict JSON and back: numbers that are not finite become the words nan, inf and -inf."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from bilip.errors import BilipError, RecordError
from bilip.record.files import read_file, write_aside

__all__ = ["from_plain", "json_text", "parse_json", "read_json", "to_plain", "write_json"]

NESTING = 48
MOST = 2**28  # bytes of a JSON file
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_BREAK = re.compile(r"\n *")
_NUMBERS = re.compile(r'\[\n *((?:[^\[\]{}"]|"nan"|"-?inf")+?)\n *\]')  # no word holds a line break


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
    """Write a value as strict JSON, whole or not at all; a list of numbers is one line."""
    write_aside(path, json_text(value))


def json_text(value: Any) -> str:
    """What `write_json` writes.

    Example:
        >>> print(json_text({"worst": [1.5, float("nan")]}), end="")
        {
         "worst": [1.5, "nan"]
        }
    """
    text = json.dumps(to_plain(value), indent=1, allow_nan=False) + "\n"
    return _NUMBERS.sub(lambda found: f"[{_BREAK.sub(' ', found[1])}]", text)


def parse_json(data: str | bytes, where: str, *, strict: bool = True, advice: str = "It may be truncated.") -> Any:
    """The value of a JSON text in UTF-8, with lists and tables at most 48 deep.

    Args:
        data: The text.
        where: What it is called in errors.
        strict: Refuse the bare words NaN and Infinity, which JSON does not know.
        advice: What to do about a text that cannot be read.

    Raises:
        RecordError: It is no JSON, or nested deeper.

    Example:
        >>> parse_json("[" * 60 + "]" * 60, "the text")
        Traceback (most recent call last):
        ...
        bilip.errors.RecordError: the text is nested deeper than 48 levels: it is not what bilip writes.
    """
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
    except UnicodeDecodeError as error:
        raise RecordError(f"{where} is not a text file; expected JSON in UTF-8.") from error
    kind = "strict JSON" if strict else "readable JSON"
    try:
        value = json.loads(text, parse_constant=_refuse_constant if strict else None)
    except RecursionError as error:
        raise _too_deep(where) from error
    except BilipError as error:
        raise RecordError(f"{where} is not {kind} ({error}).") from error
    except (ValueError, MemoryError) as error:
        raise RecordError(f"{where} is not {kind} ({error}). {advice}") from error
    level = [value]
    for _ in range(NESTING + 1):
        level = [part for whole in level if isinstance(whole, (list, dict)) for part in _parts(whole)]
        if not level:
            return value
    raise _too_deep(where)


def _parts(whole: list[Any] | dict[str, Any]) -> Any:
    return whole.values() if isinstance(whole, dict) else whole


def _too_deep(where: str) -> RecordError:
    return RecordError(f"{where} is nested deeper than {NESTING} levels: it is not what bilip writes.")


def _refuse_constant(name: str) -> NoReturn:
    raise RecordError(f"the bare word {name} is not JSON")


def read_json(path: str | Path) -> Any:
    """Read what `write_json` wrote.

    Raises:
        RecordError: The file is missing, truncated, too large, no regular file or no JSON.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_json(f"{folder}/a.json", {"worst": float("nan")})
        ...     read_json(f"{folder}/a.json")
        {'worst': nan}
    """
    return from_plain(parse_json(read_file(path, most=MOST, error=RecordError), str(path), strict=False))
