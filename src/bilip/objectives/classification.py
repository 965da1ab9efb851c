"""Classification with an invertible network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bilip.errors import InputError
from bilip.models import Classifier
from bilip.objectives.penalized import penalized
from bilip.regularizers import Penalty

__all__ = ["Classification"]


class Classification:
    """The mean cross-entropy of a classifier in nats, penalties on its trunk that share its pass, and the share it gets right.

    The log-determinant is computed only where a penalty uses it.

    Args:
        penalties: What is added.

    Example:
        >>> from bilip.models import classifier, glow
        >>> model = classifier(glow((3, 8, 8), levels=1, blocks=1, hidden=8))
        >>> found = Classification()(model, 0, torch.randn(4, 3, 8, 8), torch.arange(4))
        >>> sorted(found)
        ['accuracy', 'cross_entropy', 'loss']
    """

    def __init__(self, penalties: Sequence[Penalty] = ()) -> None:
        self.penalties = tuple(penalties)

    def __call__(self, model: Classifier, step: int, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if not isinstance(model, Classifier):
            raise InputError(
                f"Classification: the model is a {type(model).__name__}, not a Classifier: bilip.models.classifier makes one."
            )
        due = any(p.uses_log_det and p.weight and step % p.every == 0 for p in self.penalties)
        z, log_det = model.trunk.forward_and_log_det(x) if due else (model.trunk(x), None)
        logits = model.head(z)
        found = penalized(
            {"cross_entropy": cross_entropy(logits, y)}, self.penalties, model.trunk, step, x, (z, log_det)
        )
        with torch.no_grad():
            found["accuracy"] = (logits.argmax(1) == y).to(x.dtype).mean()
        return found
