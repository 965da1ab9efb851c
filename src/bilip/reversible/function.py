"""The autograd function over a whole chain: forward keeps its two ends, backward walks from one to the other."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bilip.blocks import Bijection
from bilip.errors import DriftError
from bilip.reversible.guard import DriftWarning, Fingerprint, Watch, drifts_of, true_drift
from bilip.reversible.replay import Conditions, Seeds, batch_norms, draws_numbers, frozen_statistics
from bilip.reversible.units import Grads, Pulled, Unit, forget, prepare, windows

__all__ = ["Backward", "Call", "MemorySaving", "angle"]


@dataclass
class Call:
    """One call of a `Reversible`: what runs, in which direction, and what its backward pass needs to know."""

    bijection: Bijection
    units: list[Unit]
    parameters: list[nn.Parameter]
    inverse: bool
    log_det: bool
    watch: Watch | None
    checkpoint: bool = False  # no walk: every state is evaluated again from the first one
    prints: dict[int, Tensor] = field(default_factory=dict)
    fingerprint: Fingerprint | None = None
    kept: list[int] = field(default_factory=list)  # states that are stored: anchors, and inputs of units that store

    def __post_init__(self) -> None:
        self.modes = [(module, module.training) for module in self.bijection.modules()]
        self.versions: dict[str, tuple[Tensor, int]] = {}
        self.draws = [any(map(draws_numbers, unit.modules)) for unit in self.units]
        self.norms = [[norm for module in unit.modules for norm in batch_norms(module)] for unit in self.units]
        self.windows = windows(self.units)
        self.window = {k: w for w, span in enumerate(self.windows) for k in span}
        self.ready: tuple[int, bool, bool] | None = None

    def unit(self, k: int, *, inverses: bool = False, log_det: bool = False) -> Unit:
        """Unit `k` with its matrices at hand. Only one window has them at a time: memory does not grow with depth."""
        wanted = (self.window[k], inverses or self.inverse, log_det)
        if self.ready != wanted:
            self.done()
            prepare(self._span(wanted[0]), inverses=wanted[1], log_det=log_det)
            self.ready = wanted
        return self.units[k]

    def done(self) -> None:
        """Let go of the matrices."""
        if self.ready is not None:
            forget(self._span(self.ready[0]))
        self.ready = None

    def _span(self, window: int) -> list[Unit]:
        return [self.units[k] for k in self.windows[window]]

    # ---- forward

    def run(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """The output, its log-determinant, and the states that are stored."""
        self.conditions, self.seeds = Conditions.now(x), Seeds(x.device)
        self.seeds.begin()
        anchors = set() if self.watch is None else self.watch.places(self.inverse, x.element_size() * x.numel())
        if self.watch is not None and not self.checkpoint and not self.watch.rest:
            self.fingerprint = self.watch.fingerprint(x.device)
        logs: list[Tensor] = []
        stored: list[Tensor] = []
        for k, unit in enumerate(self.units):
            if unit.stores or k in anchors:
                self.kept.append(k)
                stored.append(x)
            elif (
                k and self.fingerprint is not None and not unit.rearranges
            ):  # moving entries around does not change a drift
                self.prints[k] = self.fingerprint.of(x)
            x, log = self.unit(k, log_det=self.log_det).run(x, context, log_det=self.log_det)
            self.draws[k] = self.seeds.moved(k) or self.draws[k]
            if log is not None:
                logs.append(log)
        self.done()
        self.versions = _versions(self.bijection)
        return x, _total(logs, x) if self.log_det else None, stored

    # ---- backward

    def pull(self, back: Backward) -> tuple[Tensor, _Sum]:
        """Gradients with respect to the input, and the parameters and the context."""
        self._require_unchanged()
        try:
            with _modes(self.modes):
                return self._pull(back)
        finally:
            self.done()

    def _pull(self, back: Backward) -> tuple[Tensor, _Sum]:
        watch = self.watch
        if self.checkpoint:
            return self._recompute(back)
        if watch is None:
            return self._walk(back)[:2]
        if self.fingerprint is None:  # this call was made while resting
            watch.rest, watch.steps, watch.repaired = max(0, watch.rest - 1), watch.steps + 1, watch.repaired + 1
            return self._recompute(back)
        grad, result, drifts = self._walk(back)
        if self._drifted(watch, drifts, back.x) or self._spot_check(watch, back):
            return self._recompute(back)
        return grad, result

    def _walk(self, back: Backward, *, watched: bool = True) -> tuple[Tensor, _Sum, dict[int, Tensor]]:
        """From the output to the input, each state recovered from the one after it."""
        given = dict(zip(self.kept, back.stored, strict=True))
        seen: dict[int, Tensor] = {}
        result, y, grad = _Sum(), back.z, back.grad
        for k in reversed(range(len(self.units))):
            pulled = self._back(k, y, back, grad, given.get(k))
            result.add(pulled)
            y, grad = pulled.x, pulled.grad
            if watched and self.fingerprint is not None and k in self.prints:
                seen[k] = self.fingerprint.of(y)
        drifts: dict[int, Tensor] = {}
        if seen:
            drifts.update(
                zip(seen, drifts_of([self.prints[k] for k in seen], list(seen.values())).unbind(), strict=True)
            )
        if self.watch is not None and 0 not in given:
            drifts[0] = true_drift(y, back.x)
        return grad, result, drifts

    def _back(self, k: int, y: Tensor, back: Backward, grad: Tensor, known: Tensor | None) -> Pulled:
        unit = self.unit(k, inverses=True)
        if known is None and unit.twice and self.draws[k]:  # the same numbers for the inverse and the second evaluation
            with torch.no_grad(), self.seeds.again(k), self.conditions.again(), frozen_statistics(self.norms[k]):
                known = unit.undo(y, back.context)
        with self.seeds.again(k), self.conditions.again(), frozen_statistics(self.norms[k]):
            return unit.back(y, back.context, grad, back.grad_log, known)

    def _again(self, k: int, x: Tensor, context: Tensor | None) -> Tensor:
        with self.seeds.again(k), self.conditions.again(), frozen_statistics(self.norms[k]):
            return self.unit(k).run(x, context, log_det=False)[0]

    def _drifted(self, watch: Watch, drifts: dict[int, Tensor], x: Tensor) -> bool:
        limit = watch.guard.limit(x.dtype)
        places = sorted(drifts)
        values = torch.stack([drifts[k] for k in places]) if places else torch.zeros(1, device=x.device)
        if x.is_cuda:
            if watch.flag is None:
                watch.flag = torch.zeros((), dtype=torch.float64, device=x.device)
            watch.flag.copy_(torch.maximum(watch.flag, values.amax() / limit))
            if torch.cuda.is_current_stream_capturing():
                return False
        names = [self.units[k].name for k in places]
        beyond = watch.settle(names, values.tolist() if places else [], limit)
        return watch.react(self.inverse, places, names, beyond, x.element_size() * x.numel())

    def _spot_check(self, watch: Watch, back: Backward) -> bool:
        """Every so often: do a few samples have the gradient that they would have without a walk?"""
        every = watch.guard.spot_check
        if not every or watch.steps % every or (back.x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        together = any(isinstance(m, nn.modules.batchnorm._NormBase) for m in self.bijection.modules())
        few = back if any(self.draws) or together else back.rows(8)
        (g_walked, walked), (g_true, true) = self._walk(few, watched=False)[:2], self._recompute(few)
        watch.spot_checks += 1
        found = angle(
            [g_walked, *(walked.parameters.get(p, torch.zeros_like(p)) for p in true.parameters)],
            [g_true, *true.parameters.values()],
        )
        watch.worst_angle = max(watch.worst_angle, found) if not math.isnan(found) else math.inf
        if found <= 1e-2:
            return False
        watch.warned += 1
        warnings.warn(
            f"spot check: the memory-saving gradient is {found:.1e} rad from the stored one, and no drift was noticed; this "
            "step is repaired. Lower Guard(tolerance=...).",
            DriftWarning,
            stacklevel=2,
        )
        return True

    def _recompute(self, back: Backward) -> tuple[Tensor, _Sum]:
        """Right whatever the inverse does: the states again from what is stored, in segments, so that few are kept at once."""
        count = len(self.units)
        given = dict(zip(self.kept, back.stored, strict=True))
        given[0] = x = back.x
        length = max(1, math.isqrt(count))
        with torch.no_grad():
            for k in range(count):
                x = given.get(k, x)
                if k % length == 0:
                    given[k] = x
                x = self._again(k, x, back.context)
        self._require_same(x, back.z)
        result, y, grad, stop = _Sum(), back.z, back.grad, count
        for begin in sorted(given, reverse=True):
            states = [given[begin]]
            with torch.no_grad():
                states += (self._again(k, states[-1], back.context) for k in range(begin, stop - 1))
            for k in reversed(range(begin, stop)):
                pulled = self._back(k, y, back, grad, states[k - begin])
                result.add(pulled)
                y, grad = pulled.x, pulled.grad
            stop = begin
        return grad, result

    def _require_unchanged(self) -> None:
        """Trainable parameters are watched by autograd; frozen ones, buffers and swaps are watched here."""
        now = {name: p for name, p in self.bijection.named_parameters() if p.requires_grad}
        if [id(p) for p in self.parameters if p.requires_grad] != [id(p) for p in now.values()]:
            known = {id(p) for p in self.parameters}
            if any(id(p) not in known for p in now.values()):
                raise DriftError(
                    "the parameters of the network are other ones than at the call (torch.func.functional_call, or a new "
                    "parameter): use Reversible(..., memory='stored') there."
                )
        for name, (tensor, version) in self.versions.items():
            if tensor._version != version:
                raise DriftError(
                    f"{name!r} was changed in place between the call and its backward pass: the activations cannot be "
                    "recovered. Change it after the backward pass."
                )

    def _require_same(self, z: Tensor, before: Tensor) -> None:
        if z.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        difference = float(true_drift(z, before))
        limit = 10 * math.sqrt(torch.finfo(z.dtype).eps)
        if not difference <= limit and bool(torch.isfinite(before).all()):
            raise DriftError(
                f"evaluated again, the network gives another output (relative difference {difference:.1e}): it is stochastic "
                "with a generator of its own, or its parameters or buffers have changed since. Draw from torch's global generators."
            )


@dataclass(frozen=True)
class Backward:
    """What a backward pass is given: the two ends, what was stored, and the gradients of the outputs."""

    x: Tensor
    z: Tensor
    context: Tensor | None
    stored: tuple[Tensor, ...]
    grad: Tensor
    grad_log: Tensor | None

    def rows(self, count: int) -> Backward:
        """The first samples only."""
        cut = [None if t is None else t[:count] for t in (self.x, self.z, self.context, self.grad, self.grad_log)]
        return Backward(cut[0], cut[1], cut[2], tuple(t[:count] for t in self.stored), cut[3], cut[4])  # type: ignore[arg-type]


def _versions(module: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Frozen parameters and buffers with their versions; running statistics may move, they are not used in training mode."""
    moving = {
        id(buffer)
        for part in module.modules()
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.training
        for buffer in part.buffers(recurse=False)
    }
    frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    still = [(name, b) for name, b in module.named_buffers() if id(b) not in moving]
    return {name: (t, t._version) for name, t in (*frozen, *still) if not t.is_inference()}


