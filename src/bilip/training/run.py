"""One run: everything that is carried from step to step, saved and restored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilip.blocks import ActNorm
from bilip.blocks.actnorm import shared_statistics
from bilip.data import seed_of
from bilip.errors import CheckpointError, InputError
from bilip.reversible import Reversible
from bilip.training.average import Average
from bilip.training.log import Log
from bilip.training.machines import own_rows
from bilip.training.settings import Settings
from bilip.training.state import load_weights, read_state, restore_optimizer, save_state, split_optimizer
from bilip.training.step import CapturedStep, Step
from bilip.training.task import Objective, Task

__all__ = ["Run", "Trained"]


@dataclass(frozen=True)
class Trained:
    """Where a run ended.

    Attributes:
        folder: `last.safetensors`, `best.safetensors` if a test loss was evaluated, `train.csv`, `evaluation.csv`.
        steps: Steps done.
        best_step: Steps done when the test loss was smallest; 0 if none was evaluated.
        best_loss: That test loss.
        main: Whether this process is the one that writes and measures.
    """

    folder: Path
    steps: int
    best_step: int
    best_loss: float
    main: bool


class Run:
    """A run at some step, begun anew or from what its folder holds.

    Args:
        task: Model, data and loss.
        settings: Optimizer, schedule, cadence.
        folder: Where checkpoints and logs go.
        fabric: A launched Fabric.
    """

    def __init__(self, task: Task, settings: Settings, folder: Path, fabric: Any) -> None:
        self.task, self.settings, self.folder, self.fabric = task, settings, folder, fabric
        self.main: bool = fabric.is_global_zero
        self.done, self.best_step, self.best_loss = 0, 0, math.inf
        self.sums: dict[str, Tensor] = {}  # of the losses since the last logged row
        self.summed, self.between_steps = 0, True
        folder.mkdir(parents=True, exist_ok=True)
        tensors, facts = read_state(self.last) if self.last.exists() else ({}, {})
        if facts:
            self._require_same(facts)
            load_weights(task.model, tensors, self.last)
        objective = Objective(task).to(fabric.device).train()
        self._require_dtype(objective)
        if not facts:
            self._share_weights(objective)
            self._start_actnorms(objective)
        self.average = None if settings.ema is None else Average(task.model, settings.ema)
        captured = settings.captures(fabric.device.type, fabric.world_size)
        wrapped, self.optimizer = fabric.setup(objective, make_optimizer(objective, settings, captured))
        if facts:
            self._restore(tensors, facts)
        step = Step(fabric, wrapped, self.optimizer, settings, self.average)
        self.step = CapturedStep(step, task.variant) if captured else step
        self.log = Log(folder if self.main else None, facts.get("log"), self.done)

    @property
    def last(self) -> Path:
        """The file of the state."""
        return self.folder / "last.safetensors"

    @property
    def exact(self) -> bool:
        """Whether every loss is looked at: elsewhere that would hold up the device, or the other processes."""
        return self.fabric.device.type == "cpu" and self.fabric.world_size == 1

    def set_rate(self, lr: float) -> None:
        """The learning rate of the next step; in place where a graph has to see it."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """This process's rows of the batch of a step, on its device."""
        whole = self.task.batch(lambda purpose: seed_of(self.settings.seed, step, purpose))
        if not isinstance(whole, (tuple, list)) or not all(isinstance(tensor, Tensor) for tensor in whole) or not whole:
            raise InputError(f"Task.batch returned a {type(whole).__name__}: expected a tuple of tensors, as in (x,).")
        return tuple(self.fabric.to_device(own_rows(tensor, self.fabric)) for tensor in whole)

    def save(self) -> None:
        """Write the state, unless the weights are not finite: the state before them is worth more."""
        weights = list(self.task.model.parameters())
        if not self.main or not bool(torch.stack([p.isfinite().all() for p in weights]).all()):
            return
        tensors, plain = split_optimizer(self.optimizer)
        tensors |= self.weights() | {f"sums.{name}": value for name, value in self.sums.items()}
        if self.average is not None:
            tensors |= {f"average.{name}": value for name, value in self.average.weights.items()}
        facts = {
            "step": self.done,
            "settings": self.settings.defining(),
            "optimizer": plain,
            "best_step": self.best_step,
            "best_loss": self.best_loss,
            "guards": {name: walk.guard_state() for name, walk in self._walks().items()},
            "penalties": [{"seen": p.seen, "skipped": p.skipped} for p in self.task.penalties],
            "log": self.log.sizes,
            "sums": list(self.sums),
            "summed": self.summed,
        }
        save_state(self.last, tensors, facts)

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers of the model, as a state names them."""
        return {f"model.{name}": value for name, value in self.task.model.state_dict().items()}

    def _restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self.done, self.best_step, self.best_loss = facts["step"], facts["best_step"], facts["best_loss"]
        restore_optimizer(self.optimizer, tensors, facts["optimizer"])
        self.sums = {name: tensors[f"sums.{name}"].to(self.fabric.device) for name in facts["sums"]}
        self.summed = facts["summed"]
        if self.average is not None:
            for name, value in self.average.weights.items():
                value.copy_(tensors[f"average.{name}"])
        for name, walk in self._walks().items():
            walk.load_guard_state(facts["guards"].get(name, {}))
        for penalty, counts in zip(self.task.penalties, facts["penalties"], strict=True):
            penalty.seen, penalty.skipped = counts["seen"], counts["skipped"]

    def _require_same(self, facts: dict[str, Any]) -> None:
        difference = self.settings.difference(facts["settings"])
        if not difference and len(facts["penalties"]) != len(self.task.penalties):
            difference = f"{len(facts['penalties'])} penalties there, {len(self.task.penalties)} now"
        if difference:
            raise CheckpointError(
                f"{self.folder} holds a run with other settings ({difference}). Choose another folder, or delete that one."
            )
        if facts["step"] > self.settings.steps:
            raise CheckpointError(
                f"{self.folder} holds a run of {facts['step']} steps, more than the {self.settings.steps} asked for. "
                "Choose another folder, or delete that one."
            )

    def _require_dtype(self, objective: Objective) -> None:
        wanted = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
        dtype = wanted.get(self.settings.precision, torch.float32)
        other = next((p.dtype for p in objective.parameters() if p.is_floating_point() and p.dtype != dtype), None)
        if other is not None:
            raise InputError(
                f"precision={self.settings.precision!r} trains weights in {str(dtype).removeprefix('torch.')}, but the model has some in "
                f"{str(other).removeprefix('torch.')}. Convert it first, as in model.to({dtype})."
            )

    def _share_weights(self, objective: Objective) -> None:
        """All processes begin with the weights of the first, before ActNorms look at activations."""
        if self.fabric.world_size > 1:
            for value in objective.state_dict().values():
                value.copy_(self.fabric.broadcast(value))

    def _walks(self) -> dict[str, Reversible]:
        return {name: part for name, part in self.task.model.named_modules() if isinstance(part, Reversible)}

    def _start_actnorms(self, objective: Objective) -> None:
        """ActNorms start from the first batch, the rows of all processes together."""
        if all(part._ready for part in objective.modules() if isinstance(part, ActNorm)):
            return
        torch.manual_seed(seed_of(self.settings.seed, 0, "start"))
        counts = [(p.seen, p.skipped) for p in self.task.penalties]
        with torch.no_grad(), shared_statistics(lambda value: self.fabric.all_reduce(value, reduce_op="sum")):
            objective(0, *self.batch(0))
        for penalty, (seen, skipped) in zip(self.task.penalties, counts, strict=True):
            penalty.seen, penalty.skipped = seen, skipped


def make_optimizer(objective: Objective, settings: Settings, captured: bool) -> torch.optim.Optimizer:
    """Adam, fused, or AdamW where weights decay."""
    parameters = [p for p in objective.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("the model has no parameter that requires a gradient: there is nothing to train.")
    kind = torch.optim.AdamW if settings.weight_decay else torch.optim.Adam
    lr = torch.tensor(settings.lr, device=parameters[0].device) if captured else settings.lr
    return kind(
        parameters, lr=lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True, capturable=captured
    )
