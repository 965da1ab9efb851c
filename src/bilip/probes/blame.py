"""Which block breaks the inverse, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bilip import _linalg
from bilip.adapters import Foreign
from bilip.blocks import Bijection
from bilip.blocks.on_kept import OnKept
from bilip.data import Source
from bilip.errors import NotMeasured
from bilip.probes.distance import distances, typical_norm
from bilip.probes.guarded import run_guarded
from bilip.probes.lanczos import largest_singular_value
from bilip.probes.linear_part import LinearPart
from bilip.probes.probe import Probe
from bilip.probes.subject import Subject
from bilip.record import Measurement

__all__ = ["Blame"]

_DENSE = 64
_STEPS = 12


class Blame(Probe):
    r"""Follows the error block by block, for own and foreign blocks alike.

    The forward pass stores what reaches each block. *Local* error: the round trip of one block alone, at these activations.
    *Carried* error: what is wrong with each activation when walking back from z; its growth through a block's inverse is the
    *gain*. Medians are over the samples that come back wrong, if there are any. Beside them stand the extremes of the block's
    own Jacobian, in float64 at a few samples, and its log-determinant against slogdet for up to 64 dimensions.

    The guilty block is the one whose own round trip is wrong; if there is none, the one whose inverse makes the error grow most.

    Args:
        samples: Samples walked through the model.
        spectra: Samples for the blocks' Jacobians; 0 leaves them out.

    Example:
        >>> from bilip.models import real_nvp
        >>> m = Blame().measure(real_nvp(2, blocks=3), torch.randn(10, 2))
        >>> len(m.rows), m["guilty"]
        (3, '')
    """

    name = "blame"

    def __init__(self, samples: int = 64, *, spectra: int = 2) -> None:
        self.samples, self.spectra = samples, spectra

    @torch.no_grad()
    def _measure(self, subject: Subject, source: Source) -> Measurement:
        batch = next(iter(source.batches(self.samples, limit=self.samples, dtype=subject.dtype, device=subject.device)))
        parts, context, notes = subject.parts, batch.context, []
        stored = [batch.x]
        for _, part in parts:
            stored.append(run_guarded(part.__call__, stored[-1].clone(), context).value)
        states = self._local_states(subject, batch.x, context, notes)
        local, carried, absolute, born = [], [], [], []
        back = stored[-1]
        for k in reversed(range(len(parts))):
            part = parts[k][1]
            back = run_guarded(part.inverse, back.clone(), context).value
            alone = run_guarded(part.inverse, stored[k + 1].clone(), context).value
            typical = typical_norm(stored[k])
            own, all_ = distances(stored[k], alone, typical), distances(stored[k], back, typical)
            local.append(own.relative.cpu())
            born.append(own.l2.cpu())
            carried.append(all_.relative.cpu())
            absolute.append(all_.l2.cpu())
            self.progress(1 - k / len(parts))
        local, carried, absolute = local[::-1], carried[::-1], [*absolute[::-1], torch.zeros(len(batch.x))]
        grown = [
            (a - b).clamp_min(0) for a, b in zip(absolute, born[::-1], strict=False)
        ]  # without what is born in the block
        wrong = ~(carried[0] <= math.sqrt(subject.eps))
        chosen = wrong if bool(wrong.any()) else ~wrong
        rows: list[dict] = []
        for k, (name, part) in enumerate(parts):
            known = chosen & (absolute[k + 1] > 0) & torch.isfinite(absolute[k])
            rows.append(
                {
                    "block": name,
                    "kind": kind_of(part),
                    "local_median": _median(local[k][chosen]),
                    "local_max": _largest(local[k]),
                    "carried_median": _median(carried[k][chosen]),
                    "carried_max": _largest(carried[k]),
                    "gain": _median((grown[k] / absolute[k + 1])[known]),
                    "share_non_finite": float((~torch.isfinite(carried[k])).double().mean()),
                    "forward_non_finite": float((~torch.isfinite(stored[k + 1].flatten(1)).all(1)).double().mean()),
                    **vars(states[k]),
                }
            )
        values = {
            "samples": len(batch.x),
            "wrong": int(wrong.sum()),
            **_judge(rows, subject.eps, math.prod(source.shape)),
        }
        return Measurement(self.name, source.name, values=values, rows=tuple(rows), notes=tuple(notes))

    def _local_states(self, subject: Subject, x: Tensor, context: Tensor | None, notes: list[str]) -> list[_LocalState]:
        found = [_LocalState() for _ in subject.parts]
        if not self.spectra:
            return found
        try:
            twin = subject.twin(torch.float64)
        except NotMeasured as why:
            notes.append(str(why))
            return found
        x = x[: self.spectra].double()
        given = None if context is None else context[: self.spectra]
        given = given.double() if given is not None and given.is_floating_point() else given
        for k, (name, part) in enumerate(twin.parts):
            try:
                linear = LinearPart(part, x, given, name)
                x = linear.z
                if not bool(torch.isfinite(x).all()):
                    notes.append(f"block {name} gives numbers that are not finite even in float64")
                    break
                found[k] = _LocalState() if part.rearranges else _look(linear)
            except NotMeasured as why:
                notes.append(str(why))
            except Exception as error:  # a foreign block may raise anything
                notes.append(f"block {name} raised in float64 ({type(error).__name__}: {error})")
                break
            if part.rearranges:
                found[k] = _LocalState(1.0, 1.0, 1.0, 0.0)
        return found


@dataclass
class _LocalState:
    sigma_min: float = math.nan
    sigma_max: float = math.nan
    condition: float = math.nan
    log_det_error: float = math.nan


def kind_of(part: Bijection) -> str:
    """The class of a block, of the foreign one where it is foreign."""
    inner = part.block if isinstance(part, OnKept) else part
    return str(inner.kind if isinstance(inner, Foreign) else type(inner).__name__)


def _look(linear: LinearPart) -> _LocalState:
    """Extremes of one block's Jacobian over the points, and its log-determinant where the block is small."""
    size, state = linear.x[0].numel(), _LocalState()
    if size <= _DENSE:
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
        start = torch.randn(len(linear.x), size, generator=generator, dtype=torch.float64).to(linear.x.device)
        top = largest_singular_value(linear.apply, linear.adjoint, start, steps=_STEPS).value
        bottom = 1 / largest_singular_value(linear.solve, linear.solve_adjoint, start, steps=_STEPS).value
    state.sigma_min, state.sigma_max = float(bottom.min()), float(top.max())
    state.condition = float((top / bottom).max())
    return state


