"""Which block breaks the inverse, and how; of a composite of another library, which part inside."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform

from bilip import _linalg
from bilip.adapters import Foreign
from bilip.auditing.budget import Budget
from bilip.auditing.probes.probe import Probe, Task
from bilip.auditing.round_trip import Distances, Typical, distances, distances_each, norms, typical
from bilip.auditing.subject import Subject, in_dtype, run_guarded
from bilip.blocks import Bijection
from bilip.blocks.factor_out import OnKept
from bilip.data import Source
from bilip.errors import NotMeasured
from bilip.linalg.lanczos import largest_singular_value
from bilip.linalg.linearized import AtPoint, LinearPart
from bilip.record import Measurement, Quantity

__all__ = ["Blame", "InnerPart", "inner_parts"]

_DENSE = 64
_STEPS = 12


class Blame(Probe):
    r"""Follows the error block by block, for own and foreign blocks alike.

    The forward pass stores what reaches each block. *Local* error: the round trip of one block alone, at these activations.
    *Carried* error: what is wrong with each activation on the way back from z; its growth through a block's inverse is the
    *gain*. Medians are over the samples that come back wrong, if there are any. Beside them stand the extremes of the block's
    own Jacobian, in float64 at a few samples, and its log-determinant against slogdet for up to 64 dimensions.

    In an audit it follows the samples that fail. The guilty block is the one whose own round trip is wrong; if there is none, the one
    whose inverse makes the error grow by 10 or more and three times as much as the median block. Where none stands out, none is named.
    Weights that are not finite are named before anything else.

    Args:
        samples: Samples followed through the model.
        spectra: Samples for the blocks' Jacobians; 0 leaves them out.

    Example:
        >>> from bilip.models import real_nvp
        >>> m = Blame().measure(real_nvp(2, blocks=3), torch.randn(10, 2))
        >>> len(m.rows), m["guilty"]
        (3, '')
    """

    name = "blame"
    scope = "failing"
    place = 50
    quantities = (
        Quantity("samples", "samples walked", "count"),
        Quantity("wrong", "of them do not come back", "count", "lower"),
        Quantity("guilty", "block that stands out", "text"),
        Quantity("guilty_kind", "its class", "text"),
        Quantity("why", "why", "text"),
        Quantity("first_non_finite", "first block that is not finite", "text"),
        Quantity("guilty_log_det", "block with a wrong log-determinant", "text"),
        Quantity("inside", "composite that it is a part of", "text"),
        Quantity("cause", "rounding, solver or bug", "text"),
        Quantity("local_float64", "largest error of the block's own round trip in float64", "relative", "lower"),
        Quantity("broken_weight", "parameter that is not finite", "text"),
        Quantity("block", "block", "text"),
        Quantity("kind", "kind", "text"),
        Quantity("gain", "growth of the error through the inverse", "", "lower"),
        Quantity("condition", "condition number", "", "lower"),
        Quantity("share_non_finite", "share of Inf/NaN on the way back", "share", "lower"),
        Quantity("forward_non_finite", "share of Inf/NaN on the way forth", "share", "lower"),
        Quantity("local_median", "median error of the block's own round trip", "relative", "lower"),
        Quantity("local_max", "largest error of the block's own round trip", "relative", "lower"),
        Quantity("carried_median", "median error carried to this block", "relative", "lower"),
        Quantity("carried_max", "largest error carried to this block", "relative", "lower"),
        Quantity("log_det_error", "error of the block's log-determinant", "nats", "lower"),
    )

    def __init__(self, samples: int = 64, *, spectra: int = 2) -> None:
        self.samples, self.spectra = samples, spectra

    @classmethod
    def cost(cls, budget: Budget, task: Task) -> dict[str, object] | None:
        return {"samples": budget.walk, "spectra": min(1 if task.large else 2, budget.spectra)}

    @torch.no_grad()
    def _measure(self, subject: Subject, source: Source) -> Measurement:
        batch = source.first(self.samples, dtype=subject.dtype, device=subject.device)
        parts, context, notes = subject.parts, batch.context, []
        broken, sizes = broken_weight(subject), Typical(None, typical(source).scale)
        stored = [batch.x]
        for _, part in parts:
            stored.append(run_guarded(part.__call__, stored[-1].clone(), context).value)
        states = self._local_states(subject, batch.x, context, sizes, notes)
        walk, back = _Walk(stored, sizes), stored[-1]
        for k in reversed(range(len(parts))):
            part = parts[k][1]
            back = run_guarded(part.inverse, back.clone(), context).value
            walk.add(k, run_guarded(part.inverse, stored[k + 1].clone(), context).value, back)
            self.progress(1 - k / len(parts))
        (local, born), (carried, absolute) = walk.errors()
        absolute.append(torch.zeros(len(batch.x), device="cpu"))
        # Without what is born in the block.
        grown = [(a - b).clamp_min(0) for a, b in zip(absolute, born, strict=False)]
        wrong = ~(carried[0] <= subject.half_digits)
        chosen = wrong if bool(wrong.any()) else ~wrong
        rows: list[dict] = []
        for k, (name, part) in enumerate(parts):
            known = chosen & (absolute[k + 1] > 0) & torch.isfinite(absolute[k])
            gain = (grown[k] / absolute[k + 1])[known]
            row = _row(name, kind_of(part), local[k], carried[k], gain, stored[k + 1], chosen)
            rows.append(row | vars(states[k]))
        rows += self._inside(parts, stored, chosen, context)
        values = {
            "samples": len(batch.x),
            "wrong": int(wrong.sum()),
            "broken_weight": broken,
            **_judge(rows, subject.half_digits, subject.eps, math.prod(source.shape), dict(parts)),
        }
        return Measurement(self.name, source.name, values=values, rows=tuple(rows), notes=tuple(notes))

    def _inside(
        self, parts: list[tuple[str, Bijection]], stored: list[Tensor], chosen: Tensor, context: Tensor | None
    ) -> list[dict]:
        """Rows for the parts of composites: of a model that is one opaque block, or has few."""
        rows: list[dict] = []
        for k, (name, part) in enumerate(parts):
            inner = part.block if isinstance(part, OnKept) else part
            if not isinstance(inner, Foreign) or len(parts) > 8:
                continue
            try:
                found = inner_parts(
                    inner.module,
                    lambda part=part, k=k: part(stored[k].clone(), context),
                    lambda z, part=part: part.inverse(z.clone(), context),
                    len(stored[k]),
                )
            except Exception:  # a foreign model may raise anything; the block as a whole was followed
                continue
            if len(found) < 2:
                continue
            for one in found:
                gain, carried = one.gain.cpu(), distances(one.stored, one.carried).relative.cpu()
                known = chosen & torch.isfinite(gain)
                # Whether nothing was wrong before.
                born = bool((norms(one.arrived - one.after)[chosen.to(one.after.device)] == 0).all())
                local = carried if born else None
                row = _row(f"{name}.{one.name}", one.kind, local, carried, gain[known], one.after, chosen)
                rows.append(row | {"inside": name} | vars(_LocalState()))
        return rows

    def _local_states(
        self, subject: Subject, x: Tensor, context: Tensor | None, sizes: Typical, notes: list[str]
    ) -> list[_LocalState]:
        found = [_LocalState() for _ in subject.parts]
        if not self.spectra:
            return found
        try:
            double = subject.copy_in(torch.float64)
        except NotMeasured as why:
            notes.append(str(why))
            return found
        x = x[: self.spectra].double()
        given = None if context is None else in_dtype(context[: self.spectra], torch.float64)
        together = subject.repointed(x, given) if sizes.scale is None else None
        if together is not None:
            return _look_together(together)
        for k, (name, part) in enumerate(double.parts):
            try:
                linear = LinearPart(part, x, given, name)
                x = linear.z
                if not bool(torch.isfinite(x).all()):
                    notes.append(f"block {name} gives numbers that are not finite even in float64")
                    break
                found[k] = _LocalState() if part.rearranges else _look(linear)
                back = run_guarded(part.inverse, linear.z.clone(), given).value
                found[k].local_float64 = _largest(distances(linear.x, back, None if k else sizes).relative)
            except NotMeasured as why:
                notes.append(str(why))
            except Exception as error:  # a foreign block may raise anything
                notes.append(f"block {name} raised in float64 ({type(error).__name__}: {error})")
                break
            if part.rearranges:
                found[k] = _LocalState(1.0, 1.0, 1.0, 0.0)
        return found


class _Walk:
    """How far off is what comes back to each block, alone and carried; on a GPU with room for all that is computed at the end, at once."""

    def __init__(self, stored: list[Tensor], sizes: Typical) -> None:
        self.stored, self.sizes = stored, sizes
        self.together = sizes.scale is None and _fit_together(stored)
        self.back: list[tuple[Tensor, Tensor]] = []
        self.found: list[tuple[Distances, Distances]] = []

    def add(self, k: int, alone: Tensor, back: Tensor) -> None:
        """Block `k`, from the last to the first."""
        at, units = self.stored[k], None if k else self.sizes  # activations have no units of their own
        if self.together and alone.numel() == back.numel() == at.numel():
            self.back.insert(0, (alone.flatten(1), back.flatten(1)))
        else:
            self.together = False
            self.found.insert(0, (_on_cpu(distances(at, alone, units)), _on_cpu(distances(at, back, units))))

    def errors(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Relative and absolute errors, those alone and those carried."""
        found = self.found
        if self.back:  # all, or those behind a block that gave back another number of entries
            x = torch.stack([at.flatten(1) for at in self.stored[len(found) : -1]])
            each = (_on_cpu(distances_each(x, torch.stack(list(other)))) for other in zip(*self.back, strict=True))
            rows = zip(*(zip(d.l2, d.relative, d.largest, strict=True) for d in each), strict=True)
            found = [*found, *((Distances(*own), Distances(*all_)) for own, all_ in rows)]
        return [([pair[k].relative for pair in found], [pair[k].l2 for pair in found]) for k in (0, 1)]


