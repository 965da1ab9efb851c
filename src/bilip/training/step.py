"""One training step, eager or as a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bilip._capture import Flag, noting
from bilip.blocks import Residual, Roulette
from bilip.blocks.log_det import one_draw
from bilip.errors import InputError
from bilip.nets.spectral import Certificate, HeldConv2d, HeldLinear, certify_anew, held_layers
from bilip.reversible import Reversible
from bilip.reversible.guard import Watch
from bilip.training.average import Average
from bilip.training.settings import Settings
from bilip.training.task import Objective, Task

__all__ = ["CapturedStep", "Step"]

Batch = tuple[Tensor, ...]
WARMUP = 3
RARE = 0.01  # numbers of terms that are drawn less often are not worth a graph


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
        parts = [part.estimator for part in objective.modules() if isinstance(part, Residual)]
        self.shared = list(dict.fromkeys(part for part in parts if isinstance(part, Roulette) and part.shared))

    def draw(self) -> dict[Roulette, int]:
        """How many further terms the log-determinants of this step have, where all blocks share the number."""
        return {estimator: estimator.law.draw() for estimator in self.shared}

    def __call__(self, step: int, batch: Batch) -> Mapping[str, Tensor]:
        """Train on a batch; its losses."""
        self.optimizer.zero_grad()
        with one_draw(self.draw()):
            found = self.gradients(step, batch)
        self.look(found, (p.grad for p in self.objective.parameters()))
        if not self.is_skipped(found):
            self.update()
        return found

    def look(self, found: dict[str, Tensor], grads: Iterable[Tensor | None]) -> None:
        """Where gradients are looked at, note `skipped`: 1 where the loss or one of them is not finite, else 0."""
        if self.settings.skip is None:
            return
        dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads if grad is not None]
        sizes = torch.stack([found["loss"].detach().float(), *(size.float() for size in torch._foreach_norm(dense, 1))])
        found["skipped"] = (~torch.isfinite(sizes).all()).to(torch.float32)

    def is_skipped(self, found: Mapping[str, Tensor]) -> bool:
        """Whether a step changes nothing; read from the device where gradients are looked at."""
        return self.settings.skip is not None and bool(found["skipped"])

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

    Where the blocks of a residual flow share the number of terms of their log-determinants (`Roulette(shared=True)`), it is drawn before
    the step, on the host: each number has a graph, but for those that are rare, which run eagerly. These graphs use the same
    memory. Norms of held layers are certified outside of the graphs, where weights have left their certificates; inside,
    the bound for a changed weight holds them.

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
        walks = (part for part in step.objective.modules() if isinstance(part, Reversible))
        self.flags = [walk._flag for walk in walks]  # others are noted when they are met
        self.anchors: list = []
        self.failed, self.replays, self.reruns = False, 0, 0
        self.grads = {p: torch.zeros_like(p) for p in step.objective.parameters() if p.requires_grad}
        self.held = [layer for layer in held_layers(step.objective) if layer.weight.requires_grad]
        self.certificates: dict[HeldLinear | HeldConv2d, Certificate] = {}
        self.pool = torch.cuda.graph_pool_handle() if step.shared else None

    def __call__(self, step: int, batch: Batch) -> Mapping[str, Tensor]:
        """Train on a batch; its losses, valid until the next call."""
        drawn = self.step.draw()
        with one_draw(drawn):
            return self._call(step, batch, drawn)

    def _call(self, step: int, batch: Batch, drawn: Mapping[Roulette, int]) -> Mapping[str, Tensor]:
        self._certify()
        for parameter, grad in self.grads.items():  # one storage, which graphs and eager steps share
            parameter.grad = grad
        watches = [flag.owner for flag in self.flags if isinstance(flag.owner, Watch)]
        anchors = [list(watch.anchors) for watch in watches]
        if anchors != self.anchors:  # other activations are stored: the old graphs, and their memory, are done with
            self.graphs.clear()
            self.calls.clear()
            self.anchors = anchors
        shapes = [(tensor.shape, tensor.dtype) for tensor in batch]
        kind = (self.task.variant(step), *shapes, *(watch.rest > 0 for watch in watches))
        self.calls[kind] = self.calls.get(kind, 0) + 1
        rare = any(estimator.law.probability(further) < RARE for estimator, further in drawn.items())
        if self.calls[kind] <= WARMUP or rare:
            return self._eagerly(step, batch)
        key = (*kind, *drawn.items())  # other numbers of terms use the same libraries: they need no steps before them
        if key not in self.graphs and not self._capture(key, step, batch):
            return self.step(step, batch)
        recorded = self.graphs[key]
        if recorded.spot_check_is_due():
            return self._eagerly(step, batch)
        found = recorded.replay(batch)
        self.replays += 1
        if recorded.raised():
            self.reruns += 1
            self.reseed(step)
            self.step.draw()  # the same numbers again, so that what is drawn after them is the same too
            found = self._gradients(step, batch)
        else:
            recorded.count()
        if not self.step.is_skipped(found):
            recorded.finish.replay()
        return found

    def _certify(self) -> None:
        """Certify the weights that have left their certificates, in the memory that graphs read."""
        for layer in self.held:
            mine, now = self.certificates.get(layer), layer._certificate
            if mine is not None and now is not mine:
                if now is not None and now.is_about(mine.weight):
                    mine.renew(now)  # somebody else has certified the layer meanwhile
                layer._certificate = mine
        certify_anew(self.held, in_place=True)
        now = {layer: layer._certificate for layer in self.held}
        if any(now[layer] is not mine for layer, mine in self.certificates.items()):
            self.graphs.clear()  # of weights in another place or dtype
        self.certificates = now  # type: ignore[assignment]

    def _eagerly(self, step: int, batch: Batch) -> dict[str, Tensor]:
        """On a stream of its own, as graphs ask of the steps before them."""
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            found = self._gradients(step, batch)
            if not self.step.is_skipped(found):
                self.step.update()
        torch.cuda.current_stream().wait_stream(self.side)
        return found

    def _gradients(self, step: int, batch: Batch) -> dict[str, Tensor]:
        for parameter in self.step.objective.parameters():
            parameter.grad = None  # the first gradient of each is taken over as it is, not added to zeros
        with noting(self.flags):
            found = self.step.gradients(step, batch)
        new = [(static, p.grad) for p, static in self.grads.items() if p.grad is not None]
        if new:
            grads = [grad.to_dense() if grad.is_sparse else grad for _, grad in new]
            torch._foreach_copy_([static for static, _ in new], grads)
        for parameter, static in self.grads.items():
            if parameter.grad is None:
                static.zero_()
            parameter.grad = static
        self.step.look(found, self.grads.values())
        return found

    def _capture(self, key: object, step: int, batch: Batch) -> bool:
        """Capture this kind of step; False where it cannot be, and steps stay eager from then on."""
        if self.failed:
            return False
        stream = torch.cuda.current_stream()
        try:
            self.graphs[key] = self._record(step, batch)
        except RuntimeError as error:
            cause = error.__context__ or error  # a graph that was broken off says nothing of the reason
            torch.cuda.set_stream(stream)
            if self.step.settings.capture:
                raise InputError(
                    f"capture=True: this step cannot run as a CUDA graph ({cause}). Use capture=None."
                ) from error
            torch.cuda.synchronize()
            self.failed = True
            warnings.warn(f"this step cannot run as a CUDA graph and stays eager: {cause}", stacklevel=2)
        return not self.failed

    def _record(self, step: int, batch: Batch) -> Recorded:
        known = list(self.flags)
        for flag in known:
            flag.on(batch[0].device)
        inputs = tuple(tensor.clone() for tensor in batch)
        before = [counts_of(flag) for flag in known]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                found = self._gradients(step, inputs)
            after = [counts_of(flag) for flag in known]
        finally:
            for flag, old in zip(known, before, strict=True):  # recording is no step
                vars(flag.owner or self).update(old)
        if self.finish is None:
            finish = torch.cuda.CUDAGraph()
            with torch.cuda.graph(finish):
                self.step.update()
            self.finish = finish  # one for all kinds of steps
        added = [{name: new[name] - old[name] for name in new} for new, old in zip(after, before, strict=True)]
        return Recorded(graph, self.finish, inputs, found, list(self.flags), added)


@dataclass(frozen=True)
class Recorded:
    """A graph of the gradients of one kind of step.

    Attributes:
        graph: The graph.
        finish: That of the update.
        inputs: The tensors it reads the batch from.
        found: The tensors it leaves the losses in.
        flags: Those it may raise.
        added: What each replay adds to the counts of their owners.
    """

    graph: torch.cuda.CUDAGraph
    finish: torch.cuda.CUDAGraph
    inputs: Batch
    found: dict[str, Tensor]
    flags: list[Flag]
    added: list[dict[str, int]]

    def spot_check_is_due(self) -> bool:
        """Whether a guard is to compare gradients in the next step."""
        pairs = ((flag.owner, added) for flag, added in zip(self.flags, self.added, strict=False))
        return any(isinstance(owner, Watch) and owner.spot_check_within(added["steps"]) for owner, added in pairs)

    def replay(self, batch: Batch) -> dict[str, Tensor]:
        """Gradients of a batch; its losses."""
        for static, tensor in zip(self.inputs, batch, strict=True):
            static.copy_(tensor)
        for flag in self.flags:
            flag.on(self.inputs[0].device).zero_()
        self.graph.replay()
        return self.found

    def raised(self) -> bool:
        """Whether one of the flags is."""
        values = [flag.on(self.inputs[0].device) for flag in self.flags]
        return bool(values) and float(torch.stack(values).amax()) > 1

    def count(self) -> None:
        """Take note of a replay."""
        for flag, added in zip(self.flags, self.added, strict=False):
            for name, more in added.items():
                setattr(flag.owner, name, max(0, getattr(flag.owner, name) + more))


def counts_of(flag: Flag) -> dict[str, int]:
    """What the owner of a flag counts on the host, which a replay does not do."""
    names = ("steps", "repaired", "rest") if isinstance(flag.owner, Watch) else ("seen",)
    return {} if flag.owner is None else {name: getattr(flag.owner, name) for name in names}
