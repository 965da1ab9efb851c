"""Invertible blocks, each with exact inverse, log-determinants and proven bounds."""

from bilip.blocks.actnorm import ActNorm
from bilip.blocks.additive_coupling import AdditiveCoupling
from bilip.blocks.affine_coupling import AffineCoupling
from bilip.blocks.bijection import Bijection
from bilip.blocks.chain import Chain
from bilip.blocks.conv1x1 import InvertibleConv1x1
from bilip.blocks.diagonal_scaling import DiagonalScaling
from bilip.blocks.factor_out import FactorOut
from bilip.blocks.flatten import Flatten
from bilip.blocks.flow import Flow
from bilip.blocks.log_det import Exact, Geometric, Poisson, Roulette, Series
from bilip.blocks.logit import Logit
from bilip.blocks.neural_ode import NeuralODE
from bilip.blocks.partition import Checkerboard, Indices, Partition, Split, Streams
from bilip.blocks.permutation import Permutation
from bilip.blocks.residual import Residual, Solution, inverting
from bilip.blocks.scale import EXP, HALF_SIGMOID, SIGMOID, ExpScale, Scale, SigmoidScale, TanhExpScale, scale_from
from bilip.blocks.squeeze import Squeeze
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
