"""Whether a block and its twin compute the same function, tried on a few points before a proof relies on it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

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
    """Compare both in float64 on 8 points, there and back; a library that changed a formula fails here, and so does a block whose two
    directions are no longer each other's inverse, so that no proof speaks about it.

    The way back is compared for samples that the twin brings back itself: of the others rounding leaves nothing to compare.
    """
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(8, *shape, generator=generator, dtype=torch.float64)
    given = _contexts(context, context_shape, generator)
    twin, block = _copy(twin), _copy(block)
    z_twin, z = (f(x, given) for f in (twin, block))
    finite = torch.isfinite(z) & torch.isfinite(z_twin)
    if not bool(_close(z, z_twin)[finite].all()):
        return False
    back_twin, back = (f.inverse(z_twin, given) for f in (twin, block))
    good = (_close(back_twin, x, 1e-9) & finite).flatten(1).all(1)
    return bool(_close(back, x)[good].all())


def _close(a: Tensor, b: Tensor, share: float = 1e-6) -> Tensor:
    return (a - b).abs() <= share * (1 + b.abs())


def _copy(module: Bijection) -> Bijection:
    return copy.deepcopy(module).double().cpu().eval()


def _contexts(context: Box | None, shape: tuple[int, ...] | None, generator: torch.Generator) -> Tensor | None:
    if context is not None and context.shape and context.is_bounded:
        return context.sample(8, generator=generator)
    return None if shape is None else torch.randn(8, *shape, generator=generator, dtype=torch.float64)
