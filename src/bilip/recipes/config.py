"""Typed configuration of a recipe, changed by `key=value`."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from bilip.errors import InputError

__all__ = ["configured", "differences", "nearest", "require"]

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


def require(config: Any, *, positive: Sequence[str] = (), filled: Sequence[str] = ()) -> None:
    """Raise an `InputError` unless some fields are positive, and some lists are too, with at least one number and each once."""
    for name in (*positive, *filled):
        value = getattr(config, name)
        items = value if isinstance(value, tuple) else (value,)
        if not items or not all(0 < item < float("inf") for item in items):
            raise InputError(
                f"--set {name}={value}: expected positive numbers{', one or more' if name in filled else ''}."
            )
        if name in filled and len(set(items)) < len(items):
            raise InputError(f"--set {name}={value}: expected each number once.")


def differences(config: Any, other: Any) -> list[str]:
    """The fields in which a configuration differs from another one, as `steps=5 (100)`.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Config:
        ...     steps: int = 100
        >>> differences(Config(5), Config())
        ['steps=5 (100)']
    """
    pairs = ((f.name, getattr(config, f.name), getattr(other, f.name)) for f in dataclasses.fields(config))
    return [f"{name}={_short(a)} ({_short(b)})" for name, a, b in pairs if a != b]


def _short(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


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
