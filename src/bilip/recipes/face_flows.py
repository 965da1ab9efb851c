"""Flows on faces at 5 bits: affine, modified affine and residual, in the architecture of the paper's CelebA models.

A part is `affine` (every scale onto (0, 1)), `modified` (every one onto (0.5, 1)), `modified-unmasked` (as the original code has it: the
couplings of the first scale, which are masked, stay on (0, 1)) or `residual`. All see images in [0, 1) through a logit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bilip import Flow
from bilip.blocks import ActNorm, AffineCoupling, Bijection, Chain, Checkerboard, Flatten, Logit, Split, Squeeze
from bilip.blocks.scale import HALF_SIGMOID, SIGMOID, Scale
from bilip.data import IMAGE_SETS, Images, dequantize, image_set, seed_of
from bilip.errors import InputError
from bilip.nets import MLP, ConvNet, activations
from bilip.objectives import Likelihood
from bilip.recipes.images import (
    Dequantized,
    count_parameters,
    load_average,
    look_steps,
    require_batch,
    require_same_images,
    schedule,
    shrunk,
    skipped_steps,
    start_actnorms,
)
from bilip.recipes.recipe import Found, Line, Measured, Work, require, runs_of_part, sized, sound
from bilip.recipes.residual_flows import ALPHA, make_residual
from bilip.training import Task

__all__ = ["PARTS", "TITLES", "Config", "Faces", "load", "make_flow", "runs_of", "trained"]

TITLES = {
    "affine": "affine",
    "modified": "modified affine",
    "modified-unmasked": "modified affine, masked ones on (0, 1)",
    "residual": "residual flow",
}
PARTS = ("affine", "modified", "residual")
MAY_BE_ZERO = ("images", "dense", "warmup", "clip", "ema", "skip", "exact_terms")  # settings that may be 0


@dataclass(frozen=True)
class Config:
    """Sizes and schedules: the values of the size `paper`, and in `sized` those of other sizes where they differ."""

    side: int = sized(64, quick=16)  # height and width of the images; smaller than 64 they are averaged
    images: int = sized(0, quick=2048)  # training images; 0 for all that are not test images
    test: int = sized(1000, quick=256)  # test images, the last ones of the set
    bits: int = 5  # of a pixel and its dequantization
    # Couplings of each scale; images are squeezed before each. Those of the first scale are masked.
    blocks: tuple[int, ...] = sized((16, 16, 16, 16), quick=(6, 6))
    hidden: int = sized(512, gpu=128, quick=32)  # channels of the nets
    dense: int = sized(4, quick=2)  # fully connected blocks at the end
    dense_hidden: int = sized(128, quick=32)  # their width
    batch: int = sized(320, gpu=64, quick=64)  # images in each step
    accumulate: int = sized(5, gpu=1, quick=1)  # parts into which a batch is cut
    steps: int = sized(90_000, gpu=3000, quick=800)  # training steps
    # `adam` or `adamax`, of the affine flows; the residual flow has Adam.
    optimizer: str = sized("adamax", gpu="adam", quick="adam")
    lr: float = sized(1e-3, gpu=5e-4, quick=2e-3)  # learning rate
    warmup: int = sized(1000, gpu=500, quick=50)  # steps over which it grows
    # Largest norm of a gradient, of a loss in nats per image; 0 for any. Without it flows at 64 x 64 pixels diverge.
    clip: float = sized(8517.0, quick=0.0)
    # Decay of an average of the weights, which is then what is measured; 0 for none.
    ema: float = sized(0.999, gpu=0.0, quick=0.0)
    # Gradients in a row that may be not finite. Such a step is skipped and counted; one more ends the run.
    skip: int = 10
    start: int = sized(320, gpu=256, quick=256)  # images that the ActNorms start from
    looks: int = sized(20, gpu=6, quick=5)  # evaluations along training, evenly spaced
    test_looked: int = sized(1000, gpu=500, quick=256)  # test images whose likelihood is computed then
    samples: int = sized(512, gpu=256, quick=256)  # samples at each look and in the end
    shown: int = sized(8, gpu=6)  # images of each kind that are kept for the figures
    attacked: int = sized(64, gpu=32, quick=16)  # training images that are attacked
    attack_steps: int = 200  # steps of each attack
    # Steps of the attacks on the converged inverse of the residual flow; 40 are 0.64 widths of a cell, from whose centre they reach
    # every corner.
    converged_steps: int = sized(200, gpu=40)
    iterations: int = 5  # of the cut inverse of the residual flow that the paper's attack sees
    conditions: int = sized(4, gpu=2, quick=2)  # points found by the attack whose condition number is computed
    lanczos: int = sized(12, gpu=6)  # steps of Lanczos' method for each
    # Dequantized training images that are reconstructed without any attack.
    plain: int = sized(1000, gpu=500, quick=256)
    # Blocks of each scale of the residual flow.
    residual_blocks: tuple[int, ...] = sized((16, 16, 16, 16), gpu=(4, 4, 4, 4), quick=(2, 2))
    residual_hidden: int = sized(512, gpu=128, quick=16)  # channels of its nets
    residual_steps: int = sized(90_000, gpu=800, quick=120)  # its steps
    coefficient: float = 0.98  # certified constant of its branches
    exact_terms: int = sized(8, gpu=4, quick=2)  # terms of its log-determinants that are always there
    # Whether its activations are computed again in the backward pass instead of kept.
    recompute: bool = sized(True, gpu=False, quick=False)
    residual_attacked: int = sized(32, gpu=8, quick=4)  # images that are attacked there
    residual_samples: int = sized(128, gpu=64, quick=32)  # samples of it

    def __post_init__(self) -> None:
        scaled = ("blocks", "residual_blocks", "coefficient", "dense_hidden")
        require(self, nonnegative=MAY_BE_ZERO, one_of={"optimizer": ("adam", "adamax")}, free=scaled)
        if self.bits > 8 or self.ema >= 1 or not 0 < self.coefficient < 1:
            raise InputError(
                f"--set bits={self.bits} ema={self.ema} coefficient={self.coefficient}: expected at most 8 bits, an average below 1, and "
                "a number between 0 and 1."
            )
        for name in ("blocks", "residual_blocks"):
            scales = getattr(self, name)
            if not scales or min(scales) < 1 or self.side % 2 ** len(scales):
                raise InputError(
                    f"--set {name}={scales} side={self.side}: expected a positive number for each scale, and a side that can be halved for "
                    "each."
                )
        if self.side > 64 or 64 % self.side:
            raise InputError(f"--set side={self.side}: expected a side that divides 64.")


def as_residual(config: Config) -> Config:
    """The configuration with the residual flow's own schedule."""
    return replace(config, steps=config.residual_steps, optimizer="adam", samples=config.residual_samples)


