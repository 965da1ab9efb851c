"""What training minimises: a loss for each task, and the penalties that are added to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from bilip.blocks import Bijection, Flow
from bilip.errors import InputError
from bilip.models import Classifier
from bilip.regularizers import Latent, Penalty

__all__ = ["Classification", "Likelihood", "Regression", "penalized"]


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
