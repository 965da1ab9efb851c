"""What every probe has in common: the author writes `_measure`, this class brings model and data into shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from bilip.data import Source, as_source
from bilip.errors import InputError, NotMeasured
from bilip.probes.subject import Subject
from bilip.record import Measurement

__all__ = ["Probe", "Progress"]

Progress = Callable[[float], None]
ENDED = "the model ended the program"


def silent(share: float) -> None:
    """No progress shown."""


class Probe(ABC):
    """One question about a model, answered with numbers.

    A probe of your own sets `name` and writes `_measure(subject, source)`; raise `NotMeasured` with the reason where there is
    no answer. `measure` accepts anything that `as_bijection` and `as_source` take, puts the model into evaluation mode, switches
    TF32 off, and puts both back.

    Attributes:
        name: Name in records.
        progress: Called with the share that is done.

    Example:
        >>> from bilip.models import real_nvp
        >>> class Size(Probe):
        ...     name = "size"
        ...     def _measure(self, subject, source):
        ...         return Measurement(self.name, source.name, values={"count": source.count})
        >>> Size().measure(real_nvp(2, blocks=1), torch.zeros(5, 2))["count"]
        5
    """

    name: ClassVar[str] = "probe"
    progress: Progress = staticmethod(silent)

    def measure(self, model: Any, x: Any, *, name: str = "x") -> Measurement:
        """Measure on a batch, a pair `(x, context)`, a file or a `Source`."""
        subject = Subject.of(model)
        source = x if isinstance(x, Source) else as_source(name, x)
        with torch.inference_mode(False), subject.evaluating(), torch.random.fork_rng(devices=subject.devices):
            try:
                return self._measure(subject, source)
            except NotMeasured as why:
                return Measurement(self.name, source.name, reason=str(why))
            except (InputError, torch.OutOfMemoryError, KeyboardInterrupt):
                raise
            except BaseException as error:  # one probe that a model defeats, also by sys.exit, does not lose the others
                text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                reason = text if isinstance(error, Exception) else f"{ENDED} ({text})"
                return Measurement(self.name, source.name, reason=reason)

    @abstractmethod
    def _measure(self, subject: Subject, source: Source) -> Measurement:
        """The answer."""
