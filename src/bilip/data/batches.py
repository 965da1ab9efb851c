"""Labelled images on the device, shuffled and augmented there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_sides

from bilip.data.images import Images
from bilip.errors import InputError

__all__ = ["ImageBatches", "seed_of"]


class Drawing(Protocol):
    """What a training loop hands over: its seed and the number of the step."""

    @property
    def seed(self) -> int: ...

    @property
    def step(self) -> int: ...


class ImageBatches:
    r"""Batches of labelled images for a training loop: every image once an epoch, in an order of its own each time.

    All images stay on the device as bytes. There each batch is cut out of them: moved by up to `pad` pixels with black where it
    leaves the image, mirrored with probability 1/2, and normalised, $(x/255 - \text{mean}) / \text{std}$. Order and augmentation
    are functions of seed and epoch alone, the same on every device, so a run that is resumed sees the batches it would have seen.
    What is left over at the end of an epoch, less than a batch, waits for another one.

    Args:
        images: Images with labels.
        size: Images in a batch.
        device: Where they stay.
        pad: Largest shift in pixels.
        flip: Whether to mirror.
        mean: Of each channel, in [0, 1].
        std: Of each channel.

    Attributes:
        per_epoch: Batches in an epoch.

    Example:
        >>> from bilip.training import Draw
        >>> images = Images(torch.randint(256, (10, 3, 8, 8), dtype=torch.uint8), torch.arange(10))
        >>> batches = ImageBatches(images, 4)
        >>> seen = torch.cat([batches(Draw(0, step))[1] for step in range(batches.per_epoch)])
        >>> batches.per_epoch, len(seen.unique())
        (2, 8)
    """

    def __init__(
        self,
        images: Images,
        size: int,
        *,
        device: str | torch.device = "cpu",
        pad: int = 4,
        flip: bool = True,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
    ) -> None:
        if images.y is None:
            raise InputError(
                "ImageBatches: these images have no labels; expected Images(x, y), as from an .npz file with an array 'y', or from folders "
                "of classes."
            )
        if not 1 <= size <= len(images):
            raise InputError(f"ImageBatches(size={size}): expected 1 to {len(images)}, the number of images.")
        channels = images.x.shape[1]
        if pad < 0 or len(mean) != channels or len(std) != channels or not all(s > 0 for s in std):
            raise InputError(
                f"ImageBatches(pad={pad}, mean={tuple(mean)}, std={tuple(std)}): expected pad 0 or more, and a mean and a "
                f"positive std for each of {channels} channels."
            )
        self.size, self.pad, self.flip, self.per_epoch = size, pad, flip, len(images) // size
        self.count, (self.height, self.width) = len(images), images.x.shape[2:]
        self.y = images.y.to(device)
        padded = pad_sides(images.x.to(device), (pad, pad, pad, pad))
        self._pixels = padded.permute(0, 2, 3, 1).contiguous()  # a pixel's channels side by side
        self._scale = torch.tensor([1 / (255 * s) for s in std], device=device)
        self._shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device)
        self._rows = torch.arange(self.height, device=device)
        self._columns = torch.arange(self.width, device=device)
        self._epoch: tuple[int, int, Tensor] | None = None

    def __call__(self, draw: Drawing) -> tuple[Tensor, Tensor]:
        """The images, float32 and normalised, and labels of a step."""
        epoch, k = divmod(draw.step, self.per_epoch)
        which, down, right, mirrored = self._plan(draw.seed, epoch)[:, k * self.size : (k + 1) * self.size]
        rows = down[:, None] + self._rows
        columns = right[:, None] + torch.where(mirrored[:, None] > 0, self.width - 1 - self._columns, self._columns)
        return self._normalised(self._pixels[which[:, None, None], rows[:, :, None], columns[:, None, :]]), self.y[
            which
        ]

    def plain(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The images `start` to `stop` as they are, normalised, and their labels."""
        p, stop = self.pad, min(stop, self.count)
        pixels = self._pixels[start:stop, p : p + self.height, p : p + self.width]
        return self._normalised(pixels), self.y[start:stop]

    def _normalised(self, pixels: Tensor) -> Tensor:
        return (pixels * self._scale + self._shift).permute(0, 3, 1, 2).contiguous()

    def _plan(self, seed: int, epoch: int) -> Tensor:
        """Image, shifts and mirroring for every place of an epoch, drawn on the host at once and then kept until its end."""
        if self._epoch is None or self._epoch[:2] != (seed, epoch):
            generator = torch.Generator().manual_seed(seed_of(seed, epoch, "images"))
            order = torch.randperm(self.count, generator=generator, device="cpu")
            shifts = torch.randint(2 * self.pad + 1, (2, self.count), generator=generator, device="cpu")
            mirrored = torch.randint(2, (1, self.count), generator=generator, device="cpu") * int(self.flip)
            self._epoch = seed, epoch, torch.cat((order[None], shifts, mirrored)).to(self._pixels.device)
        return self._epoch[2]


def seed_of(seed: int, step: int, purpose: str) -> int:
    """A seed, 63 bits, for one purpose in one step of a run.

    A run that draws all of its numbers by such seeds has no state to save: stopped and resumed, on one process or on several, it sees
    the same numbers.

    Example:
        >>> seed_of(0, 17, "data")
        6908351948378805153
        >>> seed_of(0, 17, "data") == seed_of(0, 18, "data")
        False
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