class Faces:
    """Face images for training and measuring, in [0, 1), dequantized; the seed is that of what is measured."""

    def __init__(self, train: Images, test: Images, config: Config, seed: int, device: str) -> None:
        self.train, self.test, self.bits, self.seed, self.device = train, test, config.bits, seed, device
        labelled = Images(train.x, torch.zeros(len(train), dtype=torch.long))
        self.batches = Dequantized(labelled, config, device, pad=0)

    def levels(self, which: str, count: int) -> Tensor:
        """The first images as grey levels of so many bits."""
        return (self.train if which == "train" else self.test).x[:count] >> (8 - self.bits)

    def first(self, which: str, count: int) -> Tensor:
        """The first images, dequantized, the same on every call and device."""
        levels = self.levels(which, count)
        generator = torch.Generator().manual_seed(seed_of(self.seed, 0, f"faces {which}"))
        return dequantize(levels, self.bits, generator).to(self.device)


def load(config: Config, work: Work) -> tuple[Faces, dict[str, Any]]:
    """The faces, and what they are."""
    every = image_set("celeba64", "train", work.data)
    if len(every) < config.test + config.batch:
        raise InputError(
            f"--set test={config.test} batch={config.batch}: there are {len(every)} faces, expected as many as the test images and a batch."
        )
    count = len(every) - config.test
    if config.images > count:
        raise InputError(
            f"--set images={config.images}: there are {count} faces beside the test images; expected so many at most, or 0 for all of them."
        )
    train = shrunk(Images(every.x), config.images or count, config.side)
    test = shrunk(Images(every.x[-config.test :]), config.test, config.side)
    require_batch(train, config)
    facts = {"images": len(train), "test_images": len(test), "of": IMAGE_SETS["celeba64"].counts["train"]}
    require_same_images(work, facts, (train, test))
    return Faces(train, test, config, work.seed, work.device), facts


