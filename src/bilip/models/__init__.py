"""Ready-made networks as functions, and their checkpoints."""

import sys

from bilip.models.checkpoint import flow, load, save
from bilip.models.classifier import Classifier, classifier
from bilip.models.coupling import glow, real_nvp
from bilip.models.published import import_glow, import_residual_flow
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

# Modules that 0.1 had; the functions of the same names come first.
sys.modules.update({f"{__name__}.{old}": sys.modules[f"{__name__}.coupling"] for old in ("glow", "real_nvp")})
