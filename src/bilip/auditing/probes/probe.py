"""What every probe has in common: the author writes `_measure`, this class brings model and data into shape."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from bilip.auditing.budget import Budget
from bilip.auditing.looks import Looks
from bilip.auditing.subject import ENDED, Subject
from bilip.data import Batch, Source, as_source
from bilip.errors import InputError, NotMeasured, said_by
from bilip.record import Measurement, Quantity

__all__ = ["PROBES", "SCOPES", "Finding", "Probe", "Progress", "Task"]

Progress = Callable[[float], None]
SCOPES = {
    "source": "on every source",
    "data": "once, on the main data source",
    "failing": "on every source, at the samples that fail there if there are any",
}
PROBES: dict[str, type[Probe]] = {}


def silent(share: float) -> None:
    """No progress shown."""


@dataclass(frozen=True)
class Task:
    """What an audit asks of its probes, beside the budget.

    Attributes:
        seed: Seed of everything random.
        shape: Shape of one sample.
        conditional: Whether samples come with a context.
        bits: Bit depth of the data, if it was given.
        relative: Relative error above which a round trip is wrong.
        log_prob: Error of a log-likelihood above which it is wrong, as a part of d + |log p|.
        range: Samples may lie within so many times the range of the data.
        looks: When to look at the share of bad samples, and when to stop.
    """

    seed: int = 0
    shape: tuple[int, ...] = ()
    conditional: bool = False
    bits: int | None = None
    relative: float | None = None
    log_prob: float = 1e-3
    range: float = 10.0
    looks: Looks | None = None

    @property
    def large(self) -> bool:
        """Whether a sample is so large that Jacobians and float64 passes cost more than all the rest."""
        return math.prod(self.shape) > 512


@dataclass(frozen=True)
class Finding:
    """A measurement, and the samples that failed, for the probes that look closer.

    Attributes:
        measurement: What goes into the record.
        failing: Samples that failed, the worst first, or None.
        piece: What one piece of a probe found; the measurement is then empty, unless there is a reason why nothing was found.
    """

    measurement: Measurement
    failing: Batch | None = None
    piece: Any = None


class Probe(ABC):
    """One question about a model, answered with numbers.

    A probe of your own sets `name` and writes `_measure(subject, source)`; raise `NotMeasured` with the reason where there is
    no answer. `measure` accepts anything that `as_bijection` and `as_source` take, puts the model into evaluation mode and back.
    Pass it as `audit(probes=[MyProbe()])`.

    A class that also states its `scope` is part of every audit from then on: it is planned with what `cost` takes from the budget, its
    `quantities` say what its values are and which verdict they decide, and the page shows it under `section`.

    Attributes:
        name: Name in records.
        scope: Where an audit measures it, one of `SCOPES`; empty for a probe that is only measured when it is passed.
        place: Where it stands in the order of an audit.
        quantities: What its values, and the columns of its rows, are.
        only_failing: With the scope `failing`: leave out sources where nothing fails, but for the main one.
        section: Title and first sentence on the page, where it has no file in `report/sections`.
        pieces: In how many pieces several processes may divide it: see `_piece` and `_join`.
        load: Where several processes share an audit, what has a higher number is begun earlier: the longest tasks come first.
        progress: Called with the share that is done.

    Example:
        >>> from bilip.models import real_nvp
        >>> class Size(Probe):
        ...     name = "size"
        ...     quantities = (Quantity("count", "number of samples", "count"),)
        ...     def _measure(self, subject, source):
        ...         return Measurement(self.name, source.name, values={"count": source.count})
        >>> m = Size().measure(real_nvp(2, blocks=1), torch.zeros(5, 2))
        >>> m["count"], m.quantity("count").label
        (5, 'number of samples')
    """

    name: ClassVar[str] = "probe"
    scope: ClassVar[str] = ""
    place: ClassVar[int] = 100
    quantities: ClassVar[tuple[Quantity, ...]] = ()
    section: ClassVar[tuple[str, str]] = ("", "")
    only_failing: ClassVar[bool] = False
    load: ClassVar[int] = 0
    pieces: int = 1
    progress: Progress = staticmethod(silent)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "scope" not in cls.__dict__:
            return
        if cls.scope not in SCOPES:
            raise InputError(f"{cls.__name__}.scope = {cls.scope!r}: expected one of {', '.join(map(repr, SCOPES))}.")
        PROBES[cls.name] = cls

    @classmethod
    def cost(cls, budget: Budget, task: Task) -> Mapping[str, Any] | None:
        """The arguments with which an audit makes this probe, taken from its budget; `None` leaves it out."""
        return {}

    def measure(self, model: Any, x: Any, *, name: str = "x") -> Measurement:
        """Measure on a batch, a pair `(x, context)`, a file or a `Source`."""
        return self.find(model, x, name=name).measurement

    def find(
        self,
        model: Any,
        x: Any,
        *,
        name: str = "x",
        piece: int | None = None,
        pieces: Sequence[Any] | None = None,
        progress: Progress | None = None,
    ) -> Finding:
        """The measurement, and the samples that failed.

        Args:
            model: Anything `as_bijection` takes.
            x: A batch, a pair `(x, context)`, a file or a `Source`.
            name: Name of the source.
            piece: Find only this piece.
            pieces: What the pieces found, all of them: put the measurement together.
            progress: Called with the share that is done, in place of the attribute.
        """
        if progress is not None:
            with self._reporting_to(progress):
                return self.find(model, x, name=name, piece=piece, pieces=pieces)
        subject = Subject.of(model)
        source = x if isinstance(x, Source) else as_source(name, x)
        with torch.inference_mode(False), subject.evaluating(), torch.random.fork_rng(devices=subject.devices):
            try:
                if piece is not None:
                    found = Finding(Measurement(self.name, source.name), piece=self._piece(subject, source, piece))
                elif pieces is not None:
                    found = self._join(subject, source, pieces)
                else:
                    found = self._measure(subject, source)
            except NotMeasured as why:
                found = Measurement(self.name, source.name, reason=str(why))
            except (InputError, torch.OutOfMemoryError, KeyboardInterrupt):
                raise
            except BaseException as error:  # one probe that a model defeats, also by sys.exit, does not lose the others
                text = said_by(error)
                reason = text if isinstance(error, Exception) else f"{ENDED} ({text})"
                found = Measurement(self.name, source.name, reason=reason)
        found = found if isinstance(found, Finding) else Finding(found)
        if not found.measurement.quantities:
            found = replace(found, measurement=replace(found.measurement, quantities=tuple(self.quantities)))
        return found

    @contextlib.contextmanager
    def _reporting_to(self, progress: Progress) -> Iterator[None]:
        before = vars(self).get("progress")
        self.progress = progress
        try:
            yield
        finally:
            if before is None:
                del self.progress
            else:
                self.progress = before

    @abstractmethod
    def _measure(self, subject: Subject, source: Source) -> Measurement | Finding:
        """What was measured on the source; `NotMeasured` is raised with the reason where there is no answer."""

    def _piece(self, subject: Subject, source: Source, piece: int) -> Any:
        """What one piece finds, on the CPU: it travels between processes."""
        raise NotImplementedError

    def _join(self, subject: Subject, source: Source, found: Sequence[Any]) -> Measurement | Finding:
        """The answer from what the pieces found: that of `_measure`."""
        raise NotImplementedError
