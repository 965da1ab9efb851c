"""What is trained: a model, its data, and what is minimised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from bilip.errors import InputError
from bilip.regularizers import Penalty

__all__ = ["Objective", "Task"]

Draw = Callable[[str], int]


@dataclass(frozen=True)
class Task:
    """A model with its data and its loss.

    Args:
        model: What has the parameters.
        batch: From `draw` to the tensors of a whole batch, over all processes: `draw("data")` is a seed for that purpose in this step.
            Its rows are shared out to the processes.
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
    batch: Callable[[Draw], tuple[Tensor, ...]]
    loss: Callable[..., Mapping[str, Tensor]]
    evaluate: Callable[[nn.Module, int], Mapping[str, float]] | None = None
    penalties: Sequence[Penalty] = ()

    def __post_init__(self) -> None:
        if not self.penalties:
            object.__setattr__(self, "penalties", tuple(getattr(self.loss, "penalties", ())))

    def variant(self, step: int) -> tuple[bool, ...]:
        """Which penalties are due: steps with the same answer do the same work."""
        return tuple(step % penalty.every == 0 for penalty in self.penalties)


class Objective(nn.Module):
    """The loss as a module, so that processes and precisions see one call in each step whatever happens inside."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model, self.loss = task.model, task.loss

    def forward(self, step: int, *batch: Tensor) -> dict[str, Tensor]:
        found = dict(self.loss(self.model, step, *batch))
        value = found.get("loss")
        if not isinstance(value, Tensor) or value.ndim:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"Task.loss returned 'loss' as {got}: expected a scalar tensor under the name 'loss'.")
        for name, part in found.items():
            if not isinstance(part, Tensor) or part.numel() != 1:
                raise InputError(f"Task.loss returned {name!r} as {type(part).__name__}: expected scalar tensors.")
        return found
