"""Maximum likelihood."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bilip.blocks import Flow
from bilip.errors import InputError
from bilip.objectives.penalized import penalized
from bilip.regularizers import Penalty

__all__ = ["Likelihood"]


class Likelihood:
    """The mean negative log-likelihood of a flow in nats, and penalties that share its pass.

    Args:
        penalties: What is added.

    Example:
        >>> import torch
        >>> from bilip.models import flow, real_nvp
        >>> found = Likelihood()(flow(real_nvp(2)), 0, torch.randn(16, 2))
        >>> sorted(found)
        ['loss', 'nll']
    """

    def __init__(self, penalties: Sequence[Penalty] = ()) -> None:
        self.penalties = tuple(penalties)

    def __call__(self, flow: Flow, step: int, x: Tensor) -> dict[str, Tensor]:
        if not isinstance(flow, Flow):
            raise InputError(
                f"Likelihood: the model is a {type(flow).__name__}, not a Flow. Wrap it: bilip.Flow(model)."
            )
        z, log_det = flow.bijection.forward_and_log_det(x)
        nll = -(flow.base_log_prob(z) + log_det).mean()
        return penalized({"nll": nll}, self.penalties, flow.bijection, step, x, (z, log_det))
