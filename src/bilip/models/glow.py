"""Glow and the paper's image networks."""

from __future__ import annotations

from collections.abc import Sequence

from bilip.blocks import (
    ActNorm,
    AdditiveCoupling,
    AffineCoupling,
    Bijection,
    Chain,
    FactorOut,
    InvertibleConv1x1,
    Permutation,
    Split,
    Squeeze,
)
from bilip.blocks.scale import Scale, scale_from
from bilip.errors import InputError
from bilip.models._config import remembers
from bilip.models.real_nvp import check_choices
from bilip.nets import ConvNet

__all__ = ["glow"]


@remembers
def glow(
    shape: Sequence[int],
    *,
    levels: int = 3,
    blocks: int = 16,
    hidden: int = 128,
    coupling: str = "affine",
    scale: Scale | str = "sigmoid",
    mixing: str = "conv1x1",
    matrix: str = "full",
    factor_out: bool = False,
    learned_prior: bool = True,
    prior_scale: Scale | str = "exp",
    actnorm: str | None = "data",
    activation: str = "relu",
    context: int = 0,
    lipschitz: float | None = None,
) -> Chain:
    r"""Levels of squeeze and blocks of ActNorm, mixing and coupling, as in Glow and in the paper's classifiers.

    Args:
        shape: Shape of one image, `(C, H, W)`.
        levels: Number of levels; each halves height and width.
        blocks: Blocks a level.
        hidden: Hidden channels of the nets.
        coupling: `"affine"` or `"additive"`.
        scale: Scale function of affine coupling, or its name.
        mixing: `"conv1x1"`, `"shuffle"` or `"reverse"`: how channels are mixed between couplings.
        matrix: Kind of the 1x1 convolutions: `"full"`, `"plu"` or `"orthogonal"`.
        factor_out: Let half of the channels leave after each level but the last; the latent is then one flat tensor.
        learned_prior: With `factor_out`: predict mean and scale of the channels that leave from those that stay, an
            affine coupling; an additive model with it has no global bound.
        prior_scale: Scale function of that prediction: with `"exp"` it is unbounded, with `"tanh_exp"` within $(e^{-2}, e^{2})$.
        actnorm: `"data"`, `"identity"`, or `None` for no ActNorm.
        activation: Activation of the nets.
        context: Channels of a context image at the resolution of the level; only for a single level.
        lipschitz: Hold the net of every coupling to this certified constant: the paper's global cure for additive
            models.

    Example:
        >>> import torch
        >>> trunk = glow((3, 8, 8), levels=2, blocks=1, hidden=8)
        >>> trunk(torch.randn(4, 3, 8, 8)).shape
        torch.Size([4, 48, 2, 2])
    """
    check_choices(coupling, levels=levels, blocks=blocks, hidden=hidden)
    if mixing not in ("conv1x1", "shuffle", "reverse"):
        raise InputError(f"mixing={mixing!r}: expected 'conv1x1', 'shuffle' or 'reverse'.")
    if actnorm not in ("data", "identity", None):
        raise InputError(f"actnorm={actnorm!r}: expected 'data', 'identity' or None.")
    if context and levels > 1:
        raise InputError("context= works with levels=1: the nets of other levels see images of other sizes.")
    shape = tuple(int(n) for n in shape)
    if len(shape) != 3 or levels > 62 or any(side % 2**levels for side in shape[1:]):
        raise InputError(
            f"glow(shape={shape}, levels={levels}): expected (C, H, W) with H and W divisible by {2 ** min(levels, 62)}."
        )
    scale, prior_scale = scale_from(scale), scale_from(prior_scale)

    def level(channels: int) -> list[Bijection]:
        chain: list[Bijection] = []
        for _ in range(blocks):
            if actnorm is not None:
                chain.append(ActNorm(channels, start=actnorm))
            if mixing == "conv1x1":
                chain.append(InvertibleConv1x1(channels, kind=matrix))
            else:
                chain.append(getattr(Permutation, mixing)(channels))
            seen, moved = channels // 2, channels - channels // 2
            outputs = moved if coupling == "additive" else 2 * moved
            net = ConvNet(seen, outputs, hidden=hidden, activation=activation, context=context, lipschitz=lipschitz)
            chain.append(AdditiveCoupling(net) if coupling == "additive" else AffineCoupling(net, scale=scale))
        return chain

    def from_level(k: int, shape: tuple[int, ...]) -> list[Bijection]:
        squeeze = Squeeze()
        c, h, w = squeeze.out_shape(shape)
        chain = [squeeze, *level(c)]
        if k == levels - 1:
            return chain
        if not factor_out:
            return chain + from_level(k + 1, (c, h, w))
        kept = (c + 1) // 2
        if learned_prior:
            prior = ConvNet(kept, 2 * (c - kept), hidden=hidden, activation=activation, lipschitz=lipschitz)
            chain.append(AffineCoupling(prior, scale=prior_scale, partition=Split(size=kept)))
        inner_shape = (kept, h, w)
        inner = Chain(*from_level(k + 1, inner_shape), shape=inner_shape)
        return [*chain, FactorOut(inner, (c, h, w), keep=kept)]

    return Chain(*from_level(0, shape), shape=shape)
