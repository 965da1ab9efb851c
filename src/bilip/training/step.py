"""One training step, eager or as a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from bilip.errors import InputError
from bilip.reversible import Reversible
from bilip.training.average import Average
from bilip.training.settings import Settings
from bilip.training.task import Objective

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

    The first steps of a kind run eagerly, which allocates what the libraries need. Between gradients and update the drift flags of
    `Reversible`s are read; if one is set, the gradients are computed again without the graph, which repairs.

    Args:
        step: The eager step. Its optimizer has to be capturable.
        variant: From the number of a step to what decides the work it does.
        reseed: Seeds torch's generators for a step.
    """

    def __init__(self, step: Step, variant: Callable[[int], tuple[bool, ...]], reseed: Callable[[int], object]) -> None:
        self.step, self.variant, self.reseed = step, variant, reseed
        self.calls: dict[object, int] = {}
        self.graphs: dict[object, tuple[torch.cuda.CUDAGraph, Batch, dict[str, Tensor]]] = {}
        self.finish = torch.cuda.CUDAGraph()
        self.side = torch.cuda.Stream()
        self.reruns = 0
        self.state: tuple = ()
        self.failed = self.finished = False
        self.watches = [
            module._watch
            for module in step.objective.modules()
            if isinstance(module, Reversible) and module._watch is not None
        ]
        self.grads = {p: torch.zeros_like(p) for p in step.objective.parameters() if p.requires_grad}

    def __call__(self, step: int, batch: Batch) -> Mapping[str, Tensor]:
        """Train on a batch; its losses, valid until the next call."""
        for parameter, grad in self.grads.items():  # one storage, which graphs and eager steps share
            parameter.grad = grad
        state = tuple((tuple(watch.anchors), bool(watch.rest)) for watch in self.watches)
        if state != self.state:  # new anchors, or a rest, need new graphs
            self.graphs.clear()
            self.calls.clear()
            self.state = state
        key = (self.variant(step), *((tensor.shape, tensor.dtype) for tensor in batch))
        self.calls[key] = self.calls.get(key, 0) + 1
        if self.calls[key] <= WARMUP:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                found = self._gradients(step, batch)
                self.step.update()
            torch.cuda.current_stream().wait_stream(self.side)
            return found
        if key not in self.graphs and not self._capture(key, step, batch):
            return self.step(step, batch)
        graph, inputs, found = self.graphs[key]
        for static, tensor in zip(inputs, batch, strict=True):
            static.copy_(tensor)
        flags = [watch.flag for watch in self.watches if watch.flag is not None]
        for flag in flags:
            flag.zero_()
        graph.replay()
        if flags and float(torch.stack(flags).amax()) > 1:
            self.reruns += 1
            self.reseed(step)
            found = self._gradients(step, batch)
        self.finish.replay()
        return found

    def _gradients(self, step: int, batch: Batch) -> dict[str, Tensor]:
        self.step.optimizer.zero_grad(set_to_none=False)
        return self.step.gradients(step, batch)

    def _capture(self, key: object, step: int, batch: Batch) -> bool:
        """Capture this kind of step; False where it cannot be, and steps stay eager from then on."""
        if self.failed:
            return False
        try:
            self._record(key, step, batch)
        except RuntimeError as error:
            if self.step.settings.capture:
                raise InputError(
                    f"capture=True: this step cannot run as a CUDA graph ({error}). Use capture=None."
                ) from error
            torch.cuda.synchronize()
            self.failed = True
            warnings.warn(f"this step cannot run as a CUDA graph and stays eager: {error}", stacklevel=2)
        return not self.failed

    def _record(self, key: object, step: int, batch: Batch) -> None:
        for watch in self.watches:
            if watch.flag is None:
                watch.flag = torch.zeros((), dtype=torch.float64, device=batch[0].device)
        inputs = tuple(tensor.clone() for tensor in batch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = self._gradients(step, inputs)
        self.graphs[key] = (graph, inputs, found)
        if not self.finished:
            with torch.cuda.graph(self.finish):
                self.step.update()
            self.finished = True
