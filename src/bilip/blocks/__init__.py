"""Invertible blocks, each with exact inverse, log-determinants and proven bounds."""

import sys

from bilip.blocks.additive_coupling import AdditiveCoupling
from bilip.blocks.affine_coupling import AffineCoupling
from bilip.blocks.bijection import Bijection
from bilip.blocks.chain import Chain
from bilip.blocks.conv1x1 import InvertibleConv1x1
from bilip.blocks.diagonal import ActNorm, DiagonalScaling
from bilip.blocks.factor_out import FactorOut
from bilip.blocks.flow import Flow
from bilip.blocks.log_det import Exact, Geometric, Poisson, Roulette, Series
from bilip.blocks.logit import Logit
from bilip.blocks.neural_ode import NeuralODE
from bilip.blocks.partition import Checkerboard, Indices, Partition, Split, Streams
from bilip.blocks.rearranging import Flatten, Permutation, Squeeze
from bilip.blocks.residual import Residual, Solution, inverting
from bilip.blocks.scale import EXP, HALF_SIGMOID, SIGMOID, ExpScale, Scale, SigmoidScale, TanhExpScale, scale_from
from bilip.blocks.wrapped import Invert, Wrapped

__all__ = [
    "EXP",
    "HALF_SIGMOID",
    "SIGMOID",
    "ActNorm",
    "AdditiveCoupling",
    "AffineCoupling",
    "Bijection",
    "Chain",
    "Checkerboard",
    "DiagonalScaling",
    "Exact",
    "ExpScale",
    "FactorOut",
    "Flatten",
    "Flow",
    "Geometric",
    "Indices",
    "Invert",
    "InvertibleConv1x1",
    "Logit",
    "NeuralODE",
    "Partition",
    "Permutation",
    "Poisson",
    "Residual",
    "Roulette",
    "Scale",
    "Series",
    "SigmoidScale",
    "Solution",
    "Split",
    "Squeeze",
    "Streams",
    "TanhExpScale",
    "Wrapped",
    "scale_from",
    "inverting",
]

# Modules that 0.1 had, such as bilip.blocks.squeeze: imports and pickles name them.
_MOVED = {
    "actnorm": "diagonal",
    "diagonal_scaling": "diagonal",
    "flatten": "rearranging",
    "invert": "wrapped",
    "on_kept": "factor_out",
    "permutation": "rearranging",
    "reach": "bijection",
    "squeeze": "rearranging",
}
sys.modules.update({f"{__name__}.{old}": sys.modules[f"{__name__}.{new}"] for old, new in _MOVED.items()})
