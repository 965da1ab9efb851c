"""Regression with an invertible network."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import mse_loss

from bilip.blocks import Bijection
from bilip.errors import InputError
from bilip.objectives.penalized import penalized
from bilip.regularizers import Penalty

__all__ = ["Regression"]


class Regression:
    """The mean squared error of F(x) as a prediction of y, over samples and entries, and penalties that share its pass.

    Args:
        penalties: What is added.

    Example:
        >>> import torch
        >>> from bilip.models import real_nvp
        >>> found = Regression()(real_nvp(2), 0, torch.randn(16, 2), torch.zeros(16, 2))
        >>> sorted(found)
        ['loss', 'mse']
    """

    def __init__(self, penalties: Sequence[Penalty] = ()) -> None:
        self.penalties = tuple(penalties)

    def __call__(self, model: Bijection, step: int, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if not self.penalties:
            z, log_det = model(x), None
        else:
            z, log_det = model.forward_and_log_det(x)
        if z.shape != y.shape:
            raise InputError(
                f"Regression: predictions have shape {tuple(z.shape)}, targets {tuple(y.shape)}: expected the same."
            )
        return penalized({"mse": mse_loss(z, y)}, self.penalties, model, step, x, (z, log_det))
