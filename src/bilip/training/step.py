"""One training step, eager or as a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bilip._torch import Flag, noting
from bilip.blocks import Residual, Roulette
from bilip.blocks.log_det import one_draw
from bilip.errors import InputError
from bilip.nets.replay import batch_norms
from bilip.nets.spectral import Certificate, HeldConv2d, HeldLinear, certify_anew, held_layers
from bilip.reversible import Reversible
from bilip.reversible.guard import Watch
from bilip.training.average import Average
from bilip.training.settings import Settings
from bilip.training.task import Handed, Task

__all__ = ["CapturedStep", "Settled", "Step"]

Batch = tuple[Tensor, ...]
WARMUP = 3
RARE = 0.01  # numbers of terms that are drawn less often are not worth a graph
CAREFUL = 16  # steps that wait for their flags after one was raised


@dataclass(frozen=True)
class Settled:
    """A step that is done for good: its number, what it was trained on, and its losses, valid until the next call."""

    step: int
    batch: Batch
    found: Mapping[str, Tensor]


class Step:
    """Gradients, then the update, and the average of the weights where there is one; objective and optimizer as Fabric wraps them."""

    def __init__(
        self, fabric, objective: nn.Module, optimizer, settings: Settings, average: Average | None = None
    ) -> None:
        self.fabric, self.objective, self.optimizer = fabric, objective, optimizer
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

    def advance(self, step: int, batch: Batch) -> list[Settled]:
        """Train on a batch; which steps are now done for good."""
        return [Settled(step, batch, self(step, batch))]

    def settle(self) -> list[Settled]:
        """Wait for what is under way."""
        return []

    def look(self, found: dict[str, Tensor], grads: Iterable[Tensor | None]) -> None:
        """Where gradients are looked at, note `skipped`: 1 where the loss or the norm of the gradient is not finite, else 0.

        A finite gradient whose square overflows counts too: clipping would make it zero, and Adam would never move these weights again.
        """
        if self.settings.skip is None:
            return
        dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads if grad is not None]
        loss = found["loss"].detach().float()
        sizes = torch.stack([torch.zeros_like(loss), *(size.float() for size in torch._foreach_norm(dense, 2))])
        found["skipped"] = (~torch.isfinite(torch.stack([loss, sizes.norm()])).all()).to(torch.float32)

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
                found = self.objective(step, Handed(part))
                self.fabric.backward(found["loss"] * share if len(parts) > 1 else found["loss"])
            for name, value in found.items():
                total[name] = total.get(name, 0) + value.detach() * share
        return total

    def can_hold(self) -> bool:
        """Whether a number on the device can keep the update from happening."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        fused = isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)) and all(g["fused"] for g in inner.param_groups)
        return fused and self.settings.skip is None and self.average is None

    def hold(self, held: Tensor) -> None:
        """From now on there is no update while this number on the device is 1: the way that fused optimizers leave out what overflowed."""
        getattr(self.optimizer, "optimizer", self.optimizer).found_inf = held

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

    The first steps of a kind run eagerly, which allocates what the libraries need. After the gradients the flags of
    `Reversible`s and penalties are looked at; if one is raised, the gradients are computed again without the graph, which repairs. So are
    those of every step in which a guard is to make a spot check.

    Where the optimizer can leave out an update on the device (fused Adam without an average), the host does not wait for the flags:
    an update with a raised flag, and every one after it, changes nothing, and the host reads the flags of a step while the next one
    runs. If one was raised, that step is repaired and the next one is run again, so the weights are those of steps that waited.

    Where the blocks of a residual flow share the number of terms of their log-determinants (`Roulette(shared=True)`), it is drawn before
    the step, on the host: each number has a graph, but for those that are rare, which run eagerly. These graphs use the same
    memory. Norms of held layers are certified outside of the graphs, where weights have left their certificates; inside,
    the bound for a changed weight holds them.

    Args:
        step: The eager step. Its optimizer has to be capturable.
        task: Decides which steps do the same work.
        begin: Sets the learning rate of a step, and seeds torch's generators for it.
    """

    def __init__(self, step: Step, task: Task, begin: Callable[[int], object]) -> None:
        self.step, self.task, self.begin = step, task, begin
        self.calls: dict[object, int] = {}
        self.graphs: dict[object, Recorded] = {}
        self.finish: torch.cuda.CUDAGraph | None = None
        self.side = torch.cuda.Stream()
        walks = (part for part in step.objective.modules() if isinstance(part, Reversible))
        self.flags = [walk.flag for walk in walks]  # others are noted when they are met
        self.anchors: list = []
        self.failed, self.replays, self.reruns = False, 0, 0
        self.subtracting: set[object] = set()  # variants of steps with calls behind a loss that subtracts
        self.grads = {p: torch.zeros_like(p) for p in step.objective.parameters() if p.requires_grad}
        self.held: Tensor | None = None  # 1 from a raised flag on, until the host has looked
        self.pending: Pending | None = None
        self.careful = 0
        if step.can_hold():
            self.held = torch.zeros((), device=next(iter(self.grads)).device)
            step.hold(self.held)
        self.layers = [layer for layer in held_layers(step.objective) if layer.weight.requires_grad]
        self.certificates: dict[HeldLinear | HeldConv2d, Certificate] = {}
        self.pool = torch.cuda.graph_pool_handle() if step.shared else None

    def advance(self, step: int, batch: Batch) -> list[Settled]:
        """Train on a batch; which steps are now done for good."""
        drawn = self.step.draw()
        with one_draw(drawn):
            return self._advance(step, batch, drawn)

    def _advance(self, step: int, batch: Batch, drawn: Mapping[Roulette, int]) -> list[Settled]:
        self._certify()
        for parameter, grad in self.grads.items():  # one storage, which graphs and eager steps share
            parameter.grad = grad
        watches = self._watches()
        anchors = [list(watch.anchors) for watch in watches]
        if anchors != self.anchors:  # other activations are stored: the old graphs, and their memory, are done with
            self.graphs.clear()
            self.calls.clear()
            self.anchors = anchors
        shapes = [(tensor.shape, tensor.dtype) for tensor in batch]
        variant = self.task.variant(step)
        resting = [(watch.rest > 0, watch.apart > 0 and variant in self.subtracting) for watch in watches]
        kind = (variant, *shapes, *resting)
        key = (*kind, *drawn.items())  # other numbers of terms use the same libraries: they need no steps before them
        recorded = self.graphs.get(key)
        if self.pending is not None and (recorded is None or recorded.spot_check_is_due()):
            before = self.settle()  # it may change everything that was asked above
            self.begin(step)
            return before + self.advance(step, batch)
        self.calls[kind] = self.calls.get(kind, 0) + 1
        rare = any(estimator.law.probability(further) < RARE for estimator, further in drawn.items())
        if self.calls[kind] <= WARMUP or rare:
            return [Settled(step, batch, self._eagerly(step, batch))]
        if recorded is None:
            if not self._capture(key, step, batch):
                return self.step.advance(step, batch)
            recorded = self.graphs[key]
        if recorded.spot_check_is_due():
            return [Settled(step, batch, self._eagerly(step, batch))]
        self.replays += 1
        if self.held is None or self.careful or not recorded.flags or self.layers or drawn:
            before = self.settle()
            return [*before, Settled(step, batch, self._waiting(recorded, step, batch))]
        running = Pending(step, batch, recorded, self.held)
        before, self.pending = self.pending, running
        if before is None:
            return []
        if not before.raised():
            return [Settled(before.step, before.batch, before.found)]
        self.replays -= 1  # it ran without an effect, and runs again
        self.pending = before
        running.undo()
        repaired = self.settle()
        self.begin(step)
        return repaired + self.advance(step, batch)

    def settle(self) -> list[Settled]:
        """Wait for what is under way, and repair it where it has to be."""
        last, self.pending = self.pending, None
        if last is None:
            return []
        found = last.found
        if last.raised():
            last.undo()
            self.begin(last.step)
            found = self._repaired(last.step, last.batch)
            last.recorded.finish.replay()
        return [Settled(last.step, last.batch, found)]

    def _waiting(self, recorded: Recorded, step: int, batch: Batch) -> Mapping[str, Tensor]:
        """A replay whose update waits until the host has looked at the flags."""
        self.careful = max(0, self.careful - 1)
        before = recorded.state()
        found = recorded.replay(batch)
        if recorded.raised():
            _restore(before)
            if self.held is not None:
                self.held.zero_()
            self.begin(step)
            self.step.draw()  # the same numbers again, so that what is drawn after them is the same too
            found = self._repaired(step, batch)
        else:
            recorded.count()
        if not self.step.is_skipped(found):
            recorded.finish.replay()
        return found

    def _repaired(self, step: int, batch: Batch) -> dict[str, Tensor]:
        self.reruns += 1
        self.careful = CAREFUL
        return self._gradients(step, batch)

    def _certify(self) -> None:
        """Certify the weights that have left their certificates, in the memory that graphs read."""
        for layer in self.layers:
            mine, now = self.certificates.get(layer), layer._certificate
            if mine is not None and now is not mine:
                if now is not None and now.is_like(mine.weight, mine.stride):
                    mine.renew(now)  # somebody else has certified the layer meanwhile
                layer._certificate = mine
        certify_anew(self.layers, in_place=True)
        now = {layer: layer._certificate for layer in self.layers}
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

    def _watches(self) -> list[Watch]:
        return [flag.owner for flag in self.flags if isinstance(flag.owner, Watch)]

    def _gradients(self, step: int, batch: Batch) -> dict[str, Tensor]:
        for parameter in self.step.objective.parameters():
            parameter.grad = None  # the first gradient of each is taken over as it is, not added to zeros
        held = sum(watch.held for watch in self._watches())
        with noting(self.flags):
            found = self.step.gradients(step, batch)
        if sum(watch.held for watch in self._watches()) > held:
            self.subtracting.add(self.task.variant(step))
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
            if self.step.settings.capture and isinstance(cause, torch.OutOfMemoryError):
                raise cause from error
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
        buffers = list(self.step.objective.buffers())
        versions = [buffer._version for buffer in buffers]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                found = self._gradients(step, inputs)
                if self.held is not None and self.flags:
                    self.held.copy_(torch.maximum(self.held, _is_raised(self.flags, inputs[0].device).to(self.held)))
            after = [counts_of(flag) for flag in known]
        finally:
            for flag, old in zip(known, before, strict=True):  # recording is no step
                if flag.owner is not None:
                    flag.owner.recount(old)
        if self.finish is None:
            finish = torch.cuda.CUDAGraph()
            with torch.cuda.graph(finish):
                self.step.update()
            self.finish = finish  # one for all kinds of steps
        added = [{name: new[name] - old[name] for name in new} for new, old in zip(after, before, strict=True)]
        changed = [b for b, version in zip(buffers, versions, strict=True) if b._version != version]
        # Kernels of BatchNorm do not tell that they write.
        changed += [
            b for norm in batch_norms(self.step.objective) for b in norm.buffers() if all(b is not c for c in changed)
        ]
        return Recorded(graph, self.finish, inputs, found, list(self.flags), added, changed)


@dataclass(frozen=True)
class Recorded:
    """A graph of the gradients of one kind of step."""

    graph: torch.cuda.CUDAGraph
    finish: torch.cuda.CUDAGraph  # the graph of the update
    inputs: Batch  # the tensors it reads the batch from
    found: dict[str, Tensor]  # the tensors it leaves the losses in
    flags: list[Flag]  # those it may raise
    added: list[dict[str, int]]  # what each replay adds to the counts of their owners
    buffers: list[Tensor]  # buffers of the model that it writes, such as running statistics

    def state(self) -> list[tuple[Tensor, Tensor]]:
        """What a replay writes beside gradients and losses, with copies of what is there now; nothing where no flag can be raised."""
        watches = (flag.owner for flag in self.flags if isinstance(flag.owner, Watch))
        counters = [counter for watch in watches for counter in watch.counters.values()]
        return [(tensor, tensor.clone()) for tensor in (*counters, *self.buffers)] if self.flags else []

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
        return bool(self.flags) and bool(_is_raised(self.flags, self.inputs[0].device))

    def count(self) -> None:
        """Take note of a replay."""
        for flag, added in zip(self.flags, self.added, strict=False):
            if flag.owner is not None:
                flag.owner.recount({name: max(0, n + added.get(name, 0)) for name, n in flag.owner.counts().items()})


class Pending:
    """A replay, with its update, whose flags the host has not seen yet; `held` is 1 if one was raised, here or in a replay before."""

    def __init__(self, step: int, batch: Batch, recorded: Recorded, held: Tensor) -> None:
        self.step, self.batch, self.recorded, self.held = step, batch, recorded, held
        owners = [flag.owner for flag in recorded.flags]
        self.counts = [(owner, counts_of(flag)) for owner, flag in zip(owners, recorded.flags, strict=True)]
        self.before = recorded.state()
        self.found = {name: value.clone() for name, value in recorded.replay(batch).items()}
        self.seen = torch.empty((), pin_memory=held.is_cuda, device="cpu")
        self.seen.copy_(held, non_blocking=True)
        self.event = torch.cuda.Event() if held.is_cuda else None
        if self.event is not None:
            self.event.record()
        recorded.finish.replay()
        recorded.count()

    def raised(self) -> bool:
        """Whether a flag was: waits for the gradients of this step, not for what was begun after it."""
        if self.event is not None:
            self.event.synchronize()
        return bool(self.seen)

    def undo(self) -> None:
        """Take back counts and running statistics. The weights were not touched."""
        for owner, counts in self.counts:
            if owner is not None:
                owner.recount(counts)
        _restore(self.before)
        self.held.zero_()


@torch.no_grad()
def _restore(state: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, before in state:
        tensor.copy_(before)


def _is_raised(flags: list[Flag], device: torch.device) -> Tensor:
    """Whether one of the flags is, on the device; what is not a number is no good."""
    return ~(torch.stack([flag.on(device) for flag in flags]).amax() <= 1)


def counts_of(flag: Flag) -> dict[str, int]:
    """What the owner of a flag counts on the host, which a replay does not do."""
    return {} if flag.owner is None else flag.owner.counts()