def _fit_together(stored: list[Tensor]) -> bool:
    """Whether activations lie on a GPU, are of one size, and leave room for a dozen copies of them in float64."""
    size = sum(x.numel() for x in stored)
    if not stored[0].is_cuda or any(x.numel() != stored[0].numel() for x in stored):
        return False
    return 100 * size < torch.cuda.mem_get_info(stored[0].device)[0]


def _on_cpu(found: Distances) -> Distances:
    return Distances(found.l2.cpu(), found.relative.cpu(), found.largest.cpu())


def _row(
    name: str, kind: str, local: Tensor | None, carried: Tensor, gain: Tensor, after: Tensor, chosen: Tensor
) -> dict[str, Any]:
    """What is told of a block, or of a part inside one; its own round trip is not known there if something was wrong before it."""
    return {
        "block": name,
        "kind": kind,
        "local_median": math.nan if local is None else _median(local[chosen]),
        "local_max": math.nan if local is None else _largest(local),
        "carried_median": _median(carried[chosen]),
        "carried_max": _largest(carried),
        "gain": _median(gain),
        "share_non_finite": float((~torch.isfinite(carried)).double().mean()),
        "forward_non_finite": float((~torch.isfinite(after.flatten(1)).all(1)).double().mean()),
    }


@dataclass
class _LocalState:
    sigma_min: float = math.nan
    sigma_max: float = math.nan
    condition: float = math.nan
    log_det_error: float = math.nan
    local_float64: float = math.nan


