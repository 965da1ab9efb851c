r"""Third rung: stable code in the place of a library's own, for the same function and the same parameters.

Rational-quadratic splines of nflows and normflows invert by a quadratic formula in float32, whose discriminant may come out negative: they
then assert, or lose digits inside steep bins. Here knots, root and derivative are computed in float64 from the same raw parameters, the
discriminant and the root are held to where they lie in exact arithmetic, and both directions take their log-determinant from one formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilip.cures.rung import Case, Rung, Skipped
from bilip.cures.treated import Treated

__all__ = ["Replacements", "rational_quadratic"]

_HOMES = ("nflows", "glasflow", "enflows", "flowcon", "normflows")


class Replacements(Rung):
    """Spline inverses that never assert and hold at the edges, with one formula for both log-determinants."""

    name: ClassVar[str] = "replacements"
    place: ClassVar[int] = 30

    def options(self, case: Case) -> Iterator[tuple[dict[str, Any], str]]:
        count = len(_splines(case.subject.bijection))
        if not count:
            raise Skipped(
                "there is no block for which there is more stable code: rational-quadratic splines of nflows and normflows"
            )
        yield {"splines": True}, f"{count} splines with a stable inverse, computed in float64 inside"

    def apply(self, treated: Treated, settings: dict[str, Any]) -> Treated:
        for part in _splines(treated.bijection):
            kind = type(part)
            method = "_piecewise_cdf" if hasattr(kind, "_piecewise_cdf") else "_elementwise"
            stable = {"_piecewise_cdf": _coupling, "_elementwise": _autoregressive}[method]
            part.__class__ = type(kind.__name__, (kind,), {method: stable, "__module__": kind.__module__})
        return treated


def _splines(module: nn.Module) -> list[nn.Module]:
    """Couplings and autoregressive blocks with rational-quadratic splines."""
    found = []
    for part in module.modules():
        kind = type(part)
        if (
            kind.__module__.split(".")[0] not in _HOMES
            or "RationalQuadratic" not in kind.__name__
            or kind.__name__.endswith("CDF")
        ):
            continue
        known = hasattr(kind, "_piecewise_cdf") or hasattr(kind, "_elementwise")
        if (
            known
            and getattr(part, "tails", None) in (None, "linear")
            and isinstance(getattr(part, "num_bins", None), int)
        ):
            found.append(part)
    return found


def _coupling(self: Any, inputs: Tensor, transform_params: Tensor, inverse: bool = False) -> tuple[Tensor, Tensor]:
    net = getattr(self, "transform_net", None)
    width = getattr(net, "hidden_features", None) or getattr(net, "hidden_channels", None)
    return _spline(self, inputs, transform_params, width, inverse)


def _autoregressive(
    self: Any, inputs: Tensor, autoregressive_params: Tensor, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    params = autoregressive_params.view(len(inputs), inputs.shape[1], -1)
    width = getattr(self.autoregressive_net, "hidden_features", None)
    out, log_det = _spline(self, inputs, params, width, inverse)
    return out, log_det.flatten(1).sum(1)


def _spline(self: Any, inputs: Tensor, params: Tensor, width: int | None, inverse: bool) -> tuple[Tensor, Tensor]:
    bins, raw = self.num_bins, params.double()
    widths, heights, slopes = raw[..., :bins], raw[..., bins : 2 * bins], raw[..., 2 * bins :]
    if width:
        widths, heights = widths / math.sqrt(width), heights / math.sqrt(width)
    ends = (0.0, 1.0)
    if self.tails == "linear":
        end = math.log(math.exp(1 - self.min_derivative) - 1)
        slopes = F.pad(slopes, (1, 1), value=end)
        ends = (-float(self.tail_bound), float(self.tail_bound))
    x = inputs.double()
    out, log_det = rational_quadratic(
        x,
        widths,
        heights,
        slopes,
        ends=ends,
        inverse=inverse,
        floors=(self.min_bin_width, self.min_bin_height, self.min_derivative),
    )
    outside = (x < ends[0]) | (x > ends[1])  # without tails: a straight line of slope 1, instead of an exception
    out = torch.where(outside, x, out)
    log_det = torch.where(outside, torch.zeros_like(log_det), log_det)
    return out.to(inputs.dtype), log_det.to(inputs.dtype)


def rational_quadratic(
    x: Tensor,
    widths: Tensor,
    heights: Tensor,
    slopes: Tensor,
    *,
    ends: tuple[float, float],
    inverse: bool,
    floors: tuple[float, float, float] = (1e-3, 1e-3, 1e-3),
) -> tuple[Tensor, Tensor]:
    r"""A monotone rational-quadratic spline on an interval, or its inverse, entry by entry, with the log of its derivative.

    In a bin of width w, height h, mean slope $s = h / w$ and slopes $d_0, d_1$ at its ends, with $\theta = (x - x_0) / w$:

    $$y = y_0 + h \frac{s \theta^2 + d_0 \theta (1 - \theta)}{s + (d_0 + d_1 - 2 s) \theta (1 - \theta)}.$$

    Reference: Durkan et al., *Neural Spline Flows*, 2019.

    Args:
        x: What goes in; outside of the interval it is taken as its nearest end.
        widths: Raw widths of the bins, softmax of which are the shares of the interval, shape `(*x.shape, bins)`.
        heights: Raw heights, likewise.
        slopes: Raw slopes at the knots, of which softplus is taken, shape `(*x.shape, bins + 1)`.
        ends: The interval, the same for x and y.
        inverse: From y to x.
        floors: Least shares of a bin's width and height, least slope.

    Example:
        >>> raw = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 9, dtype=torch.float64)
        >>> x = torch.linspace(-3, 3, 5, dtype=torch.float64)
        >>> y, up = rational_quadratic(x, *raw, ends=(-3.0, 3.0), inverse=False)
        >>> back, down = rational_quadratic(y, *raw, ends=(-3.0, 3.0), inverse=True)
        >>> bool(torch.allclose(back, x)), bool(torch.allclose(up, -down))
        (True, True)
    """
    xs, ys = (_knots(raw, floor, ends) for raw, floor in ((widths, floors[0]), (heights, floors[1])))
    slopes = floors[2] + F.softplus(slopes)
    given = x.clamp(*ends)[..., None]
    bins = widths.shape[-1]
    place = (torch.searchsorted((ys if inverse else xs).contiguous(), given, right=True) - 1).clamp(0, bins - 1)

    def at(values: Tensor, k: int = 0) -> Tensor:
        return values.gather(-1, place + k)[..., 0]

    x0, y0, d0, d1 = at(xs), at(ys), at(slopes), at(slopes, 1)
    w, h = at(xs, 1) - x0, at(ys, 1) - y0
    s = h / w
    bend = d0 + d1 - 2 * s
    if inverse:
        rise = given[..., 0] - y0
        b = h * d0 - rise * bend
        c = -s * rise
        a = h * (s - d0) + rise * bend
        root = (b.square() - 4 * a * c).clamp_min(0.0).sqrt()
        theta = (2 * c / (-b - root).clamp_max(-1e-300)).clamp(0.0, 1.0)
    else:
        theta = ((given[..., 0] - x0) / w).clamp(0.0, 1.0)
    mixed = theta * (1 - theta)
    below = s + bend * mixed
    log = 2 * s.log() + (d1 * theta.square() + 2 * s * mixed + d0 * (1 - theta).square()).log() - 2 * below.log()
    if inverse:
        return x0 + theta * w, -log
    return y0 + h * (s * theta.square() + d0 * mixed) / below, log


def _knots(raw: Tensor, floor: float, ends: tuple[float, float]) -> Tensor:
    shares = floor + (1 - floor * raw.shape[-1]) * raw.softmax(-1)
    inner = shares.cumsum(-1)[..., :-1]
    inner = F.pad(F.pad(inner, (1, 0), value=0.0), (0, 1), value=1.0)
    return ends[0] + (ends[1] - ends[0]) * inner
