"""What training minimises."""

from bilip.objectives.classification import Classification
from bilip.objectives.likelihood import Likelihood
from bilip.objectives.penalized import penalized
from bilip.objectives.regression import Regression

__all__ = ["Classification", "Likelihood", "Regression", "penalized"]
