"""What is trained: a model, its data, and what is minimised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bilip.data import seed_of
from bilip.errors import InputError
from bilip.regularizers import Penalty

__all__ = ["Draw", "Handed", "Objective", "Task"]


@dataclass(frozen=True)
class Draw:
    """The seeds of one step, one for each purpose.

    Attributes:
        seed: The run's.
        step: Number of the step, from 0.

    Example:
        >>> draw = Draw(seed=0, step=17)
        >>> draw("data")
        6908351948378805153
    """

    seed: int
    step: int

    def __call__(self, purpose: str) -> int:
        """A seed, 63 bits, for one purpose in this step."""
        return seed_of(self.seed, self.step, purpose)


@dataclass(frozen=True)
class Task:
    """A model with its data and its loss.

    Args:
        model: What has the parameters.
        batch: From `draw` to the tensors of a whole batch, over all processes: `draw("data")` is a seed for that purpose in this step.
            `draw.step` is the number of the step. Its rows are shared out to the processes.
        loss: From the model, the step and the tensors of a batch to scalars by name. `"loss"` is minimised, all are logged. A mean over the
            batch, so that the shares of several processes average to it.
        evaluate: From the model, in evaluation mode, and the number of steps done to numbers for the log. The weights with the smallest
            `"test_loss"` are kept beside the last ones.
        penalties: The penalties that `loss` uses: their cadence decides which steps are alike, their counts are saved. By default those
            of `loss.penalties`, which the objectives of bilip have.

    Example:
        >>> import torch
        >>> from bilip import Flow, models
        >>> from bilip.data import checkerboard
        >>> task = Task(
        ...     model=Flow(models.real_nvp(2)),
        ...     batch=lambda draw: (checkerboard(200, draw("data")),),
        ...     loss=lambda model, step, x: {"loss": -model.log_prob(x).mean()},
        ... )
    """

    model: nn.Module
    batch: Callable[[Any], tuple[Tensor, ...]]
    loss: Callable[..., Mapping[str, Tensor]]
    evaluate: Callable[[nn.Module, int], Mapping[str, float]] | None = None
    penalties: Sequence[Penalty] = ()

    def __post_init__(self) -> None:
        if not self.penalties:
            object.__setattr__(self, "penalties", tuple(getattr(self.loss, "penalties", ())))

    def variant(self, step: int) -> tuple[bool, ...]:
        """Which penalties are due: steps with the same answer do the same work."""
        return tuple(step % penalty.every == 0 for penalty in self.penalties)


class Handed:
    """A batch as one argument that is handed on as it is: mixed precision would round tensors, targets included."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors


class Objective(nn.Module):
    """The loss as a module, so that processes and precisions see one call in each step whatever happens inside."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model, self._loss = task.model, [task.loss]  # in a list: a loss that is a module is not a part of this one
        known = {id(p) for p in task.model.parameters()}
        own = task.loss.parameters() if isinstance(task.loss, nn.Module) else ()
        if any(id(p) not in known for p in own):
            raise InputError(
                "Task.loss has parameters of its own, which would be neither trained nor saved. Make them a part of Task.model."
            )

    def forward(self, step: int, batch: Handed) -> dict[str, Tensor]:
        returned = self._loss[0](self.model, step, *batch.tensors)
        if not isinstance(returned, Mapping):
            raise InputError(
                f"Task.loss returned a {type(returned).__name__}: expected scalar tensors by name, as in {{'loss': loss}}."
            )
        found = dict(returned)
        for name in ("loss", *found):
            value = found.get(name)
            if not isinstance(value, Tensor) or value.ndim:
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise InputError(
                    f"Task.loss returned {name!r} as {got}: expected a scalar tensor under the name {name!r}."
                )
            if name in ("step", "lr"):
                raise InputError(f"Task.loss returned {name!r}: the log has a column of that name. Choose another.")
        if torch.is_grad_enabled() and not found["loss"].requires_grad:
            raise InputError(
                "Task.loss returned a loss that does not depend on any parameter: there is nothing to train."
            )
        return found
