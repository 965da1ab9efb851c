"""Fifth rung: fine-tuning with penalties, on data, on samples and on the source that fails."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from bilip.blocks import Bijection
from bilip.cures.rung import Case, Rung
from bilip.cures.screening import Screen
from bilip.cures.treated import Treated
from bilip.cures.tuning import tuned
from bilip.regularizers import FiniteDifference, FlowLikelihood, Penalty
from bilip.regularizers.penalty import Latent

__all__ = ["Penalties", "RoundTrip"]


class Penalties(Rung):
    """The flow's likelihood, finite differences, or round trips, added to the loss; the best state that was seen is kept."""

    name: ClassVar[str] = "penalties"
    place: ClassVar[int] = 50
    needs_loss: ClassVar[bool] = True

    def options(self, case: Case) -> Iterator[tuple[dict[str, Any], str]]:
        words = {
            "likelihood": "fine-tuned with the likelihood of a normal latent as a penalty",
            "finite-differences": "fine-tuned with finite differences of the map and its inverse as a penalty",
            "round-trips": "fine-tuned with round trips of data, samples and the failing source as a penalty",
        }
        for kind in ("likelihood", "finite-differences", "round-trips"):
            if kind == "likelihood" and (case.subject.base is not None or not case.subject.has_log_det):
                continue  # it is the loss already, or cannot be computed
            yield {"penalty": kind}, words[kind]

    def finish(self, treated: Treated, settings: dict[str, Any], case: Case) -> dict[str, Any]:
        size = math.prod(case.sources[0].shape)
        penalty: Penalty | None = None
        if settings["penalty"] == "likelihood":
            penalty = FlowLikelihood(0.03 / size)
        elif settings["penalty"] == "finite-differences":
            penalty = FiniteDifference(1e-3 if size > 64 else 0.3, every=1 if size > 64 else 10)
        trips = _Trips(case) if settings["penalty"] == "round-trips" else None
        result = tuned(
            treated,
            replace(case.tuned, steps=max(1, case.tuned.steps // 3)),  # each step costs more than a plain one
            penalties=() if penalty is None else (penalty,),
            extra=trips,
            bad=Screen(treated, case),
            target=case.tuned.metrics.get("loss", -math.inf),
            left=case.left,
            tell=case.tell,
        )
        return {"loss": result.loss, **result.facts()}


class RoundTrip(Penalty):
    r"""How far $F^{-1}(F(x))$ is from $x$, as the mean of $\log(1 + |x - \hat x|^2 / |x|^2)$, which a single lost sample does not outweigh.

    Rounding cannot be differentiated, so the latent is shaken as rounding would: each entry by `noise` times its size.

    Args:
        weight: Factor.
        every: Steps from one penalty to the next.
        noise: Size of the shaking, relative to a latent; about $2^{-12}$ makes the effect of float32 visible and differentiable.

    Example:
        >>> from bilip.models import real_nvp
        >>> bool(RoundTrip(1.0)(real_nvp(2, coupling="additive"), torch.randn(8, 2), step=0) < 0.1)
        True
    """

    uses_log_det = False

    def __init__(self, weight: float, every: int = 1, *, noise: float = 2.0**-12) -> None:
        super().__init__(weight, every)
        self.noise = self._number("noise", noise, least=0.0)

    def value(self, model: Bijection, x: Tensor, latent: Latent | None, step: int, context: Tensor | None) -> Tensor:
        def terms(kept: Tensor | None) -> Tensor:
            points = x if kept is None else x[kept]
            given = None if context is None else context if kept is None else context[kept]
            z = model(points, given)
            generator = torch.Generator().manual_seed(step)
            signs = (torch.randint(0, 2, z.shape, generator=generator) * 2 - 1).to(z)
            back = model.inverse(z + self.noise * z.detach().abs() * signs, given)
            size = points.flatten(1).square().sum(1).clamp_min(1e-12)
            return torch.log1p((back - points).flatten(1).square().sum(1) / (size * self.noise))

        found = self._finite_only(terms, len(x))
        return found.mean() if len(found) else x.new_zeros(())


class _Trips:
    """Round trips of samples and of the sources that fail; data come with the batch."""

    def __init__(self, case: Case, batch: int = 128) -> None:
        subject = case.subject
        self.penalty = RoundTrip(0.1)
        self.pools: list[tuple[Tensor, Tensor | None]] = []
        data = [s for s in case.sources if s.role == "data"]
        for source in {s.name: s for s in (*data, *case.failing())}.values():
            some = source.first(2048, dtype=subject.dtype, device=subject.device)
            self.pools.append((some.x, some.context))
        self.base = subject.base if subject.base is not None and not subject.conditional else None
        self.batch = batch

    def __call__(self, model: Bijection, step: int) -> Tensor:
        x, context = self.pools[step % len(self.pools)]
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(len(x), (min(self.batch, len(x)),), generator=generator).to(x.device)
        value = self.penalty(model, x[rows], step=step, context=None if context is None else context[rows])
        if self.base is not None and step % 2 == 0:
            with torch.no_grad():
                made = model.inverse(self.base.sample(self.batch).to(x))
            made = made[torch.isfinite(made.flatten(1)).all(1)]
            if len(made):
                value = value + self.penalty(model, made.detach(), step=step)
        return value
