"""What the three flows on the checkerboard are judged by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from bilip.recipes.recipe import Found, Line, Measured

__all__ = ["ATTACK_RADIUS", "TITLES", "checkerboard_lines"]

TITLES = {"sigmoid": "affine (0, 1)", "half": "affine (0.5, 1)", "residual": "residual 0.8"}
ATTACK_RADIUS = 0.125


def checkerboard_lines(found: Found, said: Mapping[str, str]) -> list[Line]:
    """Everything that was measured, seed by seed.

    Args:
        found: The numbers of the three flows.
        said: What the paper says of them, in short.
    """

    def each(part: str, text: Callable[[Mapping[str, Any]], str]) -> str:
        return "; ".join(text(found[seed][part].numbers) for seed in found)

    lines = [
        Line(
            f"{title}: lost outside",
            said[part],
            each(part, _outside),
            all(_holds(part, found[seed][part].numbers) for seed in found),
        )
        for part, title in TITLES.items()
    ]
    densities = [[found[seed][part].numbers["density_lost_outside"] for part in ("sigmoid", "half")] for seed in found]
    lines += [
        Line(
            "worst error outside, of the three in this order: falling",
            said["order"],
            "; ".join(", ".join(f"{_worst(found[seed][part].numbers):.1g}" for part in TITLES) for seed in found),
            all(_order(found[seed]) for seed in found),
        ),
        Line(
            "Inf/NaN densities outside, affine (0, 1) and (0.5, 1)",
            said["density"],
            "; ".join(f"{100 * a:.2g} %, {100 * b:.2g} %" for a, b in densities),
            all(a > 0 and b == 0 for a, b in densities),
        ),
        Line(
            "residual: error over eps (1 + |x|) cond, at most",
            "",
            each("residual", lambda n: f"{n['error_over_predicted']:.2g}"),
            key=True,
        ),
    ]
    for part, title in TITLES.items():
        lines += [
            Line(f"{title}: lost outside, best test loss", "", each(part, lambda n: _outside(n["best"]))),
            Line(
                f"{title}: evaluations with any lost",
                "",
                each(part, lambda n: "{} of {}".format(*n["evaluations_lost"])),
            ),
            Line(f"{title}: test loss, at least {math.log(32):.3f}", "", each(part, lambda n: f"{n['test_nll']:.3f}")),
            Line(
                f"{title}: Lip(F⁻¹) on [-8, 8]² proven",
                "",
                each(part, lambda n: "none of use" if (log := n["log10_inverse_bound"]) > 300 else f"10^{log:.3g}"),
            ),
            Line(
                f"{title}: attacked within ±{ATTACK_RADIUS}, relative error above 3.5e-4",
                "",
                each(part, lambda n: "{:.0f} of {}".format(_attacked(n), n["attack"]["samples"])),
            ),
        ]
    return lines


def _outside(numbers: Mapping[str, Any]) -> str:
    out = numbers["outside"]
    broken = f" ({100 * out['share_non_finite']:.2g} % Inf/NaN)" if out["share_non_finite"] else ""
    return f"{100 * out['share_above_1']:.2g} %{broken}, worst {_worst(numbers):.1g}"


def _worst(numbers: Mapping[str, Any], where: str = "outside") -> float:
    out = numbers[where]
    return math.inf if out["share_non_finite"] else out["worst_finite"]


def _attacked(numbers: Mapping[str, Any]) -> float:
    return numbers["attack"]["share_success"] * numbers["attack"]["samples"]


def _holds(part: str, numbers: Mapping[str, Any]) -> bool:
    if part == "residual":
        return max(_worst(numbers), _worst(numbers, "inside")) < 1e-3
    return numbers["outside"]["share_above_1"] > 0


def _order(parts: Mapping[str, Measured]) -> bool:
    sigmoid, half, residual = (_worst(parts[part].numbers) for part in TITLES)
    return sigmoid > half > residual
