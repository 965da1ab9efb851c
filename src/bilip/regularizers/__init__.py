"""Regularizers: what a training loss adds to keep a network invertible."""

from bilip.regularizers.activation_norm import ActivationNorm
from bilip.regularizers.finite_difference import FiniteDifference
from bilip.regularizers.flow_likelihood import FlowLikelihood
from bilip.regularizers.penalty import Latent, Penalty, SkippedSamples

__all__ = ["ActivationNorm", "FiniteDifference", "FlowLikelihood", "Latent", "Penalty", "SkippedSamples"]
