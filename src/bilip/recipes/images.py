"""What the recipes on images share: sets of a size, batches, how ActNorms start, and schedules."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from bilip import Bijection, models
from bilip.blocks import Chain, TanhExpScale
from bilip.data import ImageBatches, Images, dequantize, image_set, seed_of
from bilip.errors import InputError
from bilip.recipes.recipe import Work
from bilip.training import Draw, read_state

PRIOR = TanhExpScale(clamp=3.0)  # of the channels that leave early: their deviation is predicted within e^-3 and e^3


def shrunk(images: Images, count: int, side: int) -> Images:
    """The first images, all for 0, averaged to a smaller side."""
    count = count or len(images)
    x = images.x[:count]
    if side < x.shape[-1]:
        x = adaptive_avg_pool2d(x.float(), side).round().to(torch.uint8)
    return Images(x, None if images.y is None else images.y[:count], images.classes)


def cifar10_sets(config: Any, work: Work) -> tuple[dict[str, Images], dict[str, int]]:
    """Training and test images of CIFAR-10 at the sizes of a configuration, as `train` and `cifar10`, and how many there are."""
    wanted = {"train": ("train", config.images), "cifar10": ("test", config.test)}
    sets = {}
    for name, (split, count) in wanted.items():
        images = image_set("cifar10", split, work.data)
        if count > len(images):
            key = "images" if split == "train" else "test"
            raise InputError(
                f"--set {key}={count}: there are {len(images)} {split} images; expected so many at most, or 0 for all of them."
            )
        sets[name] = shrunk(images, count, config.side)
    return sets, {"images": len(sets["train"]), "test_images": len(sets["cifar10"])}


def make_glow(config: Any, **options: Any) -> Chain:
    """A Glow of the size that a configuration states."""
    sizes = {name: getattr(config, name) for name in ("levels", "blocks", "hidden")}
    return models.glow((3, config.side, config.side), **(sizes | options))


def make_multiscale(config: Any, **options: Any) -> Chain:
    """The same with channels that leave early, and their distribution predicted from the others where the configuration says so."""
    early = {"factor_out": True, "learned_prior": config.prior, "prior_scale": PRIOR}
    return make_glow(config, mixing=config.mixing, **early, **options)


def require_side(config: Any) -> None:
    """Raise an `InputError` unless images of 32 x 32 can be averaged to the side of a configuration, and halved at each of its levels."""
    if config.side > 32 or 32 % config.side or config.side % 2**config.levels:
        raise InputError(
            f"--set side={config.side} levels={config.levels}: expected a side that divides 32 and can be halved {config.levels} times."
        )


def require_batch(images: Images, config: Any) -> None:
    """Raise an `InputError` unless there are images for one batch."""
    if len(images) < config.batch:
        raise InputError(f"--set images={config.images} batch={config.batch}: expected a batch of images or more.")


def require_same_images(work: Work, facts: Mapping[str, Any], sets: Iterable[Images]) -> None:
    """Remember which images a part was begun with, and refuse to go on with others."""
    work.require_same("data", {**facts, "crc32": [zlib.crc32(some.x.numpy().tobytes()) for some in sets]})


class Dequantized:
    """Batches of labelled images for a training loop, shifted by up to `pad` pixels and mirrored, dequantized in [0, 1), less an offset."""

    def __init__(self, images: Images, config: Any, device: str, *, pad: int, offset: float = 0.0) -> None:
        self.levels = ImageBatches(images, config.batch, device=device, pad=pad, std=(1 / 255,) * 3)
        self.bits, self.device, self.offset = config.bits, device, offset

    @classmethod
    def centred(cls, images: Images, config: Any, device: str) -> Dequantized:
        """In [-1/2, 1/2], shifted by up to a tenth."""
        return cls(images, config, device, pad=max(1, round(config.side / 10)), offset=0.5)

    def __call__(self, draw: Draw) -> tuple[Tensor]:
        generator = torch.Generator(self.device).manual_seed(draw("dequantization"))
        levels = self.levels(draw)[0].round().to(torch.uint8)
        return (dequantize(levels >> (8 - self.bits), self.bits, generator) - self.offset,)


@torch.no_grad()
def start_actnorms(bijection: Bijection, batches: Callable[[Draw], tuple[Tensor, ...]], config: Any, seed: int) -> None:
    """ActNorms start from the first `config.start` augmented images, of a seed of their own."""
    draws = (Draw(seed_of(seed, 0, "start"), k) for k in range(math.ceil(config.start / config.batch)))
    bijection.train()(torch.cat([batches(draw)[0] for draw in draws])[: config.start])


def look_steps(config: Any) -> tuple[int, ...]:
    """The steps after which a flow is looked at, evenly spaced; 0 is before the first."""
    return tuple(round(config.steps * k / config.looks) for k in range(config.looks + 1))


def schedule(config: Any) -> dict[str, Any]:
    """Settings of the training of a flow that stand in its configuration."""
    return {
        **{name: getattr(config, name) for name in ("steps", "optimizer", "lr", "warmup", "skip")},
        **{name: getattr(config, name) or None for name in ("clip", "ema")},
        "save_every": max(1, config.steps // config.looks),
        "log_every": max(1, min(100, config.steps // 50)),
    }


@torch.no_grad()
def load_average(model: nn.Module, work: Work) -> None:
    """Give a trained model the average of its weights, from the checkpoint in the folder."""
    average = read_state(work.folder / "last.safetensors")[0]
    for name, p in model.named_parameters():
        p.copy_(average[f"average.{name}"])


def skipped_steps(logs: Mapping[str, Any]) -> int:
    """How many steps were skipped, from the shares in the rows of a training log."""
    before, total = 0.0, 0.0
    for step, share in zip(logs.get("train_step", ()), logs.get("train_skipped", ()), strict=True):
        total, before = total + share * (step - before), step
    return round(total)


def count_parameters(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in model.parameters())


def as_bytes(x: Tensor) -> Tensor:
    """Grey levels of images in [-1/2, 1/2]; 128 where they are not finite."""
    return ((x.nan_to_num(0.0, 0.0, 0.0) + 0.5) * 256).floor().clamp(0, 255).to(torch.uint8)
