"""Typed configuration of a recipe, changed by `key=value`."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from bilip.errors import InputError

__all__ = ["configured", "nearest"]

C = TypeVar("C")
WORDS = {"true": True, "yes": True, "false": False, "no": False}


def configured(defaults: C, changes: Sequence[str]) -> C:
    """A configuration with some of its values changed; each value is read as the type of its field.

    Args:
        defaults: A frozen dataclass.
        changes: Entries such as `"steps=200"` or `"hidden=64,64"`.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Config:
        ...     steps: int = 100
        ...     hidden: tuple[int, ...] = (64, 64)
        >>> configured(Config(), ["steps=5", "hidden=32,32,32"])
        Config(steps=5, hidden=(32, 32, 32))
    """
    kinds = typing.get_type_hints(type(defaults))
    found: dict[str, Any] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        key = key.strip()
        if not equals:
            raise InputError(f"--set {change}: expected key=value.")
        if key not in kinds:
            raise InputError(f"--set {key}: there is no such key. {nearest(key, kinds)}There are {', '.join(kinds)}.")
        found[key] = _read(key, text.strip(), kinds[key])
    return dataclasses.replace(defaults, **found)  # type: ignore[type-var]


def nearest(word: str, known: Sequence[str] | Any) -> str:
    """`Did you mean ...? `, or nothing.

    Example:
        >>> nearest("chekerboard", ["checkerboard", "coupling_depth"])
        "Did you mean 'checkerboard'? "
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}? " if close else ""


def _read(key: str, text: str, kind: Any) -> Any:
    options = typing.get_args(kind)
    if type(None) in options:  # X | None
        if text.lower() in ("none", ""):
            return None
        kind = next(option for option in options if option is not type(None))
    if typing.get_origin(kind) is tuple:
        return tuple(_read(key, part.strip(), typing.get_args(kind)[0]) for part in text.split(",") if part.strip())
    try:
        if kind is bool:
            return WORDS[text.lower()]
        if kind is int:
            return int(float(text)) if float(text) == int(float(text)) else int(text)
        return kind(text)
    except (ValueError, KeyError, OverflowError) as error:
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, str(kind))
        raise InputError(f"--set {key}={text}: expected {wanted}.") from error
