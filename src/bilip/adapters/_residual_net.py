"""The residual nets inside nflows couplings, with a Lipschitz constant proved from their layers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bilip.bounds import log_of, log_product, log_sum
from bilip.errors import UnknownLipschitz
from bilip.nets import Declared, log_lipschitz
from bilip.nets.readable import tampered

__all__ = ["certified"]

_ONE = (F.relu, torch.relu, F.elu, F.leaky_relu, F.softplus, torch.tanh, F.tanh, torch.sin)


def certified(net: nn.Module) -> nn.Module:
    r"""A net that bilip can prove things about.

    For `ResidualNet` of nflows the constant is $\|W_{in}\| \prod_k (1 + \|W_{k,2}\| \, \|W_{k,1}\|) \, \|W_{out}\|$;
    other nets come back as they are.

    Args:
        net: The net of a coupling.

    Raises:
        UnknownLipschitz: A residual net with batch normalisation, active dropout, a context or an unknown activation.
    """
    if not (type(net).__name__ == "ResidualNet" and type(net).__module__.endswith("nflows.nn.nets.resnet")):
        return net
    known: Any = net
    log = log_product(log_lipschitz(known.initial_layer), log_lipschitz(known.final_layer))
    for block in known.blocks:
        log = log_product(log, _block(block))
    if log > 700:
        raise UnknownLipschitz(f"{type(net).__name__}: its constant is too large for a number (e^{log:.0f}).")
    return Declared(net, lipschitz=math.exp(log) * (1 + 1e-12))


def _block(block: Any) -> float:
    """Log of the constant of x + W2 act(W1 act(x))."""
    why = None
    kind = type(block)
    if kind.__name__ != "ResidualBlock" or not kind.__module__.endswith("nflows.nn.nets.resnet"):
        why = f"a block of the class {kind.__module__}.{kind.__qualname__}"
    elif block.use_batch_norm:
        why = "batch normalisation"
    elif block.dropout.p and block.dropout.training:
        why = "dropout in training mode: call .eval()"
    elif hasattr(block, "context_layer"):
        why = "a context that gates its layers"
    elif not any(block.activation is known for known in _ONE):
        why = f"the activation {getattr(block.activation, '__name__', block.activation)}"
    elif any(tampered(part) is not None for part in block.modules()):
        why = "hooks or replaced methods"
    if why is not None:
        raise UnknownLipschitz(
            f"the ResidualNet of a coupling holds {why}, so its Lipschitz constant cannot be proved."
        )
    first, second = block.linear_layers
    return log_sum(log_of(1.0), log_product(log_lipschitz(first), log_lipschitz(second)))
