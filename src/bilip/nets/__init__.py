"""The free functions t, s and g inside blocks, and what can be proved about them."""

from bilip.nets import activations
from bilip.nets import torch_layers as torch_layers  # it registers readers
from bilip.nets.certify import enclose, log_cap, log_lipschitz, point_image
from bilip.nets.conv import ConvNet
from bilip.nets.layers import Declared, GainConv2d
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
    "log_cap",
    "log_lipschitz",
    "matrix_norm",
    "point_image",
    "power_lower_bound",
]
