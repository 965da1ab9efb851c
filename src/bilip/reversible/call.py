"""One call over a whole chain: forward keeps its two ends, backward walks from one to the other."""

from __future__ import annotations

import contextlib
import gc
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from bilip._torch import Flag, capturing, half_digits
from bilip.blocks import Bijection
from bilip.blocks.chain import iterated
from bilip.blocks.log_det import Roulette, drawn_again, drawn_now, one_draw
from bilip.errors import DriftError
from bilip.nets.replay import (
    Advance,
    Conditions,
    Seeds,
    Snapshot,
    as_recorded,
    batch_norms,
    buffers_again,
    draws_numbers,
    frozen_statistics,
    modes_again,
    versions_of,
)
from bilip.nets.spectral import again, held_layers, held_now, held_together
from bilip.reversible.backward import Backward, Size, Sum
from bilip.reversible.coupling import Coupling
from bilip.reversible.fingerprint import Fingerprint, Print, drifts_of
from bilip.reversible.guard import REST, Drift, DriftWarning, Watch, anchors_for, angle
from bilip.reversible.kinks import Signs
from bilip.reversible.mixing import MatrixWindows, Mixing
from bilip.reversible.units import Recovered, Unit
from bilip.reversible.within import MARGIN, NOTHING, Within, places, sizes

__all__ = ["Call"]

# A spot check measures the angle between a memory-saving gradient and the stored one, in radians. Below `CLOSE` it ends there; above, the
# part that comes from ReLUs on the other side of their kink is taken off, and where more than `WRONG` is left, the step is repaired.
WRONG = 1e-2
CLOSE = 1e-4
# Where the gradients of several calls in one backward pass nearly cancel, what remains may be off by this many tolerances of the guard
# before it acts. One would be too strict: only the last of the gradients can still be repaired, the others have been handed out.
CANCELS = 5
# Where nets run in 16 bits, gradients that are scaled up to what these hold, and do not cancel as weighed at random, would be too large.
SCALES = (1.0, 2.0**-8, 2.0**-16)
LOOKS = 4  # draws of random weights where what cancels within a call may decide whether it is repaired