@contextlib.contextmanager
def _modes(modes: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Training or evaluation mode as it was at the call."""
    changed = [(module, module.training) for module, mode in modes if module.training != mode]
    for module, mode in modes:
        module.training = mode
    try:
        yield
    finally:
        for module, mode in changed:
            module.training = mode


class _Sum:
    """Gradients, added up where a parameter occurs in several units."""

    def __init__(self) -> None:
        self.parameters: Grads = {}
        self.context: Tensor | None = None

    def add(self, pulled: Pulled) -> None:
        for parameter, grad in pulled.parameters.items():
            self.parameters[parameter] = self.parameters[parameter] + grad if parameter in self.parameters else grad
        if pulled.context is not None:
            self.context = pulled.context if self.context is None else self.context + pulled.context


class MemorySaving(torch.autograd.Function):
    """Ordinary autograd outside; inside, nothing between the two ends is kept."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, context: Tensor | None, *parameters: Tensor):
        z, log_det, stored = call.run(x, context)
        z = z.clone() if z is x or z._base is not None else z  # an output of its own: no view of the input
        ctx.call, ctx.has_context, ctx.count = call, context is not None, len(stored)
        ctx.save_for_backward(x, z, *([] if context is None else [context]), *stored, *parameters)
        ctx.set_materialize_grads(False)
        return (z, log_det) if call.log_det else z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        call: Call = ctx.call
        x, z, *rest = ctx.saved_tensors
        context = rest.pop(0) if ctx.has_context else None
        stored, parameters = tuple(rest[: ctx.count]), rest[ctx.count :]
        grad = torch.zeros_like(z) if grads[0] is None else grads[0]
        back = Backward(x, z, context, stored, grad, grads[1] if call.log_det else None)
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            return _differentiable(call, back, parameters)
        g_x, found = call.pull(back)
        return (
            None,
            g_x.to(x.dtype) if ctx.needs_input_grad[1] else None,
            found.context if ctx.needs_input_grad[2] else None,
            *(found.parameters.get(p) for p in call.parameters),
        )


def _differentiable(call: Call, back: Backward, parameters: Sequence[Tensor]):
    """The stored path: everything again, with a graph that can be differentiated."""
    b, context = call.bijection, back.context
    x = back.x if back.x.requires_grad else back.x.detach().requires_grad_()
    norms = [norm for unit in call.norms for norm in unit]
    call._require_unchanged()
    with _modes(call.modes), call.seeds.again(-1), call.conditions.again(), frozen_statistics(norms):
        if call.log_det:
            outputs = list((b.inverse_and_log_det if call.inverse else b.forward_and_log_det)(x, context))
        else:
            outputs = [(b.inverse if call.inverse else b)(x, context)]
    pairs = [
        (o, g) for o, g in zip(outputs, (back.grad, back.grad_log), strict=False) if g is not None and o.requires_grad
    ]
    given = [] if context is None or not context.requires_grad else [context]
    inputs = [x, *given, *parameters]
    found = torch.autograd.grad(
        [o for o, _ in pairs], inputs, [g for _, g in pairs], create_graph=True, allow_unused=True
    )
    return None, found[0], found[1] if given else None, *found[1 + len(given) :]


def angle(u: Sequence[Tensor], v: Sequence[Tensor]) -> float:
    r"""The angle between two gradients in radians, $2\,\mathrm{atan2}(|a - b|, |a + b|)$ of the unit vectors, in float64.

    Example:
        >>> round(angle([torch.tensor([1.0, 0.0])], [torch.tensor([1.0, 1.0])]), 4)
        0.7854
    """
    a = torch.cat([t.detach().double().flatten() for t in u]) if u else torch.zeros(1)
    b = torch.cat([t.detach().double().flatten() for t in v]) if v else torch.zeros(1)
    if not a.any() and not b.any():
        return 0.0
    a, b = a / a.norm(), b / b.norm()
    return float(2 * torch.atan2((a - b).norm(), (a + b).norm()))


def _total(logs: list[Tensor], x: Tensor) -> Tensor:
    """The sum of log-determinants, some for each sample and some numbers for all."""
    rows = [log for log in logs if log.ndim]
    numbers = [log for log in logs if not log.ndim]
    total = torch.stack(rows).sum(0) if rows else x.new_zeros(len(x))
    return total + torch.stack(numbers).sum() if numbers else total
