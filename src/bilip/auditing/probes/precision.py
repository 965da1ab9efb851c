"""Would more bits cure it? One model computed in each floating-point format, from float64 to float16."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from bilip._torch import dtype_name
from bilip.auditing.budget import Budget
from bilip.auditing.float32 import float32_products
from bilip.auditing.probes.probe import Probe, Task
from bilip.auditing.round_trip import Typical, distances, norms, typical
from bilip.auditing.subject import Outcome, Subject, in_dtype, run_guarded
from bilip.data import Source
from bilip.errors import BilipError, InputError, NotMeasured
from bilip.linalg.lanczos import largest_singular_value
from bilip.record import Measurement, Quantity

__all__ = ["FORMATS", "Precision", "Format", "FormatModel", "condition_numbers"]

_DOUBLE = torch.finfo(torch.float64).eps
Row = dict[str, float | int | str | bool | None]


class Precision(Probe):
    r"""Round trips in float64, float32, TF32 (on CUDA), bfloat16 and float16, and where their errors come from.

    The paper's account of a reconstruction error: with $F_\delta(x) = F(x) + \delta$ the inexact forward pass and
    $\delta_2$ the error of the inexact inverse,

    $$|x - \hat x| \le \mathrm{Lip}(F^{-1})\,|\delta| + |\delta_2|.$$

    Here $F$ is the float64 model *with the parameters of the format*, so that $\delta = F_\mathrm{format}(x) - F(x)$ is the
    error of the arithmetic alone, $\delta_2 = F^{-1}_\mathrm{format}(z) - F^{-1}(z)$ at $z = F_\mathrm{format}(x)$, and Lip
    is the gain measured along $\delta$, $|F^{-1}(z) - F^{-1}(F(x))| / |\delta|$. That makes the right-hand side sharp:
    `holds` can only fail where the reference does. Samples that float64 itself does not reconstruct to half of its
    digits have no reference; they are left out of these numbers, and `reference` counts the others. The float64 format has
    no reference above it.

    `cure` is the first format, from the model's own towards more bits, in which every sample comes back finite and with a
    relative error below the square root of the own dtype's epsilon. `predicted` is epsilon times the largest condition
    number of $J_F$ at a few samples, approached from below by Lanczos.

    Args:
        samples: Number of samples.
        seed: Seed of the search for the condition number.
        condition_samples: Samples whose condition number is measured; 0 for none.
        steps: Lanczos steps for it.

    Example:
        >>> from bilip.models import real_nvp
        >>> m = Precision(samples=16).measure(real_nvp(2, blocks=2, coupling="additive"), torch.randn(16, 2))
        >>> m["own"], m["cure"], [row["rung"] for row in m.rows]
        ('float32', 'float32', ['float64', 'float32', 'bfloat16', 'float16'])
        >>> m.rows[1]["holds"]
        True
    """

    name = "precision"
    scope = "failing"
    only_failing = True
    place = 60
    load = 2
    quantities = (
        Quantity("cure", "first precision in which all is well", "text"),
        Quantity("own", "the model's own precision", "text"),
        Quantity("lowest", "lowest precision in which all is well", "text"),
        Quantity("samples", "samples", "count"),
        Quantity("condition", "condition number", "", "lower"),
        Quantity("share_non_finite", "share of Inf/NaN", "share", "lower"),
        Quantity("error_median", "median relative error", "relative", "lower"),
        Quantity("error_max", "largest relative error", "relative", "lower"),
    )

    def __init__(self, samples: int = 64, *, seed: int = 0, condition_samples: int = 4, steps: int = 30) -> None:
        for label, value, least in (("samples", samples, 1), ("condition_samples", condition_samples, 0)):
            if not isinstance(value, int) or value < least:
                raise InputError(f"Precision({label}={value!r}): expected a whole number, {least} or more.")
        self.samples, self.seed, self.condition_samples, self.steps = samples, seed, condition_samples, steps

    @classmethod
    def cost(cls, budget: Budget, task: Task) -> dict[str, object] | None:
        if not budget.precision:
            return None
        return {
            "samples": max(1, budget.precision // 2) if task.large else budget.precision,
            "seed": task.seed,
            "condition_samples": 1 if budget.precision < 64 else 4,
            "steps": 10 if task.large else 30,
        }

    def _measure(self, subject: Subject, source: Source) -> Measurement:
        batch = source.first(self.samples, dtype=subject.dtype, device=subject.device)
        own = dtype_name(subject.dtype)
        notes: list[str] = []
        condition = self._condition(subject, batch.x, batch.context, notes)
        sizes = typical(source)
        rows: list[Row] = []
        for k, fmt in enumerate(FORMATS):
            if fmt.name == "tf32" and subject.device.type != "cuda":
                continue
            try:
                row = self._row(subject, fmt, batch.x, batch.context, sizes, notes)
            except BilipError as why:  # NotMeasured, or a block that refuses this precision
                notes.append(f"{fmt.name} not measured: {why}")
            else:
                row["predicted"] = None if condition is None else fmt.eps * condition
                rows.append(row)
            self.progress((k + 1) / len(FORMATS))
        if not rows:
            raise NotMeasured("; ".join(notes))
        names = [fmt.name for fmt in FORMATS]
        upwards = [r for r in reversed(rows) if names.index(str(r["rung"])) <= names.index(own) and r["rung"] != "tf32"]
        cure = next((str(r["rung"]) for r in upwards if r["well"]), "none")
        well = [str(r["rung"]) for r in rows if r["well"]]
        lowest = well[-1] if well else "none"
        values = {"cure": cure, "lowest": lowest, "own": own, "samples": len(batch), "condition": condition}
        return Measurement(self.name, source.name, values=values, rows=tuple(rows), notes=tuple(notes))

    def _condition(self, subject: Subject, x: Tensor, context: Tensor | None, notes: list[str]) -> float | None:
        if not self.condition_samples:
            return None
        rows = slice(self.condition_samples)
        try:
            given = None if context is None else context[rows]
            found = condition_numbers(subject, x[rows], given, seed=self.seed, steps=self.steps)
        except NotMeasured as why:
            notes.append(f"condition number not measured: {why}")
            return None
        return float(found.nan_to_num(math.inf).max())

    def _row(
        self, subject: Subject, fmt: Format, x: Tensor, context: Tensor | None, sizes: Typical, notes: list[str]
    ) -> Row:
        model = FormatModel(subject, fmt)
        found = _compare(model, x, context, sizes)
        if fmt.half and not model.emulated and bool(found.failed.all()):
            notes.append(f"{fmt.name}: the model does not run in it ({found.message[:200]})")
            model = FormatModel(subject, fmt, emulate=True)
            found = _compare(model, x, context, sizes)
        if model.emulated:
            blocks = len(model.subject.parts)
            notes.append(
                f"{fmt.name} is emulated: parameters, inputs and the outputs of {blocks} "
                f"block{'s' * (blocks != 1)} are rounded to it, blocks compute inside in float32"
            )
        if bool(found.failed.any()):
            raised = int(found.failed.sum())
            notes.append(f"{fmt.name}: the model raised for {raised} of {len(x)} samples ({found.message[:200]})")
        limit = max(math.sqrt(fmt.eps), subject.half_digits)
        broken = ~torch.isfinite(found.relative)
        errors = torch.where(broken, torch.inf, found.relative)
        row: Row = {
            "rung": fmt.name,
            "eps": fmt.eps,
            "error_median": float(errors.median()),
            "error_max": float(errors.max()),
            "share_non_finite": float(broken.double().mean()),
            "predicted": None,
            "well": bool(errors.max() <= limit),
        }
        return row | (found.inequality() if fmt.dtype != torch.float64 else dict.fromkeys(_TERMS))


_TERMS = ("delta", "delta_2", "lip_inverse", "right_side", "left_side", "holds", "reference")


@dataclass(frozen=True)
class _Comparison:
    """A format against its reference, sample by sample, float64."""

    relative: Tensor  # error of the format's round trip
    left: Tensor  # |x - x_hat|
    delta: Tensor  # |F_rung(x) - F(x)|
    moved: Tensor  # |F^-1(z_rung) - F^-1(F(x))|, which is Lip |delta|
    delta_2: Tensor  # |F_rung^-1(z_rung) - F^-1(z_rung)|
    slack: Tensor  # what float64 itself gets wrong
    valid: Tensor  # whether float64 is a reference
    failed: Tensor
    message: str

    def inequality(self) -> Row:
        """The terms of the paper's inequality: medians, and both sides for the sample with the largest left side."""
        ok = self.valid & torch.isfinite(self.left) & torch.isfinite(self.delta_2)
        if not bool(ok.any()):
            return {**dict.fromkeys(_TERMS), "reference": 0}
        right, worst = self.moved + self.delta_2, int(torch.where(ok, self.left, -1.0).argmax())
        gains = (self.moved / self.delta)[ok & (self.delta > 0)]
        return {
            "delta": float(self.delta[ok].median()),
            "delta_2": float(self.delta_2[ok].median()),
            "lip_inverse": float(gains.median()) if len(gains) else None,
            "right_side": float(right[worst]),
            "left_side": float(self.left[worst]),
            "holds": bool((self.left <= right + self.slack)[ok].all()),
            "reference": int(ok.sum()),
        }


