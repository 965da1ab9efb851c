"""What every rung has in common, what it is given, and a quick measurement of round trips between two audits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from bilip.auditing.round_trip import distances
from bilip.auditing.subject import Subject
from bilip.cures.treated import Treated
from bilip.data import Source
from bilip.errors import BilipError
from bilip.record import AuditRecord

if TYPE_CHECKING:
    from bilip.cures.tuning import Tuning

__all__ = ["Case", "RUNGS", "Rung", "Screen", "Skipped"]

RUNGS: dict[str, type[Rung]] = {}


class Skipped(BilipError):
    """A rung, or one way of it, that does not apply; the message says why."""


@dataclass
class Case:
    """What is known about the model that is to be cured."""

    subject: Subject  # the model as it is, for measuring; never changed
    sources: list[Source]  # where it is audited
    before: AuditRecord  # the audit as it is
    uses: tuple[str, ...]  # what has to become safe
    tuning: Tuning | None  # loss, batches and held-out batches; `None` without them
    left: Callable[[], float]  # seconds that are left, possibly infinite
    tell: Callable[[str], None]  # called with a text, for progress
    was: dict[str, Any] = field(default_factory=dict)  # TF32 and autocast as the model is run

    @property
    def tuned(self) -> Tuning:
        """Loss and batches, for a rung that needs them."""
        if self.tuning is None:
            raise Skipped("it needs batches and a loss")
        return self.tuning

    def guilty(self) -> str:
        """Path of the first block that an audit names as guilty; empty if it names none."""
        named = [str(m.get("guilty") or "") for m in self.before.measurements if m.probe == "blame" and m.measured]
        order = [name for name, _ in self.subject.parts]
        found = sorted((name for name in named if name in order), key=order.index)
        return found[0] if found else ""

    def failing(self) -> list[Source]:
        """The sources on which round trips fail; all of them where none does."""
        bad = {m.source for m in self.before.measurements if m.probe == "reconstruction" and m.get("bad")}
        return [s for s in self.sources if s.name in bad] or self.sources


class Rung(ABC):
    """One kind of cure.

    A new one is a subclass with a `name` and a `place`: `options` says what there is to try, `apply` changes a copy, in a way that its
    settings alone describe, and `finish` does what needs data. Stating `name` enters it in the ladder.
    """

    name: ClassVar[str] = ""
    place: ClassVar[int] = 0
    needs_loss: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.name:
            RUNGS[cls.name] = cls

    @abstractmethod
    def options(self, case: Case) -> Iterator[tuple[dict[str, Any], str]]:
        """Settings to try, the mildest first, each with what it does in words.

        Raises:
            Skipped: The rung does not apply to this model.
        """

    def apply(self, treated: Treated, settings: dict[str, Any]) -> Treated:
        """Change a copy as the settings say. Nothing else is looked at, so that a saved cure can be applied again."""
        return treated

    def finish(self, treated: Treated, settings: dict[str, Any], case: Case) -> dict[str, Any]:
        """What needs data, such as fine-tuning; returns facts about it for the record.

        Raises:
            Skipped: It turns out that this does not help.
        """
        return {}


class Screen:
    """The share of samples that do not come back, on the first ones of each source: a quick look before an audit."""

    def __init__(self, treated: Treated, case: Case, samples: int = 256) -> None:
        self.subject = Subject(treated.adapted, case.subject.name)
        self.case, self.samples = case, samples
        self.limit = self.subject.half_digits

    def __call__(self) -> float:
        worst = 0.0
        subject = self.subject
        with subject.evaluating():
            for x, context in self._inputs():
                z = subject.forward(x, context).value
                error = distances(x, subject.inverse(z, context).value).relative
                worst = max(worst, float((~(error <= self.limit)).double().mean()))
        return worst

    def _inputs(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        subject = self.subject
        wanted = self.case.sources
        if "ood-inversion" not in self.case.uses:
            wanted = [s for s in wanted if s.role == "data"] or wanted
        for source in wanted:
            batch = source.first(self.samples, dtype=subject.dtype, device=subject.device)
            yield batch.x, batch.context
        if subject.base is not None and not subject.conditional and "sampling" in self.case.uses:
            with torch.random.fork_rng(devices=subject.devices):
                torch.manual_seed(1)
                z = subject.base.sample(self.samples)
            x = subject.inverse(z).value
            fine = torch.isfinite(x.flatten(1)).all(1)
            # what is not finite counts as bad
            yield torch.where(fine.view(-1, *[1] * (x.ndim - 1)), x, torch.full_like(x, torch.nan)), None
