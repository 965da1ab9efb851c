"""What an attack found, as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bilip.auditing.probes.attack_methods import Hunt
from bilip.auditing.probes.region import Region

__all__ = ["AttackResult", "AttackRun"]


@dataclass(frozen=True)
class AttackRun:
    """What one method found.

    Attributes:
        method: Its name.
        points: The worst point of each sample, in the model's dtype.
        back: Their reconstructions.
        l2: Euclidean errors of the plain round trip, float64; infinite where something is not finite or the model raised.
        errors: Relative errors.
        success: Whether the relative error is above the limit.
        trajectory: Euclidean errors along the steps, shape `(steps + 1, batch)`, the start first.
        random_steps: Moves at random for want of a gradient, summed over samples.
        start_errors: Relative errors where the search began.
    """

    method: str
    points: Tensor
    back: Tensor
    l2: Tensor
    errors: Tensor
    success: Tensor
    trajectory: Tensor
    random_steps: int
    start_errors: Tensor

    @classmethod
    def of(cls, method: str, hunt: Hunt, limit: float) -> AttackRun:
        """The outcome of a search; success is a relative error above the limit."""
        found, trajectory = hunt.found, torch.stack(hunt.trajectory).cpu()
        success = found.relative > limit
        return cls(
            method,
            hunt.points,
            found.back,
            found.l2,
            found.relative,
            success,
            trajectory,
            hunt.random_steps,
            hunt.start_errors,
        )

    def cpu(self) -> AttackRun:
        """The same with all tensors on the CPU."""
        return replace(self, **{name: value.cpu() for name, value in vars(self).items() if isinstance(value, Tensor)})


@dataclass(frozen=True)
class AttackResult:
    """What all methods found together: for each sample the worst point of any.

    Attributes:
        points: The points, in the model's dtype.
        back: Their reconstructions.
        errors: Relative errors of the plain round trip, float64.
        success: Whether they are above the limit.
        runs: Each method by itself.
        notes: Methods that could not run, and why.
        region: Where the points lie.
    """

    points: Tensor
    back: Tensor
    errors: Tensor
    success: Tensor
    runs: Mapping[str, AttackRun]
    notes: tuple[str, ...]
    region: Region

    @classmethod
    def together(cls, runs: Mapping[str, AttackRun], notes: tuple[str, ...], region: Region) -> AttackResult:
        """Take for each sample the worst point of any method."""
        everyone = list(runs.values())
        best = torch.stack([run.errors for run in everyone]).argmax(0)
        rows = torch.arange(len(best), device=best.device)

        def pick(name: str) -> Tensor:
            return torch.stack([getattr(run, name) for run in everyone])[best, rows]

        return cls(pick("points"), pick("back"), pick("errors"), pick("success"), runs, notes, region)

    @property
    def trajectory(self) -> Tensor:
        """Euclidean errors along the steps of the strongest method, shape `(steps + 1, batch)`."""
        return self.strongest.trajectory

    @property
    def start_errors(self) -> Tensor:
        """Relative errors where the search began, before any attack."""
        return self.strongest.start_errors

    @property
    def strongest(self) -> AttackRun:
        """The method with most successes, among equals the one with the largest error."""
        return max(self.runs.values(), key=lambda run: (int(run.success.sum()), float(run.errors.max())))
