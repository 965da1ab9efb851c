"""What is measured of an invertible classifier: errors, singular values, and the angle of memory-saving gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bilip.blocks import Bijection
from bilip.errors import NotMeasured
from bilip.models import Classifier
from bilip.probes import Subject, jacobian
from bilip.probes.lanczos import largest_singular_value
from bilip.probes.linear import Linearized
from bilip.reversible import Guard, Reversible, angle

__all__ = ["angles", "float32_ends", "round_trips", "singular_ends", "trunk_of"]

CHUNK = 1000
Batches = Callable[[int, int], tuple[Tensor, Tensor]]


def trunk_of(model: Classifier) -> Bijection:
    """The bijection itself, whatever computes its gradients."""
    trunk = model.trunk
    return trunk.bijection if isinstance(trunk, Reversible) else trunk


@torch.no_grad()
def round_trips(model: Classifier, batches: Batches, count: int, inverted: int) -> tuple[dict[str, float], Tensor]:
    """Accuracy and cross-entropy on `count` images, and how the first `inverted` of them come back.

    Returns:
        Numbers: `test_accuracy`, `test_cross_entropy`, `error_mean` (over all images: Inf or NaN if one is), `error_median`,
        `error_worst`, `error_finite` (mean of those that are finite), `share_non_finite`. And the errors, L2 norms of one image each in
        normalised pixels, float64.
    """
    trunk, right, nats, errors = trunk_of(model), 0.0, 0.0, []
    for start in range(0, count, CHUNK):
        x, y = batches(start, min(start + CHUNK, count))
        z = trunk(x)
        logits = model.head(z)
        right += float((logits.argmax(1) == y).double().sum())
        nats += float(cross_entropy(logits.double(), y, reduction="sum"))
        if (left := inverted - start) > 0:
            back = trunk.inverse(z[:left])
            errors.append((back.double() - x[:left].double()).flatten(1).norm(dim=1))
    error = torch.cat(errors)
    finite = torch.isfinite(error)
    known = torch.where(finite, error, math.inf)
    return {
        "test_accuracy": right / count,
        "test_cross_entropy": nats / count,
        "error_mean": float(error.mean()),
        "error_median": float(known.median()),
        "error_worst": float(known.max()),
        "error_finite": float(error[finite].mean()) if bool(finite.any()) else math.nan,
        "share_non_finite": float((~finite).double().mean()),
    }, error


def singular_ends(model: Bijection, x: Tensor) -> dict[str, list[float]]:
    r"""Largest and smallest singular value of the Jacobian at each image, in float64.

    Both Jacobians are built whole, that of the inverse block by block at the activations of the forward pass, because there the
    smallest value of the one is the largest of the other; the largest of each is then found by Lanczos' method.

    Returns:
        Lists, one entry for each image: `sigma_max`, `sigma_min`, `sigma_min_error` (relative, an estimate) and `condition`. NaN
        where float64 is not enough either.
    """
    subject = Subject.of(model)
    found: dict[str, list[float]] = {name: [] for name in ("sigma_max", "sigma_min", "sigma_min_error", "condition")}
    for k in range(len(x)):
        for name, value in zip(found, _ends(subject, x[k : k + 1]), strict=True):
            found[name].append(value)
    return found


def _ends(subject: Subject, x: Tensor) -> tuple[float, float, float, float]:
    try:
        at = Linearized(subject, x)
        eye = torch.eye(at.size, dtype=torch.float64, device=x.device)
        top, _ = _largest(at.apply(eye).T)
        bottom, error = _largest(at.solve(eye).T)
    except NotMeasured:
        return math.nan, math.nan, math.nan, math.nan
    return top, 1 / bottom, error + at.residual, top * bottom


def _largest(matrix: Tensor) -> tuple[float, float]:
    if not bool(torch.isfinite(matrix).all()):
        raise NotMeasured("the Jacobian is not finite in float64")
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1, len(matrix), generator=generator, dtype=torch.float64).to(matrix.device)
    found = largest_singular_value(lambda v: v @ matrix.T, lambda u: u @ matrix, start, steps=100)
    return float(found.value), float(found.residual)


def float32_ends(model: Bijection, x: Tensor) -> dict[str, float]:
    """What a decomposition in float32 of the Jacobian in float32 states for one image, as the original code had it."""
    values = torch.linalg.svdvals(jacobian(model, x, dtype=torch.float32))
    top, bottom = float(values[0]), float(values[-1])
    return {"sigma_max": top, "sigma_min": bottom, "condition": top / bottom if bottom > 0 else math.inf}


def angles(model: Classifier, batches: Iterable[tuple[Tensor, Tensor]], *, guarded: bool = False) -> list[float]:
    """The angle in radians between the stored gradient of the classification loss and the memory-saving one, for each batch.

    In evaluation mode, over the parameters of the trunk, both gradients in the model's own dtype and the angle in float64. NaN where the
    memory-saving gradient is not finite. `guarded=False` is the bare walk. A guard begins with what that of the model knows by now, and
    leaves it alone.
    """
    inner = trunk_of(model)
    walk = Reversible(inner, Guard() if guarded else None)
    if guarded and isinstance(model.trunk, Reversible):
        walk.load_guard_state(model.trunk.guard_state())
    parameters = [p for p in inner.parameters() if p.requires_grad]
    found = []
    for x, y in batches:
        stored, saving = (_gradients(trunk, model.head, x, y, parameters) for trunk in (inner, walk))
        good = all(bool(torch.stack([g.isfinite().all() for g in grads]).all()) for grads in (stored, saving))
        found.append(angle(saving, stored) if good else math.nan)
    return found


def _gradients(trunk: Bijection, head, x: Tensor, y: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    with torch.enable_grad():
        loss = cross_entropy(head(trunk(x)), y)
        return torch.autograd.grad(loss, parameters)
