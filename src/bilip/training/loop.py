"""The loop: data, step, log, evaluation, checkpoint, until the last step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bilip.auditing.probes.blame import kind_of
from bilip.blocks import Bijection
from bilip.data import seed_of
from bilip.errors import InputError, Stopped, TrainingDiverged
from bilip.reversible import Reversible
from bilip.training.interrupt import Interrupts
from bilip.training.lock import alone
from bilip.training.machines import launch
from bilip.training.progress import shown
from bilip.training.run import Run, Trained
from bilip.training.settings import Settings
from bilip.training.state import save_state
from bilip.training.step import Settled
from bilip.training.task import Task

__all__ = ["Trained", "train"]

Progress = Callable[[int, int, Mapping[str, float]], None]


def train(
    task: Task,
    settings: Settings,
    folder: str | Path,
    *,
    fabric: Any = None,
    progress: Progress | None = None,
    deadline: float | None = None,
) -> Trained:
    """Train a model, or go on where an earlier run in the same folder was stopped.

    Every random number is a function of seed, step and purpose, so a run that was killed at any moment and resumed ends with the same
    weights and logs as one that was not: bit for bit on a CPU with the same number of threads. Ctrl-C, SIGTERM and
    the deadline save before they stop. States are written by a thread of their own while training goes on.

    Args:
        task: Model, data and loss. The model ends with the last weights (those of the average are in `last.safetensors`).
        settings: Optimizer, schedule, cadence, machines.
        folder: Where checkpoints and logs go.
        fabric: A launched Fabric, for several runs in one program; by default one is made from the settings.
        progress: Called as `progress(done, steps, latest)`; by default a bar in the terminal.
        deadline: When to save and stop, in the seconds of `time.time()`; `None` for never.

    Raises:
        Stopped: The deadline has passed, or SIGTERM asked to end; the state is saved.
        TrainingDiverged: A loss was not finite.
        torch.OutOfMemoryError: With what to do about it.
        CheckpointError: The folder holds a run of another model or with other settings.

    Example:
        >>> import tempfile
        >>> from bilip import Flow, models
        >>> from bilip.data import checkerboard
        >>> task = Task(
        ...     model=Flow(models.real_nvp(2, blocks=2)),
        ...     batch=lambda draw: (checkerboard(64, draw("data")),),
        ...     loss=lambda model, step, x: {"loss": -model.log_prob(x).mean()},
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     train(task, Settings(steps=5, device="cpu"), folder).steps
        5
    """
    with contextlib.ExitStack() as stack:
        fabric = launch(settings) if fabric is None else fabric
        if fabric.is_global_zero:
            stack.enter_context(alone(Path(folder)))
        with _advised(task, settings, lambda: "at the start"):
            run = Run(task, settings, Path(folder), fabric)
        stack.callback(run.log.close)
        stack.callback(run.writer.close)
        show = progress or (stack.enter_context(shown()) if run.main else lambda done, steps, latest: None)
        interrupts = stack.enter_context(Interrupts(deadline))
        try:
            with _advised(task, settings, lambda: f"in step {run.done + 1}; {run.left}"):
                _to_the_end(run, show, interrupts)
        except (KeyboardInterrupt, Stopped):
            if run.between_steps:
                _taken(run, run.step.settle())
                run.save()
            raise
    return Trained(run.folder, run.done, run.best_step, run.best_loss, run.main)


def _to_the_end(run: Run, progress: Progress, interrupts: Interrupts) -> None:
    settings, latest = run.settings, {}
    if not run.done and settings.evaluates(0):
        latest |= _evaluated(run)
    while run.done < settings.steps:
        step, run.between_steps = run.done, False
        run.begin(step)
        _taken(run, run.step.advance(step, run.batch(step)))
        run.done = step + 1
        logs, saves = (settings.due(every, run.done) for every in (settings.log_every, settings.save_every))
        if logs or saves or settings.evaluates(run.done) or run.done == settings.steps:
            _taken(run, run.step.settle())
        if logs or (run.exact and run.summed and not math.isfinite(float(run.sums["loss"]))):
            latest |= _logged(run)
        if settings.evaluates(run.done):
            latest |= _evaluated(run)
        if saves and not run.save() and run.done == settings.steps:
            raise TrainingDiverged(
                f"training diverged: the last step left weights that are not finite; {run.left}.", run.done
            )
        run.between_steps = True
        progress(run.done, settings.steps, latest)
        interrupts.check(*_shared_clock(run))
    run.writer.wait()
    run.fabric.barrier()


@contextlib.contextmanager
def _advised(task: Task, settings: Settings, when: Callable[[], str]) -> Iterator[None]:
    """Inside, an error for want of memory says what to do, in one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = str(error).partition(". ")[0].rstrip(".") or "no more can be had"
        stores = not any(isinstance(part, Reversible) for part in task.model.modules())
        wrap = "Wrap the bijection in bilip.Reversible, which keeps the activations of one block alone, or use"
        raise torch.OutOfMemoryError(
            f"training is out of memory {when()} ({said}). {wrap if stores else 'Use'} a smaller batch, or "
            f"Settings(accumulate={2 * settings.accumulate})."
        ) from error


def _taken(run: Run, settled: Sequence[Settled]) -> None:
    """Add up the losses of steps that are done for good."""
    for one in settled:
        if run.settings.skip is not None:
            _judged(run, one)
        for name, value in one.found.items():
            run.sums[name] = run.sums[name] + value if name in run.sums else value.clone()
        run.summed += 1


def _judged(run: Run, settled: Settled) -> None:
    """Count steps that were skipped; end where the loss is not finite, or too many were skipped one after the other."""
    found, batch = settled.found, settled.batch
    run.skipped_in_a_row = run.skipped_in_a_row + 1 if bool(found["skipped"]) else 0
    if not run.skipped_in_a_row:
        return
    loss, step, model = float(found["loss"]), settled.step + 1, run.task.model
    if not math.isfinite(loss) and run.fabric.world_size == 1:
        raise TrainingDiverged(
            f"training diverged: the loss was {loss} in step {step}; {first_non_finite(model, batch[0])}; {run.left}.",
            step,
        )
    if run.settings.skip is not None and run.skipped_in_a_row > run.settings.skip:
        broken = [
            name for name, p in model.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())
        ]
        where = f"in {len(broken)} parameters, going backward first in {broken[-1]}" if broken else "in another process"
        raise TrainingDiverged(
            f"training diverged: {run.skipped_in_a_row} gradients in a row were not finite, the last one in step {step}, {where}; "
            f"{run.left}.",
            step,
        )


