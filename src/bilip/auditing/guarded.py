"""Calls into a model that may raise for some samples of a batch: find those samples, keep the rest."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bilip.errors import BilipError, NotConverged, SolverFailed, said_by

__all__ = ["ENDED", "Outcome", "as_tuple", "run_guarded"]

ENDED = "the model ended the program"
Call = Callable[[Tensor, Tensor | None], "Tensor | tuple[Tensor, ...]"]
_CANDIDATES = 8


@dataclass(frozen=True)
class Outcome:
    """What came out of a guarded call.

    Attributes:
        values: The tensors that the call returned; NaN in the rows of failed samples.
        failed: For each sample: did the model raise because of it?
        message: The first exception, in one line; empty if there was none.
        exact: Whether the guilty samples could be told apart within the budget of the search; if not, some innocent may be
            among them.
    """

    values: tuple[Tensor, ...]
    failed: Tensor
    message: str = ""
    exact: bool = True

    @property
    def value(self) -> Tensor:
        """The first tensor."""
        return self.values[0]


def run_guarded(call: Call, x: Tensor, context: Tensor | None = None, *, budget: int = 512) -> Outcome:
    """Call a model on a batch; if it raises, find the samples that make it raise.

    Smaller batches round differently and can lose the failure, so that the search keeps the shape of the batch: it replaces
    suspects by a copy of a sample that is known to be good, and halves the set of suspects.

    Args:
        call: `call(x, context)`, which returns a tensor or a tuple of tensors with the batch in front.
        x: The batch.
        context: Its contexts.
        budget: Largest number of calls spent on the search.

    Example:
        >>> def picky(x, context):
        ...     if (x > 2).any():
        ...         raise ValueError("too large")
        ...     return 2 * x
        >>> outcome = run_guarded(picky, torch.tensor([[0.0], [3.0], [1.0]]))
        >>> outcome.failed.tolist(), outcome.value.flatten().tolist(), outcome.message
        ([False, True, False], [0.0, nan, 2.0], 'ValueError: too large')
    """
    try:
        return Outcome(as_tuple(call(x, context)), torch.zeros(len(x), dtype=torch.bool, device=x.device))
    except BaseException as error:  # a model may call sys.exit
        if not _of_a_sample(error):
            raise
        message = _one_line(error)
    return _Search(call, x, context, budget).run(message)


class _Search:
    def __init__(self, call: Call, x: Tensor, context: Tensor | None, budget: int) -> None:
        self.call, self.x, self.context, self.left = call, x, context, budget
        self.good: int | None = None
        self.exact = True

    def run(self, message: str) -> Outcome:
        everyone = torch.arange(len(self.x))
        norms = self.x.detach().double().flatten(1).norm(dim=1).nan_to_num(torch.inf)
        order = norms.argsort().cpu()  # small samples are good ones most often; then some of every size
        spread = order[_CANDIDATES :: max(1, (len(order) - 1) // _CANDIDATES)]
        candidates = [*order[:_CANDIDATES].tolist(), *spread.tolist()]
        for k in candidates:
            self.good = k
            if self._try(everyone[:0]) is not None:
                break
        else:
            failed = torch.ones(len(self.x), dtype=torch.bool, device=self.x.device)
            return Outcome(self._nothing(), failed, message, len(candidates) == len(self.x))
        guilty = self._find(everyone)
        innocent = torch.ones(len(self.x), dtype=torch.bool)
        innocent[guilty] = False
        values = self._try(everyone[innocent])
        if values is None:  # the innocent fail together: nobody can be told apart
            innocent[:] = self.exact = False
            values = self._try(everyone[:0]) or self._nothing()
        failed = ~innocent.to(self.x.device)
        return Outcome(tuple(_blank(v, failed) for v in values), failed, message, self.exact)

    def _nothing(self) -> tuple[Tensor, Tensor]:
        nan = torch.full_like(self.x, torch.nan)
        return nan, nan.flatten(1).sum(1)

    def _find(self, suspects: Tensor) -> Tensor:
        if self.left <= 0:
            self.exact = False
            return suspects
        self.left -= 1
        if self._try(suspects) is not None:
            return suspects[:0]
        if len(suspects) == 1:
            return suspects
        half = len(suspects) // 2
        found = torch.cat([self._find(suspects[:half]), self._find(suspects[half:])])
        if len(found):
            return found
        self.exact = False  # they raise only together
        return suspects

    def _try(self, kept: Tensor) -> tuple[Tensor, ...] | None:
        """The result with everybody but `kept` replaced by the good sample, or `None` if it raises."""
        rows = torch.full((len(self.x),), self.good or 0, dtype=torch.long)
        rows[kept] = kept
        rows = rows.to(self.x.device)
        try:
            return as_tuple(self.call(self.x[rows], None if self.context is None else self.context[rows]))
        except BaseException as error:
            if not _of_a_sample(error):
                raise
            return None


def _of_a_sample(error: BaseException) -> bool:
    """Whether an exception may be about some samples: bilip's own complaints about the whole call, memory and Ctrl-C are not."""
    if isinstance(error, (NotConverged, SolverFailed)):
        return True
    whole = (BilipError, torch.OutOfMemoryError, NotImplementedError, KeyboardInterrupt, GeneratorExit)
    return not isinstance(error, whole)


def _blank(value: Tensor, failed: Tensor) -> Tensor:
    return torch.where(failed.view(-1, *[1] * (value.ndim - 1)), torch.full_like(value, torch.nan), value)


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One tensor or several, as several."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _one_line(error: BaseException) -> str:
    """The message of an exception; where it has none, the place that raised it. One that would end the program says so."""
    text = said_by(error)
    if not isinstance(error, Exception):
        return f"{ENDED} ({text})"
    if text != type(error).__name__:
        return text
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}: {place.line}"
