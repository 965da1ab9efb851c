"""Image flows on CIFAR-10: likelihood, samples, and how images of other kinds come back, while they are trained and in the end.

A part is one Glow, `additive`, `affine` (scale onto (0, 1)) or `modified` (onto (0.5, 1)). After it may come `-eps0.01`, added to the
scale, `-reverse`, `-shuffle` or `-conv1x1` for another mixing of channels, and `-steps1000` for another number of steps. `residual`, with
sizes and schedule of its own, is a residual flow, for the recipe `ood`. A part trains and measures everything that needs its
weights, so that `ood` has nothing left to train.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilip import Flow, models
from bilip.auditing.round_trip import norms
from bilip.blocks import ActNorm, Chain, Logit
from bilip.data import IMAGE_SETS, image_set, seed_of
from bilip.errors import DataNotFound, InputError
from bilip.objectives import Likelihood
from bilip.recipes import flow_probes
from bilip.recipes.flow_probes import NOISE, Inputs, Trip
from bilip.recipes.flow_runs import GLOWS, SETS, SOURCES, Run, flow_figures, flow_lines
from bilip.recipes.images import (
    Dequantized,
    cifar10_sets,
    count_parameters,
    load_average,
    look_steps,
    make_multiscale,
    require_batch,
    require_same_images,
    require_side,
    schedule,
    shrunk,
    skipped_steps,
    start_actnorms,
)
from bilip.recipes.recipe import Figures, Found, Line, Measured, Recipe, Work, require, sized, sizes_of
from bilip.recipes.residual_flows import by_series, is_residual, loose_inverse, make_residual, solved_inverse
from bilip.training import Task

__all__ = ["RECIPE", "Config"]

MAY_BE_ZERO = ("images", "test", "warmup", "weight_decay", "clip", "ema", "skip")  # settings that may be 0
JUDGED = ("log_prob", "trusted")  # arrays of a set: likelihoods with a reference, and which of them hold
MAY_BE_ZERO += ("residual_dense", "residual_warmup", "exact_terms")


@dataclass(frozen=True)
class Config:
    """Sizes and schedules: the values of the size `paper`, and in `sized` those of other sizes where they differ."""

    side: int = sized(32, quick=8)  # height and width of the images; smaller than 32 they are averaged
    images: int = sized(0, quick=4096)  # training images; 0 for all there are
    test: int = sized(0, quick=1000)  # test images; 0 for all
    bits: int = 8  # of a pixel and its dequantization
    levels: int = sized(3, quick=2)  # levels of the network
    blocks: int = sized(32, gpu=16, quick=8)  # blocks a level
    hidden: int = sized(512, gpu=256, quick=32)  # channels of the nets
    mixing: str = sized("reverse", gpu="conv1x1", quick="conv1x1")  # `conv1x1`, `reverse` or `shuffle`
    # Whether mean and scale of the channels that leave early are predicted from the others, or standard normal.
    prior: bool = True
    batch: int = 64  # images in each step
    steps: int = sized(100_000, gpu=5000, quick=600)  # training steps
    optimizer: str = sized("adamax", gpu="adam", quick="adam")  # `adam` or `adamax`
    lr: float = sized(5e-4, quick=4e-3)  # learning rate
    warmup: int = sized(3905, gpu=500, quick=50)  # steps over which it grows
    weight_decay: float = sized(5e-5, gpu=0.0, quick=0.0)  # see `Settings`
    clip: float = 0.0  # largest norm of a gradient; 0 for any
    ema: float = 0.0  # decay of an average of the weights, which is then what is measured; 0 for none
    # Gradients in a row that may be not finite. Such a step is skipped and counted; one more ends the run.
    skip: int = 10
    start: int = sized(640, quick=256)  # images that the ActNorms start from
    looks: int = sized(20, gpu=10, quick=6)  # evaluations along training, evenly spaced
    looked: int = sized(512, gpu=128, quick=128)  # images of each source that are reconstructed then
    test_looked: int = sized(10_000, gpu=1000, quick=512)  # test images whose likelihood is computed then
    conditions: int = sized(2, quick=1)  # images of each source whose condition number is found, at about half of them
    lanczos: int = sized(30, gpu=12, quick=12)  # steps of Lanczos' method for each
    # Training and test images, so many of each at most, whose likelihood is computed in the end.
    likelihoods: int = 10_000
    samples: int = sized(10_000, gpu=2000, quick=500)  # samples drawn in the end
    ood: int = sized(10_000, quick=500)  # images of each set that are reconstructed in the end
    referenced: int = sized(10_000, gpu=2000, quick=500)  # of them with a float64 reference of their likelihood
    pictures: int = 3  # images of each set that are kept for the figures
    points: int = 2  # images at which the log-determinant is held against the Jacobian
    # Blocks of each scale of the residual flow.
    residual_blocks: tuple[int, ...] = sized((16, 16, 16), gpu=(8, 8, 8), quick=(4, 4))
    residual_hidden: int = sized(512, gpu=256, quick=32)  # channels of its nets
    residual_dense: int = sized(4, quick=2)  # fully connected blocks at its end
    residual_steps: int = sized(100_000, gpu=1000, quick=300)  # its steps, by Adam without weight decay
    residual_lr: float = sized(1e-3, quick=2e-3)  # its learning rate
    residual_warmup: int = sized(1000, gpu=100, quick=30)  # steps over which that grows
    coefficient: float = 0.98  # certified constant of its branches
    # Terms of its log-determinants that are always there; a Poisson number of further ones, the same for all blocks
    # of a step, makes the estimate unbiased.
    exact_terms: int = 2
    # Whether its activations are computed again in the backward pass instead of kept.
    recompute: bool = sized(True, gpu=False, quick=False)
    residual_looks: int = sized(10, gpu=4, quick=3)  # its evaluations along training
    residual_likelihoods: int = sized(10_000, gpu=2000)  # images of each set whose likelihood it computes in the end
    residual_ood: int = sized(10_000, gpu=2000, quick=500)  # images of each set that it reconstructs in the end
    # Of them by the loose stop of the original code, and of them with a float64 reference of their likelihood.
    residual_loose: int = 500
    # Estimates of its log-determinant that are averaged before it is held against the Jacobian.
    residual_repeats: int = 64

    def __post_init__(self) -> None:
        require(
            self,
            nonnegative=MAY_BE_ZERO,
            one_of={"mixing": ("conv1x1", "reverse", "shuffle"), "optimizer": ("adam", "adamax")},
            free=("residual_blocks", "coefficient"),
        )
        if not self.residual_blocks or min(self.residual_blocks) < 1:
            raise InputError(
                f"--set residual_blocks={self.residual_blocks}: expected positive numbers, one or more, as in 8,8,8."
            )
        if self.bits > 8 or self.ema >= 1:
            raise InputError(f"--set bits={self.bits} ema={self.ema}: expected at most 8 bits, and an average below 1.")
        if not 0 < self.coefficient < 1 or self.residual_repeats < 2:
            raise InputError(
                f"--set coefficient={self.coefficient} residual_repeats={self.residual_repeats}: expected a number between 0 and 1, and 2 "
                "repeats or more."
            )
        if self.side % 2 ** (len(self.residual_blocks) - 1):
            raise InputError(
                f"--set side={self.side} residual_blocks={self.residual_blocks}: expected a side that can be halved between the scales."
            )
        require_side(self)


class Cifar10Flow(Recipe):
    """Bits per dimension, samples, and stability on data, samples and other images, for three kinds of couplings."""

    name = "cifar10_flow"
    where = "table of flow results on CIFAR-10, figures of stability statistics and reconstructions"
    claim = "An affine flow becomes unstable on its own samples while it trains; additive flows and those onto (0.5, 1) stay reliable."
    sizes: Mapping[str, Config] = sizes_of(Config)
    cost: Mapping[str, str] = {
        "quick": "3 minutes of one core, 2 on two",
        "gpu": "5,000 steps of three flows; about a quarter of an hour on one H200 with --jobs 3 under CUDA's MPS, an estimate",
        "paper": "100,000 steps; hours on one GPU for each flow; not timed yet",
    }
    matched = (
        "Batches of 64, shifted by up to a tenth and mirrored, in [-1/2, 1/2]; ActNorm from 640 augmented images; the loss in nats per "
        "image. At the size paper the mixing is a reversal, with Adamax and warm-up, as in the paper's own flows.",
        "Noise is uniform, standard normal or two-valued, clipped to ±0.49, as in the original's OOD table.",
    )
    corrected = (
        "Gradients that are not finite are not set to zero: the step is skipped and counted, and too many in a row end the run.",
        "Scale onto (0, 1); the original adds 0.01, which is the part affine-eps0.01. The modified scale, of which the original has no "
        "code, is (0.5, 1) in every coupling. The deviation of channels that leave early is predicted within e^-3 and e^3: no exponential "
        "overflows. The prior of those that stay is standard normal; ours has no learned mean and scale for them.",
        "Samples are drawn from the model's own prior. Images are dequantized when they are measured. A sample is reliable if it is finite "
        "and its bits per dimension change by at most 0.01 when it is encoded again; an error is visible if a pixel is off by more than "
        "4 of 256 grey levels. Condition numbers in float64, the largest of some images, from below by Lanczos' method.",
    )
    partial = True
    named = Run.of

    def parts(self, config: Config) -> Sequence[str]:
        return GLOWS

    def run(self, part: str, config: Config, work: Work) -> Measured:
        run = Run.of(part)
        config = replace(config, mixing=run.mixing or config.mixing)
        if run.kind == "residual":
            config = as_residual(config)
        config = replace(config, steps=run.steps or config.steps)
        train, inputs, facts = load(config, work)
        torch.manual_seed(seed_of(work.seed, 0, "weights"))
        flow = make_flow(run, config).to(work.device)
        start_actnorms(flow.bijection, train, config, work.seed)
        looks = Looks(flow, inputs, config, work.seed)
        task = Task(flow, train, Likelihood(), looks.during)
        settings = schedule(config) | {"weight_decay": config.weight_decay, "evaluate_at": looks.steps}
        failure = work.try_train(task, until=0.8, **settings)
        if not work.main:
            return Measured({})
        logs = work.logs()
        numbers: dict[str, Any] = {
            "steps": config.steps,
            "mixing": config.mixing,
            "bits": config.bits,
            "dimensions": math.prod(inputs.shape),
            **facts,
            "diverged": str(failure or ""),
            "model": described(run, config),
            "parameters": count_parameters(flow),
            "skipped": skipped_steps(logs),
        }
        if failure is not None:
            return Measured(numbers, logs)
        if config.ema:
            load_average(flow, work)
        with by_series(flow):
            found = looks.after(work)
        return Measured({**numbers, **found.numbers}, {**logs, **found.arrays})

    def lines(self, config: Config, found: Found) -> list[Line]:
        return flow_lines(found, self.paper())

    def figures(self, config: Config, found: Found) -> Figures:
        return flow_figures(found)


def load(config: Config, work: Work) -> tuple[Dequantized, Inputs, dict[str, Any]]:
    """Training batches, what is measured, and what they are. Sets other than CIFAR-10 that are not there are left out, and named."""
    images, counts = cifar10_sets(config, work)
    train = images["train"]
    require_batch(train, config)
    missing = []
    for name in SETS:
        if name in images or name in NOISE:
            continue
        try:
            images[name] = shrunk(image_set(name, None, work.data), config.ood, config.side)
        except DataNotFound:
            missing.append(name)
    facts = {
        **counts,
        "counts": {name: len(some) for name, some in images.items() if name != "train"},
        "of": {name: IMAGE_SETS[name].counts["test"] for name in images if name != "train"},
        "missing": missing,
    }
    require_same_images(work, facts, images.values())
    inputs = Inputs(images, train.x.shape[1:], bits=config.bits, seed=work.seed, device=work.device)
    return Dequantized.centred(train, config, work.device), inputs, facts


def described(run: Run, config: Config) -> str:
    """The size of the flow of a run, in words."""
    if run.kind == "residual":
        blocks = "-".join(map(str, config.residual_blocks))
        return f"{blocks} blocks and {config.residual_dense} dense, width {config.residual_hidden}, c = {config.coefficient:g}"
    return f"{config.levels} levels of {config.blocks} blocks, width {config.hidden}"


def as_residual(config: Config) -> Config:
    """The configuration with the residual flow's own schedule and cadence."""
    return replace(
        config,
        steps=config.residual_steps,
        optimizer="adam",
        lr=config.residual_lr,
        warmup=config.residual_warmup,
        weight_decay=0.0,
        looks=config.residual_looks,
        likelihoods=config.residual_likelihoods,
        samples=min(config.samples, config.residual_ood),
        ood=config.residual_ood,
        referenced=min(config.referenced, config.residual_loose),
        conditions=1,
    )


