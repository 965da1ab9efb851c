"""A task's loss with its penalties."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bilip.blocks import Bijection
from bilip.regularizers import Latent, Penalty

__all__ = ["penalized"]


def penalized(
    task: dict[str, Tensor], penalties: Sequence[Penalty], model: Bijection, step: int, x: Tensor, latent: Latent
) -> dict[str, Tensor]:
    """The one loss of a task, its penalties, and their sum as `loss`.

    Example:
        >>> import torch
        >>> from bilip.models import real_nvp
        >>> from bilip.regularizers import FlowLikelihood
        >>> model, x = real_nvp(2), torch.randn(16, 2)
        >>> z, log_det = model.forward_and_log_det(x)
        >>> found = penalized({"mse": z.square().mean()}, [FlowLikelihood(1e-3)], model, 0, x, (z, log_det))
        >>> sorted(found)
        ['FlowLikelihood', 'loss', 'mse']
    """
    (total,) = task.values()
    parts: dict[str, Tensor] = {}
    for penalty in penalties:
        value, name = penalty(model, x, step=step, latent=latent), type(penalty).__name__
        parts[name] = parts[name] + value if name in parts else value
        total = total + value
    return {"loss": total, **task, **parts}
