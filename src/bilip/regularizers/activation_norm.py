"""Activations between levels kept small."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bilip.blocks import Bijection, Chain, FactorOut, Squeeze
from bilip.blocks.factor_out import OnKept
from bilip.errors import InputError
from bilip.regularizers.penalty import Latent, Penalty
from bilip.reversible import Reversible

__all__ = ["ActivationNorm"]

PLACES = ("levels", "blocks")


class ActivationNorm(Penalty):
    r"""The mean square of the activations at the boundaries $h_1, \dots, h_m$ of levels, and of the latents $h_m$.

    $$\frac{1}{n\,m\,d} \sum_{i=1}^n \sum_{k=1}^m |h_k(x_i)|^2$$

    The paper suggests it beside the flow likelihood, which bounds the latents alone: "a subflow exhibits high magnitude that is
    cancelled out by the subsequent subflow". It says nothing about the inverse; use it with `FlowLikelihood`, not instead of it.

    A boundary is where an image is squeezed or channels leave. A network without any has one, its latents; `at="blocks"` takes the
    output of every block. The penalty runs a pass of its own, because a memory-saving pass keeps no activations; of a `Reversible`
    each level is run memory-saving, under the same guard.

    Args:
        weight: Factor.
        every: Steps from one penalty to the next; not made up for by a factor.
        at: `"levels"` or `"blocks"`.

    Example:
        >>> from bilip.models import glow
        >>> model, x = glow((3, 8, 8), levels=2, blocks=1, hidden=8), torch.randn(4, 3, 8, 8)
        >>> penalty = ActivationNorm(weight=1e-2)
        >>> [len(segment) for segment in penalty.segments(model)]  # squeeze, ActNorm, convolution, coupling; twice
        [4, 4]
        >>> penalty(model, x, step=0).backward()
    """

    uses_log_det = False

    def __init__(self, weight: float, every: int = 1, *, at: str = "levels") -> None:
        super().__init__(weight, every)
        if at not in PLACES:
            raise InputError(f"ActivationNorm(at={at!r}): expected one of {', '.join(map(repr, PLACES))}.")
        self.at = at
        self._guards: list[dict[str, Any]] = []
        self._known: weakref.WeakKeyDictionary[Bijection, list[Bijection]] = weakref.WeakKeyDictionary()

    def value(self, model: Bijection, x: Tensor, latent: Latent | None, step: int, context: Tensor | None) -> Tensor:
        segments = self._known.get(model)
        if segments is None:
            self._known[model] = segments = self._made(model)

        def terms(h: Tensor, given: Tensor | None) -> Tensor:
            squares = []
            for segment in segments:
                h = segment(h, given)
                squares.append(h.flatten(1).square().mean(1))
            return torch.stack(squares).mean(0)

        return self._finite_mean(terms, x, context)

    def segments(self, model: Bijection) -> list[Chain]:
        """The stretches of a network between its boundaries; they share its blocks."""
        inner = model.bijection if isinstance(model, Reversible) else model
        groups: list[list[Bijection]] = [[]]
        for _, part in inner.parts():
            entered = groups[-1] and not all(map(_boundary, groups[-1]))
            if entered and (self.at == "blocks" or _boundary(part)):
                groups.append([])
            groups[-1].append(part)
        return [Chain(*group) for group in groups]

    def _made(self, model: Bijection) -> list[Bijection]:
        if not isinstance(model, Reversible):
            return list(self.segments(model))
        made = [Reversible(segment, model.guard, memory=model.memory) for segment in self.segments(model)]
        for walk in made:
            walk.load_guard_state(self._guards.pop(0) if self._guards else {})
        return list(made)

    def walks(self) -> list[Reversible]:
        """Memory-saving walks that the penalty has made for itself."""
        return [part for segments in self._known.values() for part in segments if isinstance(part, Reversible)]

    def state(self) -> dict[str, Any]:
        return {**super().state(), "guards": [walk.guard_state() for walk in self.walks()] + self._guards}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self._guards = list(state.get("guards", ()))  # of walks that are made when the network is seen
        self._known.clear()

    def __getstate__(self) -> dict[str, Any]:
        """For copies: a network that is copied along is another one, with walks of its own."""
        return {**vars(self), "_known": None, "_guards": self.state()["guards"]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._known = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"ActivationNorm(weight={self.weight:g}, every={self.every}, at={self.at!r})"


def _boundary(part: Bijection) -> bool:
    return isinstance(part.block if isinstance(part, OnKept) else part, (Squeeze, FactorOut))
