"""What is true of a flow, use by use. Nothing here comes from bilip: the libraries are called by their own interface (`views`).

A share of bad samples is counted on many more samples than an audit takes, with a 99 % interval (Clopper and Pearson). Where all of it
lies above the limit the use is `unsafe`, where all of it lies below `safe`, else `borderline`.

What the model computes in float32 is held against a float64 copy. How far that copy may be off is found by computing it again with
every weight and every input changed in its last bit, at random, for each sample where the two are not plainly alike: an error counts
if it exceeds the limit by twice that, and is excused if it stays below the limit by twice that; the rest are `unknown`, and widen the
interval. Where the last bits of float64 alone move a result by more than the limit, the float32 result, whose last bits are 5e8 times
larger, is taken to be off by more than the limit too (counted as `beyond`).
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import beta
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flow_zoo.flows import Spec
from flow_zoo.views import Context, View

__all__ = ["LIMITS", "SAMPLES", "interval", "other_sources", "status", "truth"]

RELATIVE = 2.0**-11.5  # half of the digits of float32
LOG_PROB, LOG_DET, RANGE, ANGLE = 1e-3, 1e-3, 10.0, 1e-2
LIMITS = {"quick": 0.01, "standard": 0.001}
SAMPLES = 61_440  # ten times what a standard audit takes to call a use safe
_CALM = 0.05  # of the limit: results so close need no second look
_ULP = 2.0**-52


def interval(bad: int, count: int, unknown: int = 0, confidence: float = 0.99) -> tuple[float, float]:
    """What the true share lies in."""
    side = (1 - confidence) / 2
    worst = min(count, bad + unknown)
    low = 0.0 if bad == 0 else float(beta.ppf(side, bad, count - bad + 1))
    high = 1.0 if worst == count else float(beta.ppf(1 - side, worst + 1, count - worst))
    return low, high


def status(low: float, high: float, limit: float) -> str:
    return "unsafe" if low > limit else "safe" if high <= limit else "borderline"


def other_sources(
    x: Tensor, context: Context, seed: int, like: Tensor | None = None
) -> dict[str, tuple[Tensor, Context]]:
    """Input that the flow was not trained on: noise over each feature's range (images: over that of all pixels), and the data times 4.

    The range is that of `like`, by default of the samples themselves: of heavy tails, more samples have a wider one.
    """
    generator = torch.Generator().manual_seed(seed)
    like = x if like is None else like
    low, high = (like.amin(0), like.amax(0)) if x.ndim == 2 else (like.amin(), like.amax())
    noise = low + (high - low) * torch.rand(x.shape, generator=generator)
    return {"uniform": (noise, context), "scaled:4": (4 * x, context)}


# ---- copies


def reference(view: View) -> View:
    """A float64 copy; nets that compute in fewer bits on their own compute as they were meant to."""
    view.settle()
    twin = copy.deepcopy(view).double().eval()
    for module in twin.modules():
        if hasattr(module, "exact"):
            module.exact = True  # type: ignore[assignment]
    return twin


def shaken(view: View, seed: int) -> View:
    """A float64 copy whose weights are changed in their last bit."""
    twin, generator = copy.deepcopy(view), torch.Generator().manual_seed(seed)
    for weight in twin.parameters():
        if weight.is_floating_point():
            weight.data.copy_(_shaken(weight.data, generator))
    return twin


def _shaken(x: Tensor, generator: torch.Generator) -> Tensor:
    return x * (1 + _ULP * (2.0 * torch.randint(0, 2, x.shape, generator=generator) - 1))


@contextlib.contextmanager
def _in_double() -> Iterator[None]:
    """Some libraries make tensors in torch's default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def same_numbers(seed: int) -> Iterator[None]:
    """Random numbers that do not depend on the dtype: drawn in float32, then converted."""
    kept = {name: getattr(torch, name) for name in ("randn", "randn_like")}
    generator = torch.Generator().manual_seed(seed)

    def randn_like(x: Tensor, **_: Any) -> Tensor:
        return kept["randn"](x.shape, generator=generator, dtype=torch.float32).to(x.dtype)

    def randn(*size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        drawn = kept["randn"](tuple(shape), generator=generator, dtype=torch.float32)
        return drawn.to(dtype or torch.get_default_dtype())

    before = np.random.get_state()  # noqa: NPY002 - normflows draws from it
    np.random.seed(seed)  # noqa: NPY002
    torch.randn, torch.randn_like = randn, randn_like  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.randn, torch.randn_like = kept["randn"], kept["randn_like"]
        np.random.set_state(before)  # noqa: NPY002


# ---- calls that survive


def attempt(call: Callable[[Tensor, Context], Tensor], x: Tensor, context: Context, like: tuple[int, ...]) -> Tensor:
    """What a call gives; NaN for the samples that make it raise, found by halving the batch."""
    try:
        with torch.no_grad():
            return call(x.clone(), context).detach()
    except Exception:  # a library may raise anything
        if len(x) == 1:
            return torch.full((1, *like), torch.nan, dtype=x.dtype)
        half = len(x) // 2
        first, second = (None, None) if context is None else (context[:half], context[half:])
        return torch.cat((attempt(call, x[:half], first, like), attempt(call, x[half:], second, like)))


def _norm(x: Tensor) -> Tensor:
    flat = x.double().flatten(1)
    scale = flat.abs().amax(1).nan_to_num(1.0, 1.0).clamp_min(1e-300)
    return (flat / scale[:, None]).norm(dim=1) * scale


def relative(x: Tensor, other: Tensor, typical: float) -> Tensor:
    """|x - other| / max(|x|, typical |x|); infinite where it is not finite."""
    apart = _norm(other.double().reshape(x.shape) - x.double())
    return (apart / _norm(x).clamp_min(typical)).nan_to_num(math.inf, math.inf)


def _units(x: Tensor) -> Tensor:
    """The size of each feature: the median of |x_j| over what is not 0; 1 for images, whose pixels have one unit."""
    if x.ndim != 2:
        return torch.ones(())
    size = x.double().abs()
    found = torch.where(size > 0, size, torch.nan).nanmedian(0).values
    known = found[torch.isfinite(found)]
    return found.nan_to_num(float(known.median()) if len(known) else 1.0)


def _typical(x: Tensor) -> float:
    size = _norm(x)
    size = size[torch.isfinite(size) & (size > 0)]
    return float(size.median()) if len(size) else 1.0


def _rows(x: Tensor | None, rows: Tensor) -> Any:
    return None if x is None else x[rows]


@dataclass
class Count:
    """Bad samples so far."""

    bad: int = 0
    unknown: int = 0
    beyond: int = 0
    count: int = 0

    def told(self) -> dict[str, Any]:
        low, high = interval(self.bad, self.count, self.unknown)
        found = {"bad": self.bad, "unknown": self.unknown, "beyond": self.beyond, "count": self.count}
        found |= {"low": low, "high": high}
        return found | {budget: status(low, high, limit) for budget, limit in LIMITS.items()}

    @property
    def clear(self) -> bool:
        """Bad beyond any doubt: more samples would say nothing."""
        return self.count >= 2048 and interval(self.bad, self.count, 0, 0.9999)[0] > 0.05


def _chunks(total: int, seconds: float, size: int, tally: Count) -> Iterator[slice]:
    end = time.monotonic() + seconds
    for start in range(0, total, size):
        yield slice(start, min(total, start + size))
        tally.count = min(total, start + size)
        if tally.clear or time.monotonic() > end:
            return


def _judge(error: Tensor, moved: Tensor, limit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which errors exceed the limit for sure, which may, and which do because float64 itself moves by more."""
    beyond = moved > limit
    bad = (error - 2 * moved > limit) | beyond
    unknown = ~bad & (error + 2 * moved > limit)
    return bad, unknown, beyond


class Judge:
    """A view, its float64 copy, and two shaken ones."""

    def __init__(self, view: View, chunk: int) -> None:
        self.view, self.chunk = view, chunk
        self.wide = reference(view)
        self.shaken = [shaken(self.wide, seed) for seed in (1, 2)]
        self.latent: tuple[int, ...] = ()

    # ---- inversion

    def inversion(self, x: Tensor, context: Context, seconds: float) -> dict[str, Any]:
        units = _units(x)
        tally, typical = Count(), _typical(x.double() / units)
        for rows in _chunks(len(x), seconds, self.chunk, tally):
            given, some = x[rows], None if context is None else context[rows]
            z = attempt(lambda x, c: self.view.encode(x, c)[0], given, some, self.latent)
            back = attempt(self.view.decode, z, some, tuple(x.shape[1:]))
            tally.bad += int((~(relative(given.double() / units, back / units, typical) <= RELATIVE)).sum())
        return tally.told()

    # ---- sampling

    def sampling(self, data: Tensor, held_out: Tensor, context: Context, seconds: float, count: int) -> dict[str, Any]:
        torch.manual_seed(11)
        tally, outside = Count(), [0, 0]
        # the range of the data is itself a matter of how many were looked at: all of them, or a part
        ranges = [_range(data), _range(data[:4096])]
        excused = [float(_outside(held_out, r).double().mean()) for r in ranges]
        shape = tuple(data.shape[1:])
        for rows in _chunks(count, seconds, self.chunk, tally):
            some = None if context is None else context[rows]
            with torch.no_grad():
                z = self.view.base_sample(rows.stop - rows.start, some)
            x = attempt(self.view.decode, z, some, shape)
            finite = torch.isfinite(x.flatten(1)).all(1)
            bad, unknown, beyond = self._wrong(x, z, some, finite, _units(data))
            bad |= ~finite
            tally.bad += int(bad.sum())
            tally.unknown += int((unknown & ~bad).sum())
            tally.beyond += int((beyond & finite).sum())
            for k, r in enumerate(ranges):
                outside[k] += int((_outside(x, r) & finite & ~bad).sum())
        told = []
        for k in range(2):
            more = max(0, math.ceil(outside[k] - excused[k] * tally.count))
            told.append(Count(tally.bad + more, tally.unknown, tally.beyond, tally.count).told())
        for budget in LIMITS:
            if told[0][budget] != told[1][budget]:
                told[0][budget] = "borderline"
        return told[0] | {"outside": outside[0], "held_out_outside": excused[0], "wrong": tally.bad}

    def _wrong(
        self, x: Tensor, z: Tensor, context: Context, finite: Tensor, units: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Samples that are neither the inverse of their latent nor encoded to it."""
        none = torch.zeros(len(x), dtype=torch.bool)
        typical = _typical(z)
        safe = torch.where(finite.view(-1, *[1] * (x.ndim - 1)), x, torch.zeros_like(x)).double()
        encode = lambda v: lambda x, c: v.encode(x, c)[0]  # noqa: E731
        with _in_double():
            wide = None if context is None else context.double()
            code = attempt(encode(self.wide), safe, wide, self.latent)
            backward = relative(z, code, typical)
            if bool((backward[finite] <= _CALM * RELATIVE).all()):
                return none, none, none
            rows = (finite & ~(backward <= _CALM * RELATIVE)).nonzero().flatten()
            some = _rows(wide, rows)
            zr, xr = z[rows].double(), safe[rows]
            moved = self._moved(encode, xr, some, code[rows], self.latent, typical, z[rows])
            bad_back, unknown_back, beyond = _judge(backward[rows], moved, torch.tensor(RELATIVE))
            exact = attempt(self.wide.decode, zr, some, tuple(x.shape[1:]))
            there = torch.isfinite(exact.flatten(1)).all(1)
            again = attempt(encode(self.wide), exact.nan_to_num(0.0, 0.0, 0.0), some, self.latent)
            inverse = there & (relative(zr, again, typical) <= RELATIVE)  # else the decoding is not the inverse
            size = _typical(exact[there] / units) if bool(there.any()) else 1.0
            forward = relative(exact.nan_to_num(0.0, 0.0, 0.0) / units, x[rows] / units, size)
            moved = self._moved(lambda v: v.decode, zr, some, exact, tuple(x.shape[1:]), size, exact, units)
            bad_fore, unknown_fore, _ = _judge(forward, moved, torch.tensor(RELATIVE))
            bad_fore, unknown_fore = bad_fore | ~inverse, unknown_fore & inverse
        bad, unknown = none.clone(), none.clone()
        bad[rows] = bad_back & bad_fore
        unknown[rows] = ~(bad_back & bad_fore) & (bad_back | unknown_back) & (bad_fore | unknown_fore)
        far = none.clone()
        far[rows] = beyond & bad_fore
        return bad, unknown, far

    def _moved(
        self,
        pick: Any,
        x: Tensor,
        context: Context,
        value: Tensor,
        like: tuple[int, ...],
        typical: float,
        scale: Tensor,
        units: Tensor | float = 1.0,
    ) -> Tensor:
        """How far the last bits of float64 move a result, as a relative error."""
        found = torch.zeros(len(x), dtype=torch.float64)
        for k, twin in enumerate(self.shaken):
            other = attempt(pick(twin), _shaken(x, torch.Generator().manual_seed(k)), context, like)
            apart = _norm((other - value) / units) / _norm(scale / units).clamp_min(typical)
            found = torch.maximum(found, apart.nan_to_num(math.inf, math.inf))
        return found

    # ---- likelihood

    def likelihood(self, x: Tensor, context: Context, seconds: float) -> dict[str, Any]:
        tally, size = Count(), x[0].numel()
        for rows in _chunks(len(x), seconds, self.chunk, tally):
            given, some = x[rows], None if context is None else context[rows]
            narrow = self._log_prob(self.view, given, some, rows.start)
            with _in_double():
                more = None if some is None else some.double()
                wide = self._log_prob(self.wide, given.double(), more, rows.start)
            error = torch.where(narrow.double() == wide, 0.0, (narrow.double() - wide).abs()).nan_to_num(
                math.inf, math.inf
            )
            limit = LOG_PROB * (size + wide.abs())
            # both NaN or infinite: the reference knows no better, the model as run is still of no use
            limit = torch.where(torch.isfinite(wide), limit, torch.tensor(LOG_PROB * size, dtype=torch.float64))
            far = ~(error <= _CALM * limit)
            if not bool(far.any()):
                continue
            at = far.nonzero().flatten()
            moved = torch.zeros(len(given), dtype=torch.float64)
            with _in_double():
                for k, twin in enumerate(self.shaken):
                    generator = torch.Generator().manual_seed(k)
                    if self.view.random:  # the draws of a part of a batch are not those of the whole
                        other = self._log_prob(twin, _shaken(given.double(), generator), more, rows.start)[at]
                    else:
                        other = self._log_prob(
                            twin, _shaken(given[at].double(), generator), _rows(more, at), rows.start
                        )
                    apart = torch.where(other == wide[at], 0.0, (other - wide[at]).abs())
                    moved[at] = torch.maximum(moved[at], apart.nan_to_num(math.inf, math.inf))
            bad, unknown, beyond = _judge(error[at], moved[at], limit[at])
            tally.bad += int(bad.sum())
            tally.unknown += int(unknown.sum())
            tally.beyond += int((beyond & torch.isfinite(narrow[at])).sum())
        return tally.told()

    def _log_prob(self, view: View, x: Tensor, context: Context, seed: int) -> Tensor:
        with same_numbers(seed + 1) if view.random else contextlib.nullcontext():
            return attempt(view.log_prob, x, context, ())

    # ---- log-determinants

    def log_det(self, x: Tensor, context: Context, seconds: float) -> dict[str, Any]:
        """The claimed log-determinant at some points against that of the Jacobian, block by block, in float64."""
        size, end = x[0].numel(), time.monotonic() + seconds
        bad = unknown = count = 0
        worst = 0.0
        for k in range(len(x)):
            point = x[k : k + 1].double()
            given = None if context is None else context[k : k + 1].double()
            with _in_double():
                try:
                    claimed, error = self._claimed(point, given)
                    found = [_log_det_of_jacobian(v, point, given) for v in (self.wide, self.shaken[0])]
                except Exception:  # a library may raise anything; such points are counted with the log-densities
                    continue
            count += 1
            off, error = abs(claimed - found[0]) / size, (4 * error + 2 * abs(found[1] - found[0])) / size
            if not (math.isfinite(off) and math.isfinite(error)):
                unknown += 1
            elif off - error > LOG_DET:
                bad += 1
            elif off + error > LOG_DET:
                unknown += 1
            worst = max(worst, off if math.isfinite(off) else 0.0)
            if time.monotonic() > end:
                break
        # one wrong point of many is told from all by the points that an audit happens to look at
        verdict = (
            "unsafe" if count and bad > 0.9 * count else "safe" if count and not bad and not unknown else "borderline"
        )
        return {"points": count, "bad": bad, "unknown": unknown, "off_max": worst, "status": verdict}

    def _claimed(self, x: Tensor, context: Context) -> tuple[float, float]:
        if not self.view.random:
            with torch.no_grad():
                return float(self.wide.encode(x, context)[1]), 0.0
        rows, calls = (4096 if x[0].numel() <= 16 else 256), 16
        many = x.expand(rows, *x.shape[1:]).clone()
        given = None if context is None else context.expand(rows, -1)
        found = torch.stack([self.wide.encode(many, given)[1].detach().mean() for _ in range(calls)])
        # rows of one call share how many terms of a series are summed: calls are what is independent
        return float(found.mean()), float(found.std() / math.sqrt(calls))

    # ---- is it a function?

    def same_again(self, x: Tensor, context: Context) -> bool:
        """Whether the model gives the same twice, and for a sample alone as in company."""
        few, some = x[:64].double(), None if context is None else context[:64].double()
        call = lambda x, c: self.wide.encode(x, c)[0]  # noqa: E731
        with _in_double():
            z = attempt(call, few, some, self.latent)
            again = attempt(call, few, some, self.latent)
            alone = torch.cat(
                [attempt(call, few[k : k + 2], _rows(some, torch.arange(k, k + 2)), self.latent) for k in (0, 2, 4)]
            )
        known = torch.isfinite(z.flatten(1)).all(1)
        if not bool(known[:6].any()):
            return True
        typical = _typical(z[known])
        twice = relative(z[known], again[known], typical)
        company = relative(z[:6][known[:6]], alone[known[:6]], typical)
        return bool((twice <= RELATIVE).all()) and bool((company <= RELATIVE).all())

    # ---- memory-saving gradients

    def gradients(self, x: Tensor, context: Context, batches: int, seconds: float) -> dict[str, Any] | None:
        """Angles between stored gradients and those with activations recomputed from outputs, block by block, as the model runs."""
        end, angles = time.monotonic() + seconds, []
        self.view.settle()
        view = copy.deepcopy(self.view)
        for weight in view.parameters():
            weight.requires_grad_(weight.is_floating_point())  # FrEIA keeps permutations as parameters
        for k in range(batches):
            rows = slice(32 * k, 32 * k + 32)
            given = None if context is None else context[rows]
            try:
                found = _angle(view, x[rows], given)
            except Exception:  # the inverse of a batch may raise: there is no memory-saving gradient then
                found = math.nan
            if found is not None:
                angles.append(found)
            if time.monotonic() > end:
                break
        if not angles:
            return None
        order = sorted(math.inf if math.isnan(a) else a for a in angles)
        middle, largest, least = order[len(order) // 2], order[-1], order[0]
        verdict = "safe" if largest <= ANGLE else "unsafe" if least > ANGLE else "borderline"
        return {"batches": len(order), "median": middle, "largest": largest, "least": least, "status": verdict}


def _range(data: Tensor) -> tuple[Tensor, Tensor]:
    x = data.double()
    low, high = (x.amin(), x.amax()) if x.ndim == 4 else (x.amin(0), x.amax(0))
    centre, half = (low + high) / 2, (high - low) / 2
    half = torch.where(half > 0, half, half.max().clamp_min(1e-30))
    return centre - RANGE * half, centre + RANGE * half


def _outside(x: Tensor, ends: tuple[Tensor, Tensor]) -> Tensor:
    wide = x.double()
    return ((wide < ends[0]) | (wide > ends[1])).flatten(1).any(1)


def _log_det_of_jacobian(view: View, x: Tensor, context: Context) -> float:
    """The sum over blocks of log |det J|, each from as many copies of the point as it has entries and one backward pass."""
    total = 0.0
    for step in view.steps():
        size = x[0].numel()
        many = x.expand(size, *x.shape[1:]).clone().requires_grad_(True)
        given = None if context is None else context.expand(size, *context.shape[1:])
        with torch.enable_grad():
            y, _ = step.forward(many, given)
            (jacobian,) = torch.autograd.grad(y.flatten(1).diagonal().sum(), many)
        total += float(torch.linalg.slogdet(jacobian.flatten(1))[1])
        with torch.no_grad():
            x = step.forward(x.clone(), context)[0].detach()
    return total


class _Sides(TorchFunctionMode):
    """Piecewise activations stay on the side of their kink where the forward pass had them."""

    def __init__(self, kept: list[Tensor], *, replay: bool) -> None:
        super().__init__()
        self.kept, self.replay, self.place = kept, replay, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in ("relu", "relu_", "leaky_relu") or not isinstance(args[0], Tensor):
            return func(*args, **(kwargs or {}))
        if not self.replay:
            self.kept.append(args[0].detach() > 0)
            return func(*args, **(kwargs or {}))
        side = self.kept[self.place]
        self.place += 1
        slope = 0.0
        if name == "leaky_relu":
            slope = args[1] if len(args) > 1 else (kwargs or {}).get("negative_slope", 0.01)
        return torch.where(side, args[0], slope * args[0])


def _angle(view: View, x: Tensor, context: Context) -> float | None:
    """The angle of one batch; NaN where the memory-saving gradient is not finite, `None` where the stored one is not."""
    weights = [p for p in view.parameters() if p.is_floating_point()]
    count = len(x)
    z, log_det = view.encode(x.clone(), context)
    loss = (0.5 * z.flatten(1).square().sum(1) - log_det).mean()
    if not loss.requires_grad:  # zuko's CNF lets gradients through in training mode only
        return None
    parts = torch.autograd.grad(loss, weights, allow_unused=True)
    if all(g is None for g in parts):
        return None
    stored = [torch.zeros_like(p) if g is None else g for p, g in zip(weights, parts, strict=True)]
    if not all(bool(torch.isfinite(g).all()) for g in stored):
        return None
    steps, sides = view.steps(), []
    with torch.no_grad():
        y = x.clone()
        for step in steps:
            sides.append([])
            with _Sides(sides[-1], replay=False):
                y, _ = step.forward(y, context)
    gradient = y / count
    found = [torch.zeros_like(p) for p in weights]
    for step, side in zip(reversed(steps), reversed(sides), strict=True):
        with torch.no_grad():
            before = step.inverse(y, context)
        before = before.detach().clone().requires_grad_(True)
        with torch.enable_grad(), _Sides(side, replay=True):
            y, log_det = step.forward(before * 1.0, context)
        outputs, given = [y], [gradient.reshape(y.shape)]
        if log_det.requires_grad:
            outputs, given = [*outputs, log_det], [*given, torch.full_like(log_det, -1 / count)]
        parts = torch.autograd.grad(outputs, [before, *weights], given, allow_unused=True)
        found = [f if g is None else f + g for f, g in zip(found, parts[1:], strict=True)]
        assert parts[0] is not None
        gradient, y = parts[0], before.detach()
    u, v = (torch.cat([g.double().flatten() for g in grads]) for grads in (found, stored))
    if not bool(torch.isfinite(u).all()):
        return math.nan
    if float(u.norm()) == 0.0 or float(v.norm()) == 0.0:
        return 0.0 if float(u.norm()) == float(v.norm()) else math.pi
    u, v = u / u.norm(), v / v.norm()
    return 2 * math.atan2(float((u - v).norm()), float((u + v).norm()))


def _worse(*found: str) -> str:
    return "unsafe" if "unsafe" in found else "borderline" if "borderline" in found else "safe"


def truth(
    spec: Spec, view: View, *, samples: int = SAMPLES, points: int = 40, seconds: float = 130.0
) -> dict[str, dict[str, Any]]:
    """What is true of each use, at the limit of each budget, with the numbers behind it.

    Args:
        spec: The flow.
        view: It, trained.
        samples: Samples of each source; where time ends before, fewer, as stated.
        points: Points whose log-determinant is held against the Jacobian.
        seconds: Time for all of it, roughly.
    """
    data = spec.set
    shown, _ = data.draw(25_600 if samples >= 25_600 else samples, seed=2)  # what an audit is given
    x, context = data.draw(samples, seed=3)
    large = x[0].numel() > 128
    judge = Judge(view, chunk=512 if large else 2048)
    with torch.no_grad():
        judge.latent = tuple(view.base_sample(2, None if context is None else context[:2]).shape[1:])
    found: dict[str, dict[str, Any]] = {}
    found["inversion"] = judge.inversion(x, context, 0.15 * seconds)
    found["sampling"] = judge.sampling(shown, x, context, 0.25 * seconds, samples)
    sources = {"likelihood": (x, context)}
    sources |= {f"ood-likelihood {name}": pair for name, pair in other_sources(x, context, seed=4, like=shown).items()}
    for use, (given, some) in sources.items():
        share = 0.2 if use == "likelihood" else 0.15
        found[use] = judge.likelihood(given, some, 0.75 * share * seconds)
        few = points if not large else max(2, points // 10)
        told = judge.log_det(given[:few], None if some is None else some[:few], 0.25 * share * seconds)
        found[use]["log_det"] = told
        for budget in LIMITS:
            worse = told["status"]
            if told["points"] == 0:  # every point raises, or there is no Jacobian: the log-densities say enough
                worse = found[use][budget]
            found[use][budget] = _worse(found[use][budget], worse)
    if not view.random:
        found["reversible-gradients"] = {}
        told = judge.gradients(x, context, 40, 0.1 * seconds)
        found["reversible-gradients"] = (told or {}) | dict.fromkeys(LIMITS, told["status"] if told else "none")
    if not judge.same_again(x, context):  # then no number means anything
        for use in found:
            found[use] |= dict.fromkeys(LIMITS, "unsafe" if use != "reversible-gradients" else "none")
            found[use]["function"] = False
    return found
