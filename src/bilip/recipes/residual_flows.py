"""Residual flows in recipes: estimates of their log-determinants, and three inverses: solved to a tolerance, by the loose stop of the
original code, and cut after a few iterations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bilip import models
from bilip.blocks import Bijection, Chain, Logit, Poisson, Residual, Roulette, Series

ALPHA = 0.05  # of the logit that flows on images in [0, 1] begin with
TERMS = 20  # of the series in evaluations
MOST = 1000  # iterations of the original code's inverse


@dataclass(frozen=True)
class Solved:
    """What came back from a chain of residual blocks."""

    x: Tensor  # the inverse; NaN in the samples that some block did not invert to its tolerance
    # The same before the last sigmoid, which would hide numbers that are too large; x itself without one.
    before: Tensor
    converged: Tensor  # which samples every block inverted to its tolerance
    # Evaluations of residual branches, for each block the most that a sample took, summed over the blocks.
    evaluations: int


def make_residual(config: Any, **options: Any) -> Chain:
    """A residual flow on images in [0, 1], of the size that a configuration of image flows states for it."""
    trunk = models.residual_flow(
        (3, config.side, config.side),
        blocks=config.residual_blocks,
        hidden=config.residual_hidden,
        coefficient=config.coefficient,
        logit=ALPHA,
        recompute=config.recompute,
        **options,
    )
    share_terms(trunk, config.exact_terms)
    return trunk


def share_terms(model: nn.Module, exact_terms: int) -> None:
    """Estimate log-determinants with some terms that are always there, and further ones whose number, Poisson distributed, is drawn once
    for all blocks of a step: then steps with the same number do the same work and can be captured.
    """
    estimator = Roulette(Poisson(2.0), exact_terms=exact_terms, shared=True)
    for part in model.modules():
        if isinstance(part, Residual):
            part.estimator = estimator


@contextmanager
def by_series(model: nn.Module, terms: int = TERMS) -> Iterator[None]:
    """Inside, log-determinants of residual blocks are so many terms of their series with one random probe, as in evaluations."""
    blocks = [(part, part.estimator) for part in model.modules() if isinstance(part, Residual)]
    try:
        for part, _ in blocks:
            part.estimator = Series(terms)
        yield
    finally:
        for part, before in blocks:
            part.estimator = before


def is_residual(bijection: Bijection) -> bool:
    """Whether some block has to be inverted by iteration."""
    return any(isinstance(part, Residual) for part in bijection.modules())


@torch.no_grad()
def solved_inverse(bijection: Bijection, z: Tensor) -> Solved:
    """Invert block by block; a sample that misses the tolerance of a block is marked, and does not stop the others.

    Example:
        >>> from bilip import models
        >>> flow = models.residual_flow(2, blocks=3, hidden=(8,)).eval()
        >>> x = torch.randn(5, 2)
        >>> found = solved_inverse(flow, flow(x))
        >>> bool(found.converged.all()), bool((found.x - x).abs().max() < 1e-4)
        (True, True)
    """
    state, before, evaluations = z, None, 0
    converged = torch.ones(len(z), dtype=torch.bool, device=z.device)
    for _, part in reversed(bijection.parts()):
        if isinstance(part, Residual):
            solution = part.solve(state)
            state, converged = solution.x, converged & solution.converged
            evaluations += int(solution.evaluations.max())
            continue
        before = state if isinstance(part, Logit) else before
        state = part.inverse(state)
    lost = (~converged).view(-1, *[1] * (state.ndim - 1))
    state = state.masked_fill(lost, torch.nan)
    before = state if before is None else before.masked_fill(lost, torch.nan)
    return Solved(state, before, converged, evaluations)


@torch.no_grad()
def decode(bijection: Bijection, z: Tensor) -> Tensor:
    """F^-1(z); with residual blocks, NaN where one of them could not be inverted to its tolerance."""
    return solved_inverse(bijection, z).x if is_residual(bijection) else bijection.inverse(z)


@torch.no_grad()
def loose_inverse(bijection: Bijection, z: Tensor) -> Tensor:
    r"""Invert as the original code does: x <- z - g(x) until every entry of the batch has $(\Delta x)^2 < 10^{-5} (1 + |z|)$.

    The square stands against a tolerance that was meant for the step itself, so that a step of 3e-3 is small enough.

    Example:
        >>> from bilip import models
        >>> flow = models.residual_flow(2, blocks=3, hidden=(8,)).eval()
        >>> x = torch.randn(5, 2)
        >>> bool((loose_inverse(flow, flow(x)) - x).abs().max() < 0.1)
        True
    """
    state = z
    for _, part in reversed(bijection.parts()):
        if not isinstance(part, Residual):
            state = part.inverse(state)
            continue
        y, enough = state, 1e-5 * (1 + state.abs())
        x, previous = y - part.branch(y), y
        for _ in range(MOST):
            if bool(((x - previous).square() < enough).all()):
                break
            x, previous = y - part.branch(x), x
        state = x
    return state


class Cut(Bijection):
    """A residual block whose inverse is a fixed number of plain iterations, with their gradient."""

    def __init__(self, block: Residual, steps: int) -> None:
        super().__init__()
        self.block, self.steps = block, steps

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.block(x)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return self.block.unrolled_inverse(z, self.steps)


def cut_after(chain: Chain, steps: int) -> Chain:
    """The same chain, with the same weights, whose residual blocks are inverted by so many iterations.

    Example:
        >>> from bilip import models
        >>> flow = models.residual_flow(2, blocks=3, hidden=(8,)).eval()
        >>> x = torch.randn(5, 2)
        >>> bool((cut_after(flow, 40).inverse(flow(x)) - x).abs().max() < 1e-4)
        True
    """
    blocks = [Cut(block, steps) if isinstance(block, Residual) else block for block in chain]
    return Chain(*blocks, shape=chain.shape)
