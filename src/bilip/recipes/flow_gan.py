"""Flow-GAN: an invertible generator on CIFAR-10, trained by likelihood, against a discriminator, or by both.

A part is a kind of coupling and an objective: `additive-mle`, `additive-gan`, `additive-flowgan`, and the same with `affine`, or with
`modified` for a scale onto (0.5, 1). After it may come `-plain` for a generator without ActNorm, `-small` for a smaller one, `-eps0.01`,
added to the scale, and `-steps1000` for another number of steps. The part `features` trains the CNN whose features tell how good samples
are; one comes with bilip.

The generator's gradients pass through its inverse, from latents to images, with `bilip.Reversible` and its guard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, leaky_relu, linear, softplus
from torch.nn.utils.parametrizations import spectral_norm

from bilip import Bijection, Flow, Reversible
from bilip.data import image_set, seed_of
from bilip.errors import InputError
from bilip.recipes import flow_probes
from bilip.recipes.flow_probes import Inputs, Trip
from bilip.recipes.gan_runs import OBJECTIVES, USUAL, Run, gan_figures, gan_lines
from bilip.recipes.images import (
    Dequantized,
    as_bytes,
    cifar10_sets,
    count_parameters,
    make_multiscale,
    require_batch,
    require_same_images,
    skipped_steps,
    start_actnorms,
)
from bilip.recipes.recipe import Figures, Found, Line, Measured, Recipe, Work, require, sized, sizes_of
from bilip.recipes.sample_quality import load_features, quality, train_features
from bilip.training import Draw, Task, load_weights, read_state

__all__ = ["RECIPE", "Config"]

WHOLE = 3072  # dimensions of an image of CIFAR-10; of smaller ones a likelihood in nats counts as much more


@dataclass(frozen=True)
class Config:
    """Sizes and schedules: the values of the size `paper`, and in `sized` those of other sizes where they differ."""

    side: int = sized(32, quick=8)  # height and width of the images; smaller than 32 they are averaged
    images: int = sized(0, quick=8192)  # training images; 0 for all there are
    test: int = sized(0, quick=1000)  # test images; 0 for all
    bits: int = 8  # of a pixel and its dequantization
    levels: int = sized(3, quick=2)  # levels of the generator
    blocks: int = sized(8, quick=2)  # blocks a level
    hidden: int = sized(128, quick=24)  # channels of its nets
    small: tuple[int, ...] = sized((2, 2, 32), quick=(1, 1, 16))  # levels, blocks and channels of the smaller generator
    mixing: str = "reverse"  # `conv1x1`, `reverse` or `shuffle`
    # Whether mean and scale of the channels that leave early are predicted from the others, or standard normal.
    prior: bool = True
    # Channels of the discriminator's seven convolutions; every second one halves height and width.
    critic: tuple[int, ...] = sized((64, 64, 128, 128, 256, 256, 512), quick=(8, 8, 16, 16, 32, 32, 64))
    batch: int = 32  # images in each step, and as many latents
    steps: int = sized(50_000, gpu=6000, quick=300)  # training steps
    lr: float = sized(5e-5, quick=5e-4)  # learning rate of both players
    penalty: float = 10.0  # weight of the gradient penalty
    # Of the negative log-likelihood, nats per image of 32 x 32, beside the generator's loss; of smaller ones so much
    # larger.
    weight: float = 1e-3
    # Gradients in a row that may be not finite. Such a step is skipped and counted; one more ends the run.
    skip: int = 10
    start: int = sized(640, quick=256)  # images that the ActNorms start from
    # Evaluations along training, evenly spaced, and two more before the first of them.
    looks: int = sized(10, gpu=6, quick=6)
    looked: int = sized(512, gpu=256, quick=256)  # test images that are reconstructed then
    test_looked: int = sized(10_000, gpu=1000, quick=512)  # test images whose likelihood is computed then
    conditions: int = sized(2, gpu=1, quick=1)  # test images whose condition number is found
    lanczos: int = sized(30, gpu=12, quick=12)  # steps of Lanczos' method for each
    # Samples drawn in the end, and test images they are compared with.
    samples: int = sized(10_000, gpu=5000, quick=1000)
    pictures: int = 16  # samples that are kept for the figure
    feature_steps: int = 1950  # steps of the CNN whose features are compared
    feature_batch: int = 128  # images in each of them

    def __post_init__(self) -> None:
        require(self, nonnegative=("images", "test", "skip", "penalty"), free=("small", "critic"))
        if self.mixing not in ("conv1x1", "reverse", "shuffle"):
            raise InputError(f"--set mixing={self.mixing}: expected conv1x1, reverse or shuffle.")
        if len(self.small) != 3 or len(self.critic) != 7 or not all(n > 0 for n in (*self.small, *self.critic)):
            raise InputError(
                f"--set small={self.small} critic={self.critic}: expected levels, blocks and channels, and seven numbers of channels."
            )
        deepest = max(self.levels, self.small[0], 3)
        if self.side > 32 or 32 % self.side or self.side % 2**deepest:
            raise InputError(f"--set side={self.side}: expected 8, 16 or 32, and no more levels than it can be halved.")
        if self.bits > 8 or self.pictures % 2 or self.samples < max(4, self.pictures):
            raise InputError(
                f"--set bits={self.bits} pictures={self.pictures} samples={self.samples}: expected at most 8 bits, an even number of "
                "pictures, and as many samples or more."
            )


class FlowGan(Recipe):
    """Likelihood, stability at data and sample quality of invertible generators, by what they were trained on."""

    name = "flow_gan"
    where = "appendix on bi-directional training: table and samples of Flow-GAN"
    claim = "A generator trained against a discriminator alone explodes at data; likelihood beside it prevents that, with better samples."
    sizes: Mapping[str, Config] = sizes_of(Config)
    cost: Mapping[str, str] = {
        "quick": "6 minutes of one core, half of that on two",
        "gpu": "6,000 steps of ten generators; 5 to 16 minutes each on one H200 under CUDA's MPS, six to nine processes side by side",
        "paper": "50,000 steps, a number the paper does not state; hours on one GPU; not timed yet",
    }
    matched = (
        "Channels reversed between couplings, no learned prior at the top; the discriminator's last layer is linear and spectrally "
        "normalised too, LeakyReLU 0.1; gradient penalty 10 (|slope| - 1)² at points between images and samples; one update of each player "
        "a step; the likelihood in nats per image.",
    )
    corrected = (
        "Both players are updated at once from the same weights, where the original updates the discriminator first. Gradients that are "
        "not finite are skipped and counted, NaN pixels are not set to zero.",
        "ActNorm starts from data, not from one, so that all runs start at the same finite likelihood. Batches of 32 as in the paper, not "
        "the original's 64. The affine scale is onto (0, 1); with the original's 0.01 added to it there are runs of their own. Of the "
        "discriminator's convolutions only the first has a bias.",
        "The original's FID takes the logits of an Inception network and 1,000 images. Ours: features of a small CNN trained on CIFAR-10, "
        "which comes with bilip, so the numbers compare runs here and nothing else.",
        "Training images are mirrored, not shifted by up to a tenth: shifted ones have black borders, which a discriminator tells from "
        "samples at a glance, and which the test images do not have that samples are compared with.",
    )
    partial = True
    named = Run.of

    def parts(self, config: Config) -> Sequence[str]:
        usual = [f"{kind}-{objective}" for kind in USUAL for objective in OBJECTIVES]
        return [*usual, "additive-gan-plain", "additive-gan-small", "affine-gan-eps0.01", "affine-flowgan-eps0.01"]

    def has(self, part: str, config: Config) -> bool:
        return part == "features" or super().has(part, config)

    def run(self, part: str, config: Config, work: Work) -> Measured:
        if part == "features":
            train_set, test_set = (image_set("cifar10", split, work.data) for split in ("train", "test"))
            return train_features(train_set, test_set, config.feature_steps, config.feature_batch, work)
        run = Run.of(part)
        config = replace(config, steps=run.steps or config.steps)
        net, about_net = load_features(work)  # said before training, not after it
        train, inputs, facts = load(config, work)
        torch.manual_seed(seed_of(work.seed, 0, "weights"))
        model = make_model(run, config).to(work.device)
        start_actnorms(model.bijection, train, config, work.seed)
        looks = Looks(model, inputs, config, work.seed)
        failure = work.try_train(
            Task(model, Batches(train, model, config, work.device), Loss(run.objective, config), looks.during),
            until=0.85,
            steps=config.steps,
            lr=config.lr,
            betas=(0.5, 0.99),
            skip=config.skip,
            evaluate_at=looks.steps,
            save_every=max(1, config.steps // (2 * config.looks)),
            log_every=max(1, min(100, config.steps // 50)),
        )
        at = config.steps if failure is None else _last_good(model, work, failure.step)
        if not work.main:
            return Measured({})
        logs = work.logs()
        numbers: dict[str, Any] = {
            "steps": config.steps,
            "measured_at": at,
            "dimensions": math.prod(inputs.shape),
            **facts,
            "diverged": str(failure or ""),
            "parameters": count_parameters(model.flow),
            "skipped": skipped_steps(logs),
            "guard": _guarded(model),
            "features": about_net,
        }
        return Measured(numbers | looks.after(work, net), logs | looks.pictures)

    def lines(self, config: Config, found: Found) -> list[Line]:
        return gan_lines(found, self.paper())

    def figures(self, config: Config, found: Found) -> Figures:
        return gan_figures(found)


def load(config: Config, work: Work) -> tuple[Dequantized, Inputs, dict[str, Any]]:
    """Training batches, what is measured, and what they are. Images are mirrored, and not shifted: a discriminator sees the black borders
    of shifted ones, and samples get them too, but not the test images that they are compared with.
    """
    images, facts = cifar10_sets(config, work)
    require_batch(images["train"], config)
    require_same_images(work, facts, images.values())
    inputs = Inputs(images, images["train"].x.shape[1:], bits=config.bits, seed=work.seed, device=work.device)
    return Dequantized(images["train"], config, work.device, pad=0, offset=0.5), inputs, facts


# ---- the two players


class Critic(nn.Module):
    """Seven convolutions, each spectrally normalised, and a linear layer to a score: above 0 for an image.

    Only the first convolution and the last layer have a bias. Normalised weights shrink what passes; deeper biases would not shrink with
    it, and soon every unit would stand on the flat side of its LeakyReLU. Without any, twice an image would score twice as high. The
    weights are made once a step and handed over, so that one step is one step of their power iteration. Of the convolutions, whose channels
    are `widths`, the second, fourth and sixth halve the image.
    """

    def __init__(self, side: int, widths: Sequence[int]) -> None:
        super().__init__()
        before, layers = 3, []
        for k, width in enumerate(widths):
            kernel, stride = (4, 2) if k % 2 else (3, 1)
            layers.append(spectral_norm(nn.Conv2d(before, width, kernel, stride, padding=1, bias=k == 0)))
            before = width
        layers.append(spectral_norm(nn.Linear(before * (side // 8) ** 2, 1)))
        self.layers = nn.ModuleList(layers)

    def weights(self) -> list[Tensor]:
        """Normalised weights, layer by layer, and the two biases."""
        return [*(layer.weight for layer in self.layers), self.layers[0].bias, self.layers[-1].bias]  # type: ignore[list-item]

    def forward(self, x: Tensor, weights: Sequence[Tensor] | None = None) -> Tensor:
        """Scores, of shape `(batch,)`."""
        *convolutions, last, first_bias, bias = weights if weights is not None else self.weights()
        for k, weight in enumerate(convolutions):
            x = leaky_relu(conv2d(x, weight, None if k else first_bias, stride=1 + k % 2, padding=1), 0.1)
        return linear(x.flatten(1), last, bias)[:, 0]


class Players(nn.Module):
    """The generator, a memory-saving flow, and its critic; without one where likelihood is all that is trained."""

    def __init__(self, trunk: Bijection, critic: Critic | None) -> None:
        super().__init__()
        self.flow, self.critic = Flow(Reversible(trunk)), critic

    @property
    def bijection(self) -> Bijection:
        """The generator's blocks."""
        return self.walk.bijection

    @property
    def walk(self) -> Reversible:
        """The generator, with its guard."""
        return self.flow.bijection  # type: ignore[return-value]

    @property
    def plain(self) -> Flow:
        """The same flow with stored activations, to be measured."""
        return Flow(self.bijection)