def make_flow(run: Run, config: Config) -> Flow:
    """The flow of a run, before it has seen data."""
    if run.kind != "residual":
        return models.flow(make_multiscale(config, coupling=run.coupling, scale=run.scale))
    trunk = make_residual(config, dense_blocks=config.residual_dense)
    move = ActNorm(3, start="identity").requires_grad_(False)  # from [-1/2, 1/2] to [0, 1]
    with torch.no_grad():
        move.bias.fill_(0.5)
    return Flow(Chain(move, *trunk, shape=trunk.shape))


class Looks:
    """What is measured of a flow, along the way and in the end; the seed is that of samples."""

    def __init__(self, flow: Flow, inputs: Inputs, config: Config, seed: int) -> None:
        self.flow, self.inputs, self.config, self.seed = flow, inputs, config, seed
        self.sources = [name for name in SOURCES if name in (*inputs.images, *NOISE, "samples")]
        self.steps = look_steps(config)
        last = len(self.steps) - 1
        at = {last} if is_residual(flow.bijection) else {0, 1, *(last >> k for k in range(8))}
        self.conditions_at = {self.steps[k] for k in at}

    def during(self, model: Any, done: int) -> dict[str, float]:
        """A row of the log; NaN for what is not measured at this step."""
        with by_series(model):
            return self._during(model, done)

    def _during(self, model: Any, done: int) -> dict[str, float]:
        config = self.config
        found = {"test_bits": flow_probes.bits_per_dim(model, self.inputs, "cifar10", config.test_looked)}
        images: dict[str, Tensor] = {}
        for name in SOURCES:
            wanted = ("non_finite", "wrong", "square", "condition")
            found |= {f"{name}_{what}": math.nan for what in wanted}
            if name not in self.sources:
                continue
            if name == "samples":
                several, images[name] = flow_probes.sampled(model, config.looked, bits=config.bits, seed=self.seed)
                trip = several.trip
                found["samples_reliable"] = several.numbers()["reliable"]
            else:
                images[name] = self.inputs.first(name, config.looked)
                trip = flow_probes.round_trip(model, images[name])
            numbers = flow_probes.summary(trip)
            found |= {
                f"{name}_non_finite": numbers["share_non_finite"],
                f"{name}_wrong": numbers["share_wrong"],
                f"{name}_square": numbers["square"],
            }
        if done in self.conditions_at:
            chosen = torch.cat([x[: config.conditions] for x in images.values()])
            values = flow_probes.conditions(model, chosen, steps=config.lanczos)
            for name, x in images.items():
                own, values = values[: len(x[: config.conditions])], values[len(x[: config.conditions]) :]
                found[f"{name}_condition"] = max(math.inf if math.isnan(value) else value for value in own)
        return found

    def after(self, work: Work) -> Measured:
        """What is said of the trained flow, and pictures; what was measured before a stop is not measured again."""
        self.flow.eval()
        names = [name for name in SETS if name in (*self.inputs.images, *NOISE)]
        several = [
            work.once("likelihoods", lambda: self._likelihoods(work)),
            work.once("samples", lambda: self._samples(work)),
        ]
        sets: dict[str, Measured] = {}
        for k, name in enumerate(names):
            work.progress(f"reconstructing {SETS[name]}", 0.85 + 0.12 * k / len(names))
            sets[name] = work.once(f"set-{name}", lambda name=name: self._set(name))
        several.append(work.once("log-determinant", lambda: self._log_det(work)))
        numbers = {key: value for one in several for key, value in one.numbers.items()}
        numbers["sets"] = {name: {**m.numbers, **_detected(sets[names[0]], m)} for name, m in sets.items()}
        arrays = {key: value for one in (*several, *sets.values()) for key, value in one.arrays.items()}
        return Measured(numbers, {key: value for key, value in arrays.items() if key not in JUDGED})

    def _likelihoods(self, work: Work) -> Measured:
        work.progress("likelihoods", 0.81)
        pairs = (("train_bits", "train"), ("test_bits", "cifar10"))
        most = self.config.likelihoods
        return Measured({name: flow_probes.bits_per_dim(self.flow, self.inputs, which, most) for name, which in pairs})

    def _samples(self, work: Work) -> Measured:
        work.progress("samples", 0.84)
        config = self.config
        several, kept = flow_probes.sampled(self.flow, config.samples, bits=config.bits, seed=self.seed)
        return Measured({"samples": several.numbers()}, self._pictures("samples", kept))

    def _set(self, name: str) -> Measured:
        """How a set comes back, and which of its likelihoods hold, with these for `_detected`."""
        flow, config, inputs = self.flow, self.config, self.inputs
        trip = Trip.cat([flow_probes.round_trip(flow, x) for x in inputs.chunks(name, config.ood)])
        known = trip.first(config.referenced)
        held = flow_probes.trusted(flow, inputs.chunks(name, config.referenced), known.log_prob)
        good = held & known.back
        bits = config.bits - known.log_prob / (math.log(2) * math.prod(inputs.shape))
        bits = bits[torch.isfinite(bits)]
        found = flow_probes.summary(trip) | {
            "referenced": len(held),
            "share_log_prob_wrong": float((~held).double().mean()),
            "share_trusted": float(good.double().mean()),
            "trusted": int(good.sum()),
            "bits_median": float(bits.median()) if len(bits) else math.nan,
        }
        if is_residual(flow.bijection):
            found |= self._inverses(inputs.first(name, config.residual_loose))
        judged = dict(zip(JUDGED, (known.log_prob.numpy(), good.numpy()), strict=True))
        return Measured(found, self._pictures(name, inputs.first(name, flow_probes.CHUNK)) | judged)

    def _log_det(self, work: Work) -> Measured:
        work.progress("the log-determinant against the Jacobian", 0.97)
        points = self.inputs.first("cifar10", self.config.points)
        if is_residual(self.flow.bijection):
            return Measured(
                {"log_det_spread": flow_probes.log_det_spread(self.flow, points, self.config.residual_repeats)}
            )
        return Measured({"log_det": flow_probes.log_det_errors(self.flow, points)})

    @torch.no_grad()
    def _inverses(self, x: Tensor) -> dict[str, float]:
        """Of the residual flow: what its solved inverse and the original's loose stop leave, L2 errors of an image.

        `unsquashed` is the largest error before the sigmoid that ends the inverse, where nothing bounds it, NaN if one is; `evaluations`
        are those of all residual branches, for the sample that took most in each.
        """
        bijection = self.flow.bijection
        z = bijection(x)
        solved, before = solved_inverse(bijection, z), x
        for _, part in bijection.parts():
            before = part(before)
            if isinstance(part, Logit):
                break
        loose = norms((loose_inverse(bijection, z).double() - x.double()).flatten(1))
        return {
            "loose_error": float(loose.mean()),
            "loose_worst": float(loose.max()),
            "unconverged": int((~solved.converged).sum()),
            "unsquashed": float(norms((solved.before.double() - before.double()).flatten(1)).max()),
            "evaluations": solved.evaluations,
        }

    def _pictures(self, name: str, x: Tensor) -> dict[str, np.ndarray]:
        kept = flow_probes.pictures(self.flow, x, self.config.pictures)
        return {f"{what}_{name}": value for what, value in kept.items()}


def _detected(inside: Measured, outside: Measured) -> dict[str, float]:
    """How well likelihoods tell a set from test images: all of them, and those that hold."""
    (log_p, good), (log_q, fine) = ([torch.from_numpy(m.arrays[name]) for name in JUDGED] for m in (inside, outside))
    return {
        "auroc": flow_probes.auroc(log_p, log_q),
        "auroc_trusted": flow_probes.auroc(log_p[good], log_q[fine]),
    }


RECIPE = Cifar10Flow()