def _compare(model: FormatModel, x: Tensor, context: Tensor | None, sizes: Typical) -> _Comparison:
    x, context = model.enter(x), None if context is None else model.enter(context)
    forward = model.forward(x, context)
    z = forward.value
    back = model.inverse(z, context)
    found = distances(x, back.value, sizes)
    exact, wide = model.reference, in_dtype(context, torch.float64)
    z_exact = exact.forward(x.double(), wide).value
    home = exact.inverse(z_exact, wide).value
    there = exact.inverse(z.double(), wide).value
    again = exact.inverse(exact.forward(there, wide).value, wide).value
    own, other = distances(x, home), distances(there, again)
    good = math.sqrt(_DOUBLE)
    return _Comparison(
        relative=found.relative,
        left=found.l2,
        delta=norms(z.double() - z_exact),
        moved=norms(there - home),
        delta_2=norms(back.value.double() - there),
        slack=own.l2 + 8 * _DOUBLE * (norms(x) + norms(there) + norms(back.value)),
        valid=(own.relative <= good) & (other.relative <= good),
        failed=forward.failed | back.failed,
        message=forward.message or back.message,
    )


def condition_numbers(
    subject: Subject, x: Tensor, context: Tensor | None = None, *, seed: int = 0, steps: int = 30
) -> Tensor:
    r"""Condition numbers $\sigma_{\max} / \sigma_{\min}$ of $J_F$, one for each sample, from the float64 copy, by Lanczos: from below.

    Raises:
        NotMeasured: The model cannot be linearised in float64.

    Example:
        >>> from bilip.blocks import DiagonalScaling
        >>> found = condition_numbers(Subject.of(DiagonalScaling(torch.tensor([4.0, 0.5]))), torch.zeros(1, 2))
        >>> round(float(found), 6)
        8.0
    """
    at = subject.linearized(x, context)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(at.count, at.size, generator=generator, dtype=torch.float64, device="cpu").to(x.device)
    largest = largest_singular_value(at.apply, at.adjoint, start, steps=steps).value
    return largest * largest_singular_value(at.solve, at.solve_adjoint, start, steps=steps).value