@torch.no_grad()
def first_non_finite(model: torch.nn.Module, x: torch.Tensor) -> str:
    """In words, the first block of a flow, or of a model with a trunk, that leaves numbers that are not finite."""
    bijection = getattr(model, "bijection", getattr(model, "trunk", model))
    if not isinstance(bijection, Bijection):
        return f"the model, a {type(model).__name__}, has no blocks to look into"
    state = x
    for name, part in bijection.parts():
        state, log_det = part.forward_and_log_det(state)
        for what, values in (("output", state), ("log-determinant", log_det)):
            if not bool(values.isfinite().all()):
                return f"the first {what} that is not finite is that of block {name} ({kind_of(part)})"
    return "every block is finite: the sum over dimensions is not"


def _shared_clock(run: Run) -> tuple[float, ...]:
    """The time by which all processes judge the deadline: that of the first, asked for now and then."""
    if run.fabric.world_size == 1:
        return (time.time(),)
    return (run.fabric.broadcast(time.time()),) if run.done % run.settings.log_every == 0 else ()


def _logged(run: Run) -> dict[str, float]:
    """Log the mean losses since the last row."""
    since = run.summed
    means = {name: run.fabric.all_reduce(value / since, reduce_op="mean") for name, value in run.sums.items()}
    run.sums, run.summed = {}, 0
    values = {name: float(value) for name, value in means.items()}
    if not math.isfinite(values["loss"]):
        when = f"in step {run.done}" if run.exact else f"in step {run.done} or up to {since - 1} before"
        raise TrainingDiverged(
            f"training diverged: the loss was {values['loss']} {when}; {run.left}. Lower the learning rate, clip gradients, or "
            "add a penalty.",
            run.done,
        )
    run.log.write("train", run.done, {**values, "lr": run.settings.rate(run.done - 1)})
    return values


def _evaluated(run: Run) -> dict[str, float]:
    """Log what the task measures, and keep the weights with the smallest test loss."""
    if run.task.evaluate is None or not run.main:
        return {}
    model = run.task.model
    modes = {part: part.training for part in model.modules()}
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(),
            run.average.in_place() if run.average else contextlib.nullcontext(),
        ):
            torch.manual_seed(seed_of(run.settings.seed, run.done, "evaluation"))
            found = _numbers(run.task.evaluate(model.eval(), run.done))
            if found.get("test_loss", math.inf) < run.best_loss:
                run.best_step, run.best_loss = run.done, found["test_loss"]
                save_state(run.folder / "best.safetensors", run.weights(), {"step": run.done})
    finally:
        for part, mode in modes.items():
            part.training = mode
    run.log.write("evaluation", run.done, found)
    return found


def _numbers(found: object) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in found.items()}  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"Task.evaluate returned {found!r:.60}: expected numbers by name, as in {{'test_loss': 3.5}}."
        ) from error
