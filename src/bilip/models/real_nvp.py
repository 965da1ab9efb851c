"""Coupling flows for vectors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from bilip.blocks import ActNorm, AdditiveCoupling, AffineCoupling, Bijection, Chain, Split
from bilip.blocks.scale import Scale, scale_from
from bilip.errors import InputError
from bilip.models._config import remembers
from bilip.nets import MLP, activations

__all__ = ["real_nvp"]


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
    check_choices(coupling, blocks=blocks)
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
        net = MLP(
            seen,
            outputs,
            hidden=hidden,
            activation=activation,
            context=context,
            zero_init=zero_init,
            lipschitz=lipschitz,
        )
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


def check_choices(coupling: str, **counts: int) -> None:
    """Raise an `InputError` for an unknown coupling or a count below 1."""
    if coupling not in ("affine", "additive"):
        raise InputError(f"coupling={coupling!r}: expected 'affine' or 'additive'.")
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"{name}={count}: expected 1 or more.")
