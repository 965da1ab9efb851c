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
from bilip.probes import extremes, jacobian
from bilip.reversible import Guard, Reversible, angle

__all__ = ["angles", "float32_ends", "round_trips", "singular_ends", "trunk_of"]

CHUNK = 1000
STEPS = 100  # of Lanczos' method, at most
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
    r"""Largest and smallest singular value of the Jacobian at each image, in float64, by Lanczos' method on it and on its inverse.

    Returns:
        Lists, one entry for each image: `sigma_max`, `sigma_min`, `sigma_min_error` (relative: what the method left open, and the
        effect of rounding) and `condition`. NaN where float64 is not enough either.
    """
    names = ("sigma_max", "sigma_min", "sigma_min_error", "condition")
    try:
        found = extremes(model, x, steps=STEPS, tolerance=1e-4)
    except NotMeasured:
        if len(x) == 1:
            return {name: [math.nan] for name in names}
        each = [singular_ends(model, one) for one in x.split(1)]  # so that one image does not cost the others theirs
        return {name: [ends[name][0] for ends in each] for name in names}
    several = (found.sigma_max, found.sigma_min, found.sigma_min_error, found.sigma_max / found.sigma_min)
    return {name: values.tolist() for name, values in zip(names, several, strict=True)}


def float32_ends(model: Bijection, x: Tensor) -> dict[str, float]:
    """What a decomposition in float32 of the Jacobian in float32 states for one image, as the original code had it."""
    values = torch.linalg.svdvals(jacobian(model, x, dtype=torch.float32))
    top, bottom = float(values[0]), float(values[-1])
    return {"sigma_max": top, "sigma_min": bottom, "condition": top / bottom if bottom > 0 else math.inf}


def angles(
    model: Classifier, batches: Iterable[tuple[Tensor, Tensor]], *, guarded: bool = False, keep_signs: bool = False
) -> list[float]:
    """The angle in radians between the stored gradient of the classification loss and the memory-saving one, for each batch.

    In evaluation mode, over the parameters of the trunk, both gradients in the model's own dtype and the angle in float64. NaN where the
    memory-saving gradient is not finite. `guarded=False` is the bare walk. A guard begins with what that of the model knows by now, and
    leaves it alone. With `keep_signs` every ReLU stands on the side of the forward pass: what is missing then was no drift.
    """
    inner = trunk_of(model)
    walk = Reversible(inner, Guard() if guarded else None, keep_signs=keep_signs)
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
