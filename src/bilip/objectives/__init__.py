"""What training minimises."""

from bilip.objectives.losses import Classification, Likelihood, Regression, penalized

__all__ = ["Classification", "Likelihood", "Regression", "penalized"]