def broken_weight(subject: Subject) -> str:
    """The first parameter or buffer that holds NaN or Inf, and how many; empty if all are finite."""
    for name, value in subject.bijection.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point():
            lost = int((~torch.isfinite(value)).sum())
            if lost:
                what = "NaN" if bool(torch.isnan(value).any()) else "Inf"
                return f"{name} ({lost:,} of {value.numel():,} entries are {what})"
    return ""


def kind_of(part: Bijection) -> str:
    """The class of a block, of the foreign one where it is foreign."""
    inner = part.block if isinstance(part, OnKept) else part
    return str(inner.kind if isinstance(inner, Foreign) else type(inner).__name__)


def _look(linear: LinearPart) -> _LocalState:
    """Extremes of one block's Jacobian over the points, and its log-determinant where the block is small."""
    size, state, known = linear.x[0].numel(), _LocalState(), linear.extremes
    if known is not None:
        top, bottom = (torch.tensor([value], dtype=torch.float64, device="cpu") for value in known)
    elif size <= _DENSE:
        eye = torch.eye(size, dtype=torch.float64, device=linear.x.device)
        ones = [
            LinearPart(linear.part, linear.x[k : k + 1], None if linear.context is None else linear.context[k : k + 1])
            for k in range(len(linear.x))
        ]
        matrices = torch.stack([one.apply(eye).T for one in ones])
        values = torch.linalg.svdvals(matrices)
        top, bottom = values[:, 0], values[:, -1]
        if getattr(linear.part, "has_log_det", True):
            claimed = linear.part.forward_and_log_det(linear.x, linear.context)[1]
            state.log_det_error = float((claimed - _linalg.slogdet(matrices)[1]).abs().max())
    else:
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(len(linear.x), size, generator=generator, dtype=torch.float64, device="cpu").to(
            linear.x.device
        )
        top = largest_singular_value(linear.apply, linear.adjoint, start, steps=_STEPS).value
        bottom = 1 / largest_singular_value(linear.solve, linear.solve_adjoint, start, steps=_STEPS).value
    state.sigma_min, state.sigma_max = float(bottom.min()), float(top.max())
    state.condition = float((top / bottom).max())
    return state