def make_model(run: Run, config: Config) -> Players:
    """The players of a run, before they have seen data."""
    levels, blocks, hidden = config.small if run.small else (config.levels, config.blocks, config.hidden)
    sizes = {"levels": levels, "blocks": blocks, "hidden": hidden}
    couplings = {"coupling": run.couplings.coupling, "scale": run.couplings.scale}
    trunk = make_multiscale(config, **couplings, actnorm="data" if run.actnorm else None, **sizes)
    return Players(trunk, None if run.objective == "mle" else Critic(config.side, config.critic))


class Batches:
    """Images, latents, and how far between an image and a sample the slope of the critic is looked at."""

    def __init__(self, train: Dequantized, model: Players, config: Config, device: str) -> None:
        self.train, self.shape, self.count, self.device = train, model.flow.latent_shape or (), config.batch, device

    def __call__(self, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator(self.device).manual_seed(draw("latents"))
        z = torch.randn(self.count, *self.shape, generator=generator, device=self.device)
        between = torch.rand(self.count, 1, 1, 1, generator=generator, device=self.device)
        return (*self.train(draw), z, between)


class Loss:
    """What both players minimise, as one sum: the critic's terms reach the critic alone, the generator's the generator alone."""

    def __init__(self, objective: str, config: Config) -> None:
        self.objective, self.config = objective, config

    def __call__(self, model: Players, step: int, x: Tensor, z: Tensor, between: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        loss = x.new_zeros(())
        if self.objective != "gan":
            latent, log_det = model.walk.forward_and_log_det(x)
            found["nll"] = -(model.flow.base_log_prob(latent) + log_det).mean()
            weight = self.config.weight * WHOLE / x[0].numel()
            loss = loss + found["nll"] * (1.0 if self.objective == "mle" else weight)
        critic = model.critic
        if critic is not None:
            samples, weights = model.walk.inverse(z), critic.weights()
            fixed = [weight.detach() for weight in weights]
            found["fool"] = softplus(-critic(samples, fixed)).mean()
            drawn = samples.detach()
            found["critic"] = softplus(-critic(x, weights)).mean() + softplus(critic(drawn, weights)).mean()
            found["slope"] = _slope_penalty(critic, weights, torch.lerp(drawn, x, between))
            loss = loss + found["fool"] + found["critic"] + self.config.penalty * found["slope"]
        return {"loss": loss, **found}


def _slope_penalty(critic: Critic, weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """How far slopes of the score are from 1, squared."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(critic(x, weights).sum(), x, create_graph=torch.is_grad_enabled())
    norm = (slope.flatten(1).square().sum(1) + 1e-12).sqrt()  # the root of 0 has no slope
    return (norm - 1).square().mean()


def _last_good(model: Players, work: Work, step: int) -> int:
    """The weights before the step in which training diverged, or else those that were saved last; how many steps they have seen."""
    if all(bool(p.isfinite().all()) for p in model.parameters()):
        return step - 1  # a gradient that is not finite changes nothing
    path = work.folder / "last.safetensors"
    tensors, facts = read_state(path)
    load_weights(model, tensors, path)
    return int(facts["step"])


def _guarded(model: Players) -> dict[str, float]:
    report = model.walk.report()
    return {"passes": report.steps, "repaired": report.repaired, "worst_angle": report.worst_angle}


# ---- what is measured


class Looks:
    """What is measured of a generator, along the way and in the end."""

    def __init__(self, model: Players, inputs: Inputs, config: Config, seed: int) -> None:
        self.model, self.inputs, self.config, self.seed = model, inputs, config, seed
        even = [config.steps * k / config.looks for k in range(config.looks + 1)]
        self.steps = tuple(sorted({round(step) for step in (*even, even[1] / 4, even[1] / 2)}))
        self.pictures: dict[str, np.ndarray] = {}

    def during(self, model: Any, done: int) -> dict[str, float]:
        """A row of the log."""
        config, flow = self.config, self.model.plain.eval()
        trip = flow_probes.round_trip(flow, self.inputs.first("cifar10", config.looked))
        found = flow_probes.summary(trip)
        x = self.inputs.first("cifar10", config.conditions)
        conditions = [math.inf if math.isnan(v) else v for v in flow_probes.conditions(flow, x, steps=config.lanczos)]
        with torch.no_grad():
            drawn = flow.sample(64, generator=torch.Generator(x.device).manual_seed(seed_of(self.seed, done, "drawn")))
        return {
            "test_bits": flow_probes.bits_per_dim(flow, self.inputs, "cifar10", config.test_looked),
            "non_finite": found["share_non_finite"],
            "wrong": found["share_wrong"],
            "error": float(torch.where(trip.finite, trip.l2, math.inf).median()),
            "condition": max(conditions),
            "samples_non_finite": float((~torch.isfinite(drawn.flatten(1)).all(1)).double().mean()),
        }

    def after(self, work: Work, net: Any) -> dict[str, Any]:
        """What is said of the trained generator."""
        flow, config, inputs = self.model.plain.eval(), self.config, self.inputs
        work.progress("likelihood and reconstructions", 0.86)
        trip = Trip.cat([flow_probes.round_trip(flow, x) for x in inputs.chunks("cifar10", 10_000)])
        bits = config.bits - trip.log_prob / (math.log(2) * math.prod(inputs.shape))
        found: dict[str, Any] = {
            "test_bits": float(bits.mean()),
            "test_bits_median": float(bits.nan_to_num(math.inf, math.inf, math.inf).median()),
            "share_bits_non_finite": float((~torch.isfinite(bits)).double().mean()),
            "data": flow_probes.summary(trip),
        }
        kept = flow_probes.pictures(flow, inputs.first("cifar10", flow_probes.CHUNK), 4)
        self.pictures |= {f"{what}_data": value for what, value in kept.items()}
        work.progress("condition numbers", 0.9)
        x = inputs.first("cifar10", config.conditions)
        values = flow_probes.conditions(flow, x, steps=config.lanczos)
        found["condition"] = max(math.inf if math.isnan(value) else value for value in values)
        work.progress("samples", 0.94)
        with torch.no_grad():
            samples = torch.cat([flow.bijection.inverse(z) for z in self._latents()])
        real = inputs.first("cifar10", config.samples)
        found["samples"] = quality(net, samples, real, work.seed)
        found["floor"] = quality(net, inputs.first("train", config.samples), real, work.seed)
        self._keep(samples[: config.pictures])
        return found

    def _latents(self):
        """Standard normal, the same on every device and for every run of a seed."""
        for start in range(0, self.config.samples, flow_probes.CHUNK):
            generator = torch.Generator().manual_seed(seed_of(self.seed, start, "samples"))
            z = torch.randn(flow_probes.CHUNK, *(self.model.flow.latent_shape or ()), generator=generator)
            yield z[: self.config.samples - start].to(self.inputs.device)

    def _keep(self, samples: Tensor) -> None:
        """Keep samples for the figure, in two rows."""
        x = samples.movedim(1, -1).cpu()
        broken = ~torch.isfinite(x).all(-1)
        self.pictures["images_samples"] = as_bytes(x).unflatten(0, (-1, 2)).numpy()
        self.pictures["broken_samples"] = broken.to(torch.uint8).unflatten(0, (-1, 2)).numpy()


RECIPE = FlowGan()
