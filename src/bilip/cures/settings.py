"""First rung: how the model is called. Its parameters stay, its arithmetic too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import nn

from bilip.cures.rung import Case, Rung, Skipped
from bilip.cures.treated import Plain, Treated, wrapped

__all__ = ["Settings"]

# Attributes of solvers, and what they become: tolerances a thousandth, iterations ten times as many.
_TOLERANCES = {"atol": 1e-12, "rtol": 1e-12}
_ITERATIONS = {"fixed_point_iterations": 2000, "max_evaluations": 20_000}


class Settings(Rung):
    """TF32 and autocast off, evaluation mode, and tighter tolerances where an inverse is solved for."""

    name: ClassVar[str] = "settings"
    place: ClassVar[int] = 10

    def options(self, case: Case) -> Iterator[tuple[dict[str, Any], str]]:
        tried = False
        if case.was.get("tf32") or case.was.get("autocast"):
            tried = True
            which = " and ".join(
                text for text, on in (("TF32", case.was.get("tf32")), ("autocast", case.was.get("autocast"))) if on
            )
            yield {"plain": True}, f"{which} off"
        if any(True for _ in _solvers(case.subject.bijection)):
            tried = True
            yield {"solver": True}, "tolerances of solvers a thousandth, ten times as many iterations"
        if not tried:
            raise Skipped("it runs in plain float32 already, and no inverse is solved for with a tolerance")

    def apply(self, treated: Treated, settings: dict[str, Any]) -> Treated:
        if settings.get("solver"):
            for part, name, value in _solvers(treated.bijection):
                setattr(part, name, value)
        return wrapped(treated, Plain(treated.bijection)) if settings.get("plain") else treated


def _solvers(module: nn.Module) -> Iterator[tuple[nn.Module, str, float | int | None]]:
    """Parts, attributes and their tighter values."""
    for part in module.modules():
        for name, least in _TOLERANCES.items():
            value = vars(part).get(name)
            if isinstance(value, float) and value > least:
                yield part, name, max(value * 1e-3, least)
        for name, most in _ITERATIONS.items():
            value = vars(part).get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < most:
                yield part, name, min(10 * value, most)
        if type(part).__name__ == "Residual" and isinstance(vars(part).get("tolerance"), float):
            yield part, "tolerance", None  # what the dtype can give
