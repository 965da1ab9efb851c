"""Training from outside: a run is launched on its devices, alone in its folder, with a bar, and can be stopped between steps."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from bilip._progress import bar
from bilip.errors import InputError, MissingExtra, Stopped
from bilip.reversible import Reversible
from bilip.training.run import Progress, Run, Trained
from bilip.training.settings import Settings
from bilip.training.task import Task

try:
    import fcntl
except ImportError:  # there is none on Windows
    fcntl = None

__all__ = ["Interrupts", "alone", "launch", "train"]


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
        show = progress or (stack.enter_context(_shown()) if run.main else lambda done, steps, latest: None)
        interrupts = stack.enter_context(Interrupts(deadline))
        try:
            with _advised(task, settings, lambda: f"in step {run.done + 1}; {run.left}"):
                run.go(show, interrupts.check)
        except (KeyboardInterrupt, Stopped):
            run.stop()
            raise
    return Trained(run.folder, run.done, run.best_step, run.best_loss, run.main)


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


def launch(settings: Settings) -> Any:
    """A launched Fabric. With several devices, the program is run once for each of them from the start.

    Example:
        >>> fabric = launch(Settings(steps=1, device="cpu"))
        >>> fabric.world_size, fabric.device
        (1, device(type='cpu'))
    """
    try:
        from lightning.fabric import Fabric
    except ImportError as error:
        raise MissingExtra("training needs Lightning Fabric: pip install 'bilip[train]'.") from error
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InputError("device='cuda': torch sees no CUDA device here. Use device='cpu'.")
    device = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and settings.devices > torch.cuda.device_count():
        raise InputError(f"devices={settings.devices}: torch sees {torch.cuda.device_count()} CUDA devices here.")
    several = settings.devices * settings.nodes > 1
    with warnings.catch_warnings(), _without_advice():
        warnings.filterwarnings("ignore", module="lightning")
        fabric = Fabric(
            accelerator=device,
            devices=settings.devices,
            num_nodes=settings.nodes,
            strategy="ddp" if several else "auto",
            precision=settings.precision,  # type: ignore[arg-type]
        )
        fabric.launch()
    return fabric


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Lightning would tell in every process that products could be rounded to TF32: of all things, not here."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))
    try:
        yield
    finally:
        logging.disable(before)


class Interrupts:
    """While it is open, the first Ctrl-C or SIGTERM waits until `check()`; a second Ctrl-C stops at once.

    Outside of the main thread, where Python delivers no signals, only the deadline counts.

    Args:
        deadline: In the seconds of `time.time()`; `None` for none.

    Example:
        >>> with Interrupts() as interrupts:
        ...     interrupts.check()
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.asked, self.ended, self.deadline = False, False, deadline

    def check(self, now: float | None = None) -> None:
        """Raise `KeyboardInterrupt` or `Stopped` if one was asked for, `Stopped` if the deadline is before `now`."""
        if self.asked:
            raise KeyboardInterrupt
        if self.ended:
            raise Stopped("stopped by SIGTERM; the same call goes on from here.")
        if self.deadline is not None and now is not None and now >= self.deadline:
            raise Stopped("the time is up; the same call goes on from here.")

    def __enter__(self) -> Interrupts:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._main:
            for number, before in self._before.items():
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self.ended = True
        elif self.asked:
            raise KeyboardInterrupt
        else:
            self.asked = True


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make a folder, and keep other runs out of it; where a file system has no locks, they are not kept out.

    The folder itself is locked, so that no file is left in it and a process that was killed holds nothing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, alone(Path(folder) / "run"):
        ...     pass
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot train in {folder} ({error.strerror}).") from error
    if fcntl is None:
        yield
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(held)
        raise InputError(
            f"another run, of this or another process, is training in {folder}. Wait until it ends, or choose another folder."
        ) from error
    except OSError:  # no locks here
        pass
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_UN)  # a forked child may have it open still
        os.close(held)


@contextlib.contextmanager
def _shown(title: str = "training") -> Iterator[Progress]:
    """A bar with the latest numbers, on standard error, if that is a terminal."""
    with bar(steps=True) as shown:
        task = shown.add_task(title)

        def show(done: int, steps: int, latest: Mapping[str, float]) -> None:
            numbers = " ".join(f"{name} {value:.4g}" for name, value in list(latest.items())[:3])
            shown.update(task, completed=done, total=steps, description=f"{title} {numbers}")

        yield show
