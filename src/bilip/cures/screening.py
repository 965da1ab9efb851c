"""A quick look at round trips, for fine-tuning: an audit says more, and takes longer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bilip.auditing.round_trip import distances
from bilip.auditing.subject import Subject
from bilip.cures.rung import Case
from bilip.cures.treated import Treated

__all__ = ["Screen"]


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
