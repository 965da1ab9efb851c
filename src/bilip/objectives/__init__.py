"""What training minimises."""

from bilip.objectives.likelihood import Likelihood
from bilip.objectives.penalized import penalized
from bilip.objectives.regression import Regression

__all__ = ["Likelihood", "Regression", "penalized"]