def _look_together(at: AtPoint) -> list[_LocalState]:
    """`_look` and the own round trip in float64 for all blocks of a large model at once: on a GPU each launch counts."""
    parts = at.parts
    found = [_LocalState(1.0, 1.0, 1.0, 0.0) if part.part.rearranges else _LocalState() for part in parts]
    couplings = [k for k, part in enumerate(parts) if part.moved is not None]  # the others are linear
    known: dict[int, Tensor] = {}
    if couplings:
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(at.count, at.size, generator=generator, dtype=torch.float64, device="cpu").to(at.x.device)
        start = start.repeat(len(couplings), 1)
        tops, bottoms = (
            largest_singular_value(partial(at.each, there), partial(at.each, back), start, steps=_STEPS).value
            for there, back in (("apply", "adjoint"), ("solve", "solve_adjoint"))
        )
        ends = torch.stack((tops, 1 / bottoms)).view(2, len(couplings), at.count).cpu()
        known = dict(zip(couplings, ends.unbind(1), strict=True))
    for k, part in enumerate(parts):
        if part.part.rearranges:
            continue
        top, bottom = (
            known[k] if k in known else torch.tensor(part.extremes, dtype=torch.float64, device="cpu")[:, None]
        )
        found[k].sigma_min, found[k].sigma_max = float(bottom.min()), float(top.max())
        found[k].condition = float((top / bottom).max())
    errors = distances_each(*at.local_round_trips()).relative.cpu()
    for state, error, part in zip(found, errors, parts, strict=True):
        if not part.part.rearranges:
            state.local_float64 = _largest(error)
    return found


def _judge(rows: list[dict], limit: float, eps: float, size: int, parts: dict[str, Bijection]) -> dict[str, str]:
    """Who is guilty, why, and whether it is a bug, a solver that stops early, or rounding."""
    inside, rows = [row for row in rows if "inside" in row], [row for row in rows if "inside" not in row]
    broken = [row for row in rows if row["forward_non_finite"] > 0]  # in the order of the calls: there, and back
    broken += [row for row in reversed(rows) if row["share_non_finite"] > 0]
    first = broken[0]["block"] if broken else ""
    liars = [row for row in rows if row["log_det_error"] > 1e-3 * size]
    liar = max(liars, key=lambda r: r["log_det_error"]) if liars else None
    by_local = sorted(rows, key=lambda r: _or(r["local_median"], math.inf), reverse=True)
    worst, second = by_local[0], by_local[1]["local_median"] if len(by_local) > 1 else 0.0
    local = _or(worst["local_median"], math.inf)
    guilty, why, cause = None, "", ""
    if local > limit or (local > 1e3 * eps and local > 30 * _or(second, 0.0) and rows[0]["carried_max"] > limit):
        guilty, why = worst, f"its own round trip is off by {local:.1e}"
        cause = _cause(worst, limit, parts[worst["block"]])
        if cause == "rounding" and math.isfinite(worst["condition"]):
            why += f", with condition number {worst['condition']:.1e} at the failing samples"
    elif rows[0]["carried_max"] > limit or broken:
        growing = _growing(rows)
        guilty = growing or (broken[0] if broken else None)
        if guilty is not None and growing is not None:
            why, cause = (
                f"its inverse makes the error grow {guilty['gain']:.2g}-fold, more than any other block",
                "rounding",
            )
        elif guilty is not None:
            why, cause = "it is the first whose output is not finite", "rounding"
    if guilty is not None and why != "" and cause != "" and guilty["block"] in {row["inside"] for row in inside}:
        guilty, why = _inner(guilty, why, cause, inside)
    if guilty is None and liar is not None and not (rows[0]["carried_max"] > limit or broken):
        guilty, why = liar, f"its log-determinant is off by {liar['log_det_error']:.2g}"
    return {
        "guilty": guilty["block"] if guilty else "",
        "guilty_kind": guilty["kind"] if guilty else "",
        "why": why,
        "cause": cause,
        "first_non_finite": first,
        "guilty_log_det": liar["block"] if liar else "",
    }