# ---- the flows


def make_flow(part: str, config: Config) -> Flow:
    """The flow of a part, before it has seen data."""
    if part == "residual":
        dense = {"dense_blocks": config.dense, "dense_hidden": config.dense_hidden}
        return Flow(make_residual(config, squeeze_first=True, **dense))
    scale = SIGMOID if part == "affine" else HALF_SIGMOID
    return Flow(coupling_trunk(config, scale, masked=SIGMOID if part == "modified-unmasked" else scale))


def coupling_trunk(config: Config, scale: Scale, *, masked: Scale) -> Chain:
    """A logit, then scales of couplings with ActNorm after each: on a checkerboard in the first scale, on halves of the channels after
    it, on halves of all entries in the end.
    """
    shape: tuple[int, ...] = (3, config.side, config.side)
    chain: list[Bijection] = [Logit(ALPHA)]
    turn = False
    for k, count in enumerate(config.blocks):
        squeeze = Squeeze()
        chain.append(squeeze)
        channels, *_ = shape = squeeze.out_shape(shape)
        if k == 0:
            chain.append(ActNorm(channels))
        for j in range(count):
            seen = channels if k == 0 else channels - channels // 2 if turn else channels // 2
            moved = channels if k == 0 else channels - seen
            net: nn.Module = ConvNet(seen, 2 * moved, hidden=config.hidden, activation="elu", gain=False)
            net = net if k == 0 and j == 0 else nn.Sequential(activations.make("elu"), net)
            part = Checkerboard(swap=turn) if k == 0 else Split(swap=turn)
            chain += [AffineCoupling(net, scale=masked if k == 0 else scale, partition=part), ActNorm(channels)]
            turn = not turn
    if config.dense:
        size = math.prod(shape)
        chain.append(Flatten(shape))
        for _ in range(config.dense):
            hidden = (config.dense_hidden,) * 2
            net = nn.Sequential(activations.make("elu"), MLP(size // 2, size, hidden=hidden, activation="elu"))
            chain += [AffineCoupling(net, scale=scale, partition=Split(swap=turn)), ActNorm(size)]
            turn = not turn
    return Chain(*chain, shape=(3, config.side, config.side))


def described(part: str, config: Config) -> str:
    """The size of the flow of a part, in words."""
    residual = part == "residual"
    blocks, hidden = (config.residual_blocks, config.residual_hidden) if residual else (config.blocks, config.hidden)
    more = f", c = {config.coefficient:g}" if residual else ""
    return f"{'-'.join(map(str, blocks))} blocks and {config.dense} dense, width {hidden}{more}"


# ---- training


def trained(
    part: str, config: Config, faces: Faces, evaluate: Any, work: Work
) -> tuple[Flow, dict[str, Any], dict[str, np.ndarray]]:
    """The flow of a part, trained, or as far as it came; what is said of its training; and its logs."""
    torch.manual_seed(seed_of(work.seed, 0, "weights"))
    flow = make_flow(part, config).to(work.device)
    start_actnorms(flow.bijection, faces.batches, config, work.seed)
    task = Task(flow, faces.batches, Likelihood(), evaluate)
    settings = schedule(config) | {"betas": (0.9, 0.99), "accumulate": config.accumulate}
    failure = work.try_train(task, until=0.7, evaluate_at=look_steps(config), **settings)
    if not work.main:
        return flow, {}, {}
    logs = work.logs()
    if config.ema and failure is None:
        load_average(flow, work)
    numbers = {
        "steps": config.steps,
        "bits": config.bits,
        "side": config.side,
        "model": described(part, config),
        "diverged": str(failure or ""),
        "parameters": count_parameters(flow),
        "skipped": skipped_steps(logs),
    }
    return flow.eval(), numbers, logs


def runs_of(found: Found, lines: list[Line]) -> Iterator[tuple[str, str, list[Measured]]]:
    """Each part, its name in words with the number of steps, and those of its runs that did not diverge; `lines` gets one for each of the
    others.
    """
    for part, title in TITLES.items():
        several = runs_of_part(found, part)
        if not several:
            continue
        name = f"{title}, {several[0].numbers['steps']:,} steps"
        good, lost = sound(name, several)
        lines += lost
        if good:
            yield part, name, good
