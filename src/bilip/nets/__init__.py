"""The free functions t, s and g inside blocks, and what can be proved about them."""

import sys

from bilip.nets import activations
from bilip.nets import torch_layers as torch_layers  # it registers readers
from bilip.nets.certify import enclose, log_cap, log_lipschitz, point_image
from bilip.nets.layers import MLP, ConvNet, Declared, GainConv2d
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

# Modules that 0.1 had: imports and pickles name them.
_MOVED = {"cache": "bilip._torch", "conv": f"{__name__}.layers", "mlp": f"{__name__}.layers"}
sys.modules.update({f"{__name__}.{old}": sys.modules[new] for old, new in _MOVED.items()})
