"""The guard: notices when a memory-saving walk drifts away from the activations that the forward pass had."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from bilip._torch import Flag, dtype_name, half_digits
from bilip.errors import DriftError, InputError
from bilip.reversible.within import Within, sizes

__all__ = ["Drift", "DriftWarning", "Guard", "GuardReport", "Watch", "anchors_for", "angle"]

ACTIONS = ("repair", "warn", "raise")
REST = 20  # steps that are computed without a walk where there is no room for anchors, or where gradients cancel
APART = 240  # calls behind a loss that subtracts (`hold`) that are, where their gradients cancel: the steps between them walk on
SETS = 64  # of parameters that are trained together, of which is known what cancelled; older ones are forgotten
AHEAD = 10  # an anchor stands where a tenth of the limit has added up
_PLAIN = ("steps", "repaired", "warned", "tolerance", "spot_checks", "worst_angle", "worst_remaining", "rest", "apart")


class DriftWarning(UserWarning):
    """A memory-saving gradient was computed from activations that have drifted."""


@dataclass(frozen=True)
class Guard:
    r"""How a walk is watched, and what happens when it drifts.

    The forward pass takes two random projections of every activation, for each sample, each coordinate in its own scale over the batch
    (`bilip.reversible.fingerprint`), with weights that differ for every step, block, sample and place. The backward walk compares, block by
    block; what enters the first block is kept and used as it is. Where an input was kept, it compares what the block makes of it now.

    Args:
        tolerance: What a gradient may be wrong by, relative to its size, as the guard estimates it: drift adds up from block to block, and
            the gradients of the parameters of a block count with what has added up until there. The drift at a block is the largest of a
            sample, the root mean square over its coordinates, each in units of its typical spread over the batch, times the growth of
            the gradient there. By default $3 \sqrt{\epsilon}$ of the dtype (1.0e-3 for float32), chosen with
            `benchmarks/guard_soak.py`. Walks whose gradients are subtracted are held to a share of it (`bilip.reversible.hold`).
        action: On drift: `"repair"` recomputes this step from what is stored, so that its gradient is right wherever
            the output is finite, and places anchors for the steps to come; `"warn"` and `"raise"` do what they say. Where the
            gradients of several calls in one backward pass nearly cancel, only the last can be repaired: a warning says so.
        budget: Bytes for anchors, stored activations at which the walk starts afresh; 0 repairs without them.
        spot_check: Every so many steps compare the gradients of a few samples with stored ones; 0 for never.

    Example:
        >>> Guard(action="warn").limit(torch.float32) < 2e-3
        True
    """

    tolerance: float | None = None
    action: str = "repair"
    budget: int = 256 * 2**20
    spot_check: int = 500

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise InputError(f"Guard(action={self.action!r}): expected one of {', '.join(map(repr, ACTIONS))}.")
        for name, value in (("tolerance", self.tolerance), ("budget", self.budget), ("spot_check", self.spot_check)):
            if not isinstance(value, Real) and not (value is None and name == "tolerance"):
                raise InputError(f"Guard({name}={value!r}): expected a number.")
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise InputError(f"Guard(tolerance={self.tolerance}): expected a number between 0 and 1.")
        if not (self.budget >= 0 and self.spot_check >= 0):
            raise InputError(f"Guard(budget={self.budget}, spot_check={self.spot_check}): expected numbers >= 0.")
        if self.spot_check % 1:
            raise InputError(f"Guard(spot_check={self.spot_check}): expected a whole number of steps.")

    def limit(self, dtype: torch.dtype) -> float:
        """The tolerance for a dtype.

        Raises:
            InputError: It asks for more than the dtype can give.
        """
        eps = torch.finfo(dtype).eps
        if self.tolerance is None:
            return 3 * half_digits(dtype)
        if self.tolerance < 20 * eps:
            raise InputError(
                f"Guard(tolerance={self.tolerance:g}): {dtype_name(dtype)} rounds at {eps:.1e}, so that "
                f"even an exact walk drifts by some of that. Expected at least {20 * eps:.1e}."
            )
        return self.tolerance

    def same(self, dtype: torch.dtype) -> float:
        """How far the output of a block may be from what it was, for the same input: the tolerance, at least that by default, since a net
        may be rounded in another way when gradients are wanted.
        """
        return max(self.limit(dtype), 3 * half_digits(dtype))

    def least(self, dtype: torch.dtype) -> float:
        """The smallest limit that a walk can be held to: an exact one drifts by some epsilons of its dtype."""
        return min(self.limit(dtype), 20 * torch.finfo(dtype).eps)


@dataclass(frozen=True)
class GuardReport:
    """What the guard has seen so far.

    Attributes:
        steps: Backward passes watched.
        repaired: How many of them were recomputed.
        warned: How many ended with a warning.
        drift: By block: what drift has added up to from the output to its recovered input, in the last watched step.
        worst: By block: the largest so far.
        anchors: By block: bytes stored before it in each step.
        tolerance: The limit in force in the last watched step.
        spot_checks: Comparisons with stored gradients.
        worst_angle: Largest angle found by them, in radians.
        worst_remaining: Largest of what remained of these angles when piecewise activations (ReLU and its kind) were held on
            the side of their kink where the forward pass had them: the rest is rounding that chose the other side, no drift.
    """

    steps: int
    repaired: int
    warned: int
    drift: Mapping[str, float]
    worst: Mapping[str, float]
    anchors: Mapping[str, int]
    tolerance: float
    spot_checks: int
    worst_angle: float
    worst_remaining: float = 0.0

    @property
    def guilty(self) -> str:
        """The block at whose input drift passes the tolerance, as the walk meets it: the last one beyond. If none is, that with the largest
        drift so far; empty if there is none.
        """
        beyond = [name for name, drift in self.worst.items() if drift > self.tolerance]
        return beyond[-1] if beyond else max(self.worst, key=lambda name: self.worst[name], default="")


@dataclass(frozen=True)
class Drift:
    """How far a walk has drifted."""

    places: list[int]  # states that were compared, in the order of the walk: from the last to the first
    added: Tensor  # drift that has added up from the output to each of them: shape `(places,)`
    # What the gradient may be wrong by, relative to its size: the root mean square of what had added up where the
    # gradient of each parameter was found, weighted by its size; at least the square of all of it, since sizes are wrong by about
    # as much as the walk that found them; and all of it if the gradient of the input is wanted.
    total: Tensor
    mean: Tensor  # the same without these two
    size: Tensor | None = None  # the norm of the gradients of all parameters, if any were found
    # By unit whose input was kept: how far it now gives another output. The walk has no drift there, and without this a block that
    # has changed since the forward pass, or draws by itself, would not be noticed.
    changed: Mapping[int, Tensor] = field(default_factory=dict)

    @classmethod
    def none(cls, x: Tensor) -> Drift:
        """That of a walk in which nothing was compared."""
        zero = torch.zeros((), dtype=torch.float64, device=x.device)
        return cls([], zero[None][:0], zero, zero)

    @classmethod
    def of(cls, places: list[int], found: Tensor, grads: Sequence[tuple[int, Tensor]], *, everywhere: bool) -> Drift:
        """From the drifts at these places, and gradients with how many of them came before."""
        # Its cumsum; that of a GPU raises where torch is told to be deterministic.
        added = found.double().expand(len(found), -1).tril().sum(1)
        least = added[-1] if everywhere or not grads else added[-1].square()
        if not grads:
            return cls(places, added, least, least)
        size = sizes([g for _, g in grads])
        largest = size.amax()
        weight = size / largest
        until = [torch.zeros_like(added[0]), *added.unbind()]
        met = torch.stack([until[count] for count, _ in grads])
        total = torch.linalg.vector_norm(weight)
        mean = torch.linalg.vector_norm(weight * met) / total
        mean = torch.where(torch.isfinite(mean), mean, added[-1])  # no gradient, or one that is not finite
        return cls(places, added, torch.maximum(mean, least), mean, largest * total)


# Gradients of some calls, what their sum is wrong by, and whether all of them are behind losses that subtract.
Found = tuple[dict[Hashable, Tensor], Tensor, bool]


class Together:
    """What the calls of one `Reversible` add up to in one backward pass.

    A loss that goes there and back, or subtracts, has calls whose gradients nearly cancel: each of them is right to a few digits, and
    these may be all that is left of the sum. Gradients are held as long as calls are waiting whose backward pass is to come, and no
    longer than this one lasts. A copy starts without any.
    """

    def __init__(self) -> None:
        self.waiting: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.found: dict[int, Found] = {}  # by backward pass

    def expect(self, call: Any) -> None:
        """Take note of a call that was made."""
        self.waiting[id(call)] = call

    def add(self, call: Any, grads: Mapping[Any, Tensor], drift: Tensor) -> tuple[Tensor, bool] | None:
        """What the gradients found so far in this backward pass may be wrong by, over the size of their sum, and whether all of them are
        behind losses that subtract; `None` for one alone.

        Args:
            call: Whose backward pass this is.
            grads: What it has found.
            drift: What that may be wrong by, relative to its size.
        """
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # type: ignore[attr-defined]
            self.waiting.pop(id(call), None)  # else it may have its part in another pass
        task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        before = self.found.pop(task, None)  # of this pass: those of other threads have other numbers
        if not self.waiting:
            self.found.clear()
        others = any(key != id(call) for key in self.waiting)
        if not others and before is None:
            return None
        if not grads:
            if before is not None:
                self.found[task] = before
            return None
        total, wrong, subtracts = _added(before, grads, drift, subtracts=call.subtracts)
        if others:
            self._keep(task, (total, wrong, subtracts), begins=before is None)
        return None if before is None else (_relative(wrong, total), subtracts)

    def _keep(self, task: int, found: Found, *, begins: bool) -> None:
        """Hold what was found until its backward pass ends, since a call that is waiting may never have its own."""
        if task < 0:  # not in a pass of the engine
            return

        def ended() -> None:
            self.found.pop(task, None)

        self.found[task] = found
        if begins:
            torch.autograd.Variable._execution_engine.queue_callback(ended)

    def closed_by(self, call: Any, grads: Mapping[Any, Tensor], drift: Tensor) -> Tensor | None:
        """What the sum of all gradients of this backward pass may be wrong by, relative to its size, with those of its last call; `None`
        if others are waiting or none came before, so that nobody knows what will cancel.
        """
        before = self.found.get(torch._C._current_graph_task_id())  # type: ignore[attr-defined]
        if before is None or not grads or any(key != id(call) for key in self.waiting):
            return None
        total, wrong, _ = _added(before, grads, drift, subtracts=True)
        return _relative(wrong, total)

    def __reduce__(self) -> tuple[type[Together], tuple[()]]:
        return Together, ()


def _added(before: Found | None, grads: Mapping[Any, Tensor], drift: Tensor, *, subtracts: bool) -> Found:
    """The sum with the gradients of one call more, and what it is wrong by."""
    total, wrong = dict(grads), drift * torch.linalg.vector_norm(sizes(list(grads.values())))
    if before is not None:
        wrong, subtracts = wrong + before[1], subtracts and before[2]
        for p, g in before[0].items():
            total[p] = total[p] + g if p in total else g
    return total, wrong, subtracts


def _relative(wrong: Tensor, grads: Mapping[Any, Tensor]) -> Tensor:
    """Relative to their size; of gradients that are zero and right, as those of a hinge that is satisfied, nothing is wrong."""
    return torch.where(wrong == 0, 0.0, wrong / torch.linalg.vector_norm(sizes(list(grads.values()))))


@dataclass
class Watch:
    """What one `Reversible` remembers from step to step; the state behind a `GuardReport`."""

    guard: Guard
    steps: int = 0
    repaired: int = 0
    warned: int = 0
    tolerance: float = math.nan
    drift: dict[str, float] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    anchors: dict[tuple[bool, int], int] = field(default_factory=dict)  # (direction, state) -> bytes
    names: dict[tuple[bool, int], str] = field(default_factory=dict)
    spot_checks: int = 0
    worst_angle: float = 0.0
    worst_remaining: float = 0.0
    rest: int = 0  # steps that go straight to the repair: drifting, and no room for anchors
    apart: int = 0  # calls behind a loss that subtracts that do
    held: int = 0  # such calls so far
    # What cancelled within calls, by direction and by what was trained.
    within: dict[tuple[bool, str], Within] = field(default_factory=dict)
    count: int = 0  # where the counters start
    counters: dict[torch.device, Tensor] = field(default_factory=dict)
    together: Together = field(default_factory=Together, repr=False, compare=False)
    flag: Flag = field(init=False, repr=False, compare=False)  # largest drift over its limit, for captured steps

    def __post_init__(self) -> None:
        self.flag = Flag(self)

    def count_on(self, device: torch.device) -> Tensor:
        """The number of this call, on the device: that of the fingerprints."""
        if device not in self.counters:
            self.counters[device] = torch.full((), self.count, dtype=torch.int64, device=device)
        return self.counters[device].add_(1).clone()

    def checked(self, angle: float, remains: float) -> None:
        """Take note of a spot check: the angle, and what remains of it with the signs of the forward pass."""
        self.spot_checks += 1
        self.worst_angle = max(self.worst_angle, angle) if not math.isnan(angle) else math.inf
        self.worst_remaining = max(self.worst_remaining, remains) if not math.isnan(remains) else math.inf

    def within_of(self, inverse: bool, names: Sequence[str]) -> Within:
        """What cancelled within the calls of one direction in which the parameters of these names were trained; of others it says
        nothing.
        """
        key = inverse, hashlib.blake2s("\n".join(names).encode(), digest_size=8).hexdigest()
        if key not in self.within:
            free = [other for other, one in self.within.items() if not one.captured]
            for other in free[: max(0, len(free) + 1 - SETS)]:
                del self.within[other]
            self.within[key] = Within()
        return self.within[key]

    def places(self, inverse: bool, size: int) -> set[int]:
        """The states to be stored in a call of this size, as many as the budget allows."""
        found, spent = set(), 0
        for way, k in self.anchors:
            cost = size if k else 0  # the input is stored anyway
            if way == inverse and spent + cost <= self.guard.budget:
                found.add(k)
                spent += cost
        return found

    def report(self) -> GuardReport:
        """The present state."""
        plain = {name: getattr(self, name) for name in _PLAIN if name not in ("rest", "apart")}
        anchors = {self.names[key]: size for key, size in self.anchors.items()}
        return GuardReport(**plain, drift=dict(self.drift), worst=dict(self.worst), anchors=anchors)

    def state(self) -> dict[str, Any]:
        """Everything that is carried from step to step, as JSON values."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        count = max((int(c) for c in self.counters.values()), default=self.count)
        anchors = [[way, k, size, self.names[way, k]] for (way, k), size in self.anchors.items()]
        within = [[*key, *one.state()] for key, one in self.within.items()]
        drifts = {"drift": dict(self.drift), "worst": dict(self.worst)}
        return {**plain, **drifts, "count": count, "anchors": anchors, "within": within}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        state = {"worst_remaining": state["worst_angle"], "apart": 0, "within": [], **state}  # older states have none
        real = ("tolerance", "worst_angle", "worst_remaining")
        plain = {name: (float if name in real else int)(state[name]) for name in (*_PLAIN, "count")}
        drift, worst = ({str(k): float(v) for k, v in state[name].items()} for name in ("drift", "worst"))
        torch.tensor(plain["count"], dtype=torch.int64, device="cpu")  # raises where the counters cannot hold it
        anchors = {(bool(way), int(k)): int(size) for way, k, size, _ in state["anchors"]}
        names = {(bool(way), int(k)): str(name) for way, k, _, name in state["anchors"]}
        # Older ones of four entries do not say what was trained.
        within = {
            (bool(way), str(of)): Within.of(*one) for way, of, *one in (w for w in state["within"] if len(w) != 4)
        }
        for name, value in plain.items():  # nothing is changed before all of it could be read
            setattr(self, name, value)
        for key, one in self.within.items():
            found = within.setdefault(key, Within())
            found.captured = one.captured
            found.read_from(one.gain)
        for counter in self.counters.values():  # in place: captured steps go on from them
            counter.fill_(self.count)
        self.drift, self.worst, self.anchors, self.names, self.within = drift, worst, anchors, names, within

    def counts(self) -> dict[str, int]:
        """What is counted on the host, which a replay of a captured step does not do."""
        return {name: getattr(self, name) for name in ("steps", "repaired", "rest", "apart")}

    def recount(self, counts: Mapping[str, int]) -> None:
        """Go on from other counts."""
        for name, count in counts.items():
            setattr(self, name, count)

    def spot_check_within(self, steps: int) -> bool:
        """Whether one is due in the next so many steps."""
        every = self.guard.spot_check
        return every > 0 and (self.steps + steps) // every > self.steps // every

    def rested(self, *, subtracts: bool) -> None:
        """Take note of a step that went straight to the repair; of one behind a loss that subtracts, or another."""
        self.flag.note()
        self.rest, self.steps, self.repaired = max(0, self.rest - 1), self.steps + 1, self.repaired + 1
        self.apart = max(0, self.apart - subtracts)

    def _act(self, text: str, harm: str = "") -> bool:
        """Raise, warn or repair, as the guard says; whether the step has to be repaired."""
        if self.guard.action == "raise":
            raise DriftError(f"{text}. Use Guard(action='repair'), or train with a stability penalty.")
        if self.guard.action == "warn":
            self.warned += 1
            warnings.warn(f"{text}{harm}", DriftWarning, stacklevel=3)
            return False
        self.repaired += 1
        return True

    def changed(self, name: str, found: float) -> bool:
        """Act on a block that gives another output than in the forward pass; whether the step has to be repaired.

        A repair can only tell how far the network is another one: what the block was is gone. So it comes with a warning.
        """
        text = (
            f"block {name}, evaluated again from its stored input, gives another output (by {found:.1e} of its spread): it is stochastic "
            "with a generator of its own, or has changed since"
        )
        if self.guard.action == "raise":
            raise DriftError(
                f"{text}. Draw from torch's global generators, and change parameters after the backward pass."
            )
        self.warned += 1
        warnings.warn(f"{text}; this gradient may be wrong", DriftWarning, stacklevel=2)
        self.repaired += self.guard.action == "repair"
        return self.guard.action == "repair"

    def lost(self) -> bool:
        """Act on a gradient that is not finite although no block has drifted; whether the step has to be repaired."""
        return self._act("the memory-saving gradient is not finite")

    def cancelled(self, found: float, limit: float, *, subtracts: bool) -> bool:
        """Act on calls whose gradients nearly cancel; whether the last of them is to be repaired. What the others gave is out already.

        Where all of them are behind losses that have said that they subtract (`hold`), only such calls rest: the steps between them have
        nothing to do with it.
        """
        text = (
            f"the gradients of several calls in one backward pass nearly cancel: their drift is {found:.1e} of what remains (allowed "
            f"{limit:.1e})"
        )
        if self.guard.action == "raise":
            raise DriftError(f"{text}. Use Guard(action='repair'), or memory='checkpoint' for such a loss.")
        self.warned += 1
        if self.guard.action == "warn":
            warnings.warn(f"{text}; this gradient may be wrong", DriftWarning, stacklevel=2)
            return False
        self.rest, self.apart = (self.rest, APART) if subtracts else (REST, self.apart)
        text = f"{text}; this gradient may be wrong, the next such {'differences' if subtracts else 'steps'} are computed without a walk"
        warnings.warn(text, DriftWarning, stacklevel=2)
        return True

    def settle(self, names: Sequence[str], added: Sequence[float], total: float, limit: float) -> int | None:
        """Take note of the drift of a step, in the order of the walk; where it has passed the limit, `None` if it does no harm."""
        self.steps += 1
        self.tolerance = limit
        self.drift = dict(reversed(list(zip(names, added, strict=True))))
        for name, value in self.drift.items():
            self.worst[name] = max(value, self.worst.get(name, 0.0))
        if total <= limit:
            return None
        return next((k for k, value in enumerate(added) if not value <= limit), len(added) - 1)

    def react(self, name: str, total: float) -> bool:
        """Act on drift that has passed the limit at the input of this block; whether the step has to be repaired."""
        text = f"the memory-saving walk has drifted by {total:.1e} (allowed {self.tolerance:.1e}), first at the input of block {name}"
        return self._act(text, "; this gradient may be wrong")

    def anchor(self, inverse: bool, places: Sequence[tuple[int, str]], size: int) -> None:
        """Store these states from the next step on, in this order as far as they fit; rest if not even the first does."""
        for k, (place, name) in enumerate(places):
            cost = size if place else 0  # the input is stored anyway
            if sum(self.anchors.values()) + cost <= self.guard.budget:
                self.anchors[inverse, place] = cost
                self.names[inverse, place] = name
            elif not k:
                self.rest = REST


