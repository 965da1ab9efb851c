"""The round trip that an attack tries to break, from either side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilip._torch import Replayed
from bilip.auditing.round_trip import Typical, distances
from bilip.auditing.subject import Subject
from bilip.nets.spectral import held_layers

__all__ = ["Judgement", "Route"]


@dataclass(frozen=True)
class Judgement:
    """Plain round trips of a batch in the model's own dtype.

    Attributes:
        back: What came back.
        l2: Euclidean errors, float64; infinite where something is not finite or the model raised.
        relative: The relative error of `bilip.auditing.round_trip`.
    """

    back: Tensor
    l2: Tensor
    relative: Tensor


class Route:
    r"""Out and back: $x \to z \to x$, or $z \to x \to z$ for an attack on latents.

    Args:
        subject: The model.
        context: Contexts of the samples.
        latent: Begin at the latents.
        typical: What errors are measured by; by default the median norm of each batch that is judged.

    Example:
        >>> from bilip.models import real_nvp
        >>> route = Route(Subject.of(real_nvp(2, coupling="additive")))
        >>> bool((route.judge(torch.randn(3, 2)).relative < 1e-5).all())
        True
    """

    def __init__(
        self, subject: Subject, context: Tensor | None = None, *, latent: bool = False, typical: Typical | None = None
    ) -> None:
        self.subject, self.context, self.latent, self.typical = subject, context, latent, typical
        self._recorded: list[Replayed] = []
        self._trip = self.often(self._bare, self._guarded)

    def often(self, function: Callable[..., Any], plain: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The function, which goes through the model, as one that is called many times: see `Replayed`.

        What is recorded repeats every choice that Python made. So that there are none, all blocks have to be bilip's own with closed
        inverses, no layer may be held by norms that are looked at, and autocast, which keeps copies of weights, is off.
        """
        bijection, plain = self.subject.bijection, plain or function
        own = all(type(part).__module__.startswith("bilip.blocks.") for _, part in self.subject.parts)
        if not (own and bijection.closed_form) or held_layers(bijection):
            return plain
        recorded = Replayed(function, plain)
        self._recorded.append(recorded)

        def call(*inputs: Tensor) -> Any:
            return (plain if torch.is_autocast_enabled(inputs[0].device.type) else recorded)(*inputs)

        return call

    @property
    def replays(self) -> int:
        """How many calls were replays."""
        return sum(recorded.replays for recorded in self._recorded)

    @torch.no_grad()
    def _bare(self, x: Tensor) -> Tensor:
        with self.subject.arithmetic():
            return self.back(self.out(x.clone()).clone())

    def _guarded(self, x: Tensor) -> Tensor:
        first, second = self.subject.forward, self.subject.inverse
        if self.latent:
            first, second = second, first
        return second(first(x, self.context).value, self.context).value

    def judge(self, x: Tensor, *, plain: bool = False) -> Judgement:
        """The errors of the plain round trip, by guarded calls; no objective has a say in it.

        Args:
            x: The points.
            plain: Call the model, also where a recording could stand in for it.
        """
        self.subject.tick()
        back = self._guarded(x) if plain else self._trip(x)
        if back.shape != x.shape:  # every sample failed, and nothing is known about the shape of what should come back
            back = torch.full_like(x, torch.nan)
        found = distances(x, back, self.typical)
        bad = ~torch.isfinite(found.l2)
        infinite = torch.full_like(found.l2, torch.inf)
        return Judgement(back, torch.where(bad, infinite, found.l2), torch.where(bad, infinite, found.relative))

    def out(self, x: Tensor) -> Tensor:
        """The way out, unguarded, with gradients."""
        bijection = self.subject.bijection
        return bijection.inverse(x, self.context) if self.latent else bijection(x, self.context)

    def back(self, z: Tensor) -> Tensor:
        """The way back, unguarded, with gradients."""
        bijection = self.subject.bijection
        return bijection(z, self.context) if self.latent else bijection.inverse(z, self.context)

    def twin(self, dtype: torch.dtype) -> Route:
        """The same route through a copy of the model in another dtype."""
        context = self.context
        if context is not None and context.is_floating_point():
            context = context.to(dtype)
        return Route(self.subject.copy_in(dtype), context, latent=self.latent, typical=self.typical)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Within this context no gradient is computed for parameters."""
        wanted = [p for p in self.subject.bijection.parameters() if p.requires_grad]
        try:
            for p in wanted:
                p.requires_grad_(False)
            yield
        finally:
            for p in wanted:
                p.requires_grad_(True)
