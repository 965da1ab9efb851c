"""Everything bilip raises. Each message says what was passed, what was expected and what to do."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "BilipError",
    "CheckpointError",
    "ContractViolation",
    "DataNotFound",
    "DriftError",
    "InputError",
    "MissingExtra",
    "NoGlobalBound",
    "NonFiniteParameters",
    "NotAContraction",
    "NotConverged",
    "NotInitialized",
    "NotMeasured",
    "PartitionError",
    "RecordError",
    "SolverFailed",
    "Stopped",
    "TrainingDiverged",
    "UnknownLipschitz",
    "nearest",
    "need",
    "said_by",
]


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """` Did you mean ...?` for a word that is close to a known one, to end a sentence with; else nothing.

    Example:
        >>> nearest("chekerboard", ["checkerboard", "coupling_depth"])
        " Did you mean 'checkerboard'?"
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""


def said_by(error: BaseException, most: int = 300) -> str:
    """The kind and the words of an exception of foreign code, in one line; the kind alone where there are no words.

    Example:
        >>> said_by(ValueError("too\\nlarge")), said_by(MemoryError())
        ('ValueError: too large', 'MemoryError')
    """
    try:
        words = " ".join(str(error).split())
    except Exception:  # foreign code may fail at this too
        words = ""
    return f"{type(error).__name__}: {words[:most]}" if words else type(error).__name__


class BilipError(Exception):
    """The family: `except bilip.BilipError` catches whatever bilip itself objects to."""


class InputError(BilipError, ValueError):
    """A tensor or an argument of the wrong type, shape, dtype, device or value."""


class DataNotFound(InputError):
    """A data set that is not where it was looked for; the message says where that was, and how to get it."""


class PartitionError(BilipError, ValueError):
    """A split of the features that is empty, overlaps or does not cover its input."""


class NotInitialized(BilipError, RuntimeError):
    """A block that starts from data was used before it saw any."""


class NotAContraction(BilipError, ValueError):
    """A residual branch whose Lipschitz constant is not certified below 1: the block may not be invertible."""


class NotConverged(BilipError, RuntimeError):
    """An iterative inverse that did not reach its tolerance; `solution` holds what was reached, sample by sample."""

    def __init__(self, message: str, solution: object = None) -> None:
        super().__init__(message)
        self.solution = solution


class SolverFailed(BilipError, RuntimeError):
    """An ODE solver that gave up or returned numbers that are not finite."""


class Stopped(BilipError):
    """Work that was asked to end, by the clock or by the system, and has saved what it had: the same call goes on with it."""


class NoGlobalBound(BilipError, ValueError):
    """The map has no Lipschitz constant on all of its domain; on a bounded box it has one."""


class UnknownLipschitz(BilipError, TypeError):
    """A net inside a block whose Lipschitz constant cannot be proved from its layers."""


class NonFiniteParameters(BilipError, ValueError):
    """Weights that are NaN or Inf: nothing can be proved about them."""


class CheckpointError(BilipError, ValueError):
    """A checkpoint that is missing, truncated, foreign or does not fit the model."""


class MissingExtra(BilipError, ImportError):
    """An optional dependency that is not installed; the message names the extra."""


def need(module: str, purpose: str, extra: str = "report") -> Any:
    """A module of an optional dependency.

    Raises:
        MissingExtra: It is not installed.

    Example:
        >>> need("json", "the example").dumps(1)
        '1'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(f"{purpose} needs {module.split('.')[0]}: pip install 'bilip[{extra}]'.") from error


class ContractViolation(BilipError, AssertionError):
    """A bijection broke one of the promises checked by `bilip.testing`."""


class RecordError(BilipError, ValueError):
    """An audit record that is missing, truncated, foreign or from a newer bilip."""


class NotMeasured(BilipError, RuntimeError):
    """A probe has no answer for this model; the message says why."""


class DriftError(BilipError, RuntimeError):
    """A memory-saving backward pass whose activations are not those of the forward pass."""


class TrainingDiverged(BilipError, RuntimeError):
    """A loss that was not finite; `step` is where."""

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step
