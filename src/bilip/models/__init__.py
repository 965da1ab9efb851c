"""Ready-made networks as functions, and their checkpoints."""

from bilip.models.checkpoint import flow, load, save
from bilip.models.classifier import Classifier, classifier
from bilip.models.glow import glow
from bilip.models.published import import_glow, import_residual_flow
from bilip.models.real_nvp import real_nvp
from bilip.models.residual_flow import residual_flow

__all__ = [
    "Classifier",
    "classifier",
    "flow",
    "glow",
    "import_glow",
    "import_residual_flow",
    "load",
    "real_nvp",
    "residual_flow",
    "save",
]
