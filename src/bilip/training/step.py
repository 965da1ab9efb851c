"""One training step, eager or as a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bilip.errors import InputError
from bilip.regularizers import Penalty
from bilip.reversible import Reversible
from bilip.reversible.guard import Watch
from bilip.training.average import Average
from bilip.training.settings import Settings
from bilip.training.task import Objective, Task

__all__ = ["CapturedStep", "Step"]

Batch = tuple[Tensor, ...]
WARMUP = 3


class Step:
    """Gradients, then the update.

    Args:
        fabric: Lightning's Fabric, which knows devices and precision.
        objective: The wrapped `Objective`.
        optimizer: The wrapped optimizer.
        settings: The settings.
        average: The average of the weights that follows each update, if there is one.
    """

    def __init__(
        self, fabric, objective: nn.Module, optimizer, settings: Settings, average: Average | None = None
    ) -> None:
        self.fabric, self.objective, self.optimizer = fabric, objective, optimizer
        self.inner: Objective = next(part for part in objective.modules() if isinstance(part, Objective))
        self.settings, self.average = settings, average

    def __call__(self, step: int, batch: Batch) -> Mapping[str, Tensor]:
        """Train on a batch; its losses."""
        self.optimizer.zero_grad()
        found = self.gradients(step, batch)
        self.update()
        return found

    def gradients(self, step: int, batch: Batch) -> dict[str, Tensor]:
        """Add the gradients of a batch, in as many parts as are to be accumulated."""
        count, total = len(batch[0]), {}
        parts = list(zip(*(tensor.chunk(self.settings.accumulate) for tensor in batch), strict=True))
        for k, part in enumerate(parts):
            share = len(part[0]) / count
            with self.fabric.no_backward_sync(self.objective, enabled=k < len(parts) - 1):
                self.inner.batch = part
                found = self.objective(step)
                self.fabric.backward(found["loss"] * share if len(parts) > 1 else found["loss"])
            for name, value in found.items():
                total[name] = total.get(name, 0) + value.detach() * share
        return total

    def update(self) -> None:
        """Clip, step, average."""
        if self.settings.clip is not None:
            self.fabric.clip_gradients(
                self.objective, self.optimizer, max_norm=self.settings.clip, error_if_nonfinite=False
            )
        self.optimizer.step()
        if self.average is not None:
            self.average.update()


class CapturedStep:
    """The same step replayed as CUDA graphs: one for the gradients of each kind of step, one for the update.

    The first steps of a kind run eagerly, which allocates what the libraries need. Between gradients and update the flags of
    `Reversible`s and penalties are read; if one is raised, the gradients are computed again without the graph, which repairs. So are
    those of every step in which a guard is to make a spot check.

    Args:
        step: The eager step. Its optimizer has to be capturable.
        task: Decides which steps do the same work.
        reseed: Seeds torch's generators for a step.
    """

    def __init__(self, step: Step, task: Task, reseed: Callable[[int], object]) -> None:
        self.step, self.task, self.reseed = step, task, reseed
        self.calls: dict[object, int] = {}
        self.graphs: dict[object, Recorded] = {}
        self.finish: torch.cuda.CUDAGraph | None = None
        self.side = torch.cuda.Stream()
        self.anchors: list = []
        self.failed, self.replays, self.reruns = False, 0, 0
        self.grads = {p: torch.zeros_like(p) for p in step.objective.parameters() if p.requires_grad}

    def __call__(self, step: int, batch: Batch) -> Mapping[str, Tensor]:
        """Train on a batch; its losses, valid until the next call."""
        for parameter, grad in self.grads.items():  # one storage, which graphs and eager steps share
            parameter.grad = grad
        watches = self._watches()
        anchors = [list(watch.anchors) for watch in watches]
        if anchors != self.anchors:  # other activations are stored: the old graphs, and their memory, are done with
            self.graphs.clear()
            self.calls.clear()
            self.anchors = anchors
        shapes = [(tensor.shape, tensor.dtype) for tensor in batch]
        key = (self.task.variant(step), *shapes, *(watch.rest > 0 for watch in watches))
        self.calls[key] = self.calls.get(key, 0) + 1
        if self.calls[key] <= WARMUP:
            return self._eagerly(step, batch)
        if key not in self.graphs and not self._capture(key, step, batch):
            return self.step(step, batch)
        recorded = self.graphs[key]
        if any(watch.spot_check_within(count["steps"]) for watch, count in recorded.counts if isinstance(watch, Watch)):
            return self._eagerly(step, batch)
        found = recorded.replay(batch)
        self.replays += 1
        if recorded.flags and float(torch.stack(recorded.flags).amax()) > 1:
            self.reruns += 1
            self.reseed(step)
            found = self._gradients(step, batch)
        else:
            recorded.count()
        recorded.finish.replay()
        return found

    def _watches(self) -> list[Watch]:
        walks = [part for part in self.step.objective.modules() if isinstance(part, Reversible)]
        walks += [walk for penalty in self.task.penalties for walk in penalty.walks()]
        return [walk._watch for walk in walks if walk._watch is not None]

    def _eagerly(self, step: int, batch: Batch) -> dict[str, Tensor]:
        """On a stream of its own, as graphs ask of the steps before them."""
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            found = self._gradients(step, batch)
            self.step.update()
        torch.cuda.current_stream().wait_stream(self.side)
        return found

    def _gradients(self, step: int, batch: Batch) -> dict[str, Tensor]:
        self.step.optimizer.zero_grad(set_to_none=False)
        return self.step.gradients(step, batch)

    def _capture(self, key: object, step: int, batch: Batch) -> bool:
        """Capture this kind of step; False where it cannot be, and steps stay eager from then on."""
        if self.failed:
            return False
        try:
            self.graphs[key] = self._record(step, batch)
        except RuntimeError as error:
            if self.step.settings.capture:
                raise InputError(
                    f"capture=True: this step cannot run as a CUDA graph ({error}). Use capture=None."
                ) from error
            torch.cuda.synchronize()
            self.failed = True
            warnings.warn(f"this step cannot run as a CUDA graph and stays eager: {error}", stacklevel=2)
        return not self.failed

    def _record(self, step: int, batch: Batch) -> Recorded:
        counted: list[Watch | Penalty] = [*self._watches(), *self.task.penalties]
        flags = [part.flag.on(batch[0].device) for part in counted]
        inputs = tuple(tensor.clone() for tensor in batch)
        before = [counts_of(part) for part in counted]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                found = self._gradients(step, inputs)
            added = [
                {name: value - old[name] for name, value in counts_of(part).items()}
                for part, old in zip(counted, before, strict=True)
            ]
        finally:
            for part, old in zip(counted, before, strict=True):  # recording is no step
                vars(part).update(old)
        if self.finish is None:
            finish = torch.cuda.CUDAGraph()
            with torch.cuda.graph(finish):
                self.step.update()
            self.finish = finish  # one for all kinds of steps
        return Recorded(graph, self.finish, inputs, found, flags, list(zip(counted, added, strict=True)))


@dataclass(frozen=True)
class Recorded:
    """A graph of the gradients of one kind of step.

    Attributes:
        graph: The graph.
        finish: That of the update.
        inputs: The tensors it reads the batch from.
        found: The tensors it leaves the losses in.
        flags: Those it may raise.
        counts: What each replay adds to the counts of guards and penalties.
    """

    graph: torch.cuda.CUDAGraph
    finish: torch.cuda.CUDAGraph
    inputs: Batch
    found: dict[str, Tensor]
    flags: list[Tensor]
    counts: list[tuple[Watch | Penalty, dict[str, int]]]

    def replay(self, batch: Batch) -> dict[str, Tensor]:
        """Gradients of a batch; its losses."""
        for static, tensor in zip(self.inputs, batch, strict=True):
            static.copy_(tensor)
        for flag in self.flags:
            flag.zero_()
        self.graph.replay()
        return self.found

    def count(self) -> None:
        """Take note of a replay."""
        for part, added in self.counts:
            vars(part).update({name: max(0, getattr(part, name) + more) for name, more in added.items()})


def counts_of(part: Watch | Penalty) -> dict[str, int]:
    """What code counts on the host, which a replay does not run."""
    names = ("steps", "repaired", "rest") if isinstance(part, Watch) else ("seen",)
    return {name: getattr(part, name) for name in names}
