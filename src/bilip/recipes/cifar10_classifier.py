"""Invertible classifiers on CIFAR-10: which stay invertible while they are trained, and what keeps them so.

Additive and affine couplings, channels mixed by 1x1 convolutions or shuffles, without a regularizer and with finite differences (FD)
or the flow likelihood (NF). A part is one run, named like `affine-conv1x1-fd`. A coefficient other than the usual one follows
its regularizer, `affine-conv1x1-nf1e-3`; then come `-inverse` for FD on the inverse alone, `-every1` for how often, and `-e10` for another
number of epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bilip import Bijection, Guard, Reversible, models
from bilip.data import ImageBatches, seed_of
from bilip.errors import InputError, NotMeasured
from bilip.models import Classifier
from bilip.objectives import Classification
from bilip.probes import extremes, jacobian
from bilip.recipes.classifier_runs import GRID, TABLE, Run, classifier_figures, classifier_lines
from bilip.recipes.images import (
    cifar10_sets,
    count_parameters,
    make_glow,
    require_batch,
    require_same_images,
    require_side,
    start_actnorms,
)
from bilip.recipes.recipe import Figures, Found, Line, Measured, Recipe, Work, require, sized, sizes_of
from bilip.regularizers import FiniteDifference, FlowLikelihood, Penalty
from bilip.reversible import angle
from bilip.training import Task

__all__ = ["RECIPE", "Config"]

CHUNK = 1000
STEPS = 100  # of Lanczos' method, at most
Batches = Callable[[int, int], tuple[Tensor, Tensor]]
MEAN, STD = (125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255)
FIRST = 192  # the test image whose singular values the original code follows; the others come after it
LIMIT = 1.0  # of the mean reconstruction error of what is called invertible; a whole image has a norm of about 55
# Columns of the log.
ANGLES = ("angle", "angle_finite", "angle_worst", "angle_lost", "angle_guarded", "angle_remaining")
WITH_ANGLES = (*(f"affine-conv1x1-{kind}" for kind in ("none", "fd", "nf", "guarded")), "additive-conv1x1-none")


@dataclass(frozen=True)
class Config:
    """Sizes and schedules: the values of the size `paper`, and in `sized` those of other sizes where they differ."""

    side: int = sized(32, quick=8)  # height and width of the images; smaller than 32 they are averaged
    images: int = sized(0, quick=512)  # training images; 0 for all there are
    test: int = sized(0, quick=512)  # test images; 0 for all
    levels: int = sized(3, quick=2)  # levels of the network
    blocks: int = sized(16, quick=4)  # blocks a level
    hidden: int = sized(128, quick=32)  # channels of the nets
    batch: int = sized(128, quick=64)  # images in each step
    # Passes through the images. The rate falls tenfold at 30, 60 and 80 % of them.
    epochs: int = sized(200, gpu=20, quick=40)
    lr: float = sized(1e-4, quick=4e-3)  # learning rate of Adam
    start: int = 512  # images that the ActNorms start from
    strength: float = sized(1.0, quick=100.0)  # factor of all coefficients of regularizers
    fd_eps: float = 0.1  # step of the finite differences
    fd_every: int = sized(10, quick=5)  # training steps from one such penalty to the next
    evaluate_every: int = sized(2, quick=20)  # epochs from one evaluation to the next
    inverted: int = sized(2048, quick=512)  # test images that are reconstructed during training; all of them in the end
    spectra: int = sized(2, quick=1)  # images whose singular values are measured during training
    spectra_end: int = sized(16, quick=4)  # and in the end
    angle_batches: int = sized(40, quick=4)  # batches of the gradient angles
    grid: int = 0  # epochs of each run of the coefficient grid; 0 to leave it out

    def __post_init__(self) -> None:
        require(self, nonnegative=("images", "test", "grid"))
        require_side(self)


class Cifar10Classifier(Recipe):
    """Accuracy, reconstruction error and singular values, with and without a regularizer."""

    name = "cifar10_classifier"
    where = "tables on regularized CIFAR-10 classifiers, figures of their stability during training"
    claim = (
        "Affine classifiers lose their inverse while they train; FD and NF regularizers keep it at the same accuracy."
    )
    sizes: Mapping[str, Config] = sizes_of(Config)
    cost: Mapping[str, str] = {
        "quick": "7 minutes of one core, half of that on two",
        "gpu": "20 epochs; on one H200 in pieces of ten minutes that go on, with --jobs 5 under CUDA's MPS; not timed as a whole yet",
        "paper": "200 epochs; hours on one GPU; not timed yet",
    }
    matched = (
        "FD as the original code has it (scaling 'original'), every 10 steps, not made up for by a factor; NF in nats per image; ActNorm "
        "from 512 augmented images; no dequantization; head of BatchNorm, ReLU and a linear layer.",
        "FD is trained with memory-saving gradients, none and NF with stored ones.",
    )
    corrected = (
        "Singular values in float64, the smallest from the Jacobian of the inverse, over several test images; the original decomposes "
        "one in float32 (test image 192), which cannot see below 1e-7 of the largest.",
        "Memory-saving gradients are guarded. Their angle to stored ones is measured on fixed images without augmentation, in float64.",
        "The 80 images that are left over in an epoch wait for another one. FD for additive shuffle, for which the paper states no "
        "coefficient, has 5e-5 as additive conv.",
    )
    partial = True
    named = Run.of

    def parts(self, config: Config) -> Sequence[str]:
        """The twelve runs of the table and the guarded one, in the order of what they tell; then the coefficient grid."""
        runs = [f"{TABLE[0]}-{kind}" for kind in ("none", "fd", "nf", "guarded")]
        runs += [f"{model}-{kind}" for model in TABLE[1:] for kind in ("none", "fd", "nf")]
        if config.grid:
            runs += [f"{model}-{kind}-e{config.grid}" for model in TABLE[:3] for kind in GRID]
        return runs

    def defining(self, config: Config) -> dict[str, Any]:
        return {name: value for name, value in asdict(config).items() if name != "grid"}

    def run(self, part: str, config: Config, work: Work) -> Measured:
        run = Run.of(part)
        config = replace(config, epochs=run.epochs or config.epochs)
        train, test, facts = load(config, work)
        torch.manual_seed(seed_of(work.seed, 0, "weights"))
        model = make_model(run, config).to(work.device)
        start_actnorms(trunk_of(model), train, config, work.seed)
        steps = config.epochs * train.per_epoch
        looks = Looks(model, train, test, config, steps, with_angles=part in WITH_ANGLES or run.kind == "guarded")
        penalties = make_penalties(run, config, work.seed)
        failure = work.try_train(
            Task(model, train, Classification(penalties), looks.during, penalties),
            until=0.9,
            steps=steps,
            lr=config.lr,
            milestones=tuple(round(share * steps) for share in (0.3, 0.6, 0.8)),
            evaluate_every=config.evaluate_every * train.per_epoch,
            evaluate_at=looks.steps,
            save_every=train.per_epoch,
            log_every=max(1, min(100, train.per_epoch // 4)),
        )
        diverged = str(failure or "")
        if not work.main:
            return Measured({})
        numbers: dict[str, Any] = {
            "epochs": config.epochs,
            "steps": steps,
            **facts,
            "weight": run.weight,
            "strength": config.strength,
            "gradients": "memory-saving" if run.reversible else "stored",
            "diverged": diverged,
            "parameters": count_parameters(model),
            "skipped": {type(p).__name__: [p.skipped, p.seen] for p in penalties},
        }
        if run.reversible:
            numbers["guard"] = guard_facts(model.trunk)
        if not diverged:
            numbers |= looks.after(work)
        logs = work.logs()
        training = {name: values for name, values in logs.items() if name.startswith("train_")}
        numbers["train"] = {name.removeprefix("train_"): float(values[-1]) for name, values in training.items()}
        return Measured(numbers, logs)

    def lines(self, config: Config, found: Found) -> list[Line]:
        return classifier_lines(found, self.paper())

    def figures(self, config: Config, found: Found) -> Figures:
        return classifier_figures(found)


def load(config: Config, work: Work) -> tuple[ImageBatches, ImageBatches, dict[str, Any]]:
    """Training and test images on the device, and what they are."""
    sets, facts = cifar10_sets(config, work)
    require_batch(sets["train"], config)
    require_same_images(work, facts, sets.values())
    if facts["test_images"] < FIRST + config.spectra_end:
        raise InputError(f"--set test={config.test}: expected {FIRST + config.spectra_end} test images or more.")
    options: dict[str, Any] = {"device": work.device, "mean": MEAN, "std": STD}
    train = ImageBatches(sets["train"], config.batch, pad=max(1, config.side // 8), **options)
    return train, ImageBatches(sets["cifar10"], 1, pad=0, **options), facts


def make_model(run: Run, config: Config) -> Classifier:
    """The network of a run, before it has seen data."""
    trunk = make_glow(config, coupling=run.coupling, mixing=run.mixing)
    model = models.classifier(trunk)
    if run.reversible:
        model.trunk = Reversible(trunk, Guard())
    return model


def make_penalties(run: Run, config: Config, seed: int) -> tuple[Penalty, ...]:
    """None, the flow likelihood, or finite differences in the original's scaling."""
    if run.kind == "nf":
        return (FlowLikelihood((run.weight or 0.0) * config.strength, run.every or 1),)
    if run.kind != "fd":
        return ()
    weight, every = (run.weight or 0.0) * config.strength, run.every or config.fd_every
    return (FiniteDifference(weight, every, mode=run.mode, eps=config.fd_eps, scaling="original", seed=seed),)


