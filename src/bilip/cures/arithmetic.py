r"""The first two rungs, which leave the parameters as they are: how a model is called, and more bits where they help.

A reconstruction is off by $|x - \hat x| \le \mathrm{Lip}(F^{-1})\,|\delta| + |\delta_2|$: the rounding $\delta$ of the latent, magnified
by the inverse, and the error $\delta_2$ of the inverse itself. A refined inverse takes away $\delta_2$ alone, so it is tried where the
residual $F(\hat x) - z$ is far above the rounding of $z$ and the error of $z$, and where its steps make it smaller. Where it is not, only a
latent with more bits helps; so latents stay float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bilip._linalg import solve_ex
from bilip._torch import deepcopy_memo
from bilip.adapters import Adapted
from bilip.auditing.reference import Reference
from bilip.auditing.round_trip import norms
from bilip.auditing.subject import Subject
from bilip.blocks import Bijection
from bilip.cures.rung import Case, Rung, Skipped
from bilip.cures.treated import CallWrapper, Plain, Stepwise, Treated, Wide, wrapped
from bilip.errors import BilipError
from bilip.testing.gains import jacobian

__all__ = ["Arithmetic", "Refined", "Settings", "backward_error"]

DOMINATES = 32.0  # times the rounding of the latent: what a sum over blocks of rounding errors does not explain
_LARGEST = 64  # dimensions up to which a Jacobian is taken
_PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd)


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


class Arithmetic(Rung):
    """A refined inverse; float64 from the guilty block to the latent; the state in float64 with nets as they are; all in float64."""

    name: ClassVar[str] = "arithmetic"
    place: ClassVar[int] = 20

    def options(self, case: Case) -> Iterator[tuple[dict[str, Any], str]]:
        subject = case.subject
        error = backward_error(case)
        # in many dimensions the steps need a map near the identity: a quick look tells
        if error > DOMINATES and backward_error(case, refined=4) < 0.1 * error:
            yield (
                {"refined": 4},
                f"an inverse refined by up to 4 Newton steps with residuals in float64 (they are {error:.2g} roundings of the latent)",
            )
        if subject.dtype == torch.float64:
            if error <= DOMINATES:
                raise Skipped(
                    "it computes in float64 already, and its inverse is as good as the rounding of the latent allows"
                )
            return
        parts, guilty = subject.parts, case.guilty()
        place = next((k for k, (name, _) in enumerate(parts) if name == guilty), 0)
        if 0 < place < len(parts):
            yield {"float64_from": guilty}, f"float64 from block {guilty} to the latent, which stays float64"
        if _products(subject.bijection):
            yield {"float64_state": True}, "the state in float64 between nets that stay as they are"
        yield {"float64": True}, "the whole model in float64"

    def apply(self, treated: Treated, settings: dict[str, Any]) -> Treated:
        if "refined" in settings:
            return wrapped(treated, Refined(treated.bijection, int(settings["refined"])))
        if "float64_from" in settings:
            return _float64_from(treated, str(settings["float64_from"]))
        if settings.get("float64_state"):
            return _float64_state(treated)
        if settings.get("float64"):
            (treated.native if isinstance(treated.native, nn.Module) else treated.bijection).double()
            _base_to(treated, torch.float64)
            return wrapped(treated, Wide(treated.bijection))
        return treated


@torch.no_grad()
def backward_error(case: Case, samples: int = 64, *, refined: int = 0) -> float:
    r"""How far $F(\hat F^{-1}(z))$ is from $z$, in roundings of $z$ plus an eighth of what $z$ itself is off by.

    The median over the worst source; 0 where there is no reference. The larger it is, the more of the error is the inverse's own, which
    Newton steps take away.

    Args:
        case: The model and its sources.
        samples: Samples of each source.
        refined: Refine the inverse by so many steps.
    """
    found = [0.0]
    subject = case.subject
    inverting = subject
    if refined:
        better = Adapted(Refined(subject.bijection, refined).eval(), subject.base, subject.library)
        inverting = Subject(better, subject.name)
    with subject.evaluating():
        for source in case.failing():
            batch = source.first(samples, dtype=subject.dtype, device=subject.device)
            try:
                reference = Reference(subject)
                z = subject.forward(batch.x, batch.context).value
                back = inverting.inverse(z, batch.context).value
                exact, again = (reference.encode(x, batch.context).value for x in (batch.x, back))
            except (BilipError, RuntimeError):  # without a float64 copy nothing can be said
                continue
            if not isinstance(again, Tensor) or again.shape != z.shape:
                continue
            allowed = subject.eps * norms(z) + norms(exact - z.double()) / 8
            error = norms(again - z.double()) / allowed.clamp_min(1e-300)
            error = error[torch.isfinite(error)]
            if len(error):
                found.append(float(error.median()))
    return max(found)


def _float64_from(treated: Treated, first: str) -> Treated:
    parts = treated.bijection.parts()
    place = next((k for k, (name, _) in enumerate(parts) if name == first), None)
    if place is None:
        raise Skipped(f"there is no block {first}")
    held = {id(p) for _, part in parts[:place] for p in part.parameters()}
    for _, part in parts[place:]:
        if any(id(p) in held for p in part.parameters()):
            raise Skipped(f"blocks before and after {first} share parameters")
        part.double()
    return wrapped(treated, Stepwise(parts, treated.bijection.shape))


def _products(module: nn.Module) -> list[nn.Module]:
    """The layers that multiply by a matrix, where all of the time goes."""
    return [
        part
        for part in module.modules()
        if isinstance(part, _PRODUCTS)
        or (
            type(part).__name__.endswith("Linear")
            and isinstance(getattr(part, "weight", None), nn.Parameter)
            and hasattr(part, "bias")
        )
    ]


def _float64_state(treated: Treated) -> Treated:
    """Everything in float64 but the layers of nets, which convert what they are given and what they give."""
    narrow = {id(p): p.dtype for layer in _products(treated.bijection) for p in (*layer.parameters(), *layer.buffers())}
    target = treated.native if isinstance(treated.native, nn.Module) else treated.bijection

    def convert(t: Tensor) -> Tensor:
        return t.double() if t.is_floating_point() and id(t) not in narrow else t

    layers = _products(treated.bijection)
    target._apply(convert)
    _base_to(treated, torch.float64)
    for layer in layers:
        layer.register_forward_pre_hook(_narrowed)
        layer.register_forward_hook(_widened)
    for part in treated.bijection.modules():
        part.state_dtype = torch.float64  # type: ignore[assignment]  # bilip's blocks compare dtypes with those of their nets
    return wrapped(treated, Wide(treated.bijection))


def _narrowed(layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype: Any = layer.weight.dtype  # type: ignore[union-attr]
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in given)


def _widened(layer: nn.Module, given: Any, out: Any) -> Any:
    return out.double() if isinstance(out, Tensor) else out


def _base_to(treated: Treated, dtype: torch.dtype) -> None:
    """The base of a copy, where it is a module beside the model, in another dtype."""
    module = getattr(treated.adapted.base, "module", None)
    if isinstance(module, nn.Module):
        module.to(dtype)


class Refined(CallWrapper):
    r"""A bijection whose inverse is refined: $x \leftarrow x + J_F(x)^{-1} (z - F(x))$, with $F$ in float64.

    In more than 64 dimensions, where a Jacobian costs too much, the step is $x \leftarrow x + (z - F(x))$, which converges where
    $F$ is near the identity, as residual blocks are. A step that does not make the residual of a sample smaller is not taken.

    Args:
        inner: The bijection.
        steps: Largest number of steps.

    Example:
        >>> class Sloppy(Bijection):
        ...     def forward(self, x, context=None):
        ...         return x + 0.5 * torch.sin(x)
        ...     def inverse(self, z, context=None):
        ...         return z - 0.5 * torch.sin(z)  # one step of a fixed point
        >>> z = torch.linspace(-2, 2, 6).reshape(3, 2)
        >>> model = Refined(Sloppy(), steps=6)
        >>> bool((model(model.inverse(z)) - z).abs().max() < 1e-6)
        True
    """

    def __init__(self, inner: Bijection, steps: int = 4) -> None:
        super().__init__(inner)
        self.steps = steps
        self._exact: dict[tuple[Any, ...], Bijection] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Refined:
        return Refined(copy.deepcopy(self.inner, memo), self.steps)

    def parts(self, name: str = "") -> list[tuple[str, Bijection]]:
        return [(name or "0", self)]

    def exact(self) -> Bijection:
        """The bijection in float64, made anew where a parameter has changed."""
        key = tuple((t.data_ptr(), t._version) for t in (*self.inner.parameters(), *self.inner.buffers()))
        if key not in self._exact:
            double = copy.deepcopy(self.inner, deepcopy_memo(self.inner)).double().requires_grad_(False)
            self._exact = {key: double.train(self.training)}
        return self._exact[key]

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return self._refine(self.inner.inverse(z, context), z, context)

    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.inverse(z, context)
        return x, -self.inner.forward_and_log_det(x, context)[1]

    @torch.no_grad()
    def _refine(self, x: Tensor, z: Tensor, context: Tensor | None) -> Tensor:
        exact, target, best = self.exact(), z.double(), x.double()
        wide = context.double() if context is not None and context.is_floating_point() else context
        enough = torch.finfo(x.dtype).eps * norms(target) / 4
        residual = target - exact(best, wide)
        size = norms(residual)
        for _ in range(self.steps):
            if bool(((size <= enough) | ~torch.isfinite(size)).all()):
                break
            trial = best + self._correction(exact, best, wide, residual)
            left = target - exact(trial, wide)
            better = norms(left) < size
            if not bool(better.any()):
                break
            rows = better.view(-1, *[1] * (x.ndim - 1))
            best = torch.where(rows, trial, best)
            residual = torch.where(better.view(-1, *[1] * (residual.ndim - 1)), left, residual)
            size = torch.where(better, norms(left), size)
        return best.to(x.dtype)

    def _correction(self, exact: Bijection, x: Tensor, context: Tensor | None, residual: Tensor) -> Tensor:
        count = math.prod(x.shape[1:])
        if count > _LARGEST:
            return residual.reshape(x.shape)
        with torch.inference_mode(False), torch.enable_grad():
            at = x.clone().requires_grad_()
            slopes = jacobian(exact(at, context), at)
        fine = torch.isfinite(slopes).flatten(1).all(1) & torch.isfinite(residual.flatten(1)).all(1)
        eye = torch.eye(count, dtype=x.dtype, device=x.device)
        slopes = torch.where(fine[:, None, None], slopes, eye)
        step = solve_ex(slopes, residual.flatten(1)[:, :, None]).result[..., 0]
        return torch.where(fine[:, None], step, torch.zeros_like(step)).reshape(x.shape)
