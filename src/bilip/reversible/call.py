"""One call over a whole chain: forward keeps its two ends, backward walks from one to the other."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bilip._capture import Flag, capturing
from bilip.blocks import Bijection
from bilip.errors import DriftError
from bilip.reversible.angle import angle
from bilip.reversible.fingerprint import Fingerprint, drifts_of, true_drift
from bilip.reversible.guard import DriftWarning, Watch
from bilip.reversible.prepared import Prepared
from bilip.reversible.replay import (
    Conditions,
    Seeds,
    batch_norms,
    draws_numbers,
    frozen_statistics,
    modes_again,
    versions_of,
)
from bilip.reversible.unit import Grads, Pulled, Unit

__all__ = ["Backward", "Call"]


@dataclass
class Call:
    """One call of a `Reversible`: what runs, in which direction, and what its backward pass needs to know."""

    bijection: Bijection
    units: list[Unit]
    parameters: list[nn.Parameter]
    inverse: bool
    log_det: bool
    watch: Watch | None
    flag: Flag
    checkpoint: bool = False  # no walk: every state is evaluated again from the first one
    prints: dict[int, Tensor] = field(default_factory=dict)
    fingerprint: Fingerprint | None = None
    kept: list[int] = field(default_factory=list)  # states that are stored: anchors, and inputs of units that store

    def __post_init__(self) -> None:
        self.modes = [(module, module.training) for module in self.bijection.modules()]
        self.versions: dict[str, tuple[Tensor, int]] = {}
        self.draws = [any(map(draws_numbers, unit.modules)) for unit in self.units]
        self.norms = [[norm for module in unit.modules for norm in batch_norms(module)] for unit in self.units]
        self.prepared = Prepared(self.units, inverse=self.inverse)
        self.overflowed = False  # the repaired gradient met an activation that is not finite

    # ---- forward

    def run(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """The output, its log-determinant, and the states that are stored."""
        self.conditions, self.seeds = Conditions.now(x), Seeds(x)
        self.seeds.begin()
        anchors = set() if self.watch is None else self.watch.places(self.inverse, x.element_size() * x.numel())
        if self.watch is not None and not self.checkpoint and not self.watch.rest:
            self.fingerprint = self.watch.fingerprint(x.device)
        logs: list[Tensor] = []
        stored: list[Tensor] = []
        own = False
        with self.prepared:
            for k in range(len(self.units)):
                unit = self.prepared.unit(k, log_det=self.log_det)
                if not self.checkpoint:
                    self.prepared.before_the_walk(k, x)
                keeps = unit.stores or k in anchors
                if keeps:
                    self.kept.append(k)
                    stored.append(x)
                own = own and not keeps and k < len(self.units) - 1  # the output is to be a tensor of its own, no view
                marked = k and not keeps and not unit.rearranges  # to move entries around changes no drift
                mark = self.fingerprint if marked else None
                x, log, seen = unit.run(x, context, log_det=self.log_det, own=own, mark=mark)
                own = unit.fresh
                if seen is not None:
                    self.prints[k] = seen
                self.draws[k] = self.seeds.moved(k) or self.draws[k]
                if log is not None:
                    logs.append(log)
        self.versions = versions_of(self.bijection)
        return x, _total(logs, x) if self.log_det else None, stored

    # ---- backward

    def pull(self, back: Backward) -> tuple[Tensor, Sum]:
        """Gradients with respect to the input, and the parameters and the context."""
        self._require_unchanged()
        with self.prepared, modes_again(self.modes):
            return self._pull(back)

    def _pull(self, back: Backward) -> tuple[Tensor, Sum]:
        watch = self.watch
        if self.checkpoint:
            return self._recompute(back)
        if watch is None:
            return self._walk(back)[:2]
        if self.fingerprint is None:  # this call was made while resting
            watch.rested()
            return self._recompute(back)
        grad, result, drifts = self._walk(back)
        if self._drifted(watch, drifts, back.gives_finite(grad), back.x) or self._spot_check(watch, back):
            return self._recompute(back)
        return grad, result

    def _walk(self, back: Backward, *, watched: bool = True) -> tuple[Tensor, Sum, dict[int, Tensor]]:
        """From the output to the input, each state recovered from the one after it."""
        given = dict(zip(self.kept, back.stored, strict=True))
        seen: dict[int, Tensor] = {}
        result, y, grad, own = Sum(), back.z, back.grad, False
        for k in reversed(range(len(self.units))):
            self.prepared.on_the_walk(k, y)
            mark = self.fingerprint if watched and k in self.prints else None
            pulled = self._back(k, y, back, grad, given.get(k), own, mark)
            own = self.units[k].fresh and k not in given
            result.add(pulled)
            y, grad = pulled.x, pulled.grad
            if mark is not None:
                seen[k] = mark.of(y, norm=False) if pulled.print is None else pulled.print
        drifts: dict[int, Tensor] = {}
        if seen:
            found = drifts_of([self.prints[k] for k in seen], list(seen.values()))
            drifts.update(zip(seen, found.unbind(), strict=True))
        if self.watch is not None and 0 not in given:
            drifts[0] = true_drift(y, back.x)
        return grad, result, drifts

    def _back(
        self,
        k: int,
        y: Tensor,
        back: Backward,
        grad: Tensor,
        known: Tensor | None,
        own: bool = False,
        mark: Fingerprint | None = None,
        inverses: bool = True,
    ) -> Pulled:
        unit = self.prepared.unit(k, inverses=inverses)
        if known is None and unit.twice and self.draws[k]:  # the same numbers for the inverse and the second evaluation
            with torch.no_grad(), self.seeds.again(k), self.conditions.again(), frozen_statistics(self.norms[k]):
                known = unit.undo(y, back.context)
        with self.seeds.again(k), self.conditions.again(), frozen_statistics(self.norms[k]):
            return unit.back(y, back.context, grad, back.grad_log, known, own, mark)

    def _again(self, k: int, x: Tensor, context: Tensor | None) -> Tensor:
        with self.seeds.again(k), self.conditions.again(), frozen_statistics(self.norms[k]):
            return self.prepared.unit(k).run(x, context, log_det=False).y

    def _drifted(self, watch: Watch, drifts: dict[int, Tensor], finite: Tensor, x: Tensor) -> bool:
        limit = watch.guard.limit(x.dtype)
        places = sorted(drifts)
        values = torch.stack([*(drifts[k] for k in places), torch.where(finite, 0.0, torch.inf).double()])
        watch.flag.raise_to(values.amax() / limit)
        if capturing(x):
            watch.steps += 1
            return False
        names = [self.units[k].name for k in places]
        *found, lost = values.tolist()
        beyond = watch.settle(names, found, limit)
        if lost and not beyond:
            return watch.lost()
        return watch.react(self.inverse, places, names, beyond, x.element_size() * x.numel())

    def _spot_check(self, watch: Watch, back: Backward) -> bool:
        """Every so often: do a few samples have the gradient that they would have without a walk?"""
        every = watch.guard.spot_check
        if not every or watch.steps % every or capturing(back.x):
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

    def _recompute(self, back: Backward) -> tuple[Tensor, Sum]:
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
        result, y, grad, stop = Sum(), back.z, back.grad, count
        for begin in sorted(given, reverse=True):
            states = [given[begin]]
            with torch.no_grad():
                states += (self._again(k, states[-1], back.context) for k in range(begin, stop - 1))
            for k in reversed(range(begin, stop)):
                pulled = self._back(k, y, back, grad, states[k - begin], inverses=back.grad_log is not None)
                result.add(pulled)
                y, grad = pulled.x, pulled.grad
            stop = begin
        finite = back.gives_finite(grad)
        if capturing(grad):
            self.flag.raise_unless(finite)
        else:
            self.overflowed = not bool(finite)
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
        if capturing(z):
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

    def gives_finite(self, grad: Tensor) -> Tensor:
        """Whether the gradient of the input is finite, and the output too, or else the loss is to blame."""
        good = torch.isfinite(grad).all() & torch.isfinite(self.z).all()
        given = [g for g in (self.grad, self.grad_log) if g is not None]
        return good | ~torch.stack([torch.isfinite(g).all() for g in given]).all()

    def rows(self, count: int) -> Backward:
        """The first samples only."""
        cut = [None if t is None else t[:count] for t in (self.x, self.z, self.context, self.grad, self.grad_log)]
        return Backward(cut[0], cut[1], cut[2], tuple(t[:count] for t in self.stored), cut[3], cut[4])  # type: ignore[arg-type]


class Sum:
    """Gradients, added up where a parameter occurs in several units."""

    def __init__(self) -> None:
        self.parameters: Grads = {}
        self.context: Tensor | None = None

    def add(self, pulled: Pulled) -> None:
        for parameter, grad in pulled.parameters.items():
            self.parameters[parameter] = self.parameters[parameter] + grad if parameter in self.parameters else grad
        if pulled.context is not None:
            self.context = pulled.context if self.context is None else self.context + pulled.context


def _total(logs: list[Tensor], x: Tensor) -> Tensor:
    """The sum of log-determinants, some for each sample and some numbers for all."""
    rows = [log for log in logs if log.ndim]
    numbers = [log for log in logs if not log.ndim]
    total = torch.stack(rows).sum(0) if rows else x.new_zeros(len(x))
    return total + torch.stack(numbers).sum() if numbers else total