def guard_facts(walk: Any) -> dict[str, Any]:
    """What the guard of a run has seen."""
    report = walk.report()
    return {
        "steps": report.steps,
        "repaired": report.repaired,
        "anchors_mib": sum(report.anchors.values()) / 2**20,
        "spot_checks": report.spot_checks,
        "worst_angle": report.worst_angle,
        "worst_remaining": report.worst_remaining,
    }


def worst(several: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The largest condition number and the two extreme singular values over some images; a condition number that float64 cannot tell
    counts as infinite.
    """
    known = {name: [value for value in values if not math.isnan(value)] for name, values in several.items()}
    return {
        "condition": max(math.inf if math.isnan(value) else value for value in several["condition"]),
        "sigma_min": min(known["sigma_min"], default=math.nan),
        "sigma_max": max(known["sigma_max"], default=math.nan),
    }


class Looks:
    """What is measured of a run of so many steps, along the way and in the end."""

    def __init__(
        self,
        model: Classifier,
        train: ImageBatches,
        test: ImageBatches,
        config: Config,
        steps: int,
        *,
        with_angles: bool,
    ) -> None:
        self.model, self.train, self.test, self.config = model, train, test, config
        self.guarded = isinstance(model.trunk, Reversible)
        self.spectra_at = {0, *(round(steps / 2**k) for k in (1, 2, 3, 4))}
        self.angles_at = {0, *(round(steps / 2**k) for k in range(5))} if with_angles else set[int]()
        self.steps = tuple(sorted(self.spectra_at | self.angles_at))

    def during(self, model: Any, done: int) -> dict[str, float]:
        """A row of the log; NaN for what is not measured at this step."""
        found, _ = round_trips(model, self.test.plain, self.test.count, min(self.config.inverted, self.test.count))
        found |= dict.fromkeys(("condition", "sigma_min", "sigma_max"), math.nan)
        if done in self.spectra_at:
            found |= worst(singular_ends(trunk_of(model), self.images(self.config.spectra)))
        found |= dict.fromkeys(ANGLES, math.nan)
        if done in self.angles_at:
            found |= self.turned(model)
        return found

    def turned(self, model: Any) -> dict[str, float]:
        """Angles over the fixed batches: their mean (NaN if one is), the mean and the largest of the finite ones, the share of the others;
        and where the run has a guard, over some batches, the largest with it, and the largest that no kink explains.
        """
        size, count = self.config.batch, min(self.config.angle_batches, self.train.per_epoch)
        fixed = [(k * size, (k + 1) * size) for k in range(count)]
        bare = angles(model, (self.train.plain(*rows) for rows in fixed))
        finite = [a for a in bare if math.isfinite(a)]
        few = [self.train.plain(*rows) for rows in (fixed[:5] if self.guarded else ())]
        watched = [max(angles(model, few, guarded=True, keep_signs=keep), default=math.nan) for keep in (False, True)]
        mean = sum(finite) / len(finite) if finite else math.nan
        found = (sum(bare) / len(bare), mean, max(finite, default=math.nan), 1 - len(finite) / len(bare), *watched)
        return dict(zip(ANGLES, found, strict=True))

    def after(self, work: Work) -> dict[str, Any]:
        """What is said of the trained model."""
        model = self.model.eval()
        work.progress("reconstructing the test images", 0.91)
        found, _ = round_trips(model, self.test.plain, self.test.count, self.test.count)
        work.progress("singular values", 0.92)
        trunk, x = trunk_of(model), self.images(self.config.spectra_end)
        several = singular_ends(trunk, x)
        return {
            **found,
            "invertible": found["share_non_finite"] == 0 and found["error_mean"] < LIMIT,
            **worst(several),
            "condition_median": float(np.median([math.inf if math.isnan(c) else c for c in several["condition"]])),
            "spectra": several,
            f"image_{FIRST}": {name: values[0] for name, values in several.items()},
            f"image_{FIRST}_float32": float32_ends(trunk, x[:1]),
        }

    def images(self, count: int) -> Tensor:
        """The test images whose singular values are measured."""
        return self.test.plain(FIRST, FIRST + count)[0]


# ---- errors, singular values, and the angle of memory-saving gradients


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


RECIPE = Cifar10Classifier()
