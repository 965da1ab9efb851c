"""What the callback does with a batch: take the samples out, and add the gradients of penalties to those of the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bilip.blocks import Bijection
from bilip.errors import InputError
from bilip.regularizers import Penalty

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["add_gradients", "copy_of", "samples_of"]


def add_gradients(
    trainer: Trainer,
    optimizer: Optimizer,
    penalties: Mapping[str, Penalty],
    model: Bijection,
    x: Tensor,
    context: Tensor | None,
) -> dict[str, Tensor]:
    """Add the gradients of penalties, averaged over processes, to the `.grad` of the optimizer's parameters.

    Without autocast: the rounding of bfloat16 would drown a finite difference, and float16 would need a loss scale.

    Returns:
        The mean of each penalty over the processes, with its weight.
    """
    plugin, step = trainer.precision_plugin, trainer.global_step
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if all(p.grad is None for p in parameters):  # training_step has skipped the batch
        return {}
    with torch.enable_grad(), plugin.forward_context(), torch.autocast(x.device.type, enabled=False):
        values = torch.stack([penalty(model, x, step=step, context=context) for penalty in penalties.values()])
        total = values.sum() + values.new_zeros((), requires_grad=True)  # a constant where every sample was left out
        parts = [values.detach(), *torch.autograd.grad(total, parameters, materialize_grads=True)]
    if trainer.world_size > 1:  # DistributedDataParallel does not see torch.autograd.grad
        flat: Tensor = trainer.strategy.reduce(torch.cat([t.flatten() for t in parts]), reduce_op="mean")
        pieces = flat.split([t.numel() for t in parts])
        parts = [piece.view_as(t).to(t) for piece, t in zip(pieces, parts, strict=True)]
    # Fused optimizers take gradients scaled for float16; for all others Lightning has unscaled them by now.
    scaler = getattr(plugin, "scaler", None) if getattr(optimizer, "_step_supports_amp_scaling", False) else None
    scale = 1.0 if scaler is None else scaler.get_scale()
    for parameter, gradient in zip(parameters, parts[1:], strict=True):
        if parameter.grad is not None:
            parameter.grad.add_(gradient, alpha=scale)
        elif gradient.any():  # otherwise it belongs neither to the loss nor to a penalty
            parameter.grad = scale * gradient
    return dict(zip(penalties, parts[0], strict=True))


def samples_of(batch: Any, choose: Callable[[Any], Any] | None) -> tuple[Tensor, Tensor | None]:
    """The samples of a batch and their context: what `choose` says, or the first tensor of floats without context."""
    found = _first_floats(batch) if choose is None else choose(batch)
    x, context = found if isinstance(found, (tuple, list)) and len(found) == 2 else (found, None)
    if not isinstance(x, Tensor) or not isinstance(context, Tensor | None):
        what = (
            f"found no tensor of floats in a batch ({type(batch).__name__})"
            if choose is None
            else f"x(batch) gave {type(found).__name__}"
        )
        raise InputError(
            f"StabilityCallback: {what}. Pass x=, a function from a batch to its samples or to a pair (x, context)."
        )
    return x, context


def copy_of(x: Tensor, context: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """A copy in main memory that no training step changes."""
    kept = x.detach().to("cpu", copy=True)
    return kept if context is None else (kept, context.detach().to("cpu", copy=True))


def _first_floats(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch if batch.is_floating_point() else None
    inside = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((found for found in map(_first_floats, inside) if found is not None), None)
