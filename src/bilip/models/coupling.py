"""Coupling flows: RealNVP for vectors, Glow and the paper's networks for images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

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
from bilip.models.checkpoint import remembers
from bilip.nets import MLP, ConvNet, activations

__all__ = ["glow", "real_nvp"]


@remembers
def real_nvp(
    features: int | Sequence[int],
    *,
    blocks: int = 8,
    hidden: Sequence[int] = (64, 64),
    coupling: str = "affine",
    scale: Scale | str = "sigmoid",
    activation: str = "relu",
    actnorm: bool = False,
    zero_init: bool = False,
    context: int = 0,
    lipschitz: float | None = None,
    preactivate: bool = False,
) -> Chain:
    """Coupling blocks on vectors, the two halves taking turns.

    Args:
        features: Size of a vector, 2 or more; `(size,)` is the same.
        blocks: Number of coupling blocks.
        hidden: Hidden layers of the nets.
        coupling: `"affine"` or `"additive"`.
        scale: Scale function of affine coupling, or its name.
        activation: Activation of the nets.
        actnorm: Put a data-started `ActNorm` before each coupling.
        zero_init: Start every coupling near the identity.
        context: Size of a context vector for the nets.
        lipschitz: Hold every net to this certified constant; with additive coupling this bounds the network globally.
        preactivate: Begin every net with its activation, as the toy flows of the residual-flow code do; without context.

    Example:
        >>> model = real_nvp(4, blocks=6, coupling="additive", lipschitz=0.5)
        >>> round(model.bounds().inverse, 2) <= 4.41  # ((0.5 + sqrt(0.25 + 4)) / 2) ** 6
        True
    """
    _check_choices(coupling, blocks=blocks)
    if not isinstance(features, int):
        if len(features) != 1:
            raise InputError(
                f"real_nvp({tuple(features)}): expected the size of a vector; for images there is glow(shape)."
            )
        features = int(features[0])
    if features < 2:
        raise InputError(f"real_nvp(features={features}): a coupling needs 2 features or more.")
    if preactivate and context:
        raise InputError(f"real_nvp(preactivate=True, context={context}): a context cannot be activated; choose one.")
    scale = scale_from(scale)
    chain: list[Bijection] = []
    for k in range(blocks):
        swap = k % 2 == 1
        first = features // 2
        seen, moved = (features - first, first) if swap else (first, features - first)
        outputs = moved if coupling == "additive" else 2 * moved
        options = {"hidden": hidden, "activation": activation, "context": context, "zero_init": zero_init}
        net = MLP(seen, outputs, lipschitz=lipschitz, **options)
        net = nn.Sequential(activations.make(activation), net) if preactivate else net
        if actnorm:
            chain.append(ActNorm(features))
        split = Split(swap=swap)
        chain.append(
            AdditiveCoupling(net, split)
            if coupling == "additive"
            else AffineCoupling(net, scale=scale, partition=split)
        )
    return Chain(*chain, shape=(features,))


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
    _check_choices(coupling, levels=levels, blocks=blocks, hidden=hidden)
    shape = _image_shape(shape, levels, mixing, actnorm, context)
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


def _check_choices(coupling: str, **counts: int) -> None:
    """Raise an `InputError` for an unknown coupling or a count below 1."""
    if coupling not in ("affine", "additive"):
        raise InputError(f"coupling={coupling!r}: expected 'affine' or 'additive'.")
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise InputError(f"{name}={count!r}: expected a whole number, 1 or more.")


def _image_shape(
    shape: Sequence[int], levels: int, mixing: str, actnorm: str | None, context: int
) -> tuple[int, int, int]:
    """Shape of one image of `glow`, or an `InputError` for choices that it does not know."""
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
    return shape