def anchors_for(added: Sequence[float], limit: float, rounding: float) -> list[int]:
    """Where to store states so that a walk that has drifted stays well within its limit, in the order of the walk.

    From an anchor on a walk begins afresh with the error of rounding, which is taken to grow as the drift did.

    Args:
        added: Drift that has added up to each place.
        limit: What it may add up to.
        rounding: The drift of one block that is exact.

    Example:
        >>> anchors_for([1e-7, 2e-7, 1e-2, 2e-2], 1e-3, 1e-6)
        [2]
    """
    chosen, level, total, begun = [], limit / AHEAD, 0.0, math.nan
    for k, (before, after) in enumerate(zip([0.0, *added], added, strict=False)):
        drift = after - before if math.isfinite(after) else math.inf
        if begun == begun:  # after an anchor
            drift = min(drift, rounding * max(1.0, drift / begun if math.isfinite(drift) and begun > 0 else 1.0))
        total += drift
        if not total <= level:
            chosen.append(k)
            begun, total = max(after - before if math.isfinite(after) else math.inf, rounding), 0.0
    return chosen


def angle(u: Sequence[Tensor], v: Sequence[Tensor]) -> float:
    r"""The angle between two gradients in radians, $2\,\mathrm{atan2}(|a - b|, |a + b|)$ of the unit vectors, in float64.

    Example:
        >>> round(angle([torch.tensor([1.0, 0.0])], [torch.tensor([1.0, 1.0])]), 4)
        0.7854
    """
    a, b = (
        torch.cat([_dense(t).double().flatten() for t in one]) if one else torch.zeros(1, device="cpu")
        for one in (u, v)
    )
    if not a.any() and not b.any():
        return 0.0
    a, b = a / a.norm(), b / b.norm()
    return float(2 * torch.atan2((a - b).norm(), (a + b).norm()))


def _dense(grad: Tensor) -> Tensor:
    return grad.detach().to_dense() if grad.is_sparse else grad.detach()
