"""The free functions t, s and g inside blocks, and what can be proved about them."""

from bilip.nets import activations
from bilip.nets.certify import Declared, enclose, log_lipschitz
from bilip.nets.conv import ConvNet, GainConv2d
from bilip.nets.mlp import MLP
from bilip.nets.norms import conv_norm, gram_norm, matrix_norm, power_lower_bound
from bilip.nets.spectral import HeldConv2d, HeldLinear

__all__ = [
    "ConvNet",
    "Declared",
    "GainConv2d",
    "HeldConv2d",
    "HeldLinear",
    "MLP",
    "activations",
    "conv_norm",
    "enclose",
    "gram_norm",
    "log_lipschitz",
    "matrix_norm",
    "power_lower_bound",
]
