"""Fully connected nets for the functions t, s and g inside blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bilip.bounds import Box, log_product
from bilip.errors import InputError
from bilip.nets import activations, certify
from bilip.nets.spectral import HeldLinear

__all__ = ["MLP"]


class MLP(nn.Module):
    r"""Linear layers with an activation in between.

    Args:
        in_features: Size of the input.
        out_features: Size of the output.
        hidden: Sizes of the hidden layers.
        activation: Name of the activation (`bilip.nets.activations.make`).
        context: Size of a context vector that is concatenated to the input; its constant is with respect to the input alone.
        zero_init: Start the last layer at zero, so that a coupling block starts as the identity.
        lipschitz: Hold the net to this certified constant, shared equally among its layers.

    Example:
        >>> net = MLP(2, 4, hidden=(16, 16), activation="elu", lipschitz=0.5)
        >>> import math
        >>> math.exp(certify.log_lipschitz(net)) <= 0.5
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
        super().__init__()
        if min(in_features, out_features, *hidden, 1) < 1 or context < 0:
            raise InputError(
                f"MLP({in_features}, {out_features}, hidden={tuple(hidden)}, context={context}): every size must be at least 1."
            )
        self.in_features, self.out_features, self.context_features = in_features, out_features, context
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

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.layers(join_context(self, x, context, self.context_features, dim=-1))

    def log_lipschitz(self, shape: tuple[int, ...] | None = None, outputs: slice | None = None) -> float:
        """Log of a certified constant with respect to the input."""
        return certify_layers(self.layers, slice(0, self.in_features), None, outputs)

    def enclose(self, box: Box, context: Box | None = None) -> Box:
        """A box that holds the image of a box."""
        box = box if box.shape else box.expand((self.in_features,))
        return certify.enclose(self.layers, join_boxes(box, context, (self.context_features,)))


def join_context(net: nn.Module, x: Tensor, context: Tensor | None, features: int, dim: int) -> Tensor:
    """Concatenate input and context, or say what is wrong with the context."""
    if features == 0:
        if context is not None and not isinstance(context, Tensor):
            raise InputError(f"{type(net).__name__}: context must be a tensor, got {type(context).__name__}.")
        return x
    if context is None:
        raise InputError(f"{type(net).__name__} was built with context={features}: pass context=, a tensor with {features} features.")
    if context.shape[dim] != features:
        raise InputError(
            f"{type(net).__name__} was built with context={features}, but the context has shape {tuple(context.shape)}."
        )
    return torch.cat((x, context), dim)


def join_boxes(box: Box, context: Box | None, shape: tuple[int, ...]) -> Box:
    """The box of input and context together; a context that is not given may be anything."""
    if shape[0] == 0:
        return box
    context = Box.everything(shape) if context is None else context.expand(shape)
    return Box(torch.cat((box.low, context.low)), torch.cat((box.high, context.high)))


def certify_layers(
    layers: nn.Sequential, inputs: slice, shape: tuple[int, ...] | None, outputs: slice | None
) -> float:
    """The constant of a stack of layers in the input columns of its first layer."""
    first = certify.affine_layer(layers[0])
    if first is None:
        raise certify.unknown(layers[0])
    alone = len(layers) == 1
    log = first.log_norm(shape, outputs if alone else None, inputs)
    if alone:
        return log
    return log_product(log, certify.log_lipschitz(layers[1:], certify.out_shape(layers[0], shape), outputs))


def certify_share(lipschitz: float | None, layers: int, activation: str) -> float | None:
    """The coefficient of one of several layers, so that the net with its activations stays below `lipschitz`."""
    if lipschitz is None:
        return None
    if not 0 < lipschitz < float("inf"):
        raise InputError(f"lipschitz={lipschitz!r}: the constant to hold must be a positive number.")
    facts = activations.facts(activations.make(activation))
    gain = facts.lipschitz if facts else 1.0
    return float((lipschitz / gain ** (layers - 1)) ** (1 / layers)) * (1 - 1e-12)