def _judge(rows: list[dict], eps: float, size: int) -> dict[str, str]:
    """Who is guilty, and why."""
    limit = math.sqrt(eps)
    broken = [row for row in rows if row["forward_non_finite"] > 0]  # in the order of the walk: there, and back
    broken += [row for row in reversed(rows) if row["share_non_finite"] > 0]
    first = broken[0]["block"] if broken else ""
    liars = [row for row in rows if row["log_det_error"] > 1e-3 * size]
    liar = max(liars, key=lambda r: r["log_det_error"]) if liars else None
    by_local = sorted(rows, key=lambda r: _or(r["local_median"], math.inf), reverse=True)
    worst, second = by_local[0], by_local[1]["local_median"] if len(by_local) > 1 else 0.0
    local = _or(worst["local_median"], math.inf)
    guilty, why = None, ""
    if local > limit or (local > 1e3 * eps and local > 30 * _or(second, 0.0)):
        guilty, why = worst, f"its own round trip is off by {local:.1e}"
    elif rows[0]["carried_max"] > limit or broken:
        growing = [row for row in rows if row["gain"] > 1]
        guilty = max(growing, key=lambda r: r["gain"]) if growing else (broken[0] if broken else None)
        if guilty is not None:
            why = f"its inverse makes the error grow {guilty['gain']:.2g}-fold, more than any other block"
    elif liar is not None:
        guilty, why = liar, f"its log-determinant is off by {liar['log_det_error']:.2g}"
    return {
        "guilty": guilty["block"] if guilty else "",
        "guilty_kind": guilty["kind"] if guilty else "",
        "why": why,
        "first_non_finite": first,
        "guilty_log_det": liar["block"] if liar else "",
    }


def _median(values: Tensor) -> float:
    return float(values.nan_to_num(math.inf).median()) if len(values) else math.nan


def _largest(values: Tensor) -> float:
    return float(values.nan_to_num(math.inf, math.inf).max()) if len(values) else math.nan


def _or(value: float, other: float) -> float:
    return other if math.isnan(value) else value
