"""Whether a block and its twin compute the same function, tried on a few points before a proof relies on it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from bilip.blocks import Bijection
from bilip.bounds import Box

__all__ = ["agree"]


@torch.no_grad()
def agree(
    block: Bijection,
    twin: Bijection,
    shape: tuple[int, ...],
    context: Box | None,
    context_shape: tuple[int, ...] | None,
) -> bool:
    """Compare both in float64 on 8 points; a library that changed a formula fails here, so no proof speaks about it."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(8, *shape, generator=generator, dtype=torch.float64)
    given = _contexts(context, context_shape, generator)
    z_twin, z = (_copy(f)(x, given) for f in (twin, block))
    finite = torch.isfinite(z) & torch.isfinite(z_twin)
    return bool(((z - z_twin).abs()[finite] <= 1e-6 * (1 + z_twin.abs()[finite])).all())


def _copy(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).double().cpu().eval()


def _contexts(context: Box | None, shape: tuple[int, ...] | None, generator: torch.Generator) -> Tensor | None:
    if context is not None and context.shape and context.is_bounded:
        return context.sample(8, generator=generator)
    return None if shape is None else torch.randn(8, *shape, generator=generator, dtype=torch.float64)