@dataclass
class Call:
    """One call of a `Reversible`: what runs, in which direction, and what its backward pass needs to know.

    Attributes:
        outside: Tensors that ask for gradients and that blocks use, although they are no parameters of the bijection.
        traces: Look for more of them on the way.
        signs: Where the sides of piecewise activations are kept; `None` for nowhere.
        share: Of the tolerance that the walk of this call is held to, see `hold`.
    """

    bijection: Bijection
    units: list[Unit]
    parameters: list[nn.Parameter]
    inverse: bool
    log_det: bool
    watch: Watch | None
    flag: Flag
    checkpoint: bool = False  # no walk: every state is evaluated again from the first one
    outside: Sequence[Tensor] = ()
    traces: bool = False
    signs: Signs | None = None
    share: float | Tensor = 1.0
    subtracts: bool = False  # the loss behind it has said so, see `hold`
    prints: dict[int, Print] = field(default_factory=dict)
    outputs: dict[int, Print] = field(default_factory=dict)  # of what units made of inputs that are known in the walk
    watched: bool = False
    kept: list[int] = field(default_factory=list)  # states that are stored: anchors, and inputs of units that store
    unknown: list[Tensor] = field(default_factory=list)  # found by tracing

    def __post_init__(self) -> None:
        self.modes = [(module, module.training) for module in self.bijection.modules()]
        self.versions: dict[str, tuple[Tensor, int]] = {}
        self.draws = [any(map(draws_numbers, unit.modules)) for unit in self.units]
        self.norms = [[norm for module in unit.modules for norm in batch_norms(module)] for unit in self.units]
        self.advances: list[list[Advance]] = [[] for _ in self.units]
        self.drawn: dict[int, dict[Roulette, int] | None] = {}  # by unit: numbers of terms that were drawn before it
        self.matrices = MatrixWindows(self.units, inverse=self.inverse)
        self.dtype = torch.float32  # of the state, known when it runs

    # ---- forward

    def run(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """The output, its log-determinant, and the states that are stored."""
        self.conditions, self.seeds = Conditions.now(x), Seeds(x)
        self.seeds.begin()
        anchors = set() if self.watch is None else self.watch.places(self.inverse, x.element_size() * x.numel())
        counter = None
        if self.watch is not None and not self.checkpoint and not self.watch.rest:
            counter, self.watched = self.watch.count_on(x.device), True
        if self.watch is not None and not self.checkpoint:
            self.watch.together.expect(self)
            self.dtype = x.dtype
        logs: list[Tensor] = []
        stored: list[Tensor] = []
        own, plain = False, _plain(context)
        self.drawn[-1] = drawn_now()
        nets = [net for unit in self.units if (net := iterated(unit.block)) is not None]
        held = held_together(layer for net in nets for layer in held_layers(net))
        with self.matrices, one_draw(), held, as_recorded(), self.conditions.again():
            self.held = held_now(self.bijection)
            for k, unit in enumerate(self.units):
                self.drawn[k] = drawn_now()
                matrices = self.matrices.of(k, log_det=self.log_det)
                if not self.checkpoint:
                    self.matrices.before_the_walk(k, x)
                keeps = unit.stores or k in anchors
                if keeps:
                    self.kept.append(k)
                    stored.append(x)
                own = own and not keeps and k < len(self.units) - 1  # the output is to be a tensor of its own, no view
                mark = None if counter is None or keeps or not self._is_told(k) else Fingerprint(counter, k)
                if mark is not None and k - 1 in self.outputs:  # of this very state
                    mark, self.prints[k] = None, self.outputs[k - 1]
                before = Snapshot(unit.modules, statistics=self.traces)
                with contextlib.nullcontext() if self.signs is None else self.signs.record(k):
                    if self.traces:
                        (y, log, _), leaves = unit.traced(x, context, log_det=self.log_det, matrices=matrices)
                        seen = None if mark is None else mark.of(x)
                        self._note(leaves)
                    else:
                        y, log, seen = unit.run(x, plain, log_det=self.log_det, own=own, mark=mark, matrices=matrices)
                self.advances[k] = before.advances()
                x, own = y, unit.fresh and not self.traces
                if seen is not None:
                    self.prints[k] = seen
                # No drift tells of a change in a block whose input is known. At anchors its output is compared in every step; at the
                # first block and at those that always store, which healthy models have too, in the first call of a kind alone.
                known = k in anchors or (self.traces and (keeps or not k))
                if counter is not None and known and not unit.rearranges:
                    self.outputs[k] = Fingerprint(counter, k + 1).of(x)
                self.draws[k] = self.seeds.moved(k) or self.draws[k]
                if log is not None:
                    logs.append(log)
        if self.traces and not capturing(x):
            self._warn_of_keepers()
        self.versions = versions_of(self.bijection, self._advancing())
        return x, _total(logs, x) if self.log_det else None, stored

    def _warn_of_keepers(self) -> None:
        """Where something that nets have computed outlives the call: a loss of it would train nothing, and nobody would say so."""
        if any(unit.innermost.graph() is not None for unit in self.units):
            gc.collect()  # what is held by cycles alone is nobody's
        names = [unit.name for unit in self.units if unit.innermost.graph() is not None]
        if names:
            several = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            warnings.warn(
                f"block {names[0]}{several} keeps a tensor that it has computed, in an attribute or by a hook: behind a memory-saving call "
                "a loss of it trains nothing. Use Reversible(..., memory='stored') for such a loss; detach what is only looked at.",
                DriftWarning,
                stacklevel=2,
            )

    def _is_told(self, k: int) -> bool:
        """Whether the state before unit `k` gets a fingerprint. The first state is kept; to move entries around changes no drift; and
        half of what enters a 1x1 convolution has passed the coupling before it as it was, where it is told.
        """
        if not k or self.units[k].rearranges:
            return False
        if not isinstance(self.units[k].innermost, Mixing):
            return True
        before = next((j for j in reversed(range(k)) if not self.units[j].rearranges), 0)
        return not (isinstance(self.units[before].innermost, Coupling) and before in self.prints)

    def _note(self, leaves: Sequence[Tensor]) -> None:
        known = {id(t) for t in (*self.parameters, *self.outside, *self.unknown)}
        self.unknown += [t for t in leaves if id(t) not in known]

    def _advancing(self) -> list[tuple[nn.Module, str]]:
        return [(one.module, one.name) for advances in self.advances for one in advances]

    def hold_to(self, share: float | Tensor) -> None:
        """Hold the walk to a share of its tolerance, unless it is held to less already."""
        self.subtracts = True
        if isinstance(self.share, Tensor):
            self.share = torch.minimum(self.share, share) if isinstance(share, Tensor) else self.share.clamp_max(share)
        else:
            self.share = share.clamp_max(self.share) if isinstance(share, Tensor) else min(self.share, share)

    def as_before(self) -> None:
        """Random generators, buffers and the number of this call as they were before it, which will be made again."""
        self.seeds.rewind()
        if self.watched and self.watch is not None:
            self.watch.counters[self.seeds.device].sub_(1)
        for one in reversed([one for advances in self.advances for one in advances]):
            one.undo()

    # ---- backward

    def backward(self, back: Backward) -> tuple[Tensor, Sum]:
        """Gradients with respect to the input, and the parameters and the context."""
        self._require_unchanged()
        with self.matrices, modes_again(self.modes), as_recorded():
            return self._backward(back)

    def stored(self, x: Tensor, context: Tensor | None, *parameters: Tensor) -> tuple[Tensor, ...]:
        """The outputs once more, by the bijection itself, with a graph if one is asked for; the parameters stand in its modules."""
        b = self.bijection
        norms = [norm for unit in self.norms for norm in unit]
        first: dict[tuple[nn.Module, str], Advance] = {}
        for advances in self.advances:
            for one in advances:
                first.setdefault((one.module, one.name), one)
        self._require_unchanged()
        with (
            modes_again(self.modes),
            as_recorded(),
            self.seeds.again(-1),
            drawn_again(self.drawn[-1]),
            again(self.held),
            self.conditions.again(),
            frozen_statistics(norms),
            buffers_again(list(first.values())),
        ):
            if self.log_det:
                return (b.inverse_and_log_det if self.inverse else b.forward_and_log_det)(x, context)
            return ((b.inverse if self.inverse else b)(x, context),)

    def _backward(self, back: Backward) -> tuple[Tensor, Sum]:
        watch = self.watch
        if self.checkpoint:
            return self._recompute(back)
        if watch is None:
            return self._walk(back, signs=self.signs)[:2]
        watch.held += self.subtracts
        rests = not self.watched or (self.subtracts and watch.apart > 0)
        if rests or self._asks_too_much(watch, back.x.dtype):
            watch.rested(subtracts=self.subtracts)
            return self._exact(watch, back)
        grad, result, drift = self._walk(back, signs=self.signs)
        lost = self._lost_within(watch, back, grad, result, drift)
        share = 1.0 if self._closes_well(watch, back, result, lost * drift.total) else self.share
        if self._drifted(watch, drift, back.gives_finite(grad), back.x, share, lost) or self._spot_check(watch, back):
            return self._exact(watch, back)
        if self._cancels(watch, back, grad, result, lost * drift.mean):
            watch.repaired += 1
            return self._recompute(back)
        return grad, result

    def _exact(self, watch: Watch, back: Backward) -> tuple[Tensor, Sum]:
        grad, result = self._recompute(back)
        if result.parameters and not capturing(grad):
            self._within(watch, result).on(grad.device)  # for captured steps to come
        self._cancels(watch, back, grad, result, torch.zeros((), dtype=torch.float64, device=grad.device))
        return grad, result

    def _lost_within(self, watch: Watch, back: Backward, grad: Tensor, result: Sum, drift: Drift) -> float | Tensor:
        """How many times larger the errors of the gradient are, relative to its size, than those of the samples: where the loss subtracts
        samples of one call, or positions of one sample, as f(x) - f(x + e), their gradients cancel, and their errors do not.

        To measure it, samples are weighed at random and the walk is made once more: independent errors add up as these gradients do. Where
        it may decide, several such walks are made, since the gradients of one draw may be small by chance. How large such gradients are
        beside those of the output differs little from loss to loss, as long as these look at the same outputs, so that a call knows from
        the last such walks what to expect, by what is left of its gradients, and is looked at where that might matter, or where its loss
        looks elsewhere. A captured step cannot stop to look, and takes what is to be expected. Where nothing is trained but what is
        before the bijection, what cancels there counts.
        """
        if not result.parameters:
            lost = back.lost_before(grad, result.context)
            return lost if capturing(back.x) else float(lost)
        within = self._within(watch, result)
        given = sizes([g for g in (back.grad, back.grad_log) if g is not None])
        left = torch.linalg.vector_norm(sizes([*result.parameters.values()])) if drift.size is None else drift.size
        size = torch.linalg.vector_norm(given)
        if capturing(back.x):
            within.captured = True
            # Where no call was looked at, as much as can be: the flag has the step run again, which looks.
            return within.expected(left, size, NOTHING)
        expected = within.expected(left, size)
        limit = watch.guard.limit(back.x.dtype)
        numbers = torch.stack([left / size, expected, drift.total])
        share, likely, drifted, *place = torch.cat((numbers, places(back.grad, back.grad_log))).tolist()
        doubtful = drifted * (MARGIN * likely if within.gains and within.knows(place) else NOTHING) > limit
        if drifted > limit or not doubtful:
            return likely
        lost = within.like(share, place)
        if lost is None:
            gains = [self._gain(watch, back, 0, size)]
            if MARGIN * drifted * gains[0] > limit * share:  # it may decide, and one draw may be far from the mean
                gains += (self._gain(watch, back, k, size) for k in range(1, LOOKS))
            lost = within.measured(share, math.sqrt(sum(gain * gain for gain in gains) / len(gains)), place)
        return lost

    def _within(self, watch: Watch, result: Sum) -> Within:
        """What is known of calls like this one, in which the same is trained."""
        names = [name for name, p in self.bijection.named_parameters() if p in result.parameters]
        return watch.within_of(self.inverse, names)

    def _gain(self, watch: Watch, back: Backward, draw: int, size: Tensor) -> float:
        """How large the gradients of the parameters are, relative to those of the outputs, with samples weighed at random; infinite where
        that is more than a dtype holds.
        """
        for scale in SCALES:
            mixed = Size()
            weighed = back.weighed(LOOKS * watch.steps + draw, scale)
            self._walk(weighed, watched=False, signs=self.signs, result=mixed)
            gain = float(mixed.total() / size) / scale
            if math.isfinite(gain):
                return gain
        return math.inf

    def _closes_well(self, watch: Watch, back: Backward, result: Sum, drift: Tensor) -> bool:
        """Whether this is the last of several calls behind a loss that subtracts, and the sum of their gradients, which is known now, is
        right: how much cancels is no longer a guess, and the walk need not be held to a share of the tolerance for it.
        """
        if not self.subtracts or back.outward or capturing(back.x):
            return False
        found = watch.together.closed_by(self, result.parameters, drift)
        return found is not None and bool(found <= watch.guard.limit(self.dtype))

    def _cancels(self, watch: Watch, back: Backward, grad: Tensor, result: Sum, drift: Tensor) -> bool:
        """Whether this gradient and those of earlier calls in the same backward pass leave little but errors, and it is to be repaired."""
        grads = result.parameters or back.going_out(grad, result.context, inverse=self.inverse)
        together = watch.together.add(self, grads, drift)
        if together is None:
            return False
        found, subtracts = together
        limit = CANCELS * watch.guard.limit(self.dtype)
        watch.flag.raise_to(found / limit)
        # What is no number comes of a loss that has overflowed: nothing has cancelled.
        if capturing(found) or not float(found) > limit:
            return False
        return watch.cancelled(float(found), limit, subtracts=subtracts)

    def _walk(
        self, back: Backward, *, watched: bool = True, signs: Signs | None = None, result: Sum | None = None
    ) -> tuple[Tensor, Sum, Drift]:
        """From the output to the input, each state recovered from the one after it; with the sides of the activations as given."""
        result = Sum() if result is None else result
        given = dict(zip(self.kept, back.stored, strict=True))
        given[0] = back.x
        seen: dict[int, Tensor] = {}
        sensitivities: list[Tensor] = []
        grads: list[tuple[int, Tensor]] = []  # of parameters, and how many drifts came before
        changed: dict[int, Tensor] = {}
        y, grad, own = back.z, back.grad, False
        for k in reversed(range(len(self.units))):
            self.matrices.on_the_walk(k, y)
            mark, output = (self.prints.get(k), self.outputs.get(k)) if watched else (None, None)
            recovered = self._back(
                k, y, back, grad, given.get(k), own=own, mark=mark, replay=signs, output=output is not None
            )
            if output is not None and recovered.output is not None:
                changed[k], recovered.output = output.apart(recovered.output), None
            own = self.units[k].fresh and k not in given
            result.add(recovered)
            y, grad = recovered.x, recovered.grad
            if mark is not None:
                seen[k] = mark.again(y) if recovered.print is None else recovered.print
                sensitivities.append(mark.sensitivity(y, grad))
            if watched:
                grads += ((len(seen), g) for g in recovered.parameters.values())
        if not seen:
            return grad, result, replace(Drift.none(grad), changed=changed)
        found = drifts_of([self.prints[k] for k in seen], list(seen.values()), sensitivities)
        drift = Drift.of(list(seen), found, grads, everywhere=back.outward)
        shared = len(grads) != len(result.parameters)
        return grad, result, replace(drift, changed=changed, size=None if shared else drift.size)

    def _back(
        self,
        k: int,
        y: Tensor,
        back: Backward,
        grad: Tensor,
        known: Tensor | None,
        *,
        own: bool = False,
        mark: Print | None = None,
        inverses: bool = True,
        record: Signs | None = None,
        replay: Signs | None = None,
        output: bool = False,
    ) -> Recovered:
        unit, matrices = self.units[k], self.matrices.of(k, inverses=inverses)
        signs = contextlib.nullcontext() if replay is None else replay.replay(k)
        signs = signs if record is None else record.record(k)
        if known is None and unit.twice:  # the same numbers and buffers for the inverse and the second evaluation
            with torch.no_grad(), self._as_then(k):
                known = unit.undo(y.detach(), _plain(back.context), matrices)
        with self._as_then(k), signs:
            recovered = unit.back(
                y,
                back.context,
                grad,
                back.grad_log,
                known,
                own=own,
                mark=mark,
                matrices=matrices,
                outside=self.outside,
                output=output,
            )
        # What nobody asks for would hide what is wrong with the others, be it large, and what cancels in them.
        recovered.parameters = {p: g for p, g in recovered.parameters.items() if p in back.asked}
        return recovered

    def _again(self, k: int, x: Tensor, context: Tensor | None) -> Tensor:
        with self._as_then(k):
            given = _plain(context)
            return self.units[k].run(x.detach(), given, log_det=False, matrices=self.matrices.of(k)).y

    @contextlib.contextmanager
    def _as_then(self, k: int) -> Iterator[None]:
        """As it was when unit `k` ran: random numbers, autocast, buffers; running statistics stay."""
        with (
            self.seeds.again(k),
            drawn_again(self.drawn[k]),
            again(self.held),
            self.conditions.again(),
            frozen_statistics(self.norms[k]),
            buffers_again(self.advances[k]),
        ):
            yield

    def _asks_too_much(self, watch: Watch, dtype: torch.dtype) -> bool:
        """Whether the loss wants more of this walk than its dtype can give, so that the step is computed without it."""
        if isinstance(self.share, Tensor) or watch.guard.action != "repair":
            return False
        return not self.share * watch.guard.limit(dtype) >= watch.guard.least(dtype)

    def _drifted(
        self, watch: Watch, drift: Drift, finite: Tensor, x: Tensor, share: float | Tensor, cancelled: float | Tensor
    ) -> bool:
        asked, least = share * watch.guard.limit(x.dtype), watch.guard.least(x.dtype)
        total, lost = drift.total, torch.where(finite, 0.0, torch.inf).double()
        if isinstance(asked, Tensor):  # known on the device alone: a step that asks too much is run again
            watch.flag.raise_unless(asked >= least)
            asked = asked.clamp_min(least)
        asked = asked if isinstance(asked, Tensor) else max(asked, least)
        # What cancels was measured, no guess: drift below what a walk can be held to is seen all the same.
        most = watch.guard.limit(x.dtype) / cancelled
        if isinstance(most, Tensor):
            asked = most.clamp_max(asked)
        else:
            asked = asked.clamp_max(most) if isinstance(asked, Tensor) else min(asked, most)
        watch.flag.raise_to(torch.maximum(total, lost) / asked)
        if drift.changed:
            watch.flag.raise_to(torch.stack(list(drift.changed.values())).amax() / watch.guard.same(x.dtype))
        if capturing(x):
            watch.steps += 1
            return False
        limit = float(asked)
        numbers = torch.cat((drift.added, torch.stack([total, lost, *drift.changed.values()]))).tolist()
        added, (total, lost, *changed) = numbers[: len(drift.places)], numbers[len(drift.places) :]
        names = [self.units[k].name for k in drift.places]
        first = watch.settle(names, added, total, limit)
        if lost and first is None:
            return watch.lost()
        if first is None and max(changed, default=0.0) > watch.guard.same(x.dtype):
            worst = max(zip(changed, drift.changed, strict=True))
            return watch.changed(self.units[worst[1]].name, worst[0])
        if first is None or not watch.react(names[first], total):
            return False
        if limit < least:  # from an anchor on a walk would be no better
            watch.rest = REST
            return True
        chosen = anchors_for(added, limit, 8 * torch.finfo(x.dtype).eps) or [first]
        watch.anchor(self.inverse, [(drift.places[k], names[k]) for k in chosen], x.element_size() * x.numel())
        return True

    def _spot_check(self, watch: Watch, back: Backward) -> bool:
        """Every so often: do a few samples have the gradient that they would have without a walk?"""
        every = watch.guard.spot_check
        if not every or watch.steps % every or capturing(back.x):
            return False
        together = any(isinstance(m, nn.modules.batchnorm._NormBase) for m in self.bijection.modules())
        few = back if any(self.draws) or together or self.outside else back.few()
        signs = Signs()
        try:
            g_true, true = self._recompute(few, record=signs)
        # Of all samples it raises where the network has changed; of a few, also where nets look at the whole batch.
        except DriftError:
            few, signs = back, Signs()
            g_true, true = self._recompute(few, record=signs)

        def off(replay: Signs | None) -> float:
            g_walked, walked, _ = self._walk(few, watched=False, signs=replay)
            zeros = (walked.parameters.get(p, torch.zeros_like(p)) for p in true.parameters)
            # That of the input, where nobody wants it, does not cancel as those of parameters may, and would hide them.
            ends = ([g_walked], [g_true]) if back.outward or not true.parameters else ([], [])
            return angle([*ends[0], *zeros], [*ends[1], *true.parameters.values()])

        found = off(self.signs)
        remains = found if found <= CLOSE else off(signs)
        watch.checked(found, remains)
        if remains <= WRONG:
            return False
        watch.warned += 1
        warnings.warn(
            f"spot check: the memory-saving gradient is {remains:.1e} rad from the stored one, and no drift was noticed; this "
            "step is repaired. Lower Guard(tolerance=...).",
            DriftWarning,
            stacklevel=2,
        )
        return True

    def _recompute(self, back: Backward, *, record: Signs | None = None) -> tuple[Tensor, Sum]:
        """Right whatever the inverse does: the states again from what is stored, in segments, so that few are kept at once."""
        count = len(self.units)
        given = dict(zip(self.kept, back.stored, strict=True))
        given[0] = x = back.x
        length = max(1, math.isqrt(count))
        differences: list[Tensor] = []
        with torch.no_grad():
            for k in range(count):
                if k and k in given and not capturing(x):  # what changed before it is not seen behind it
                    differences.append(_difference(x, given[k]))
                x = given.get(k, x)
                if k % length == 0:
                    given[k] = x
                x = self._again(k, x, back.context)
            if not capturing(x):
                self._require_same([*differences, _difference(x, back.z)], x.dtype)
        result, y, grad, stop = Sum(), back.z, back.grad, count
        for begin in sorted(given, reverse=True):
            states = [given[begin]]
            with torch.no_grad():
                states += (self._again(k, states[-1], back.context) for k in range(begin, stop - 1))
            for k in reversed(range(begin, stop)):
                known, inverses = states[k - begin], back.grad_log is not None
                recovered = self._back(k, y, back, grad, known, inverses=inverses, record=record)
                result.add(recovered)
                y, grad = recovered.x, recovered.grad
            stop = begin
        finite = back.gives_finite(grad)
        if capturing(grad):
            self.flag.raise_unless(finite)
        else:
            result.overflowed = not bool(finite)
        return grad, result

    def _require_unchanged(self) -> None:
        """Trainable parameters are watched by autograd, unless hooks save them; frozen ones, buffers and swaps are watched here."""
        now: dict[str, Tensor] = dict(self.bijection.named_parameters())
        known = {id(p) for p in self.parameters} | {id(tensor) for tensor, _ in self.versions.values()}
        if any(id(p) not in known and not p.is_inference() for p in now.values()):
            raise DriftError(
                "the parameters of the network are other ones than at the call (torch.func.functional_call, or a new "
                "parameter): use Reversible(..., memory='stored') there."
            )
        now.update(self.bijection.named_buffers())
        for name, (tensor, version) in self.versions.items():
            if tensor._version != version or now.get(name) is not tensor:
                how = "changed in place" if tensor._version != version else "replaced by another tensor"
                raise DriftError(
                    f"{name!r} was {how} between the call and its backward pass: the activations cannot be recovered. Change it after "
                    "the backward pass."
                )

    def _require_same(self, differences: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Of states that were stored and their like, evaluated again."""
        difference = float(torch.stack(list(differences)).amax())
        if not difference <= 10 * half_digits(dtype):
            raise DriftError(
                f"evaluated again, the network gives another output (relative difference {difference:.1e}): it is stochastic "
                "with a generator of its own, or its parameters or buffers have changed since. Draw from torch's global generators."
            )


def _plain(context: Tensor | None) -> Tensor | None:
    """Without a graph: where none is recorded, no net shall take a tensor for one that asks for gradients."""
    return None if context is None else context.detach()


def _difference(now: Tensor, before: Tensor) -> Tensor:
    """The largest of a sample, relative to its norm; 0 where a state was not finite."""
    unit = before.double().abs().amax().clamp_min(1e-290)  # squares of tiny numbers, and of huge ones, are no float64
    apart, size = (torch.linalg.vector_norm(t.flatten(1).double() / unit, dim=1) for t in (now - before, before))
    return torch.where(torch.isfinite(before).all(), (apart / (size + 1e-30)).amax(), 0.0)


def _total(logs: list[Tensor], x: Tensor) -> Tensor:
    """The sum of log-determinants, some for each sample and some numbers for all."""
    rows = [log for log in logs if log.ndim]
    numbers = [log for log in logs if not log.ndim]
    total = torch.stack(rows).sum(0) if rows else x.new_zeros(len(x))
    return total + torch.stack(numbers).sum() if numbers else total