@dataclass(frozen=True)
class Format:
    """One precision, with the dtype of parameters and activations and the machine epsilon of its arithmetic."""

    name: str
    dtype: torch.dtype
    eps: float

    @property
    def half(self) -> bool:
        """Whether it has 16 bits."""
        return self.dtype in (torch.bfloat16, torch.float16)


def _format(dtype: torch.dtype) -> Format:
    return Format(dtype_name(dtype), dtype, torch.finfo(dtype).eps)


FORMATS = (
    _format(torch.float64),
    _format(torch.float32),
    Format("tf32", torch.float32, 2.0**-10),  # matrix products of float32 with 10 bits of fraction, on CUDA
    _format(torch.bfloat16),
    _format(torch.float16),
)


class FormatModel:
    r"""A model in one format, and the float64 model with the same parameters: the exact map that the format computes inexactly.

    16-bit arithmetic on a CPU is missing for some operations and faults on some processors. There it is emulated by default: parameters,
    inputs and the output of every visible block are rounded to the 16-bit type, and blocks compute inside in float32. That is
    kinder than real 16-bit arithmetic, which rounds inside blocks too.

    Attributes:
        emulated: Whether it is emulated.
        reference: The same parameters in float64.

    Example:
        >>> from bilip.models import real_nvp
        >>> half = FormatModel(Subject.of(real_nvp(2)), FORMATS[3])
        >>> half.emulated, half.enter(torch.tensor([[1.001, 2.0]])).tolist()
        (True, [[1.0, 2.0]])
    """

    def __init__(self, subject: Subject, fmt: Format, *, emulate: bool | None = None) -> None:
        self.fmt = fmt
        self.emulated = fmt.half and (subject.device.type == "cpu" if emulate is None else emulate)
        model = subject if fmt.dtype == subject.dtype else subject.copy_in(fmt.dtype)
        self.reference = model.copy_in(torch.float64)
        self.subject = model.copy_in(torch.float32) if self.emulated else model
        self._dtype = self.subject.dtype  # looked up once: it is asked for after every block

    def enter(self, x: Tensor) -> Tensor:
        """A tensor rounded to the format, in the dtype that its model takes; integers, such as labels, stay."""
        return x.to(self.fmt.dtype).to(self._dtype) if x.is_floating_point() else x

    def forward(self, x: Tensor, context: Tensor | None = None) -> Outcome:
        """F(x) in this format."""
        if not self.emulated:
            with self._arithmetic():
                return self.subject.forward(x, context)
        return self._by_blocks(x, context, inverse=False)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Outcome:
        """F^-1(z) in this format."""
        if not self.emulated:
            with self._arithmetic():
                return self.subject.inverse(z, context)
        return self._by_blocks(z, context, inverse=True)

    @torch.no_grad()
    def _by_blocks(self, x: Tensor, context: Tensor | None, *, inverse: bool) -> Outcome:
        parts = [part for _, part in self.subject.parts]

        def rounded_after_each(x: Tensor, context: Tensor | None) -> Tensor:
            x = self.enter(x)
            for part in reversed(parts) if inverse else parts:
                x = self.enter(part.inverse(x, context) if inverse else part(x, context))
            return x

        return run_guarded(rounded_after_each, x.clone(), context)

    def _arithmetic(self) -> AbstractContextManager[None]:
        """TF32 on for its own format; elsewhere it stays off."""
        return float32_products("tf32" if self.fmt.name == "tf32" else "ieee")