def _inner(guilty: dict, why: str, cause: str, inside: list[dict]) -> tuple[dict | None, str]:
    """The part of a guilty composite that stands out, if one does; else the composite itself, if that is no matter of rounding."""
    parts = [row for row in inside if row["inside"] == guilty["block"]]
    own = [row for row in parts if row["local_median"] > 1e-4]
    if own:
        return own[0], f"inside {guilty['kind']}, its own round trip is off by {own[0]['local_median']:.1e}"
    lost = [row for row in reversed(parts) if row["share_non_finite"] > 0 or row["forward_non_finite"] > 0]
    worst = _growing(parts)
    if worst is not None:
        grown = f"its inverse makes the error grow {worst['gain']:.2g}-fold, more than any other part"
        return worst, f"inside {guilty['kind']}, {grown}"
    if lost:
        return lost[0], f"inside {guilty['kind']}, it is the first whose output is not finite on the way back"
    if cause == "bug":
        return guilty, f"{why}, although the parts inside come back"
    return (guilty, why) if len(parts) < 2 else (None, "")


def _growing(rows: list[dict]) -> dict | None:
    """The row whose inverse makes the error grow by 10 or more, and three times as much as the median one; of two, as the other."""
    known = sorted((row for row in rows if row["gain"] > 0), key=lambda r: r["gain"])
    if not known or known[-1]["gain"] < 10:
        return None
    usual = known[min(len(known) // 2, len(known) - 2)]["gain"] if len(known) > 1 else 0.0
    return known[-1] if known[-1]["gain"] >= 3 * usual else None


def _cause(row: dict, limit: float, part: Bijection) -> str:
    """A block whose own round trip is wrong: in float64 as well, and not for its condition? Then it is no rounding."""
    again = row["local_float64"]
    if math.isnan(again) or again <= limit or row["share_non_finite"] > 0 or row["forward_non_finite"] > 0:
        return "rounding"
    if not row["condition"] * torch.finfo(torch.float64).eps * 1e3 < again:
        return "rounding"
    kind = row["kind"].lower()
    iterates = not getattr(part, "closed_form", True) or any(
        word in kind for word in ("resblock", "residual", "ode", "cnf")
    )
    return "solver" if iterates else "bug"


def _median(values: Tensor) -> float:
    return float(values.nan_to_num(math.inf).median()) if len(values) else math.nan


def _largest(values: Tensor) -> float:
    return float(values.nan_to_num(math.inf, math.inf).max()) if len(values) else math.nan


def _or(value: float, other: float) -> float:
    return other if math.isnan(value) else value


@dataclass(frozen=True)
class InnerPart:
    """One part of a composite, seen on the way there and back.

    Attributes:
        name: Its path inside the composite.
        kind: Its class.
        stored: What it was given on the way there, flat, `(batch, entries)`.
        carried: What it gave back on the way back, likewise.
        after: What it gave on the way there.
        arrived: What reached it on the way back.
    """

    name: str
    kind: str
    stored: Tensor
    carried: Tensor
    after: Tensor
    arrived: Tensor

    @property
    def gain(self) -> Tensor:
        """How much the error grew from its output to its input, for each sample."""
        return norms(self.carried - self.stored) / norms(self.arrived - self.after)


@dataclass
class _Calls:
    """Inputs and outputs of each call of a part, in order, and its class."""

    kind: str = ""
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def inner_parts(module: nn.Module, there: Callable[[], Any], back: Callable[[Any], Any], batch: int) -> list[InnerPart]:
    """The innermost parts of a module that are called both on the way there and on the way back, in the order of the way there.

    Parts are told by having two directions: a method `inverse` beside `forward`, or an argument `rev`; or they are the innermost ones of a
    `torch.distributions` transform that the module holds, or that it builds when it is called, as modules of zuko and Pyro do. Their
    calls are watched, in both directions; nothing else about the module is changed, and the watching is undone.

    Args:
        module: The composite.
        there: Runs it from data to latents.
        back: Runs it back from what `there` returned.
        batch: Number of samples.

    Example:
        >>> class Twice(nn.Module):
        ...     def forward(self, x):
        ...         return 2 * x
        ...     def inverse(self, z):
        ...         return z / 2
        >>> class Both(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.first, self.second = Twice(), Twice()
        >>> both, x = Both(), torch.ones(3, 2)
        >>> found = inner_parts(both, lambda: both.second(both.first(x)), lambda z: both.first.inverse(both.second.inverse(z)), 3)
        >>> [(part.name, part.kind) for part in found]
        [('first', 'Twice'), ('second', 'Twice')]
    """
    with _Recorder(module, batch) as first:
        z = there()
    with _Recorder(module, batch) as second:
        back(z)
    found = []
    for name in first:
        ways = zip(first[name].seen, reversed(second.get(name, _Calls()).seen), strict=False)
        for (before, after), (arrived, carried) in ways:
            if before.shape == carried.shape and after.shape == arrived.shape:
                found.append(InnerPart(name, first[name].kind, before, carried, after, arrived))
    return found


def _two_way(part: nn.Module) -> bool:
    if type(part).__module__.startswith("torch."):
        return False
    if callable(getattr(part, "inverse", None)):
        return True
    try:
        return "rev" in inspect.signature(part.forward).parameters
    except (TypeError, ValueError):
        return False


def _transforms(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Transform]]:
    """The innermost transforms that a transform or a list is made of, with their paths."""
    if isinstance(value, Transform) and id(value) not in seen:
        seen.add(id(value))
        # the attribute _inv of a transform is its inverse, which holds the transform; that of the inverse is what it inverts
        held = {k: v for k, v in vars(value).items() if k != "_inv" or type(value).__name__ == "_InverseTransform"}
        held |= getattr(value, "_modules", {})
        inner = [found for name, part in held.items() for found in _transforms(part, f"{path}.{name}", seen)]
        yield from inner or [(path.strip("."), value)]
    elif isinstance(value, (list, tuple, nn.ModuleList)):
        for k, part in enumerate(value):
            yield from _transforms(part, f"{path}.{k}", seen)


class _Recorder:
    """Keeps the input and output of every call of a module's parts, in `calls`, by the name of the part in the order of the first calls.

    While it is entered, methods of the parts are replaced on the instances; leaving it takes the replacements away.
    """

    def __init__(self, module: nn.Module, batch: int) -> None:
        self.module, self.batch = module, batch
        self.calls: dict[str, _Calls] = {}
        self._replaced: list[tuple[Any, str]] = []

    def __enter__(self) -> dict[str, _Calls]:
        parts = {name: part for name, part in self.module.named_modules() if name and _two_way(part)}
        innermost = {name: part for name, part in parts.items() if not any(n.startswith(f"{name}.") for n in parts)}
        try:
            for name, part in innermost.items():
                for method in ("forward", "inverse"):
                    self._replace(part, method, lambda f, name=name, part=part: self._recording(f, name, part))
            self._record_transforms(vars(self.module).get("held"))
            for method in ("forward", "condition"):
                self._replace(self.module, method, self._building)
        except BaseException:
            self.__exit__()
            raise
        return self.calls

    def __exit__(self, *_: object) -> None:
        for part, method in reversed(self._replaced):
            delattr(part, method)
        self._replaced.clear()

    def _replace(self, part: Any, method: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(part, method, None)
        if callable(original) and method not in vars(part):
            setattr(part, method, by(original))
            self._replaced.append((part, method))

    def _recording(self, original: Callable[..., Any], name: str, part: Any) -> Callable[..., Any]:
        """The same function, which keeps what it is given first and what it gives."""

        def call(*args: Any, **options: Any) -> Any:
            given = _flat(args[:1], self.batch)
            result = original(*args, **options)
            got = _flat(result[0] if isinstance(result, tuple) and result else result, self.batch)
            if given is not None and got is not None:
                self.calls.setdefault(name, _Calls(type(part).__name__)).seen.append((given, got))
            return result

        return call

    def _building(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; the parts of a transform that it builds are recorded too."""

        def call(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            if isinstance(result, Transform):
                self._record_transforms(result)
            return result

        return call

    def _record_transforms(self, value: Any) -> None:
        for name, part in _transforms(value, "", set()):
            for method in ("_call", "_inverse"):
                self._replace(part, method, lambda f, name=name, part=part: self._recording(f, name, part))


def _flat(value: Any, batch: int) -> Tensor | None:
    """All tensors of a value side by side, `(batch, entries)`, float64; `None` if there is none with so many rows."""
    if isinstance(value, Tensor):
        return value.detach().reshape(batch, -1).double() if value.ndim and len(value) == batch else None
    if isinstance(value, (list, tuple)):
        found = [f for f in (_flat(v, batch) for v in value) if f is not None]
        return torch.cat(found, 1) if found else None
    return None
