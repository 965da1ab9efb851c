"""The stability monitor, the guard's report and penalties, for Lightning code of one's own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bilip.adapters import as_bijection
from bilip.blocks import Bijection, Chain
from bilip.errors import InputError, MissingExtra
from bilip.regularizers import Penalty
from bilip.reversible import DriftWarning, Reversible
from bilip.training.monitor import StabilityMonitor, StabilityRow

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
except ImportError as error:
    raise MissingExtra("StabilityCallback needs lightning: pip install 'bilip[train]'.") from error

__all__ = ["StabilityCallback"]


class StabilityCallback(Callback):
    """Penalties, a stability monitor and the guard's report for any LightningModule, whose `training_step` stays as it is.

    Right before the optimizer's step, and before clipping, the gradients of the penalties, averaged over processes, are added to those of
    the loss: the same as adding penalties to the loss. They are computed without autocast, whose rounding drowns finite differences.

    Logged as often as the trainer logs: `penalty/FiniteDifference` (the last that was due, with its weight), `guard/drift` and
    `guard/repaired` (every `Reversible` of this process; the first repair warns). Logged at once: the monitor's rows,
    `stability/relative_max` and so on. Checkpoints of the trainer hold rows, the penalties' counts and the guards' state.

    Caution: Penalties run passes of their own; where `training_step` has latents, adding `penalty(..., latent=...)` to the loss is cheaper.
    With gradient accumulation they see the last of the batches. Manual optimization and sharded parameters are refused.

    Args:
        model: From the LightningModule to its network: a `Reversible`, another bijection, or anything `as_bijection` takes.
        penalties: The penalties.
        every: Optimizer steps from one row to the next, the first after the first step (step 0); `None` for no monitor.
        x: From a batch to its samples, or to a pair `(x, context)`; by default the first tensor of floats in it.
        data: What the monitor measures on, in process 0: a batch, a pair `(x, context)` or a `Source`; by default the run's first batch.
        **monitor: More arguments of `StabilityMonitor`: `spectrum`, `samples`, `spectra`, `steps`.

    Attributes:
        rows: The rows so far.
        penalties: The penalties by name, with their counts.
        monitor: The `StabilityMonitor`, once training has begun.

    Example:
        >>> import lightning.pytorch as pl
        >>> from bilip.models import real_nvp
        >>> from bilip.regularizers import FiniteDifference
        >>> class Module(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.flow = real_nvp(2, blocks=2)
        ...     def training_step(self, batch, index):
        ...         return self.flow(batch).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.Adam(self.parameters())
        >>> stability = StabilityCallback(lambda module: module.flow, [FiniteDifference(0.1, every=2)], every=3)
        >>> quiet = {f"enable_{name}": False for name in ("checkpointing", "progress_bar", "model_summary")}
        >>> trainer = pl.Trainer(max_steps=4, accelerator="cpu", logger=False, callbacks=[stability], **quiet)
        >>> trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(64, 2), batch_size=16))
        >>> [row.step for row in stability.rows], stability.penalties["FiniteDifference"].seen
        ([0, 3], 32)
    """

    def __init__(
        self,
        model: Callable[[LightningModule], Any],
        penalties: Sequence[Penalty] = (),
        *,
        every: int | None = 100,
        x: Callable[[Any], Any] | None = None,
        data: Any = None,
        **monitor: Any,
    ) -> None:
        who = "StabilityCallback"
        if not callable(model) or isinstance(model, nn.Module):
            raise InputError(f"{who}(model={type(model).__name__}): expected a function: lambda module: module.flow.")
        if x is not None and not callable(x):
            raise InputError(f"{who}(x={type(x).__name__}): expected a function: lambda batch: batch['image'].")
        if not isinstance(penalties, Sequence) or not all(isinstance(p, Penalty) for p in penalties):
            raise InputError(f"StabilityCallback(penalties={penalties!r}): expected a list of penalties.")
        self._new_monitor = partial(StabilityMonitor, every=1 if every is None else every, **monitor)
        try:  # wrong arguments are reported here, before training begins
            self._new_monitor(Chain(), torch.zeros(1, 1, device="cpu") if data is None else data)
        except TypeError as error:
            raise InputError(f"StabilityCallback: {error}.") from error
        self.model, self.every, self.x, self.data = model, every, x, data
        self.rows: list[StabilityRow] = []
        self.penalties: dict[str, Penalty] = {}
        for penalty in penalties:
            count = 1 + sum(type(p) is type(penalty) for p in self.penalties.values())
            self.penalties[type(penalty).__name__ + (f"_{count}" if count > 1 else "")] = penalty
        self.monitor: StabilityMonitor | None = None
        self._bijection: Bijection = Chain()
        self._guarded: dict[Reversible, str] = {}
        self._restored, self._values = dict[str, Any](), dict[str, Tensor]()
        self._batch, self._before, self._warned = None, 0, False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise InputError(
                f"StabilityCallback: {type(pl_module).__name__} optimizes manually. Add penalty(model, x, step=...) to its loss and "
                "call a bilip.training.StabilityMonitor after optimizer.step(), or set automatic_optimization = True."
            )
        if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)):
            raise InputError("StabilityCallback: the trainer shards parameters, expected whole ones: strategy='ddp'.")
        try:
            self._bijection = as_bijection(self.model(pl_module))
        except InputError as error:
            raise InputError(f"StabilityCallback(model=...): {error}") from error
        named = (*self._bijection.named_modules(prefix="model"), *pl_module.named_modules())
        self._guarded = {m: name for name, m in named if isinstance(m, Reversible) and m.guard is not None}
        for reversible, name in self._guarded.items():
            reversible.load_guard_state(self._restored.pop(name, {}))
        self.monitor = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch, self._before = batch, trainer.global_step
        if self.every is not None and self.monitor is None:
            data = _copy_of(*_samples_of(batch, self.x)) if self.data is None else self.data
            self.monitor = self._new_monitor(self._bijection, data)
            self.monitor.rows = self.rows

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        due = {f"penalty/{n}": p for n, p in self.penalties.items() if p.weight and trainer.global_step % p.every == 0}
        if due:
            x, context = _samples_of(self._batch, self.x)
            self._values |= _add_gradients(trainer, optimizer, due, self._bijection, x, context)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch, step = None, trainer.global_step - 1
        if step < self._before:  # gradients are being accumulated
            return
        pl_module.log_dict({**self._values, **self._guard_values()})
        if self.monitor is None or step % self.monitor.every:
            return
        row: Any = trainer.strategy.broadcast(self.monitor.measure(step) if trainer.is_global_zero else None)
        self.rows.append(row)
        apart = ("step", "drift", "repaired")
        values = {f"stability/{n}": v for n, v in asdict(row).items() if n not in apart and not math.isnan(v)}
        pl_module.log_dict(values, logger=False)  # for other callbacks; the trainer's logging would miss most rows
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)

    def state_dict(self) -> dict[str, Any]:
        penalties = {name: penalty.state() for name, penalty in self.penalties.items()}
        guards = {name: reversible.guard_state() for reversible, name in self._guarded.items()}
        return {"rows": [asdict(row) for row in self.rows], "penalties": penalties, "guards": guards}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows[:] = [StabilityRow(**row) for row in state_dict["rows"]]
        for name, penalty in self.penalties.items():
            penalty.load_state({**penalty.state(), **state_dict["penalties"].get(name, {})})
        self._restored = dict(state_dict["guards"])  # on_fit_start knows the modules

    def _guard_values(self) -> dict[str, float]:
        reports = [reversible.report() for reversible in self._guarded]
        repaired = sum(report.repaired for report in reports)
        if repaired and not self._warned:
            self._warned = True
            text = "the guard has repaired a step: its gradient is right, and took longer. guard/repaired counts them; a penalty helps."
            warnings.warn(text, DriftWarning, stacklevel=2)
        drift = max((value for report in reports for value in report.drift.values()), default=0.0)
        return {"guard/drift": drift, "guard/repaired": float(repaired)} if reports else {}


def _add_gradients(
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


def _samples_of(batch: Any, choose: Callable[[Any], Any] | None) -> tuple[Tensor, Tensor | None]:
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


def _copy_of(x: Tensor, context: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """A copy in main memory that no training step changes."""
    kept = x.detach().to("cpu", copy=True)
    return kept if context is None else (kept, context.detach().to("cpu", copy=True))


def _first_floats(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch if batch.is_floating_point() else None
    inside = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((found for found in map(_first_floats, inside) if found is not None), None)
