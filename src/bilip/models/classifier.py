"""Invertible classifiers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from bilip.blocks import Bijection
from bilip.errors import InputError
from bilip.models.checkpoint import remembers

__all__ = ["Classifier", "ClassifierOutput", "classifier"]


@dataclass(frozen=True)
class ClassifierOutput:
    """Everything one pass of a classifier gives.

    Attributes:
        logits: Of shape `(batch, classes)`.
        latent: z = F(x).
        log_det: log |det J_F(x)|, of shape `(batch,)`.
    """

    logits: Tensor
    latent: Tensor
    log_det: Tensor


class Classifier(nn.Module):
    """An invertible trunk and a head: BatchNorm1d, ReLU, Linear."""

    def __init__(self, trunk: Bijection, classes: int) -> None:
        super().__init__()
        self.trunk = trunk
        size = math.prod(trunk.shape)  # type: ignore[arg-type]
        self.head = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(size), nn.ReLU(), nn.Linear(size, classes))

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.head(self.trunk(x))

    def detailed(self, x: Tensor) -> ClassifierOutput:
        """Logits, latent and log-determinant of one pass, for losses that use them all."""
        z, log_det = self.trunk.forward_and_log_det(x)
        return ClassifierOutput(self.head(z), z, log_det)


@remembers
def classifier(trunk: Bijection, *, classes: int = 10) -> Classifier:
    """The paper's classifier: an invertible trunk, then BatchNorm1d, ReLU and a linear layer on the flat latent.

    Args:
        trunk: A bijection that knows its shape, for example from `glow`.
        classes: Number of classes.

    Example:
        >>> import torch
        >>> from bilip.models import glow
        >>> model = classifier(glow((3, 8, 8), levels=1, blocks=1, hidden=8))
        >>> model(torch.randn(4, 3, 8, 8)).shape
        torch.Size([4, 10])
    """
    if not isinstance(trunk, Bijection) or trunk.shape is None:
        raise InputError(
            "classifier: the trunk must be a Bijection that knows its shape, for example bilip.models.glow((3, 32, 32))."
        )
    if classes < 2:
        raise InputError(f"classifier(classes={classes}): expected 2 or more.")
    return Classifier(trunk, classes)
