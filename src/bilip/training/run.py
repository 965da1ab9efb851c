"""One run: the loop, and everything that it carries from step to step, saved and restored."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilip._torch import dtype_name
from bilip.auditing.probes.blame import kind_of
from bilip.blocks import ActNorm, Bijection, Residual, Roulette
from bilip.blocks.diagonal import shared_statistics
from bilip.data import seed_of
from bilip.errors import BilipError, CheckpointError, InputError, TrainingDiverged
from bilip.nets.replay import batch_norms, draws_numbers, evaluating, frozen_statistics
from bilip.nets.spectral import HeldConv2d, HeldLinear, held_layers, restore_certificate
from bilip.reversible import Reversible
from bilip.training.average import Average
from bilip.training.log import Log
from bilip.training.settings import Settings
from bilip.training.state import (
    Writer,
    load_weights,
    read_state,
    require_facts,
    require_kind,
    restore_optimizer,
    save_state,
    split_optimizer,
)
from bilip.training.step import CapturedStep, Settled, Step
from bilip.training.task import Draw, Handed, Objective, Task

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


Progress = Callable[[int, int, Mapping[str, float]], None]


class Run:
    """A run at some step, begun anew or from what its folder holds."""

    def __init__(self, task: Task, settings: Settings, folder: Path, fabric: Any) -> None:
        self.task, self.settings, self.folder, self.fabric = task, settings, folder, fabric
        self.main: bool = fabric.is_global_zero
        self.done, self.best_step, self.best_loss = 0, 0, math.inf
        self.sums: dict[str, Tensor] = {}  # of the losses since the last logged row
        self.summed, self.skipped_in_a_row, self._between_steps = 0, 0, True
        self.writer = Writer()
        self._open()
        tensors, facts = read_state(self.last) if self.last.exists() else ({}, {})
        if facts:
            self._require_same(facts)
            load_weights(task.model, tensors, self.last)
            self._require_trainable(facts["trainable"])
        objective = Objective(task).to(fabric.device).train()
        self._require_dtype(objective)
        if not facts:
            self._share_weights(objective)
            self._start_actnorms(objective)
        self.average = None if settings.ema is None else Average(task.model, settings.ema)
        captured = settings.captures(fabric.device.type, fabric.world_size) and self._same_work()
        wrapped, self.optimizer = fabric.setup(objective, make_optimizer(objective, settings, captured))
        if facts:
            try:
                self._restore(tensors, facts)
            except Exception as error:  # facts of any kind, so errors of any kind
                text = f"{error}" if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
                raise CheckpointError(
                    f"{self.last} does not fit this run ({text.rstrip('.'):.300}). Choose another folder, or delete it to begin anew."
                ) from error
        step = Step(fabric, wrapped, self.optimizer, settings, self.average)
        self.step = CapturedStep(step, task, self.begin) if captured else step
        self.log = Log(folder if self.main else None, facts.get("log"), self.done)

    @property
    def last(self) -> Path:
        """The file of the state."""
        return self.folder / "last.safetensors"

    @property
    def left(self) -> str:
        """What there is to go back to, in words."""
        self.writer.wait()
        return f"the last good checkpoint is {self.last}" if self.last.exists() else "no checkpoint was saved before"

    @property
    def exact(self) -> bool:
        """Whether every loss is looked at: elsewhere that would hold up the device, or the other processes."""
        return self.fabric.device.type == "cpu" and self.fabric.world_size == 1

    # ---- the loop

    def go(self, progress: Progress, check: Callable[..., object]) -> None:
        """Train until the last step, or until `check`, called after each step with the time where it is known, raises."""
        settings, latest = self.settings, {}
        if not self.done and settings.evaluates(0):
            latest |= self._evaluated()
        while self.done < settings.steps:
            step, self._between_steps = self.done, False
            self.begin(step)
            self._taken(self.step.advance(step, self.batch(step)))
            self.done = step + 1
            logs, saves = (settings.due(every, self.done) for every in (settings.log_every, settings.save_every))
            if logs or saves or settings.evaluates(self.done) or self.done == settings.steps:
                self._taken(self.step.settle())
            if logs or (self.exact and self.summed and not math.isfinite(float(self.sums["loss"]))):
                latest |= self._logged()
            if settings.evaluates(self.done):
                latest |= self._evaluated()
            if saves and not self.save() and self.done == settings.steps:
                raise TrainingDiverged(
                    f"training diverged: the last step left weights that are not finite; {self.left}.", self.done
                )
            self._between_steps = True
            progress(self.done, settings.steps, latest)
            check(*self._shared_clock())
        self.writer.wait()
        self.fabric.barrier()

    def stop(self) -> None:
        """Save, after an interruption between two steps; one inside a step leaves the state before it."""
        if self._between_steps:
            self._taken(self.step.settle())
            self.save()

    def begin(self, step: int) -> None:
        """Learning rate and seeds of a step."""
        self.set_rate(self.settings.rate(step))
        self.reseed(step)

    def reseed(self, step: int) -> None:
        """Seed torch's generators, for what nets draw in a step."""
        torch.manual_seed(seed_of(self.settings.seed, step, f"nets {self.fabric.global_rank}"))

    def set_rate(self, lr: float) -> None:
        """The learning rate of the next step; in place where a graph has to see it."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """This process's rows of the batch of a step, on its device."""
        whole = self.task.batch(Draw(self.settings.seed, step))
        if not isinstance(whole, (tuple, list)) or not all(isinstance(tensor, Tensor) for tensor in whole) or not whole:
            raise InputError(f"Task.batch returned a {type(whole).__name__}: expected a tuple of tensors, as in (x,).")
        shapes = [tuple(tensor.shape) for tensor in whole]
        if not all(shapes) or len({shape[0] for shape in shapes}) > 1 or not shapes[0][0]:
            raise InputError(
                f"Task.batch returned tensors of shapes {shapes}: expected the same number of rows, 1 or more."
            )
        return tuple(self.fabric.to_device(own_rows(tensor, self.fabric)) for tensor in whole)

    def _taken(self, settled: Sequence[Settled]) -> None:
        """Add up the losses of steps that are done for good."""
        for one in settled:
            if self.settings.skip is not None:
                self._judged(one)
            for name, value in one.found.items():
                self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
            self.summed += 1

    def _judged(self, settled: Settled) -> None:
        """Count steps that were skipped; end where the loss is not finite, or too many were skipped one after the other."""
        found, batch = settled.found, settled.batch
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if bool(found["skipped"]) else 0
        if not self.skipped_in_a_row:
            return
        loss, step, model = float(found["loss"]), settled.step + 1, self.task.model
        if not math.isfinite(loss) and self.fabric.world_size == 1:
            raise TrainingDiverged(
                f"training diverged: the loss was {loss} in step {step}; {first_non_finite(model, *batch)}; {self.left}.",
                step,
            )
        if self.settings.skip is not None and self.skipped_in_a_row > self.settings.skip:
            broken = [
                name
                for name, p in model.named_parameters()
                if p.grad is not None and not bool(p.grad.norm().isfinite())
            ]
            where = (
                f"in {len(broken)} parameters, going backward first in {broken[-1]}" if broken else "in another process"
            )
            raise TrainingDiverged(
                f"training diverged: {self.skipped_in_a_row} gradients in a row were not finite, the last one in step {step}, {where}; "
                f"{self.left}.",
                step,
            )

    def _shared_clock(self) -> tuple[float, ...]:
        """The time by which all processes judge the deadline: that of the first, asked for now and then."""
        if self.fabric.world_size == 1:
            return (time.time(),)
        return (self.fabric.broadcast(time.time()),) if self.done % self.settings.log_every == 0 else ()

    def _logged(self) -> dict[str, float]:
        """Log the mean losses since the last row."""
        since = self.summed
        means = {name: self.fabric.all_reduce(value / since, reduce_op="mean") for name, value in self.sums.items()}
        self.sums, self.summed = {}, 0
        values = {name: float(value) for name, value in means.items()}
        if not math.isfinite(values["loss"]):
            when = f"in step {self.done}" if self.exact else f"in step {self.done} or up to {since - 1} before"
            raise TrainingDiverged(
                f"training diverged: the loss was {values['loss']} {when}; {self.left}. Lower the learning rate, clip gradients, or "
                "add a penalty.",
                self.done,
            )
        self.log.write("train", self.done, {**values, "lr": self.settings.rate(self.done - 1)})
        return values

    def _evaluated(self) -> dict[str, float]:
        """Log what the task measures, and keep the weights with the smallest test loss."""
        if self.task.evaluate is None or not self.main:
            return {}
        averaged = self.average.in_place() if self.average else contextlib.nullcontext()
        with evaluating(self.task.model), torch.no_grad(), torch.random.fork_rng(), averaged:
            torch.manual_seed(seed_of(self.settings.seed, self.done, "evaluation"))
            found = _numbers(self.task.evaluate(self.task.model, self.done))
            if found.get("test_loss", math.inf) < self.best_loss:
                self.best_step, self.best_loss = self.done, found["test_loss"]
                save_state(self.folder / "best.safetensors", self.weights(), {"step": self.done})
        self.log.write("evaluation", self.done, found)
        return found

    # ---- the state

    def save(self) -> bool:
        """Begin to write the state as it is now; False if the weights are not finite: the state before them is worth more."""
        if not bool(torch.stack([p.isfinite().all() for p in self.task.model.parameters()]).all()):
            return False
        if not self.main:
            return True
        tensors, plain = split_optimizer(self.optimizer)
        tensors |= self.weights() | {f"sums.{name}": value for name, value in self.sums.items()}
        if self.average is not None:
            tensors |= {f"average.{name}": value for name, value in self.average.weights.items()}
        for name, layer in self._held().items():
            if layer._certificate is not None:  # the weights that act depend on it
                tensors |= {f"certificate.{name}.{part}": value for part, value in layer._certificate.tensors().items()}
        facts = {
            "step": self.done,
            "settings": self.settings.defining(),
            "trainable": self._trainable(),
            "optimizer": plain,
            "scaler": self.fabric.strategy.precision.state_dict(),
            "best_step": self.best_step,
            "best_loss": self.best_loss,
            "guards": {name: walk.guard_state() for name, walk in self._walks().items()},
            "penalties": [{"kind": type(p).__name__, **p.state()} for p in self.task.penalties],
            "log": self.log.sizes,
            "sums": list(self.sums),
            "summed": self.summed,
            "skipped_in_a_row": self.skipped_in_a_row,
        }
        copies = {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
        self.writer.begin(lambda: self._write(copies, facts))
        return True

    def _write(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self._keep_previous()
        save_state(self.last, tensors, facts)

    def _keep_previous(self) -> None:
        """The state before stays, as `previous.safetensors`, where the file system has links: the next one may be damaged."""
        previous, aside = (
            self.last.with_name("previous.safetensors"),
            self.folder / f".previous.safetensors.{os.getpid()}",
        )
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
            os.link(self.last, aside)
            os.replace(aside, previous)

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers of the model, as a state names them."""
        return {f"model.{name}": value for name, value in self.task.model.state_dict().items()}

    def _restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self.done, self.best_step, self.best_loss = facts["step"], facts["best_step"], facts["best_loss"]
        restore_optimizer(self.optimizer, tensors, facts["optimizer"])
        if set(facts["scaler"]) != set(self.fabric.strategy.precision.state_dict()):
            raise CheckpointError("its loss was scaled in another way")
        if facts["scaler"]:
            self.fabric.strategy.precision.load_state_dict(facts["scaler"])
        for name in facts["sums"]:
            require_kind(tensors[f"sums.{name}"], torch.zeros((), device="cpu"), f"sums.{name}")
        self.sums = {name: tensors[f"sums.{name}"].to(self.fabric.device) for name in facts["sums"]}
        self.summed = facts["summed"]
        self.skipped_in_a_row = facts.get("skipped_in_a_row", 0)  # states of before have none
        if not isinstance(self.skipped_in_a_row, int) or self.skipped_in_a_row < 0:
            raise CheckpointError(f"'skipped_in_a_row' is {self.skipped_in_a_row!r:.40}")
        if self.average is not None:
            for name, value in self.average.weights.items():
                require_kind(tensors[f"average.{name}"], value, f"average.{name}")
                value.copy_(tensors[f"average.{name}"])
        for name, layer in self._held().items():
            if f"certificate.{name}.weight" in tensors:  # states of before have none, and layers are certified anew
                parts = ("weight", "bound", "slope")
                restore_certificate(layer, {part: tensors[f"certificate.{name}.{part}"] for part in parts})
        for name, walk in self._walks().items():
            walk.load_guard_state(facts["guards"].get(name, {}))
        for penalty, state in zip(self.task.penalties, facts["penalties"], strict=True):
            penalty.load_state(state)

    def _open(self) -> None:
        # What a process that was killed while writing has left.
        for name in ("last", "previous", "best") if self.main else ():
            for path in self.folder.glob(f".{name}.safetensors.*"):
                path.unlink(missing_ok=True)
        other = [name for name, value in self.task.model.state_dict().items() if not isinstance(value, Tensor)]
        if other:
            raise InputError(f"{other[0]!r} in the state of the model is no tensor, and could not be saved.")

    def _trainable(self) -> list[str]:
        return [name for name, p in self.task.model.named_parameters() if p.requires_grad]

    def _same_work(self) -> bool:
        """Whether steps do the same work each time: what is drawn on the host would be frozen in a graph."""
        model, size = self.task.model, math.prod(self.task.batch(Draw(0, 0))[0].shape[1:])
        roulette = any(
            (isinstance(part.estimator, Roulette) and not part.estimator.shared)
            or (part.estimator is None and size > 64)
            for part in model.modules()
            if isinstance(part, Residual)
        )
        replayed = [part for part in model.modules() if isinstance(part, Reversible)] + [model] * bool(
            self.task.penalties
        )
        if self.settings.capture and (roulette or any(map(draws_numbers, replayed))):
            raise InputError(
                "capture=True: a graph would repeat what is drawn on the host, the terms of Russian roulette or the masks of dropout "
                "that a second evaluation needs. Use capture=None, or for roulette an estimator whose number of terms all blocks share, "
                "Roulette(..., shared=True)."
            )
        return not roulette and not any(map(draws_numbers, replayed))

    def _require_same(self, facts: dict[str, Any]) -> None:
        require_facts(facts, self.last)
        difference = self.settings.difference(facts["settings"])
        kinds = [state.get("kind") for state in facts["penalties"]], [type(p).__name__ for p in self.task.penalties]
        if not difference and kinds[0] != kinds[1]:
            difference = f"penalties {kinds[0]} there, {kinds[1]} now"
        if difference:
            raise CheckpointError(
                f"{self.folder} holds a run with other settings ({difference}). Choose another folder, or delete that one."
            )
        if facts["step"] > self.settings.steps:
            raise CheckpointError(
                f"{self.folder} holds a run of {facts['step']} steps, more than the {self.settings.steps} asked for. "
                "Choose another folder, or delete that one."
            )

    def _require_trainable(self, before: list[str]) -> None:
        if before != self._trainable():
            changed = sorted(set(before) ^ set(self._trainable())) or ["their order"]
            raise CheckpointError(
                f"{self.folder} holds a run in which the parameters that are trained differ ({changed[0]}). Choose another folder."
            )

    def _require_dtype(self, objective: Objective) -> None:
        wanted = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
        dtype = wanted.get(self.settings.precision, torch.float32)
        other = next((p.dtype for p in objective.parameters() if p.is_floating_point() and p.dtype != dtype), None)
        if other is not None:
            raise InputError(
                f"precision={self.settings.precision!r} trains weights in {dtype_name(dtype)}, but the model has some in "
                f"{dtype_name(other)}. Convert it first, as in model.to({dtype})."
            )

    def _share_weights(self, objective: Objective) -> None:
        """All processes begin with the weights of the first, before ActNorms look at activations."""
        if self.fabric.world_size > 1:
            for value in objective.state_dict().values():
                value.copy_(self.fabric.broadcast(value))

    def _held(self) -> dict[str, HeldLinear | HeldConv2d]:
        held = set(held_layers(self.task.model))
        return {name: part for name, part in self.task.model.named_modules() if part in held}  # type: ignore[misc]

    def _walks(self) -> dict[str, Reversible]:
        return {name: part for name, part in self.task.model.named_modules() if isinstance(part, Reversible)}

    def _start_actnorms(self, objective: Objective) -> None:
        """ActNorms start from the first batch, the rows of all processes together."""
        if all(part.ready for part in objective.modules() if isinstance(part, ActNorm)):
            return
        torch.manual_seed(seed_of(self.settings.seed, 0, "start"))
        states = [penalty.state() for penalty in self.task.penalties]
        batch = Handed(self.batch(0))
        norms = [part for part in batch_norms(objective) if not isinstance(part, ActNorm)]
        with frozen_statistics(norms), shared_statistics(lambda value: self.fabric.all_reduce(value, reduce_op="sum")):
            objective(0, batch)
        for penalty, state in zip(self.task.penalties, states, strict=True):
            penalty.load_state(state)


@torch.no_grad()
def first_non_finite(model: torch.nn.Module, x: torch.Tensor, *others: torch.Tensor) -> str:
    """In words, the first block of a flow, or of a model with a trunk, that leaves numbers that are not finite: on the way from x, then on
    the way back from those other tensors of the batch that have the shape of latents.
    """
    bijection = getattr(model, "bijection", getattr(model, "trunk", model))
    if not isinstance(bijection, Bijection):
        return f"the model, a {type(model).__name__}, has no blocks to look into"
    state = x
    for name, part in bijection.parts():
        state, log_det = part.forward_and_log_det(state)
        for what, values in (("output", state), ("log-determinant", log_det)):
            if not bool(values.isfinite().all()):
                return f"the first {what} that is not finite is that of block {name} ({kind_of(part)})"
    for z in others:
        if z.shape != state.shape or z.dtype != state.dtype:
            continue
        for name, part in reversed(bijection.parts()):
            try:
                z = part.inverse(z)
            except BilipError as error:
                return f"on the way back from latents block {name} ({kind_of(part)}) says: {error}"
            if not bool(z.isfinite().all()):
                return f"on the way back from latents the first output that is not finite is that of block {name} ({kind_of(part)})"
    return "every block is finite on this batch: what the loss makes of it is not"


def _numbers(found: object) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in found.items()}  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"Task.evaluate returned {found!r:.60}: expected numbers by name, as in {{'test_loss': 3.5}}."
        ) from error


def make_optimizer(objective: Objective, settings: Settings, captured: bool) -> torch.optim.Optimizer:
    """Adam, fused, or AdamW where weights decay; or Adamax."""
    parameters = [p for p in objective.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("the model has no parameter that requires a gradient: there is nothing to train.")
    lr = torch.tensor(settings.lr, dtype=torch.float32, device=parameters[0].device) if captured else settings.lr
    options: dict[str, Any] = {"lr": lr, "betas": settings.betas, "weight_decay": settings.weight_decay}
    if settings.optimizer == "adamax":
        return torch.optim.Adamax(parameters, foreach=True, capturable=captured, **options)
    kind = torch.optim.AdamW if settings.weight_decay else torch.optim.Adam
    fused = settings.precision != "16-mixed"  # fused, it would unscale by itself, and could not be clipped
    return kind(parameters, fused=fused, capturable=captured, **options)


def own_rows(batch: Tensor, fabric: Any) -> Tensor:
    """This process's share of a batch: every n-th row."""
    if len(batch) % fabric.world_size:
        raise InputError(
            f"a batch of {len(batch)} rows cannot be shared equally by {fabric.world_size} processes: the mean of their losses would not "
            "be that of the batch. Choose another batch size."
        )
    return batch[fabric.global_rank :: fabric.world_size]
