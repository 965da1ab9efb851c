"""Fully connected nets for the functions t, s and g inside blocks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from bilip.errors import InputError
from bilip.nets import activations
from bilip.nets.layers import LayeredNet
from bilip.nets.spectral import HeldLinear

__all__ = ["MLP"]


class MLP(LayeredNet):
    r"""Linear layers with an activation in between.

    Args:
        in_features: Size of the input.
        out_features: Size of the output.
        hidden: Sizes of the hidden layers.
        activation: Name of the activation (`bilip.nets.activations.make`).
        context: Size of a context vector that is concatenated to the input; its constant is with respect to the
            input alone.
        zero_init: Start the last layer at zero, so that a coupling block starts as the identity.
        lipschitz: Hold the net to this certified constant, shared equally among its layers.

    Example:
        >>> net = MLP(2, 4, hidden=(16, 16), activation="elu", lipschitz=0.5)
        >>> import math
        >>> from bilip.nets import log_lipschitz
        >>> math.exp(log_lipschitz(net)) <= 0.5
        True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        hidden: Sequence[int] = (64, 64),
        activation: str = "relu",
        context: int = 0,
        zero_init: bool = False,
        lipschitz: float | None = None,
    ) -> None:
        super().__init__(in_features, context, dim=-1)
        if min(in_features, out_features, *hidden, 1) < 1 or context < 0:
            raise InputError(
                f"MLP({in_features}, {out_features}, hidden={tuple(hidden)}, context={context}): every size "
                "must be at least 1."
            )
        self.in_features, self.out_features = in_features, out_features
        sizes = [in_features + context, *hidden, out_features]
        share = certify_share(lipschitz, len(sizes) - 1, activation)
        layers: list[nn.Module] = []
        for k, (a, b) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
            layers.append(nn.Linear(a, b) if share is None else HeldLinear(a, b, coefficient=share))
            if k < len(sizes) - 2:
                layers.append(activations.make(activation))
        if zero_init:
            nn.init.zeros_(layers[-1].weight)  # type: ignore[arg-type]
            nn.init.zeros_(layers[-1].bias)  # type: ignore[arg-type]
        self.layers = nn.Sequential(*layers)


def certify_share(lipschitz: float | None, layers: int, activation: str) -> float | None:
    """The coefficient of one of several layers, so that the net with its activations stays below `lipschitz`."""
    if lipschitz is None:
        return None
    if not 0 < lipschitz < float("inf"):
        raise InputError(f"lipschitz={lipschitz!r}: the constant to hold must be a positive number.")
    facts = activations.facts(activations.make(activation))
    gain = facts.lipschitz if facts else 1.0
    return float((lipschitz / gain ** (layers - 1)) ** (1 / layers)) * (1 - 1e-12)
