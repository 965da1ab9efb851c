"""Residual flows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from bilip.blocks import ActNorm, Bijection, Chain, FactorOut, Flatten, Logit, Residual, Squeeze
from bilip.errors import InputError
from bilip.models.checkpoint import remembers
from bilip.nets import MLP, ConvNet, activations

__all__ = ["residual_flow"]


@remembers
def residual_flow(
    shape: int | Sequence[int],
    *,
    blocks: int | Sequence[int] = 8,
    hidden: int | Sequence[int] | None = None,
    coefficient: float = 0.9,
    activation: str = "scaled_swish",
    actnorm: bool | None = None,
    squeeze_first: bool = False,
    factor_out: bool = False,
    dense_blocks: int = 0,
    dense_hidden: int = 128,
    logit: float | None = None,
    context: int = 0,
    recompute: bool = False,
) -> Chain:
    r"""Invertible residual blocks on vectors or images; both constants are bounded on all of space.

    Args:
        shape: Size of a vector, `2` or `(2,)`, or shape `(C, H, W)` of an image.
        blocks: Number of blocks; for images one number for each scale, such as `(16, 16, 16)`.
        hidden: Hidden layers of a vector net, `(128, 128, 128, 128)` by default; hidden channels of an image net,
            512 by default.
        coefficient: Certified constant c of every residual branch, in (0, 1).
        activation: Activation of the branches.
        actnorm: Put a data-started `ActNorm` before each block; by default for images.
        squeeze_first: Squeeze before the first scale as well as between scales.
        factor_out: Let half of the channels leave after each scale but the last; the latent is then one flat tensor.
        dense_blocks: Fully connected residual blocks on the flattened latent at the end.
        dense_hidden: Their hidden size.
        logit: Begin with `Logit(alpha)` for images in [0, 1].
        context: Size of a context vector for vector nets.
        recompute: Evaluate the branches again in the backward pass instead of keeping their activations; see `Residual`.

    Example:
        >>> flow = residual_flow(2, blocks=3, coefficient=0.5)
        >>> round(flow.bounds().inverse, 3) <= 8.0  # 1 / (1 - 0.5) ** 3
        True
    """
    if not 0 < coefficient < 1:
        raise InputError(
            f"residual_flow(coefficient={coefficient}): a residual branch must be held to a constant in (0, 1)."
        )
    start: list[Bijection] = [] if logit is None else [Logit(logit)]
    held = _Held(activation, coefficient, recompute)
    if not isinstance(shape, int) and len(shape) == 1:
        shape = int(shape[0])
    if isinstance(shape, int):
        if shape < 1 or not isinstance(blocks, int) or blocks < 1 or squeeze_first or factor_out or dense_blocks:
            raise InputError(
                f"residual_flow({shape}, blocks={blocks!r}): for vectors give a size and a number of blocks; squeeze_first, "
                "factor_out and dense_blocks are for images."
            )
        sizes = (128,) * 4 if hidden is None else (hidden,) if isinstance(hidden, int) else tuple(hidden)
        return Chain(*start, *held.dense(blocks, shape, sizes, context, actnorm=bool(actnorm)), shape=(shape,))
    shape, scales, width = _image_sizes(shape, blocks, hidden, squeeze_first, context)
    normalised = actnorm is None or actnorm

    def from_scale(k: int, shape: tuple[int, ...]) -> list[Bijection]:
        chain: list[Bijection] = []
        if k or squeeze_first:
            squeeze = Squeeze()
            chain.append(squeeze)
            shape = squeeze.out_shape(shape)
        for j in range(scales[k]):
            chain += held.conv(shape[0], width, actnorm=normalised, preactivate=k > 0 or j > 0)
        if k == len(scales) - 1:
            flat = [Flatten(shape)] if dense_blocks else []
            size = math.prod(shape)
            return chain + flat + held.dense(dense_blocks, size, (dense_hidden,), actnorm=normalised, begins=False)
        if not factor_out:
            return chain + from_scale(k + 1, shape)
        kept = ((shape[0] + 1) // 2, *shape[1:])
        return [*chain, FactorOut(Chain(*from_scale(k + 1, kept), shape=kept), shape)]

    return Chain(*start, *from_scale(0, shape), shape=shape)


def _image_sizes(
    shape: Sequence[int],
    blocks: int | Sequence[int],
    hidden: int | Sequence[int] | None,
    squeeze_first: bool,
    context: int,
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape of one image, blocks of each scale and hidden channels, or an `InputError` where they do not fit together."""
    shape = tuple(int(n) for n in shape)
    scales = (blocks,) if isinstance(blocks, int) else tuple(blocks)
    width = 512 if hidden is None else hidden
    squeezes = len(scales) - 1 + int(squeeze_first)
    if (
        len(shape) != 3
        or min(scales) < 1
        or not isinstance(width, int)
        or any(side % 2**squeezes for side in shape[1:])
        or context
    ):
        raise InputError(
            f"residual_flow({shape}, blocks={scales}, hidden={width}): expected (C, H, W) with H and W divisible by "
            f"{2**squeezes}, a number of blocks for each scale, one hidden size, and no context."
        )
    return shape, scales, width


@dataclass(frozen=True)
class _Held:
    """Residual blocks whose branches are held to a constant, each behind an ActNorm where that is wanted."""

    activation: str
    coefficient: float
    recompute: bool

    def dense(
        self, count: int, size: int, hidden: Sequence[int], context: int = 0, *, actnorm: bool, begins: bool = True
    ) -> list[Bijection]:
        """Blocks on vectors, each begun by an activation, but for the first of a flow, and for all that see a context."""
        options = {"hidden": hidden, "activation": self.activation, "context": context, "lipschitz": self.coefficient}
        chain: list[Bijection] = []
        for k in range(count):
            chain += [ActNorm(size)] if actnorm else []
            net = MLP(size, size, **options)
            chain.append(self._residual(net, not context and (k > 0 or not begins)))
        return chain

    def conv(self, channels: int, hidden: int, *, actnorm: bool, preactivate: bool) -> list[Bijection]:
        start = [ActNorm(channels)] if actnorm else []
        net = ConvNet(
            channels, channels, hidden=hidden, activation=self.activation, gain=False, lipschitz=self.coefficient
        )
        return [*start, self._residual(net, preactivate)]

    def _residual(self, net: nn.Module, preactivate: bool) -> Residual:
        return Residual(_preactivated(net, self.activation) if preactivate else net, recompute=self.recompute)


def _preactivated(net: nn.Module, activation: str) -> nn.Sequential:
    """An activation before the first layer as well; its constant is at most 1 for the activations of residual flows."""
    facts = activations.facts(activations.make(activation))
    if facts is None or facts.lipschitz > 1:
        raise InputError(
            f"activation={activation!r} has a Lipschitz constant above 1; use 'scaled_swish', 'elu', 'relu', "
            "'softplus' or 'tanh'."
        )
    return nn.Sequential(activations.make(activation), net)
